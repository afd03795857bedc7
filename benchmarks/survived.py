"""README's script with a SIGKILL: its parameters against those of an undisturbed run.

In float64 and with a constant batch of 32, so that all runs do the same arithmetic: one process,
then `resilin run` and `resilin run --live` with two workers, of which the first to reach step 80 is
killed. With `--warm`, restarted workers are forked. `norm` is that of the parameters of the first
run, to compare versions of torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from harness import finish, parse_args

LIMITS = {"restart": 1e-12, "live": 1e-12}
"""The largest difference of any parameter."""
JOB = """
import os, signal, sys, torch, resilin
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

result, killed = sys.argv[1:]
torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
dataset = TensorDataset(torch.tensor(x / 16, dtype=torch.float64), torch.tensor(y))
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
model.double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

resilin.init_process_group()
model = resilin.AdaptiveDataParallel(model, optimizer)
loader = resilin.AdaptiveDataLoader(dataset, batch_size=32, shuffle=True)

for epoch in resilin.remaining_epochs_until(3):
    for inputs, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        if model.clock.steps == 80:
            try:
                os.close(os.open(killed, os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)
            except FileExistsError:
                pass
        optimizer.step()
        optimizer.zero_grad()
found = [p.detach() for p in model.parameters()]
torch.save([model.clock.steps, *found], f"{result}.{os.getpid()}")
"""


def train(place: Path, name: str, *command: str) -> list[torch.Tensor]:
    """The parameters that each worker of a run ends with, as one vector."""
    result, killed = place / f"{name}.pt", place / f"{name}.killed"
    if not command:
        command, _ = (sys.executable,), killed.touch()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RESILIN_RUN_DIR": str(place / name)}
    job = [*command, str(place / "job.py"), str(result), str(killed)]
    done = subprocess.run(
        job, cwd=place, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout
    assert killed.exists(), f"{name}: nobody was killed"
    ends = [torch.load(each) for each in place.glob(f"{name}.pt.*")]
    # A live survivor may have done all steps before another worker joins.
    assert {steps for steps, *_ in ends} == {3 * 57}, [steps for steps, *_ in ends]
    return [torch.cat([each.flatten() for each in parameters]) for _, *parameters in ends]


def main() -> None:
    args = parse_args(__doc__, warm="fork the workers of `resilin run`")
    began = time.monotonic()
    with TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "job.py").write_text(JOB)
        (alone,) = train(place, "alone")
        resilin = str(Path(sys.executable).parent / "resilin")
        figures: dict[str, object] = {"torch": str(torch.__version__)}
        figures["norm"] = f"{alone.norm().item():.14f}"
        for name, options in {"restart": ("--warm",) * args.warm, "live": ("--live",)}.items():
            ours = train(place, name, resilin, "run", *options, "--nproc", "2")
            figures[name] = max((each - alone).abs().max().item() for each in ours)
    finish(
        "survived",
        {**figures, "seconds": round(time.monotonic() - began, 1)},
        LIMITS,
        check=args.check,
    )


if __name__ == "__main__":
    main()
