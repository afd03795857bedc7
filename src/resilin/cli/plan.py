"""`resilin plan`: the split of one global batch for different numbers of replicas.

The arithmetic is that of `resilin.core.plan`, which a job uses too: the table is exact.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from resilin.cli import tables, values
from resilin.cli.errors import user_errors
from resilin.core.plan import BatchBounds, BatchPlan, PlanError

COUNTS = "1,2,4,8"
"""Default numbers of replicas in the table."""
HEADER = (
    "replicas",
    "micro-batch",
    "accumulation",
    "per replica",
    "idle",
    "work",
    "balance",
)
"""The columns of the table."""
EPILOG = f"""\
columns:
  micro-batch   samples in one forward/backward; 42-43: not divisible, sizes differ by one
  accumulation  micro-batches that a replica runs one after the other in one step
  per replica   samples of a replica in one step
  idle          replicas without samples, because there are more replicas than samples
  work          share of the global batch that the busiest replica processes
  balance       mean share divided by largest share; the rest up to 100% is spent waiting

example:
  resilin plan 256 --max-local 64 --replicas 1-4,8

A global batch of 256 where 64 samples fit on a GPU. With one replica it is four micro-batches
of 64, with four replicas one on each; the optimizer sees the same gradient in both.
Without --replicas the table shows {COUNTS}. The exit code is 1 if the batch cannot be split for
any number of replicas in the table.
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    ours = argparse.ArgumentParser(
        prog="resilin plan",
        description="Shows how one global batch is split into micro-batches for each number of "
        "replicas.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ours.add_argument(
        "batch", type=values.count, metavar="BATCH", help="Samples in one step: the global batch."
    )
    ours.add_argument(
        "--replicas",
        type=values.counts,
        default=COUNTS,
        metavar="COUNTS",
        help="Numbers of replicas, such as 1,2,4 or 1-8 (default: %(default)s).",
    )
    ours.add_argument(
        "--max-local", type=values.count, metavar="N", help="Largest micro-batch that fits."
    )
    ours.add_argument(
        "--min-local",
        type=values.count_or_none,
        default=0,
        metavar="N",
        help="Smallest micro-batch worth running (default: %(default)s, which lets replicas idle).",
    )
    ours.add_argument(
        "--max-batch",
        type=values.count,
        metavar="N",
        help="Largest global batch that the job may choose. Together with --min-local it limits "
        "the number of replicas.",
    )
    ours.add_argument(
        "--no-accumulation",
        action="store_true",
        help="Allow only one micro-batch per replica and step; too few replicas are then an error.",
    )
    tables.add_json_option(ours)
    return ours


@user_errors
def main(arguments: Sequence[str]) -> int:
    """Print the table.

    Returns:
        0; 1 if the batch cannot be split over any of the numbers of replicas.
    """
    ours = parser()
    args = ours.parse_args(arguments)
    if args.max_local and args.min_local > args.max_local:
        ours.error(f"--min-local ({args.min_local}) must be at most --max-local ({args.max_local})")
    # Without an upper limit, no micro-batch is larger than the batch.
    bounds = BatchBounds(
        max_batch_size=args.max_batch,
        local_bsz_bounds=(args.min_local, args.max_local or max(args.batch, args.min_local)),
        gradient_accumulation=not args.no_accumulation,
    )
    rows = [_row(bounds, args.batch, replicas) for replicas in args.replicas]
    if args.json:
        print(tables.to_json(rows))
    else:
        print(tables.to_text(HEADER, [_cells(row) for row in rows]))
        if any(row["possible"] for row in rows):
            print(f"\nEvery row is the same step: {args.batch} samples and their mean gradient.")
    return int(not any(row["possible"] for row in rows))


def _row(bounds: BatchBounds, batch: int, replicas: int) -> dict[str, Any]:
    try:
        plan = bounds.plan(batch, replicas)
    except PlanError as error:
        return {"replicas": replicas, "possible": False, "reason": str(error)}
    largest, smallest = plan.share(0), plan.share(replicas - 1)
    return {
        "replicas": replicas,
        "possible": True,
        "global_batch": batch,
        "micro_batch": plan.batch_size,
        "smallest_micro_batch": _smallest(plan),
        "accumulation": plan.steps,
        "largest_share": largest,
        "smallest_share": smallest,
        "idle_replicas": max(0, replicas - batch),
        "work": largest / batch,
        "balance": batch / (replicas * largest),
    }


def _smallest(plan: BatchPlan) -> int:
    """The smallest micro-batch of any replica that has one."""
    # Shares descend with the number of the replica, and those of the idle are 0.
    last_busy = min(plan.replicas, plan.global_batch_size) - 1
    return plan.micro_batches(last_busy)[-1]


def _cells(row: Mapping[str, Any]) -> list[object]:
    if not row["possible"]:
        return [row["replicas"], f"not possible: {row['reason']}"]
    return [
        row["replicas"],
        _range(row["smallest_micro_batch"], row["micro_batch"]),
        row["accumulation"],
        _range(row["smallest_share"], row["largest_share"]),
        row["idle_replicas"],
        f"{row['work']:.1%}",
        f"{row['balance']:.1%}",
    ]


def _range(smallest: int, largest: int) -> str:
    return f"{largest}" if smallest == largest else f"{smallest}-{largest}"
