"""`resilin completion`: what makes a shell complete commands, options and their choices.

The script is made from the very parsers of the commands, so it cannot fall behind them.
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
"""The shells that can be helped."""
FILES = ("FILE", "TRACE", "CAPACITY", "script.py")
"""What stands for a file in a usage."""
DIRECTORIES = ("DIR", "RUN_DIR", "DIR|off")
"""What stands for a directory there."""
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
    """What the command takes."""
    ours = argparse.ArgumentParser(
        prog="resilin completion",
        description="Prints a script that makes a shell complete commands, options and choices.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ours.add_argument("shell", choices=SHELLS, help="Which shell.")
    return ours


@user_errors
def main(arguments: Sequence[str]) -> int:
    """Prints the script.

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
    """All commands in one parser; only for looking at, as it imports each of them."""
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
    """Says which arguments are paths: by what stands for them in the usage."""
    for action in arguments_of(parser):
        for command in commands_of(action):
            _mark(command, files=files, directories=directories)
        if action.metavar in FILES:
            action.complete = files  # type: ignore[attr-defined]
        elif action.metavar in DIRECTORIES:
            action.complete = directories  # type: ignore[attr-defined]
