"""Errors of commands, printed as one line.

A wrong value or an unreadable file is not a bug, and a traceback would hide the sentence that
matters. `RESILIN_LOG=DEBUG` prints the traceback anyway. Any other exception is a bug, and keeps
its traceback.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import wraps

from resilin.core.text import clean

Main = Callable[[Sequence[str]], int]
"""The function of a command, from its arguments to the exit code."""


DEEPEST = 40
"""Largest indentation that a printed line keeps, in spaces."""


class GaveUp(Exception):
    """The job failed; the message is a sentence for its user."""


class ScriptNotLive(Exception):
    """The script cannot be live; the message is the reason."""


def say(message: str) -> None:
    """Print one line on standard error, with control characters removed from the message.

    Leading spaces are kept, up to `DEEPEST`: indentation is part of stacks and logs.
    """
    indent = min(len(message) - len(message.lstrip(" ")), DEEPEST)
    print(f"resilin: {' ' * indent}{clean(message)}", file=sys.stderr, flush=True)


def told(error: BaseException) -> str:
    """The message of an error for a user; for a file, its name and the reason."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def user_errors(main: Main) -> Main:
    """Turn errors that the user can fix into one line on standard error and exit code 1.

    These are `ValueError`, `OSError` and `ImportError` (a missing optional package). A closed pipe
    (`BrokenPipeError`) is left to the caller.
    """

    @wraps(main)
    def guarded(arguments: Sequence[str]) -> int:
        try:
            return main(arguments)
        except BrokenPipeError:
            raise
        except (ValueError, OSError, ImportError) as error:
            if os.environ.get("RESILIN_LOG", "").upper() == "DEBUG":
                traceback.print_exc()
            say(told(error))
            return 1

    return guarded
