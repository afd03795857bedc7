"""The processes that save or load a checkpoint together, with errors of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar

from resilin.training.state.checkpoint.errors import CheckpointError, CorruptCheckpoint
from resilin.training.state.exchange import Swaps


class Peers(Swaps):
    """Collectives whose failures, and the loss of a process, are a `CheckpointError`."""

    kinds: ClassVar[Mapping[str, type[Exception]]] = {
        "CorruptCheckpoint": CorruptCheckpoint,
        "ValueError": ValueError,
    }
    failure: ClassVar[type[Exception]] = CheckpointError

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"replica {self.process} lost the other {self.num - 1} of its group: {error}"
            ) from error
