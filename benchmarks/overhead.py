"""Cost of the elastic step: processor time per optimizer step, over that of plain DDP.

    python benchmarks/overhead.py [--quick] [--check]
                                  [--peers | --telemetry | --identity | --optimizers | --live |
                                   --fsdp]
                                  [--minutes N]

Models of 67k, 4M and 25M parameters and one of 64 layers, on 1 and 2 processes. A process has
micro-batches of 64 samples; one process alone accumulates two of them, as it would have nothing to
measure noise by otherwise, and so do the contenders beside it. Everybody has the same data, from
a loader of its own, and the same optimizer (`overhead_jobs.py`); `contest.py` lets them take turns.

- `plain` and `control` are the same plain DDP. Their mean is what all ratios are taken over, and
  the ratio of the one to the other shows what the machine can tell: a row continues until the
  interval of that ratio is narrower than half a percent, or its time is up.
- `never`, `default` and `every` are resilin: statistics in no step, as often as their default
  budget allows, in each step. All have what `resilin run` gives: copies in memory, an event log,
  a pulse; and an autoscaler, with one batch size to choose from.
- `bare`, for one process, is plain PyTorch without DDP; `over_bare` is the ratio of our default to
  that.

Ratios are medians over turns, with intervals of 95%; `_wall` is by the clock on the wall. A figure
is `undecided`, which is neither a pass nor a failure, if its interval contains its limit or the
control was not sharp (`ratios.py`).

With `--peers`, FairScale's AdaScale and AdaptDL take turns too, if they are installed; on two
processes, because nobody can tell AdaptDL to accumulate just two micro-batches on one. With
`--telemetry` the equal contenders are resilin without an event log, beside one with it; the loss of
each step is recorded by all of them. With `--identity` they are resilin that takes the batch handed
out last for the one that is trained, beside one that looks. With `--optimizers` they have one
optimizer of two groups, beside two optimizers that step one after the other. With `--live` they are
resilin as `resilin run` starts it, beside the same in a live job whose members stay. With `--fsdp`
the model is sharded over two processes with `fully_shard`, and `plain` is plain FSDP2.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import Any

import torch
from contest import Contender, Outcome, contest
from harness import finish
from overhead_jobs import CONTENDERS, IDENTITY, LIVE, PEERS, SEVERAL, SHARDED, TELEMETRY, Model
from ratios import Ratio, Verdict, verdict

MODELS = {
    "67k": Model(width=128, depth=4),
    "4M": Model(width=1024, depth=4),
    "25M": Model(width=2048, depth=6),
    "deep": Model(width=128, depth=64),
}
ROWS = [(name, world) for world in (1, 2) for name in MODELS]
QUICK = [("67k", 2), ("4M", 2)]
WITH_PEERS = [("67k", 2), ("4M", 2), ("deep", 2)]
LIMITS = {
    **{f"{name}_{world}proc_default": 1.02 for name, world in ROWS if name != "67k"},
    **{f"{name}_{world}proc_every": 1.08 for name, world in ROWS if name != "67k"},
    "67k_2proc_default": 1.15,
    "4M_1proc_over_bare": 1.05,
}
WITH_FSDP = [("4M", 2), ("25M", 2), ("deep", 2)]
FSDP_LIMITS = {
    f"{name}_{world}proc_{kind}": limit
    for name, world in WITH_FSDP
    for kind, limit in (("default", 1.03), ("every", 1.08))
}
TELEMETRY_LIMIT = 1.01
IDENTITY_LIMIT = 1.005
OPTIMIZERS_LIMIT = 1.05
LIVE_LIMIT = 1.02
MINUTES = 60.0
QUICK_MINUTES = 1.0


def contenders_of(model: Model, world: int, args: argparse.Namespace) -> dict[str, Contender]:
    chosen = TELEMETRY if args.telemetry else LIVE if args.live else CONTENDERS
    chosen = IDENTITY if args.identity else SEVERAL if args.optimizers else chosen
    makers = dict(SHARDED if args.fsdp else chosen)
    model = replace(model, sharded=args.fsdp)
    if args.peers:
        makers.update(PEERS)
    if world > 1:
        makers.pop("bare", None)
    if args.quick:
        makers.pop("never", None)
    return {name: partial(make, model) for name, make in makers.items()}


def ratios_of(outcome: Outcome) -> dict[str, Ratio]:
    """Ratios of processor time that a row reports."""
    names = list(outcome.turns[0])
    ratios = {
        name: outcome.ratio(name, *outcome.equal) for name in names if name not in outcome.equal
    }
    if "bare" in names:
        ratios["over_bare"] = outcome.ratio("default", "bare")
    return ratios


def figures_of(row: str, outcome: Outcome) -> dict[str, Any]:
    """Figures of a row, for the JSON line."""
    figures: dict[str, Any] = {}
    for name, ratio in {**ratios_of(outcome), "control": outcome.control}.items():
        figures[f"{row}_{name}"] = round(ratio.median, 4)
        figures[f"{row}_{name}_interval"] = ratio.rounded
    for name in outcome.turns[0]:
        if name not in outcome.equal:
            wall = outcome.ratio(name, *outcome.equal, clock="wall")
            figures[f"{row}_{name}_wall"] = round(wall.median, 3)
    figures[f"{row}_plain_ms"] = round(outcome.milliseconds(outcome.equal[0]), 3)
    figures[f"{row}_turns"] = len(outcome.turns)
    for name, error in outcome.errors.items():
        figures[f"{row}_{name}"] = f"cannot run: {error}"
    return figures


def version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few rows, about a minute in all")
    parser.add_argument("--check", action="store_true", help="exit 1 if a figure misses its limit")
    parser.add_argument("--minutes", type=float, help="most time for all rows together")
    parser.add_argument("--rows", help="only these, such as 4M_2proc,deep_1proc")
    others = parser.add_mutually_exclusive_group()
    others.add_argument("--peers", action="store_true", help="measure FairScale and AdaptDL, too")
    others.add_argument("--telemetry", action="store_true", help="measure what events cost")
    others.add_argument("--identity", action="store_true", help="measure telling batches apart")
    others.add_argument("--optimizers", action="store_true", help="measure two over a joint one")
    others.add_argument("--live", action="store_true", help="measure live over restarting jobs")
    others.add_argument("--fsdp", action="store_true", help="measure sharded models, over FSDP2")
    args = parser.parse_args()
    chosen = WITH_PEERS if args.peers else WITH_FSDP if args.fsdp else ROWS
    if args.quick:
        chosen = WITH_FSDP[:1] if args.fsdp else QUICK
    rows = {f"{name}_{world}proc": (name, world) for name, world in chosen}
    if args.rows:
        rows = {row: rows[row] for row in args.rows.split(",")}
    minutes = args.minutes or (QUICK_MINUTES if args.quick else MINUTES)
    for name in [name for name in os.environ if name.startswith("RESILIN_")]:
        del os.environ[name]  # the contenders get their own
    torch.set_num_threads(1)
    name, equal = "overhead", ("plain", "control")
    if args.telemetry:
        name, equal = "telemetry", ("without", "without_again")
    elif args.identity:
        name, equal = "identity", ("without", "without_again")
    elif args.optimizers:
        name, equal = "optimizers", ("joint", "joint_again")
    elif args.live:
        name, equal = "overhead_live", ("restart", "restart_again")
    elif args.fsdp:
        name = "overhead_fsdp"
    figures: dict[str, Any] = {"torch": torch.__version__}
    if args.peers:
        figures["versions"] = {name: version_of(name) for name in PEERS}
    verdicts: dict[str, Verdict] = {}
    limits: dict[str, float] = {}
    deadline = time.monotonic() + 60 * minutes
    for number, (row, (model, world)) in enumerate(rows.items()):
        # What a row leaves over is for those after it.
        seconds = (deadline - time.monotonic()) / (len(rows) - number)
        outcome = contest(contenders_of(MODELS[model], world, args), equal, world, seconds)
        figures.update(figures_of(row, outcome))
        for kind, ratio in ratios_of(outcome).items():
            key = f"{row}_{kind}"
            limit = (FSDP_LIMITS if args.fsdp else LIMITS).get(key)
            if args.telemetry or args.live or args.identity or args.optimizers:
                limit = LIVE_LIMIT if args.live else TELEMETRY_LIMIT
                limit = IDENTITY_LIMIT if args.identity else limit
                limit = OPTIMIZERS_LIMIT if args.optimizers else limit
            if limit is not None:
                limits[key] = limit
                verdicts[key] = figures[f"{key}_verdict"] = verdict(ratio, limit, outcome.control)
        print(
            f"{row}: "
            + ", ".join(f"{key} {ratio}" for key, ratio in ratios_of(outcome).items())
            + f"; control {outcome.control}, {len(outcome.turns)} turns",
            file=sys.stderr,
        )
    finish(
        name,
        figures,
        limits,
        check=args.check,
        undecided=[key for key, decided in verdicts.items() if decided == "undecided"],
    )


if __name__ == "__main__":
    main()
