"""The command `resilin`: what a person types to run a job, and to check a machine before.

A command is a module with `main(arguments) -> exit code`, and it is imported when it is asked for:
`resilin --help` answers without loading torch. Nothing imports this room.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from resilin import __version__

COMMANDS = {
    "run": "start this machine's part of an elastic job",
    "store": "hold the meeting point of jobs on a machine that stays",
    "doctor": "check whether this machine can take part in one",
}
"""The name of each command, which is its module, and what it is for."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: What follows `resilin` on the command line; None takes it from the process.

    Returns:
        The exit code: 0 where the command did what it was asked for.
    """
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog="resilin",
        description="Elastic PyTorch training.",
        epilog="\n".join(
            ["commands:"]
            + [f"  {name:{width}}  {purpose}" for name, purpose in COMMANDS.items()]
            + ["", "resilin COMMAND --help says what a command takes."]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"resilin {__version__}")
    parser.add_argument("command", choices=tuple(COMMANDS), help="one of those below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the command takes")
    args = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    code: int = import_module(f"resilin.cli.{args.command}").main(args.arguments)
    return code
