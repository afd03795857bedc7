"""Python: names that are documented as details of CPython, or not at all."""

from __future__ import annotations

import gc
import inspect
import platform
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from resilin.compat.names import Package

if TYPE_CHECKING:
    from argparse import Action, ArgumentParser

PYTHON = Package("Python", tested=("3.11",), version=platform.python_version)
"""Python, and the names of it that resilin uses."""

_FRAME = PYTHON.name("sys:_getframe", "recognises a GradScaler among the callers of a step")
_getframe = _FRAME.find()
_FRAMES = PYTHON.name("sys:_current_frames", "recognises a worker that is in a debugger")
_AT_END = PYTHON.name(
    "threading:_register_atexit", "saves the state when a script ends, while threads can be started"
)
_END_THREADS = PYTHON.name("threading:_shutdown", "ends a warm worker as a script of its own would")
_EXIT = PYTHON.name("atexit:_run_exitfuncs", "ends a warm worker as a script of its own would")
_ACTIONS = PYTHON.name(
    "argparse:ArgumentParser._actions", "completes paths in a shell", instance=True
)
_GROUPS = PYTHON.name(
    "argparse:ArgumentParser._action_groups", "lists our options before torchrun's", instance=True
)
_COMMANDS = PYTHON.name("argparse:_SubParsersAction", "completes the options of commands")


def frame_of_caller() -> FrameType:
    """The frame of the caller of the function that calls this."""
    frame: FrameType = _getframe(2)
    return frame


def frame_of_main_thread() -> FrameType | None:
    """The frame that the main thread is executing."""
    frames: Mapping[int, FrameType] = _FRAMES.find()()
    return frames.get(threading.main_thread().ident or 0)


def leaves_by_exception() -> bool:
    """Whether an exception is what closes the generator that calls this.

    The iterator of a loop is closed when the loop is left. If that is by an exception, this has
    just come from the instruction that the frame of the loop is at. Generators around ours are
    closed in turn, by an exception of their own.
    """
    frame: FrameType | None = _getframe(2)
    while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
        frame = frame.f_back
    return frame is not None and any(
        isinstance(each, TracebackType) and each.tb_lasti == frame.f_lasti
        for each in gc.get_referrers(frame)
    )


def at_end_of_script(function: Callable[[], None]) -> None:
    """Have a function called when the main program has ended, before its threads are."""
    _AT_END.find()(function)


def run_exit_functions() -> None:
    """End threads and run the functions registered with `atexit`, as the interpreter does."""
    _END_THREADS.find()()
    _EXIT.find()()


def arguments_of(parser: ArgumentParser) -> list[Action]:
    """The arguments of a parser."""
    actions: list[Action] = _ACTIONS.of(parser)
    return actions


def list_first(parser: ArgumentParser, title: str, *, others: str) -> None:
    """List a group of options first in the help, after the positional arguments.

    Args:
        parser: A parser with groups.
        title: The title of the group.
        others: The title that the options without a group get.
    """
    groups = _GROUPS.of(parser)
    positional, optional = groups[:2]
    (chosen,) = [each for each in groups[2:] if each.title == title]
    rest = [each for each in groups[2:] if each is not chosen]
    optional.title = others
    groups[:] = [positional, chosen, *rest, optional]


def commands_of(action: Action) -> Iterator[ArgumentParser]:
    """The parsers of all commands, if this argument is a choice of commands."""
    if isinstance(action, _COMMANDS.find()):
        yield from action.choices.values()
