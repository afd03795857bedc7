"""Log files of `CSVLogger`: a resumed call of `fit` appends to the rows that its state knows of.

The file may have a row that the state does not know of: the process was killed after it was
written and before a state was kept. The epoch then ends again, and the row would be there twice; so
the file is truncated to its earlier length.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras  # type: ignore[import-untyped]

from resilin.core._warn import warn

POSITION = "position"
"""Key of the length of the file in the state of a CSVLogger."""


def position(callback: Any) -> int | None:
    """Bytes in the file of a CSVLogger; None for other callbacks, and files that are not here."""
    if not isinstance(callback, keras.callbacks.CSVLogger) or callback.csv_file is None:
        return None
    if not callback.csv_file.closed:
        callback.csv_file.flush()
    return os.path.getsize(callback.filename) if os.path.isfile(callback.filename) else None


@contextmanager
def appending(callback: Any, known: int | None) -> Iterator[None]:
    """Surround `on_train_begin` of a resumed call: the file of a CSVLogger is kept.

    Args:
        callback: Any callback.
        known: Bytes that the file had; the rest is cut off.
    """
    if not isinstance(callback, keras.callbacks.CSVLogger):
        yield
        return
    name = callback.filename
    present = os.path.getsize(name) if os.path.isfile(name) else 0
    if known is None or present < known:
        warn(
            f"{name} of {type(callback).__name__} has {present} bytes and had {known}: rows that "
            "were written before this restart are missing"
        )
    elif present > known:
        os.truncate(name, known)
    before, callback.append = callback.append, True
    try:
        yield
    finally:
        callback.append = before
