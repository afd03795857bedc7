"""The interface of the command line as text: `python -m tests.cli.interface` prints it.

Of `resilin run`, only what resilin adds is listed: the rest belongs to the installed torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from resilin.cli import EXIT_CODES
from resilin.cli.completion import whole

OWN_GROUPS = {"resilin run": "resilin"}
"""Commands of which only one group of arguments is listed, without defaults: the machine and
torchrun's environment have a say in those."""


def interface() -> str:
    """Every command with its arguments, choices and defaults, and the exit codes."""
    codes = [f"exit {code}: {meaning}" for code, meaning in EXIT_CODES.items()]
    return "\n".join([*codes, *_lines(whole(), "resilin")]) + "\n"


def _lines(parser: argparse.ArgumentParser, name: str) -> Iterator[str]:
    yield ""
    yield name
    deeper = []
    for action in _actions(parser, name):
        if isinstance(action, argparse._SubParsersAction):
            deeper += [(f"{name} {choice}", each) for choice, each in action.choices.items()]
        elif not isinstance(action, argparse._HelpAction):
            yield f"  {_argument(action, hides_default=name in OWN_GROUPS)}"
    for longer, each in deeper:
        yield from _lines(each, longer)


def _actions(parser: argparse.ArgumentParser, name: str) -> list[argparse.Action]:
    if name not in OWN_GROUPS:
        return parser._actions
    (group,) = [each for each in parser._action_groups if each.title == OWN_GROUPS[name]]
    return group._group_actions


def _argument(action: argparse.Action, *, hides_default: bool) -> str:
    parts = [", ".join(action.option_strings)] if action.option_strings else []
    if action.choices is not None:
        parts.append("{" + ",".join(map(str, action.choices)) + "}")
    elif action.nargs != 0:
        parts.append(str(action.metavar or action.dest.upper()))
    if action.nargs not in (None, 0):
        parts.append(f"[{action.nargs}]")
    if action.option_strings and action.required:
        parts.append("(required)")
    if not hides_default and action.default not in (None, argparse.SUPPRESS):
        parts += [] if action.default is False else [f"= {action.default}"]
    return " ".join(parts)


if __name__ == "__main__":
    print(interface(), end="")
