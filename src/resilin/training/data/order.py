"""Settings of a loader that determine the order of its samples."""

from __future__ import annotations

from typing import NamedTuple

from resilin.core.stream import Tail


class DataOrder(NamedTuple):
    """The order of samples, apart from the data."""

    seed: int
    """Chooses the order."""
    shuffle: bool
    """Whether each epoch has an order of its own."""
    tail: Tail
    """Treatment of the remainder of an epoch."""
    fingerprint: str | None
    """Identity of the data; None takes what they say of themselves."""
