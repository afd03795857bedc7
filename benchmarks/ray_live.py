"""A worker is killed on Ray: live elasticity beside the restart of Ray Train, in one run.

    python benchmarks/ray_live.py --quick --check

Both train the same function on two actors of one local cluster. A worker gets SIGKILL, and the time
runs until the first step that the job completes without it. Live, that is a step of the survivor;
its replacement joins later, and is waited for before the next kill. Ray Train starts all workers
again (`FailureConfig(max_failures=-1)`), which resume from a copy in memory that is made after each
step. Its controller looks at its workers every 0.5 s here, and every 2 s by default.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import finish, parse_args

SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "RESILIN_RUN_DIR": "off",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
}
WORKERS, SAMPLES, BATCH, WIDTH = 2, 480, 24, 256
MOST = 120.0
"""Seconds for which one thing is waited for."""
RATIO = 0.25
"""The most that live may take of Ray Train's time, in the median."""


def train(config: dict[str, Any]) -> None:
    """Trains for ever; each worker writes a line for each step that it has made."""
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import TensorDataset

    import resilin

    torch.set_num_threads(1)
    resilin.init_process_group()
    if not config["live"]:
        resilin.checkpoint_to(None, memory_every=1)
    x = torch.randn(config["samples"], 32, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    width = config["width"]
    net = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    model = resilin.AdaptiveDataParallel(net, optimizer)
    data = TensorDataset(x, x[:, :4].argmax(1))
    loader = resilin.AdaptiveDataLoader(data, batch_size=config["batch"], shuffle=True)
    job = resilin.current_job()
    with (Path(config["directory"]) / f"{os.getpid()}.jsonl").open("w", buffering=1) as lines:
        for _ in resilin.remaining_epochs_until(1_000_000):
            for inputs, labels in loader:
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
                now = job.engine.membership
                line = [now.generation, now.num_replicas, job.clock.steps, time.time(), os.getpid()]
                print(json.dumps(line), file=lines)
                time.sleep(0.01)


def last_lines(directory: Path) -> dict[int, list[Any]]:
    """The last whole line of each worker, by its process."""
    found = {}
    for path in directory.glob("*.jsonl"):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 1000))
            lines = file.read().split(b"\n")[:-1]
        if lines:
            found[int(path.stem)] = json.loads(lines[-1])
    return found


def first_of(directory: Path, generation: int) -> float | None:
    """When the first step after this generation was completed; None if none was."""
    times = []
    for path in directory.glob("*.jsonl"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n") and (entry := json.loads(line))[0] > generation:
                times.append(entry[3])
                break
    return min(times, default=None)


def wait_for(what: Callable[[], Any], failed: list[BaseException]) -> Any:
    """The first answer that is not None or False."""
    deadline = time.monotonic() + MOST
    while time.monotonic() < deadline:
        if failed:
            raise failed[0]
        if (answer := what()) not in (None, False):
            return answer
        time.sleep(0.02)
    raise TimeoutError(f"nothing within {MOST:g} s")


def kill_some(directory: Path, kills: int, failed: list[BaseException]) -> list[float]:
    """Kills a worker that is in a full group, several times; the seconds until the next step."""

    def full() -> list[int] | None:
        newest = max((line[0] for line in last_lines(directory).values()), default=-1)
        here = [line for line in last_lines(directory).values() if line[0] == newest]
        if len(here) < WORKERS or any(line[1] < WORKERS for line in here):
            return None
        return [newest, *sorted(line[4] for line in here)]

    times = []
    for number in range(kills):
        generation, *pids = wait_for(full, failed)
        time.sleep(1.0)  # some steps of the full group
        victim = pids[number % len(pids)]
        began = time.time()
        os.kill(victim, signal.SIGKILL)
        after = wait_for(lambda newest=generation: first_of(directory, newest), failed)
        times.append(after - began)
    return times


def measure(kind: str, run: Callable[[dict[str, Any]], object], kills: int) -> list[float]:
    """Runs the function in a thread, and kills its workers."""
    failed: list[BaseException] = []
    with tempfile.TemporaryDirectory() as name:
        config = {"directory": name, "live": kind == "live", "samples": SAMPLES}
        config |= {"batch": BATCH, "width": WIDTH}

        def target() -> None:
            try:
                run(config)
            except BaseException as error:
                failed.append(error)

        threading.Thread(target=target, daemon=True).start()
        return kill_some(Path(name), kills, failed)


def run_live(config: dict[str, Any]) -> None:
    """The function on live actors."""
    from resilin.integrations import ray_live

    ray_live.run_live(
        train, config, min_workers=WORKERS, max_workers=WORKERS, max_failures=0, name="benchmark"
    )


def run_train(config: dict[str, Any]) -> None:
    """The function on workers of Ray Train."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(
            name="benchmark",
            storage_path=config["directory"],
            failure_config=FailureConfig(max_failures=-1),
        ),
    ).fit()


def figures_of(times: list[float]) -> dict[str, Any]:
    """Median and spread of some times."""
    rounded = [round(each, 3) for each in times]
    return {"median": round(statistics.median(times), 3), "each": rounded}


def main() -> None:
    """Measures both, one after the other, on one cluster."""
    args = parse_args(__doc__ or "")
    os.environ.update(SETTINGS)
    import ray

    kills = 3 if args.quick else 7
    ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        live = measure("live", run_live, kills)
        ray.kill(ray.get_actor("benchmark"))
        restart = measure("ray train", run_train, kills)
    finally:
        ray.shutdown()
    ratio = statistics.median(live) / statistics.median(restart)
    figures = {
        "kills": kills,
        "live_seconds": figures_of(live),
        "ray_train_seconds": figures_of(restart),
        "ratio": round(ratio, 4),
    }
    finish("ray_live", figures, {"ratio": RATIO}, check=args.check)


if __name__ == "__main__":
    main()
