"""`resilin sched cancel`: end a job, which may save first."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from resilin.cli.errors import user_errors
from resilin.cli.sched import access

EPILOG = """\
example:
  resilin sched cancel train-1
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the verb."""
    ours = argparse.ArgumentParser(
        prog="resilin sched cancel",
        description="Ends jobs. They save their state, if they have a checkpoint directory.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ours.add_argument("jobs", nargs="+", metavar="JOB", help="Ids of the jobs.")
    access.add_connection(ours)
    return ours


@user_errors
def main(arguments: Sequence[str]) -> int:
    """Ask the controller to end the jobs.

    Returns:
        0; 1 if there is no such job, or it has ended.
    """
    args = parser().parse_args(arguments)
    client = access.client(args)
    for job in args.jobs:
        client.cancel(job)
    return 0
