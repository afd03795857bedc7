"""`resilin sched`: many jobs on one cluster.

Each verb is a module with `parser()` and `main(arguments)`, which is imported when it is called.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module

VERBS = {
    "serve": "run the controller of a cluster",
    "submit": "submit a job",
    "ls": "list jobs and nodes",
    "why": "say why a job has its size",
    "cancel": "end a job",
    "drain": "have a node empty, now or at a time",
    "simulate": "try policies on recorded workloads",
    "demo": "watch three jobs share four nodes of this machine",
}
"""The verbs, each the name of a module, and their purposes."""
EPILOG = """\
example:
  resilin sched serve --backend slurm                     # on a machine that stays up
  resilin sched submit --max 16 train.py --lr 0.1         # anywhere with its state directory
  resilin sched ls

The controller sets the sizes of elastic jobs, on top of the scheduler that a site has. Commands
find it by --url, by the variable RESILIN_SCHEDULER, or in the state directory. resilin sched demo
shows it on this machine.
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the command, with all verbs; it imports every one of them."""
    ours = argparse.ArgumentParser(
        prog="resilin sched",
        description="Shares a cluster among elastic jobs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = ours.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, purpose in VERBS.items():
        verb = import_module(f"resilin.cli.sched.{name}").parser()
        verbs.add_parser(
            name,
            parents=[verb],
            add_help=False,
            help=purpose,
            description=verb.description,
            epilog=verb.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    return ours


def main(arguments: Sequence[str]) -> int:
    """Run one verb.

    Returns:
        Its exit code.
    """
    if not arguments or arguments[0] not in VERBS:
        parser().parse_args(arguments)  # help, or an error
        return 2
    code: int = import_module(f"resilin.cli.sched.{arguments[0]}").main(arguments[1:])
    return code
