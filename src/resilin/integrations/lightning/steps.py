"""The training loader as the Trainer sees it: one batch per optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch import Trainer

from resilin.integrations.lightning.resume import Fit
from resilin.training.bridge.home import Home
from resilin.training.loader import AdaptiveDataLoader
from resilin.training.parallel import AdaptiveDataParallel
from resilin.training.script.epochs import begin_epoch


def launched() -> dict[str, int]:
    """Arguments of a Trainer or Fabric for the processes that the launcher has started.

    A script must not name a number of devices that the launcher may change:
    `Trainer(strategy=ElasticStrategy(), **launched())`.

    Returns:
        `devices` and `num_nodes`; both 1 without a launcher.
    """
    membership = Home().engine.membership
    return {"devices": membership.num_local_processes, "num_nodes": membership.num_hosts}


class Steps:
    """Yields the first micro-batch of each step; the strategy asks for the others.

    All replicas then take the same number of batches of the Trainer, which communicates between
    batches, even where one of them needs more micro-batches for its part of a step.
    """

    def __init__(self, loader: AdaptiveDataLoader, trainer: Trainer) -> None:
        self.loader = loader
        self._trainer = trainer
        self._batches: Iterator[Any] | None = None

    def __len__(self) -> int:
        """Reference steps in one epoch, the unit of schedules."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        begin_epoch(self._trainer.current_epoch)
        self._batches = iter(self.loader)
        yield from self._batches

    @property
    def step_is_whole(self) -> bool:
        """Whether the current micro-batch completes this replica's part of the step."""
        micro_batch = Home().micro_batch
        assert micro_batch is not None
        return micro_batch.last

    def next_part(self) -> Any:
        """The next micro-batch of the step."""
        assert self._batches is not None
        return next(self._batches)

    def finish(self) -> None:
        """End the epoch: the Trainer will not ask for a next batch."""
        batches, self._batches = self._batches, None
        for _ in batches or ():
            raise AssertionError("a batch came after the end of the epoch")

    def close(self) -> None:
        """Leave the epoch, wherever it is."""
        self._batches = None

    def state_dict(self) -> dict[str, Any]:
        """State of the loader."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self.loader.load_state_dict(state)


class InSteps:
    """The parts of a strategy that callbacks use."""

    parallel: AdaptiveDataParallel | None = None
    """The model in training; None before and after."""
    steps: Steps | None = None
    """The train dataloader, step by step; None before the Trainer has asked for it."""
    fit: Fit | None = None
    """The call of `fit` that is under way."""
