"""Optional packages: loaded on first use, with a one-sentence error if they are missing.

`import resilin` must stay fast and must work with torch and numpy alone. So code that draws, prints
in colour or talks to another service loads its package here, when it is used.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def load(module: str, extra: str, what: str = "this") -> ModuleType:
    """Imports an optional package.

    Args:
        module: Module to import, such as `rich.table`.
        extra: The extra of resilin that installs it.
        what: The feature that needs it, such as `resilin top`; the message begins with it.

    Returns:
        The module.

    Raises:
        ImportError: The package is not installed; the message has the command that installs it.
            A package that is installed but fails to load raises its own error.
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
