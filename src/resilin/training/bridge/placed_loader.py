"""`PlacedLoader`: a loader whose batches are moved to a framework's device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from resilin.training.loader import SETTINGS, AdaptiveDataLoader


class PlacedLoader:
    """An `AdaptiveDataLoader` that applies a function to each batch.

    Everything but iterating is that of the loader itself, such as `set_batch_size`.

    Args:
        loader: The loader.
        place: Moves a batch to the device.
    """

    def __init__(self, loader: AdaptiveDataLoader, place: Callable[[Any], Any]) -> None:
        self.loader = loader
        """The loader itself."""
        self._place = place

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield self._place(batch)

    def __len__(self) -> int:
        """Reference steps in one epoch."""
        return len(self.loader)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in SETTINGS:
            setattr(self.loader, name, value)  # which refuses it
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)
