"""A tiny GPT on packed text from a stream, killed and resized, against an undisturbed run.

    python benchmarks/gpt_stream.py [--quick] [--check]

Text is made on the spot, and goes from files through `FileStream`, `Shuffled` and `Packed` into a
transformer of two layers in float64, at a fixed schedule of batch sizes. One run has one replica to
its end. The other is killed (agent and workers, SIGKILL) five times, and goes on with another
number of replicas each time. It is done in two forms:

- plain: the loop as people write it. Sums over other numbers of replicas round differently, so the
  runs may differ by rounding; the figure is the largest difference of a parameter;
- exact: micro-batches of one sample, whose gradients are rounded to multiples of 2^-40, and mean
  gradients that are rounded to the multiples that a sum of those can have. Sums are exact then, so
  loss and parameters of the two runs must be equal in all bits.

The quick form has fewer steps, and kills the plain run once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import finish, make_parser
from torch import Tensor, nn
from torch.nn import functional as F

import resilin
from resilin.streams import FileStream, Packed, Shuffled
from resilin.training.data.shards import news, reading

WORLDS = (1, 2, 3, 1, 4, 2)
"""Replicas of the lives of a disturbed run."""
QUICK_PLAIN_WORLDS = (1, 3)
LENGTH, WIDTH, HEADS = 32, 32, 2
NUM_FILES, NUM_SHARDS, NUM_DOCUMENTS = 12, 6, 10
"""Files, shards, and documents of each file at most."""
SIZES = (8, 5, 12, 7)
"""Batch sizes, three steps each, over and over; the reference batch is the first one."""
GRID = 2.0**-40
"""Unit of the gradients of samples in the exact form; they are below 2^10."""
LIFE_LIMIT = 120.0
"""Seconds without a step after which a run counts as hung."""
STEPS, QUICK_STEPS = 90, 40


# The job ---------------------------------------------------------------------------------------


def write_text(folder: Path) -> None:
    """Files of documents, one in a line, of unequal lengths and numbers."""
    folder.mkdir()
    dice = random.Random(0)
    syllables = ["".join(dice.choices("bdfgklmnprst", k=1)) + vowel for vowel in "aeiou" * 6]
    for number in range(NUM_FILES):
        documents = []
        for _ in range(dice.randint(2, NUM_DOCUMENTS)):
            words = ("".join(dice.choices(syllables, k=dice.randint(1, 3))) for _ in range(25))
            documents.append(" ".join(list(words)[: dice.randint(3, 25)]))
        (folder / f"{number:02d}.txt").write_text("\n".join(documents) + "\n")


def read_lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def to_bytes(text: str) -> list[int]:
    return list(text.encode())


def make_stream(folder: Path) -> Packed:
    files = FileStream(
        sorted(folder.iterdir()), read_lines, num_shards=NUM_SHARDS, shuffle=True, fingerprint="t"
    )
    documents = Shuffled(files, buffer_size=4)
    return Packed(documents, LENGTH + 1, tokens=to_bytes, separator=0, remainder="drop")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.blocks(self.tokens(tokens) + self.places.weight)
        return logits


def loss_of(model: nn.Module, packs: Tensor) -> Tensor:
    return F.cross_entropy(model(packs[:, :-1]).flatten(0, 1), packs[:, 1:].flatten())


def snap(tensor: Tensor, unit: float) -> Tensor:
    """The nearest multiples of a unit."""
    return torch.round(tensor / unit) * unit


def job(folder: Path, steps: int, *, exact: bool) -> None:
    """Trains for so many steps, as often as it is started; writes the final state down."""
    # Lives are too short for places that are saved, and told, as rarely as in real jobs.
    reading.BOOKMARK_EVERY, news._MARKS_EVERY = 4, 3
    torch.manual_seed(0)
    torch.set_num_threads(1)
    resilin.init_process_group()
    first = resilin.current_job().engine.membership.is_first
    net = GPT().double()
    if exact:
        # Of each micro-batch: hooks on parameters get the gradient of the whole step.
        nodes = [each.view_as(each).grad_fn.next_functions[0][0] for each in net.parameters()]
        for node in nodes:
            node.register_prehook(lambda gradients: (snap(gradients[0], GRID),))
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="constant")
    loader = resilin.AdaptiveDataLoader(
        make_stream(folder.parent / "text"),
        batch_size=SIZES[0],
        max_local_bsz=1 if exact else None,
    )
    sizes = [SIZES[i // 3 % len(SIZES)] for i in range(steps)]
    loader.set_batch_size(lambda clock: sizes[min(clock.steps, steps - 1)])
    resilin.checkpoint_to(None, memory_every=1)
    began = resilin.resume()
    if first:
        with (folder / "began").open("a") as file:
            file.write(f"{0 if began is None else began.step}\n")
    samples = 0
    for _ in resilin.remaining_epochs_until(10**6):
        for batch in loader:
            before, samples = model.clock.steps, model.clock.samples
            loss_of(model, batch["input_ids"]).backward()
            with model.change_gradient() as complete:
                if exact and complete:
                    # What a sum over replicas has rounded, this puts right.
                    for parameter in net.parameters():
                        total = snap(parameter.grad * model.step_weight, GRID)
                        parameter.grad.copy_(total / model.step_weight)
            optimizer.step()
            optimizer.zero_grad()
            if first and model.clock.steps > before:
                (folder / "step.tmp").write_text(f"{model.clock.steps}")
                (folder / "step.tmp").rename(folder / "step")
            if model.clock.steps == steps:
                break
        if model.clock.steps == steps:
            break
    if first:
        shard = make_stream(folder.parent / "text").open(0, NUM_SHARDS, 0)
        packs = torch.stack([torch.as_tensor(pack["input_ids"]) for pack in shard])
        with torch.no_grad():
            loss = loss_of(net, packs).item()
        final = {"loss": loss, "samples": samples, "parameters": net.state_dict()}
        torch.save(final, folder / "final.tmp")
        (folder / "final.tmp").rename(folder / "final.pt")


# Runs ------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """What came of a run."""

    loss: float
    parameters: dict[str, Tensor]
    began: list[int]
    """The step at which each life began."""


def train(folder: Path, worlds: tuple[int, ...], steps: int, *, exact: bool) -> Run:
    """Trains to the end, with a kill between two lives."""
    folder.mkdir()
    for life, world in enumerate(worlds):
        process = start(folder, world, steps, exact=exact)
        try:
            if life < len(worlds) - 1:
                wait(folder, process, (life + 1) * steps // len(worlds))
            elif process.wait(timeout=LIFE_LIMIT * 2) != 0:
                raise SystemExit(log_of(folder))
        finally:
            end(process)
    final = torch.load(folder / "final.pt")
    began = [int(line) for line in (folder / "began").read_text().split()]
    return Run(final["loss"], final["parameters"], began)


def start(folder: Path, world: int, steps: int, *, exact: bool) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "resilin.cli", "run", "--nproc", f"{world}"]
    command += ["--rdzv-id", "gpt", "--run-dir", "off"]
    command += ["--memory-dir", str(folder / "memory"), __file__]
    command += ["--job", str(folder), "--steps", f"{steps}", *(["--exact"] if exact else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True
        )


def wait(folder: Path, process: subprocess.Popen[bytes], step: int) -> None:
    """Waits until a step is made."""
    deadline = time.monotonic() + LIFE_LIMIT
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        if (folder / "step").exists() and int((folder / "step").read_text()) >= step:
            return
        time.sleep(0.005)
    raise SystemExit(log_of(folder))


def end(process: subprocess.Popen[bytes]) -> None:
    """Kills the agent and its workers, which are in sessions of their own."""
    found = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, timeout=10
    )
    process.kill()
    for pid in found.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    process.wait()


def log_of(folder: Path) -> str:
    return (
        f"{folder.name}: the run has not come to its end\n" + (folder / "log").read_text()[-4000:]
    )


def distance(one: Run, other: Run) -> float:
    """The largest difference of a parameter."""
    pairs = ((one.parameters[name], other.parameters[name]) for name in one.parameters)
    return max(float((a - b).abs().max()) for a, b in pairs)


def compare(folder: Path, worlds: tuple[int, ...], steps: int, *, exact: bool) -> dict[str, Any]:
    name = "exact" if exact else "plain"
    alone = train(folder / f"{name}-alone", (1,), steps, exact=exact)
    killed = train(folder / f"{name}-killed", worlds, steps, exact=exact)
    # A life that began anew would have made all steps itself, and compared nothing.
    lost = sum(a >= b for a, b in zip(killed.began, killed.began[1:], strict=False))
    return {
        f"{name}_kills": len(worlds) - 1,
        f"{name}_lives_from_the_beginning": lost,
        f"{name}_loss": alone.loss,
        f"{name}_loss_difference": abs(alone.loss - killed.loss),
        f"{name}_parameter_difference": distance(alone, killed),
    }


def main() -> None:
    parser = make_parser(__doc__ or "")
    for hidden in ("--job", "--steps"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--exact", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        job(Path(args.job), int(args.steps), exact=args.exact)
        return
    steps = QUICK_STEPS if args.quick else STEPS
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="resilin-gpt-", dir=memory))
    try:
        write_text(folder / "text")
        figures = compare(folder, WORLDS, steps, exact=True)
        worlds = QUICK_PLAIN_WORLDS if args.quick else WORLDS
        figures |= compare(folder, worlds, steps, exact=False)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    limits = {
        "exact_loss_difference": 0.0,
        "exact_parameter_difference": 0.0,
        "exact_lives_from_the_beginning": 0,
        "plain_lives_from_the_beginning": 0,
        "plain_parameter_difference": 1e-9,
    }
    finish("gpt_stream", {"steps": steps, **figures}, limits, check=args.check)


if __name__ == "__main__":
    main()
