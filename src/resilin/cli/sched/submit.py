"""`resilin sched submit`: a job for the controller, with the wishes of its user."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from resilin.cli import values
from resilin.cli.errors import user_errors
from resilin.cli.sched import access

EPILOG = """\
example:
  resilin sched submit --min 2 --max 16 --checkpoint-dir s3://bucket/job train.py --lr 0.1
  resilin sched submit --fixed 4 --priority 1 --name bert -m my_package.train

Prints the id of the job. The working directory, the interpreter and the script must be the same on
all nodes. The script is run by resilin run, which the controller gives the number of workers and
the rendezvous. A job that has to leave all of its nodes resumes from its checkpoint directory,
which all nodes must reach.
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the verb."""
    ours = argparse.ArgumentParser(
        prog="resilin sched submit",
        description="Submits a job.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = ours.add_argument
    add("--name", help="Id of the job (default: after the script).")
    add(
        "--min",
        type=values.count,
        default=1,
        metavar="N",
        help="Smallest number of replicas (default: %(default)s).",
    )
    add("--max", type=values.count, metavar="N", help="Largest number (default: 64).")
    add("--fixed", type=values.count, metavar="N", help="This number, and no other.")
    add(
        "--priority",
        type=int,
        default=0,
        metavar="N",
        help="Jobs of a higher priority are served first (default: %(default)s).",
    )
    add("--tenant", default="default", help="Who pays (default: %(default)s).")
    add(
        "--kind",
        action="append",
        default=[],
        help="Kind of accelerator it may run on; may be repeated (default: any).",
    )
    add("--not-preemptible", action="store_true", help="It keeps what it has until it ends.")
    add(
        "--checkpoint-dir",
        metavar="URL",
        help="Directory for checkpoints (default: one of its own in resilin-runs of the working "
        "directory, unless the script sets one).",
    )
    add(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="Variable of its environment; may be repeated.",
    )
    add(
        "--run-option",
        action="append",
        default=[],
        metavar="OPTION",
        help="Further option of resilin run, such as --run-option=--warm; may be repeated.",
    )
    access.add_connection(ours)
    add("-m", dest="module", action="store_true", help="The script is a module.")
    add("script", metavar="script.py", help="Script of the job.")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="Arguments of the script.")
    return ours


@user_errors
def main(arguments: Sequence[str]) -> int:
    """Submit the job, and print its id.

    Returns:
        0; 1 if the controller refuses it, or does not answer.
    """
    ours = parser()
    args = ours.parse_args(arguments)
    if args.fixed is not None and (args.max is not None or args.min != 1):
        ours.error("--fixed cannot be combined with --min or --max")
    print(access.client(args).submit(_job(args)))
    return 0


def _job(args: argparse.Namespace) -> dict[str, Any]:
    environment = {}
    for text in args.env:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--env ({text!r}) must be NAME=VALUE")
        environment[name] = value
    checkpoints = args.checkpoint_dir
    if checkpoints is not None and "://" not in checkpoints:
        checkpoints = os.path.abspath(checkpoints)
    least = args.fixed or args.min
    return {
        "launch": {
            "script": [*(["-m"] if args.module else []), args.script, *args.arguments],
            "directory": os.getcwd(),
            "python": sys.executable,
            "options": args.run_option,
            "environment": environment,
            "checkpoint_dir": checkpoints,
        },
        "min": least,
        "max": args.fixed or args.max or max(64, least),
        "priority": args.priority,
        "tenant": args.tenant,
        "kinds": args.kind,
        "preemptible": not args.not_preemptible,
        **({"name": args.name} if args.name is not None else {}),
    }
