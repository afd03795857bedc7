"""Warnings at the line of the script that they concern."""

from __future__ import annotations

import inspect
import warnings
from types import FrameType

_BETWEEN = {
    "accelerate",
    "contextlib",
    "keras",
    "lightning",
    "pytorch_lightning",
    "ray",
    "resilin",
    "torch",
    "transformers",
}
"""Packages that stand between a script and resilin."""


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the innermost line of the script.

    Python shows a warning once per place: a second place in the script is then shown, too.
    """
    frame: FrameType | None = inspect.currentframe()
    assert frame is not None
    while _package(frame) in _BETWEEN and frame.f_back is not None:
        frame = frame.f_back
    warnings.warn_explicit(
        text,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
