"""The training loader as the Trainer sees it: one batch per optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch import Trainer

from resilin.integrations.lightning.resume import Fit
from resilin.training.job import current_job
from resilin.training.loader import AdaptiveDataLoader
from resilin.training.parallel import AdaptiveDataParallel
from resilin.training.script.epochs import begin_epoch


def launched() -> dict[str, int]:
    """What launched this process, in the words of a Trainer or Fabric.

    The number of devices is not the script's to say when the launcher may change it:
    `Trainer(strategy=ElasticStrategy(), **launched())`.

    Returns:
        `devices` and `num_nodes`; both 1 in a process of its own.
    """
    engine = current_job().engine
    return {
        "devices": engine.membership.num_local_processes,
        "num_nodes": engine.membership.num_hosts,
    }


class Steps:
    """Yields the first micro-batch of each step; the strategy asks for the others.

    So replicas take equally many batches of the Trainer, which communicates between batches, even
    where one of them needs more micro-batches for its part of a step.
    """

    def __init__(self, loader: AdaptiveDataLoader, trainer: Trainer) -> None:
        self.loader = loader
        self._trainer = trainer
        self._batches: Iterator[Any] | None = None

    def __len__(self) -> int:
        """Reference steps in one epoch, which is what schedules are written in."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        begin_epoch(self._trainer.current_epoch)
        self._batches = iter(self.loader)
        yield from self._batches

    @property
    def step_is_whole(self) -> bool:
        """Whether the micro-batch at hand completes this replica's part of the step."""
        micro_batch = current_job().micro_batch
        assert micro_batch is not None
        return micro_batch.last

    def next_part(self) -> Any:
        """The next micro-batch of the step."""
        assert self._batches is not None
        return next(self._batches)

    def finish(self) -> None:
        """The epoch is over, and the Trainer will not ask for a next batch to find that out."""
        batches, self._batches = self._batches, None
        for _ in batches or ():
            raise AssertionError("a batch came behind the end of the epoch")

    def close(self) -> None:
        """Leaves the epoch, wherever it is."""
        self._batches = None

    def state_dict(self) -> dict[str, Any]:
        """That of the loader."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` returned."""
        self.loader.load_state_dict(state)


class InSteps:
    """What callbacks may know of a strategy that trains in steps."""

    parallel: AdaptiveDataParallel | None = None
    """The model in training; None before and after."""
    steps: Steps | None = None
    """The train dataloader, step by step; None before the Trainer has asked for it."""
    fit: Fit | None = None
    """The call of `fit` that is under way."""
