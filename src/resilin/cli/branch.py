"""`resilin branch`: short runs from one checkpoint at several batch sizes: the critical batch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from resilin.cli import tables, values
from resilin.cli.errors import say, user_errors
from resilin.lab import launch
from resilin.lab.branch import Branches, Origin, measure
from resilin.lab.branch_table import Measurement
from resilin.lab.replay import new_run_dir
from resilin.telemetry.extras import load

PICTURE = "branch.png"
"""Name of the figure in the directory of the branches."""
EXAMPLE = f"""\
example:
    resilin branch checkpoints --sizes 1,2,4,8 --samples 16384 --repeats 3 train.py --lr 0.001

  trains from the newest checkpoint in the directory, at 1, 2, 4 and 8 times the batch size of
  the script, for 16384 samples each and three times over, at different places of the data. It
  prints the loss of each size, and the largest that is as good as the smallest: the critical
  batch. DIR holds the table as table.md and table.json, with {PICTURE}.

The script records its loss in each step: resilin.record(loss=loss). Each branch works on a copy
of the checkpoint. If a branch fails, the others continue and the exit code is 1.
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    ours = argparse.ArgumentParser(
        prog="resilin branch",
        description="Measures the critical batch of a checkpoint: short runs from it that differ\n"
        "in nothing but the batch size. Options come before the script.",
        usage="resilin branch CHECKPOINT --sizes A,B --samples N [options] script.py [arguments]",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ours.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="Directory of checkpoints, of which the newest is taken, or one of them (step-...).",
    )
    ours.add_argument("script", metavar="script.py", help="Script that saved the checkpoint.")
    ours.add_argument(
        "arguments", metavar="...", nargs=argparse.REMAINDER, help="Arguments of the script."
    )
    ours.add_argument(
        "--sizes",
        type=values.counts,
        required=True,
        metavar="A,B",
        help="Batch sizes as multiples of the reference batch, such as 1,2,4,8.",
    )
    ours.add_argument(
        "--samples",
        type=values.count,
        required=True,
        metavar="N",
        help="Samples that each branch trains on: a multiple of all batches.",
    )
    ours.add_argument(
        "--window",
        type=values.count,
        metavar="N",
        help="Samples at the end of a branch whose mean loss counts. Default: a quarter of them.",
    )
    ours.add_argument(
        "--repeats",
        type=values.count,
        default=3,
        metavar="N",
        help="Repeats, each at another place of the data after the checkpoint (3).",
    )
    ours.add_argument(
        "--tolerance",
        type=float,
        default=0.01,
        metavar="LOSS",
        help="Largest difference in loss from the smallest size that counts as none (0.01).",
    )
    ours.add_argument("--rule", help="Scaling rule, overriding the script's: NAME or module:NAME.")
    ours.add_argument(
        "--batch-size",
        type=values.count,
        metavar="N",
        help="The reference batch, for checkpoints that do not say it.",
    )
    ours.add_argument("--unit", help="Unit of the loss, for the figure.")
    ours.add_argument(
        "--jobs", type=values.count, default=1, metavar="N", help="Number of parallel runs (1)."
    )
    ours.add_argument(
        "--out", metavar="DIR", help="Output directory. Default: resilin-runs/branch-TIME."
    )
    tables.add_json_option(ours)
    return ours


@user_errors
def main(arguments: Sequence[str]) -> int:
    """Measure the critical batch of a checkpoint.

    Returns:
        1 if a branch failed, else 0.
    """
    args = parser().parse_args(arguments)
    # Checked before an hour of runs, not after it.
    load("matplotlib", "lab", "resilin branch")
    script = launch.check_script(args.script)
    branches = Branches(
        script=script,
        arguments=tuple(args.arguments),
        origin=_origin(args.checkpoint, args.batch_size),
        sizes=args.sizes,
        samples=args.samples,
        window=args.window,
        repeats=args.repeats,
        tolerance=args.tolerance,
        rule=args.rule,
        one_thread=args.jobs > 1,
        out=Path(),
    )
    # Made when all else is known to be right.
    branches = replace(branches, out=new_run_dir(args.out, kind="branch"))
    with launch.stoppable():
        measurement = measure(branches, jobs=args.jobs, say=say)
    _draw(measurement, args.unit, branches.out / PICTURE)
    header, body = measurement.cells()
    if args.json:
        print(tables.to_json(measurement.to_dict()))
    else:
        print(tables.to_text(header, body))
        print(f"\nrule {measurement.rule}; {measurement.critical()}")
    for warning in measurement.warnings:
        say(f"warning: {warning}")
    for failure in measurement.failures:
        say(f"{failure.cell.place} {failure.reason}; the end of its log:")
        for line in failure.log.splitlines():
            say(f"  {line}")
    say(f"wrote the table and the figure to {branches.out}")
    return int(bool(measurement.failures))


def _origin(checkpoint: str, batch_size: int | None) -> Origin:
    # Reads checkpoints, and so loads torch, which `--help` does not need.
    from resilin.training.state.checkpoint.fork import Fork

    fork = Fork.find(checkpoint)
    reference = fork.reference
    if reference is None:
        reference = batch_size
    elif batch_size is not None and batch_size != reference:
        raise ValueError(
            f"--batch-size ({batch_size}) is not the reference batch that {fork.commit.path} was "
            f"trained with ({reference})"
        )
    if reference is None:
        raise ValueError(
            f"{fork.commit.path} does not say its reference batch: give --batch-size, the "
            "batch_size of the script's AdaptiveDataLoader"
        )
    if fork.num_replicas > 1:
        say(
            f"the checkpoint is of {fork.num_replicas} replicas, and each branch is one process: "
            "random generators are seeded anew in it, alike in all branches"
        )
    return Origin(
        copy=lambda directory, skip: fork.copy_to(directory, skip=skip),
        step=fork.step,
        samples=fork.samples,
        reference=reference,
        room=fork.room(),
        seed=fork.seed,
    )


def _draw(measurement: Measurement, unit: str | None, path: Path) -> None:
    # matplotlib takes half a second to load, and `--help` does not need it.
    from resilin.lab import style
    from resilin.lab.branch_plots import draw

    style.save_png(draw(measurement, unit), path)
