"""`resilin completion`: shell completion of commands, options and their choices.

The script is generated from the parsers of the commands, so it is always up to date.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module

from resilin import __version__
from resilin.cli import COMMANDS
from resilin.cli.errors import user_errors
from resilin.compat.python_names import arguments_of, commands_of
from resilin.telemetry.extras import load

SHELLS = ("bash", "zsh", "fish", "tcsh")
"""Supported shells."""
FILES = ("FILE", "TRACE", "CAPACITY", "script.py")
"""Metavars that stand for a file."""
DIRECTORIES = ("DIR", "RUN_DIR", "DIR|off")
"""Metavars that stand for a directory."""
EPILOG = """\
examples:
  eval "$(resilin completion bash)"                            # this shell, until it ends
  resilin completion bash >> ~/.local/share/bash-completion/completions/resilin
  resilin completion zsh > ~/.zfunc/_resilin                   # with ~/.zfunc in $fpath
  resilin completion fish > ~/.config/fish/completions/resilin.fish
  resilin completion tcsh >> ~/.cshrc

It needs shtab: pip install 'resilin[lab]'.
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    ours = argparse.ArgumentParser(
        prog="resilin completion",
        description="Prints a script that makes a shell complete commands, options and choices.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ours.add_argument("shell", choices=SHELLS, help="Shell to complete in.")
    return ours


@user_errors
def main(arguments: Sequence[str]) -> int:
    """Print the completion script.

    Returns:
        0; 1 if shtab is missing.
    """
    args = parser().parse_args(arguments)
    shtab = load("shtab", "lab", "resilin completion")
    root = whole()
    _mark(root, files=shtab.FILE, directories=shtab.DIRECTORY)
    print(shtab.complete(root, args.shell))
    return 0


def whole() -> argparse.ArgumentParser:
    """All commands in one parser; for inspection only, because it imports every command."""
    root = argparse.ArgumentParser(prog="resilin", description="Elastic PyTorch training.")
    root.add_argument("--version", action="version", version=__version__, help="the version")
    commands = root.add_subparsers(dest="command", metavar="COMMAND")
    for name, purpose in COMMANDS.items():
        command = import_module(f"resilin.cli.{name}").parser()
        commands.add_parser(
            name,
            parents=[command],
            add_help=False,
            help=purpose,
            description=purpose,
        )
    return root


def _mark(
    parser: argparse.ArgumentParser, *, files: dict[str, str], directories: dict[str, str]
) -> None:
    """Mark the arguments that are paths, recognised by their metavar."""
    for action in arguments_of(parser):
        for command in commands_of(action):
            _mark(command, files=files, directories=directories)
        if action.metavar in FILES:
            action.complete = files  # type: ignore[attr-defined]
        elif action.metavar in DIRECTORIES:
            action.complete = directories  # type: ignore[attr-defined]
