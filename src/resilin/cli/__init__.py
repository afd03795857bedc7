"""The command `resilin`: run a job, watch it, and study it.

A command is a module with `parser()`, which defines its arguments, and `main(arguments) -> exit
code`. It is imported only when it is called, so `resilin --help` does not load torch. Nothing else
imports this package.
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
        "demo": "watch a job lose a worker and resume",
        "replay": "run a script while its batch size, or its machines, follow a trace",
    },
    "look at a run": {
        "top": "show a run while it is running",
        "report": "write one page with the charts of one or several runs",
    },
    "share a cluster": {
        "sched": "share a cluster among many jobs: serve, submit, ls, why, cancel, drain",
        "slurm": "submit an elastic job to Slurm, as a job array of single nodes",
    },
    "study": {
        "compare": "compare scaling rules under traces, over several seeds",
        "branch": "measure the critical batch of a checkpoint, by short runs from it",
        "trace": "make, check, plot and convert traces",
        "plan": "show how a global batch is split over different numbers of replicas",
    },
    "prepare a machine": {
        "doctor": "check whether this machine can take part in a job",
        "clean": "show and remove states that jobs have left in memory",
        "store": "serve the rendezvous of jobs on a machine that stays up",
        "completion": "print the shell completion script for this command",
    },
}
"""The commands, grouped by purpose."""
COMMANDS = {name: purpose for group in GROUPS.values() for name, purpose in group.items()}
"""Name of each command (also the name of its module), and its purpose."""
EXIT_CODES = {
    "0": "success",
    "1": "failure; standard error says why",
    "2": "wrong usage",
    "130": "interrupted with Ctrl-C (except top, which returns 0)",
    "128+N": "signal N stopped the job (run)",
    "other": "exit code of the script (replay)",
}
"""Exit codes of all commands."""
PIPE_CLOSED = 141
"""Exit code when the reader of the output closed the pipe: 128 + SIGPIPE, as in other tools."""


def parser() -> argparse.ArgumentParser:
    """The top-level parser, with a help that lists the commands."""
    width = max(map(len, COMMANDS))
    lines = []
    for group, commands in GROUPS.items():
        lines += [f"{group}:"]
        lines += [f"  {name:{width}}  {purpose}" for name, purpose in commands.items()]
        lines += [""]
    lines += ["exit codes:", *(f"  {code:<{width}}  {text}" for code, text in EXIT_CODES.items())]
    lines += ["", "resilin COMMAND --help lists the options of a command, with an example."]
    ours = argparse.ArgumentParser(
        prog="resilin",
        usage="resilin COMMAND [arguments]",
        description="Elastic PyTorch training.",
        epilog="\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ours.add_argument("--version", action="version", version=f"resilin {__version__}")
    ours.add_argument("command", metavar="COMMAND", help="one of the commands below")
    ours.add_argument(
        "arguments", metavar="...", nargs=argparse.REMAINDER, help="arguments of the command"
    )
    return ours


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Everything after `resilin` on the command line; None reads `sys.argv`.

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
        hint = f"did you mean {close[0]!r}?" if close else f"the commands are {', '.join(COMMANDS)}"
        ours.error(f"unknown command {args.command!r}; {hint}")
    try:
        code: int = import_module(f"resilin.cli.{args.command}").main(args.arguments)
        # Flush now, so that a closed pipe is noticed here and not at interpreter exit.
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The interpreter flushes once more at exit, and would print an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    return code
