"""Optional packages: loaded when they are needed, with one sentence if they are not there.

`import resilin` must stay quick and must work with torch and numpy alone. So whatever draws,
prints in colour or speaks to another service asks for its package here, at the moment of use.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def load(module: str, extra: str, what: str = "this") -> ModuleType:
    """Imports an optional package.

    Args:
        module: What to import, such as `rich.table`.
        extra: The extra of resilin that brings it.
        what: What needs it, to begin the message with, such as `resilin top`.

    Returns:
        The module.

    Raises:
        ImportError: The package is not installed; the message has the command that installs it.
            A package that is there and fails to load says so itself.
    """
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ImportError(
            f"{what} needs {package}: pip install 'resilin[{extra}]'", name=error.name
        ) from None
