"""How a command tells a person that it cannot do what it was asked for: in one line.

A wrong value or a file that cannot be read is no fault of the program, and a traceback would only
hide the sentence that matters. `RESILIN_LOG=DEBUG` shows where it came from all the same. Anything
else that is raised is a fault of ours, and keeps its traceback.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import wraps

from resilin.core.text import clean

Main = Callable[[Sequence[str]], int]
"""What runs a command: from its arguments to the exit code."""


DEEPEST = 40
"""Spaces of indentation that a printed line keeps at most."""


def say(message: str) -> None:
    """Prints one line for the person in front of the terminal, whatever is in the message.

    Spaces at the beginning are kept, up to `DEEPEST`: indentation is a part of stacks and logs.
    """
    indent = min(len(message) - len(message.lstrip(" ")), DEEPEST)
    print(f"resilin: {' ' * indent}{clean(message)}", file=sys.stderr, flush=True)


def told(error: BaseException) -> str:
    """What an error says to a user: for a file, its name and what is wrong with it."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def user_errors(main: Main) -> Main:
    """Makes a command end with 1 and one line on standard error where the user can mend it.

    That is after a `ValueError`, an `OSError`, or an `ImportError`, which is an optional package
    that is not there. A reader that went away (`BrokenPipeError`) is left to the caller.
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
