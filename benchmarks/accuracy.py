"""Accuracy under a changing batch size: does the default rule keep what the reference run had?

    python benchmarks/accuracy.py [--quick] [--check]

Every run trains through the public API, alone in a process with one thread; batches above the
reference batch are accumulated. A run and its reference share split, initial weights and seed, so
`d`, their difference in accuracy (or in validation loss), is paired, and its standard error is
that of the paired difference. Seeds are 0..n-1. The learning rate is a cosine over the reference
run, handed to the clock of the rule. A trace changes the batch at each fifth of training, by that
same clock. Tasks:

- `digits`: 1000 of scikit-learn's digits, pixels in 0..1, with an MLP; the other 797 are the
  test. Each seed has a split of its own.
- `digits-std`: the same with each pixel standardised. Here the negative control loses only about
  a point, with or without resilin, so it proves little: it was tried first, and has no limit.
- `noisy`: a made-up problem with 10% random labels. It was held out until `sgdscale` was
  looked at.
- `fresh`: the same generator, one epoch over 20,000 rows. A rule that needs more samples sees rows
  again, in another order.
- `conv`: digits as images, two convolutions with BatchNorm, nesterov and weight decay. A
  micro-batch of BatchNorm is the reference batch, whatever the batch.
- `friedman` and `modules`: held out. Their data, models, traces, seeds and limits were fixed before
  any run of them at another batch size; their learning rates are the best of a grid in
  factors of about two, for the reference run, on seeds 100 to 102. `friedman` is a
  regression (its score is the percent of variance explained); `modules` is text: which of Python's
  20 largest modules is a window from?
- `bytes`: a byte-level transformer on the source of Python's own library, read from the running
  Python. Its score is the validation loss in nats, less is better. One epoch is the reference
  run; whatever takes more samples sees the same windows again, in another order.
- `gpt`, and `fresh` with Muon: Muon for the matrices, AdamW for the rest. `gpt` is the byte model
  at half the width, for 4,800 steps of four windows: ten times as long as the runs that `root`
  was found with. Both were fixed before any run of them at another batch size but one of a tenth of
  the length, which told the time it takes; Muon's learning rates are the best of a grid as above
  (for `gpt` of three, on seed 100).

Learning rates were chosen for the reference runs alone. With a static rule a run has as many
samples as its reference; under the default rule it has as much progress, and its cost in samples
is reported. Losses at the end over the training rows and over the test tell a gap of optimisation
(the training loss is higher than the reference's) from one of generalisation (it is not, but the
test loss is). The negative control is linear scaling at 16 times the batch: it must lose at least 5
points, or the task could not tell a good rule from a bad one.

Rules are those of `resilin`, and `before`: the default as it was until November 2026, which is
`adascale` or `adamscale` with noise averaged over 15% of the run instead of 5%. Each cell of
`sgdscale`, and of Adam's default, has its paired difference from `adascale` and from `before`.
`sgdscale` was to become the default for SGD unless it was below either on a held-out task by more
than two standard errors. It was, in four of 16 comparisons, and `adascale` is the default. The
limits of that are left as they were chosen: the full form misses them.

Muon has three rules on the progress clock: `before` (the learning rate by sqrt(r), the momentum as
it is), `root` (the same, and the momentum mu^r) and `muonscale` (the learning rate by r, and mu^r);
AdamW has `adamscale` beside each. At as many samples as the reference it has `sqrt`, `constant`,
and the last two with the batch in place of r, `root-samples` and `samples`. `root` was to be the
default unless it was below `before`, or `root-samples` below `sqrt` or `constant`, on one of the
two tasks by more than two standard errors; and `muonscale`, a `bold` one then, if it was ahead of
`root` by as much in every cell. `samples`, and `muonscale` on `gpt`, were added after `fresh` had
been seen.

`--quick` trains on `digits` with 5 seeds; its limits are wider, as its errors are. `--tasks a,b`
does some tasks, and checks their limits only. `--keep FILE` adds each run to a file and does not
repeat what is there: runs are deterministic, so that holds until the code changes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from accuracy_figures import (
    HELD_OUT,
    Config,
    Result,
    as_json,
    changes,
    print_changes,
    print_table,
    summarise,
    verdict,
)
from accuracy_tasks import TASKS, Rows, Split, Task
from harness import finish
from torch import nn

import resilin
from resilin.core.clock import Clock, Reference
from resilin.core.rules import PowerRule
from resilin.training.scaling import estimates

BEFORE = {"sgd": "adascale", "adam": "adamscale", "adamw": "adamscale"}
"""Rules of `before`."""
HORIZON_BEFORE = 0.15
_ROOT = PowerRule(0.5, 0.5, betas=True, weight_decay=True, momentum=True)
_SAMPLES = PowerRule(0.5, betas=True, weight_decay=True, momentum=True)
RULES: dict[tuple[str, str], resilin.ScalingRule | list[resilin.ScalingRule | str]] = {
    ("muon", "muonscale"): ["muonscale", "adamscale"],
    ("muon", "before"): [PowerRule(0.5, 0.5, weight_decay=True), "adamscale"],
    ("muon", "root"): _ROOT,
    ("muon", "samples"): [PowerRule(1, weight_decay=True, momentum=True), _SAMPLES],
    ("muon", "root-samples"): _SAMPLES,
}
"""What a rule is that has no name in `resilin`, or is one for each optimizer."""
TRACES: dict[str, tuple[int, ...]] = {
    "1x": (1,),
    "8x": (8,),
    "16x": (16,),
    "up": (1, 2, 4, 8, 16),
    "down": (16, 8, 4, 2, 1),
    "zigzag": (1, 8, 2, 16, 4),
}
"""Batch sizes over the reference batch, each for an equal part of training time."""


# One run -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _horizon(fraction: float) -> Iterator[None]:
    """Averages the noise over this fraction of the run."""

    def horizon(reference: float, total_steps: float | None = None) -> float:
        assert total_steps is not None
        return reference * max(1.0, min(1000.0, fraction * total_steps))

    with mock.patch.object(estimates, "default_horizon", side_effect=horizon) as patched:
        yield
    assert patched.called, "nothing has asked for the horizon that was to be changed"


@torch.no_grad()
def _evaluate(model: nn.Module, task: Task, data: Split) -> tuple[float, float, float]:
    """Score and loss on the test, and the loss over the training rows."""
    model.eval()

    def outputs(rows: Rows) -> torch.Tensor:
        return torch.cat([model(part) for part in rows.columns[0].split(512)])

    trained, tested = outputs(data.train), outputs(data.test)
    score = task.score(tested, data.test.columns[1])
    train_loss = float(task.loss(trained, data.train.columns[1]))
    return score, train_loss, float(task.loss(tested, data.test.columns[1]))


def train(config: Config, seed: int) -> Result:
    """Trains once, as a user would."""
    if config.rule == "before" and config.optimizer in BEFORE:
        with _horizon(HORIZON_BEFORE):
            named = config._replace(rule=BEFORE[config.optimizer])
            return train(named, seed)._replace(config=config)
    began = time.process_time()
    task = TASKS[config.task]
    data = task.data(seed)
    resilin.reset_job()
    torch.manual_seed(seed)
    loader = resilin.AdaptiveDataLoader(
        data.train,
        batch_size=task.batch_size,
        shuffle=True,
        seed=seed,
        max_local_bsz=task.micro_batch or task.batch_size,
        collate_fn=Rows.collate,
    )
    total = task.epochs * len(loader)
    model = task.model()
    optimizers = task.optimizers[config.optimizer](model)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / total))
        )
        for optimizer in optimizers
    ]
    parallel = resilin.AdaptiveDataParallel(
        model,
        optimizers,
        schedulers,
        rule=RULES.get((config.optimizer, config.rule), config.rule),
        schedule_by="rule",
        stats_every=1,
    )
    reference = Reference(task.batch_size)
    scales = TRACES[config.trace]

    def batch_size(clock: Clock) -> int:
        fraction = clock.read(parallel.rule.clock, reference) / total
        return task.batch_size * scales[min(int(fraction * len(scales)), len(scales) - 1)]

    loader.set_batch_size(batch_size)
    for _ in resilin.remaining_epochs_until(task.epochs):
        for inputs, labels in loader:
            task.loss(parallel(inputs), labels).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    clock = parallel.clock
    spent = clock.read(parallel.rule.clock, reference)
    assert total - 1e-3 < spent < total + max(scales), f"{config}: {spent} of {total} steps"
    return Result(
        config,
        seed,
        *_evaluate(model, task, data),
        steps=clock.steps,
        samples=clock.samples,
        cpu_seconds=time.process_time() - began,
    )


def _start_worker() -> None:
    torch.set_num_threads(1)


def _train(arguments: tuple[Config, int]) -> Result:
    return train(*arguments)


# All runs ------------------------------------------------------------------------------------


def plan(quick: bool) -> dict[Config, int]:
    """Every configuration, and over how many seeds."""
    seeds: dict[Config, int] = {}

    def add(num: int, task: str, optimizer: str, rules: str, traces: str) -> None:
        for rule, trace in itertools.product(rules.split(), traces.split()):
            config = Config(task, optimizer, rule, trace)
            seeds[config] = num
            seeds[config.reference] = max(num, seeds.get(config.reference, 0))

    if quick:
        add(5, "digits", "adam", "auto", "8x zigzag")
        add(5, "digits", "sgd", "sgdscale adascale", "8x zigzag")
        add(5, "digits", "sgd", "linear", "16x")
        return seeds
    add(10, "gpt", "muon", "muonscale root before", "8x zigzag")
    add(10, "fresh", "muon", "muonscale root before", "8x 16x zigzag")
    add(10, "fresh", "muon", "samples root-samples sqrt constant", "8x 16x")
    add(3, "bytes", "adamw", "auto before", "8x zigzag")
    add(10, "conv", "sgd", "sgdscale before", "8x 16x")
    for task in HELD_OUT:
        add(10, task, "sgd", "sgdscale adascale before", "8x 16x down zigzag")
    add(10, "fresh", "sgd", "sgdscale adascale before", "8x 16x")
    add(10, "noisy", "sgd", "sgdscale adascale before", "8x 16x zigzag")
    add(10, "digits", "sgd", "sgdscale adascale before", "8x 16x down")
    add(20, "digits", "sgd", "sgdscale adascale before", "up zigzag")
    add(10, "digits", "sgd", "linear sqrt constant", "8x 16x zigzag")
    add(10, "digits", "adam", "auto before", "8x 16x zigzag")
    return seeds


def run(
    seeds: dict[Config, int], workers: int, keep: Path | None = None
) -> dict[Config, list[Result]]:
    """Does all runs that are not kept already, and keeps them."""
    results: dict[Config, dict[int, Result]] = {config: {} for config in seeds}
    if keep is not None and keep.exists():
        for line in keep.read_text(encoding="utf-8").splitlines():
            config, *rest = json.loads(line)
            kept = Result(Config(*config), *rest)
            if kept.config in seeds and kept.seed < seeds[kept.config]:
                results[kept.config][kept.seed] = kept
    # In the order of the plan, which begins with the longest runs.
    jobs = [
        (config, seed)
        for config, num in seeds.items()
        for seed in range(num)
        if seed not in results[config]
    ]
    with multiprocessing.get_context("spawn").Pool(workers, _start_worker) as pool:
        for done, result in enumerate(pool.imap_unordered(_train, jobs), 1):
            results[result.config][result.seed] = result
            if keep is not None:
                with keep.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(result) + "\n")
            if done % 50 == 0:
                print(f"{done} of {len(jobs)} runs", file=sys.stderr, flush=True)
    return {
        config: [found[seed] for seed in range(seeds[config])] for config, found in results.items()
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smaller form, about two minutes")
    parser.add_argument("--check", action="store_true", help="exit 1 if a figure misses its limit")
    parser.add_argument("--tasks", help="some tasks of the plan, by comma", metavar="NAMES")
    parser.add_argument("--optimizers", help="some of them, by comma", metavar="NAMES")
    parser.add_argument("--rules", help="some rules of the plan, by comma", metavar="NAMES")
    parser.add_argument("--workers", type=int, default=2, help="processes (%(default)s)")
    parser.add_argument("--keep", type=Path, help="a file of runs, which are not repeated")
    return parser.parse_args()


def chosen(seeds: dict[Config, int], **names: str | None) -> dict[Config, int]:
    """The part of a plan with these tasks, optimizers and rules, and its references."""
    found = dict(seeds)
    for field, given in names.items():
        if given is None:
            continue
        wanted, known = set(given.split(",")), {getattr(config, field) for config in seeds}
        if unknown := wanted - known:
            raise SystemExit(f"not in the plan: {sorted(unknown)}; it has {sorted(known)}")
        found = {c: num for c, num in found.items() if getattr(c, field) in wanted}
    return found | {c.reference: seeds[c.reference] for c in found}


def main() -> None:
    args = parse_args()
    began = time.perf_counter()
    part = chosen(plan(args.quick), task=args.tasks, optimizer=args.optimizers, rule=args.rules)
    results = run(part, args.workers, args.keep)
    rows = {
        config: summarise(found, results[config.reference]) for config, found in results.items()
    }
    found = changes(results)
    print_table(rows)
    print_changes(found)
    figures, limits = verdict(rows, found, args.quick)
    clocked = {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": sum(r.cpu_seconds for found in results.values() for r in found),
    }
    details = {"rows": as_json(rows), "default_minus": as_json(found)}
    finish("accuracy", {**figures, **clocked, **details}, limits, check=args.check)


if __name__ == "__main__":
    main()
