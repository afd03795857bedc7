"""`resilin sched drain`: have a node empty, now or by a time."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from resilin.cli import values
from resilin.cli.errors import user_errors
from resilin.cli.sched import access

EPILOG = """\
example:
  resilin sched drain node-3              # now: its jobs save and move
  resilin sched drain node-3 --in 2h      # before a reservation
  resilin sched drain node-3 --undo
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the verb."""
    ours = argparse.ArgumentParser(
        prog="resilin sched drain",
        description="Has nodes empty, now or by a time.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ours.add_argument("nodes", nargs="+", metavar="NODE", help="Names of the nodes.")
    when = ours.add_mutually_exclusive_group()
    when.add_argument(
        "--in", dest="within", type=values.seconds, metavar="TIME", help="Time from now: 90s, 2h."
    )
    when.add_argument("--undo", action="store_true", help="Use them again.")
    access.add_connection(ours)
    return ours


@user_errors
def main(arguments: Sequence[str]) -> int:
    """Tell the controller.

    Returns:
        0; 1 if there is no such node.
    """
    args = parser().parse_args(arguments)
    client = access.client(args)
    for node in args.nodes:
        if args.undo:
            client.undrain(node)
        else:
            client.drain(node, None if args.within is None else time.time() + args.within)
    return 0
