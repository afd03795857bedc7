"""Steps to equal loss: a batch that grows against a constant one, on a small language model.

    python benchmarks/ramp.py [--quick] [--check]

The byte-level transformer of `accuracy.py` (121k parameters, AdamW) on windows of 64 bytes of
Python's own library, none of them twice. The constant batch of 8 windows, for which the learning
rate was chosen, trains on 6400 windows: 800 steps, a warm-up of 5% and a cosine to a tenth. Its
held-out loss at the end is the target of its seed. Against it, with the default rule for learning
rate, betas and weight decay, and the same schedule on the clock of that rule:

- `doubling`: a fixed schedule in samples, 8, 16, 32 and 64 for a quarter of the 6400 each;
- `ramp`: the same sizes, each taken when the lower bound of the noise scale exceeds it.

Both train until they reach the target, or have used twice the samples; then the seed counts as
`never`, and is in no ratio. A run is evaluated every 40 reference steps from a quarter on, and the
step at which it reaches the target is interpolated. The same is done for the constant batch, which
may touch its last value before the end: ratios are of these steps, paired by seed.

All runs of a seed have the same initial weights and the same order of the same windows. The noise
is measured in every step (`stats_every=1`), as in `accuracy.py`: by default it takes a share of the
time, and the run would depend on the machine.

Two versions were run on seed 0 alone. The first evaluated from three quarters on, and the schedule
was below the target before that (at most 426 steps, against 800). The second did not tell the job
its length, so the noise was averaged over 1000 reference steps, longer than the run: the schedule
took 405 steps, and the ramp never left its first size. Targets are as they were before the first
version. One process, one thread,
about 14 minutes; `--quick` has 2 seeds with a quarter of the windows and looser limits.
"""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import asdict

import torch
from accuracy_tasks import TASKS, Rows
from harness import finish, parse_args
from ramp_figures import CONTENDERS, Point, Run, crossing, summarise
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

import resilin
from resilin.core.batch_schedule import BatchSchedule
from resilin.core.ramp import NoiseRamp

SIZES = (8, 16, 32, 64)
EVALUATIONS = 20
"""Evaluations in the run of the constant batch, of which the first quarter is left out."""
LIMITS = {
    # Upper ends of the 95% intervals, and seeds that never reached the target.
    "doubling_steps_ratio_high": 0.75,
    "ramp_steps_ratio_high": 0.9,
    "doubling_never": 1,
    "ramp_never": 1,
}
"""Targets, chosen before the first run."""
QUICK_LIMITS = {"doubling_steps_ratio": 0.9, "ramp_steps_ratio": 1.0}


def windows(seed: int, num: int) -> tuple[Rows, Rows]:
    """Windows of the library, and held-out ones that are the same for all seeds."""
    parts = [TASKS["bytes"].data(100 * seed + i) for i in range(-(-num // 3200))]
    columns = zip(*(part.train.columns for part in parts), strict=True)
    return Rows(*(torch.cat(column)[:num] for column in columns)), parts[0].test


def warmed_cosine(optimizer: torch.optim.Optimizer, total: int) -> LambdaLR:
    """A warm-up of 5% and a cosine to a tenth, over so many steps."""

    def factor(step: float) -> float:
        cosine = 0.55 + 0.45 * math.cos(math.pi * min(1.0, step / total))
        return min(1.0, (step + 1) / (0.05 * total)) * cosine

    return LambdaLR(optimizer, factor)


def train(name: str, seed: int, samples: int, target: float | None) -> Run:
    """Trains once, as a user would; the constant batch has no target and stops at its end."""
    began = time.process_time()
    task = TASKS["bytes"]
    resilin.reset_job()
    data, test = windows(seed, 2 * samples)
    torch.manual_seed(seed)
    loader = resilin.AdaptiveDataLoader(
        data, SIZES[0], shuffle=True, seed=seed, max_local_bsz=SIZES[-1], collate_fn=Rows.collate
    )
    total = samples // SIZES[0]
    model = task.model()
    (optimizer,) = task.optimizers["adamw"](model)
    scheduler = warmed_cosine(optimizer, total)
    parallel = resilin.AdaptiveDataParallel(
        model, optimizer, scheduler, schedule_by="rule", stats_every=1
    )
    if name == "doubling":
        starts = tuple(i * samples // len(SIZES) for i in range(len(SIZES)))
        loader.set_batch_size(BatchSchedule(starts, SIZES, "samples"))
    elif name == "ramp":
        loader.set_batch_size(NoiseRamp(SIZES))
    points: list[Point] = []
    due, every = 0.25 * total, total / EVALUATIONS
    size = SIZES[0]
    # The length of the run has to be known: the noise is averaged over 5% of it.
    for _ in resilin.remaining_epochs_until(1):
        for inputs, labels in loader:
            optimizer.zero_grad()
            functional.cross_entropy(parallel(inputs), labels).backward()
            optimizer.step()
            clock = parallel.clock
            if clock.progress < due - 1e-6:
                continue
            due += every * math.ceil((clock.progress - due + 1e-6) / every)
            size = loader.current_batch_size
            loss = evaluate(parallel, test)
            points.append(Point(clock.steps, clock.samples, clock.progress, loss))
            is_over = clock.samples >= (samples if target is None else 2 * samples)
            if is_over or (target is not None and loss <= target):
                break
    reached = crossing(points, points[-1].loss if target is None else target)
    spent = time.process_time() - began
    return Run(name, seed, tuple(points), reached, size, spent)


def evaluate(parallel: torch.nn.Module, test: Rows) -> float:
    parallel.eval()
    with torch.no_grad():
        loss = TASKS["bytes"].score(parallel(test.columns[0]), test.columns[1])
    parallel.train()
    return loss


def main() -> None:
    args = parse_args(__doc__ or "")
    torch.set_num_threads(1)
    num_seeds, samples = (2, 1600) if args.quick else (8, 6400)
    runs: list[Run] = []
    for seed in range(num_seeds):
        target = None
        for name in ("constant", *CONTENDERS):
            run = train(name, seed, samples, target)
            target = run.points[-1].loss if name == "constant" else target
            runs.append(run)
            # Line by line: a long run that is interrupted has something to show.
            print(json.dumps(asdict(run)), file=sys.stderr, flush=True)
    figures = {
        key: value if value is not None and math.isfinite(value) else None
        for key, value in summarise(runs).items()
    }
    rows = [
        {"run": r.name, "seed": r.seed, "size": r.last_size, "reached": r.reached} for r in runs
    ]
    clocked = {"cpu_seconds": sum(run.cpu_seconds for run in runs), "rows": rows}
    # No figure is no pass: a contender that never reaches the target has no ratio.
    limits = QUICK_LIMITS if args.quick else LIMITS
    judged = {key: math.inf if figures[key] is None else figures[key] for key in limits}
    finish("ramp", {**figures, **judged, **clocked}, limits, check=args.check)


if __name__ == "__main__":
    main()
