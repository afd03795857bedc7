"""The command `resilin`: what a person types to run a job, to look at it, and to study it.

A command is a module with `parser()`, which says what it takes, and `main(arguments) -> exit code`.
It is imported when it is asked for: `resilin --help` answers without loading torch. Nothing
imports this room.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from resilin import __version__

GROUPS = {
    "run a job": {
        "run": "start this machine's part of an elastic job",
        "demo": "see a job lose a worker and go on",
        "replay": "run a script while its batch size, or its machines, follow a trace",
    },
    "look at a run": {
        "top": "show a run while it goes",
        "report": "make one page with the charts of a run, or of several",
    },
    "study": {
        "compare": "compare scaling rules under traces, over several seeds",
        "trace": "make, check, plot and convert traces",
        "plan": "say how a global batch is split over numbers of replicas",
    },
    "prepare a machine": {
        "doctor": "check whether this machine can take part in a job",
        "store": "hold the meeting point of jobs on a machine that stays",
        "completion": "print what makes a shell complete this command",
    },
}
"""What commands are for, and those that are for it."""
COMMANDS = {name: purpose for group in GROUPS.values() for name, purpose in group.items()}
"""The name of each command, which is its module, and what it does."""
EXIT_CODES = {
    "0": "did what it was asked for",
    "1": "tried and failed; standard error says why",
    "2": "wrong usage",
    "130": "interrupted with Ctrl-C; top is ended in that way, and returns 0",
    "128+N": "signal N stopped the job (run)",
    "other": "the script's own (replay)",
}
"""What commands return."""
PIPE_CLOSED = 141
"""Exit code where whatever read the output went away first: 128 and SIGPIPE, as of other tools."""


def parser() -> argparse.ArgumentParser:
    """What comes before the name of a command, with a help that lists the commands."""
    width = max(map(len, COMMANDS))
    lines = []
    for group, commands in GROUPS.items():
        lines += [f"{group}:"]
        lines += [f"  {name:{width}}  {purpose}" for name, purpose in commands.items()]
        lines += [""]
    lines += ["exit codes:", *(f"  {code:<{width}}  {text}" for code, text in EXIT_CODES.items())]
    lines += ["", "resilin COMMAND --help says what a command takes, with an example."]
    ours = argparse.ArgumentParser(
        prog="resilin",
        usage="resilin COMMAND [arguments]",
        description="Elastic PyTorch training.",
        epilog="\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ours.add_argument("--version", action="version", version=f"resilin {__version__}")
    ours.add_argument("command", metavar="COMMAND", help="one of those below")
    ours.add_argument(
        "arguments", metavar="...", nargs=argparse.REMAINDER, help="what the command takes"
    )
    return ours


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: What follows `resilin` on the command line; None takes it from the process.

    Returns:
        The exit code: see `EXIT_CODES`.
    """
    ours = parser()
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        ours.print_help(sys.stderr)
        return 2
    args = ours.parse_args(arguments)
    if args.command not in COMMANDS:
        close = difflib.get_close_matches(args.command, COMMANDS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(COMMANDS)}"
        ours.error(f"unknown command {args.command!r}; {hint}")
    try:
        code: int = import_module(f"resilin.cli.{args.command}").main(args.arguments)
        # What is still buffered is part of the command: a closed pipe must not speak up later.
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The interpreter flushes once more at its end, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    return code
