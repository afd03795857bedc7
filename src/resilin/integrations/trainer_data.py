"""The data of an elastic Trainer of Transformers: its loader, batch size and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from resilin.compat import transformers_names
from resilin.telemetry.extras import load
from resilin.training.bridge.home import Home, refuse_stream
from resilin.training.loader import AdaptiveDataLoader
from resilin.training.sizing.batch_size import BatchSize

_utils: Any = load("accelerate.utils", "hf", "resilin.integrations.transformers")
_Hooks: Any = transformers_names.TrainerHooks
ORDERS = {"random": True, "sequential": False}
"""Whether to shuffle, for each sampling strategy that the sample stream has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """Arguments of `ElasticTrainerMixin` about its data; their documentation is there."""

    batch_size: int
    max_local_bsz: int | Literal["auto"] | None
    batch_weight: Callable[[Any], Any] | None


class ElasticData(_Hooks):  # type: ignore[misc]
    """The methods of `ElasticTrainerMixin` that are about its data."""

    control: Any

    def _begin_data(self, settings: DataSettings) -> None:
        self._settings = settings
        self._sizing: Callable[[AdaptiveDataLoader], None] | None = None
        self._elastic: tuple[Home, AdaptiveDataLoader] | None = None
        self._micro_batches: Iterator[Any] | None = None

    # The batch size ------------------------------------------------------------------------

    def set_batch_size(self, batch_size: BatchSize) -> None:
        """Set the global batch size from the next step on, also during training.

        Args:
            batch_size: As in `AdaptiveDataLoader.set_batch_size`: a number, a `BatchTrace`, a
                `BatchSchedule`, a `Schedule`, or a function of the clock.
        """
        self._size(lambda loader: loader.set_batch_size(batch_size))

    def autoscale_batch_size(self, max_batch_size: int, **bounds: Any) -> None:
        """Let resilin choose the global batch size during training.

        Args:
            max_batch_size: Upper limit of the global batch.
            **bounds: As in `AdaptiveDataLoader.autoscale_batch_size`; micro-batches have at most
                `per_device_train_batch_size` samples by default.
        """
        if self._settings.max_local_bsz != "auto":
            bounds = {"local_bsz_bounds": (0, self._largest_micro_batch), **bounds}
        self._size(lambda loader: loader.autoscale_batch_size(max_batch_size, **bounds))

    @property
    def _largest_micro_batch(self) -> Any:
        return self._settings.max_local_bsz or self.args.per_device_train_batch_size

    def _size(self, sizing: Callable[[AdaptiveDataLoader], None]) -> None:
        self._sizing = sizing
        if self._elastic is not None and self._elastic[0].is_current:
            sizing(self._elastic[1])

    def get_total_train_batch_size(self, args: Any) -> int:
        """The reference batch: it does not depend on the number of processes."""
        return self._settings.batch_size

    # Data ----------------------------------------------------------------------------------

    def get_train_dataloader(self) -> AdaptiveDataLoader:
        """An `AdaptiveDataLoader` with the settings of the stock Trainer's loader."""
        if self._elastic is not None and self._elastic[0].is_current:
            return self._elastic[1]
        stock, args = super().get_train_dataloader(), self.args
        loader = AdaptiveDataLoader(
            stock.dataset,
            self._settings.batch_size,
            shuffle=ORDERS[args.train_sampling_strategy],
            drop_last=args.dataloader_drop_last,
            max_local_bsz=self._largest_micro_batch,
            seed=args.seed if args.data_seed is None else args.data_seed,
            batch_weight=self._weigh if self._counts or self._settings.batch_weight else None,
            collate_fn=stock.collate_fn,
            num_workers=stock.num_workers,
            pin_memory=stock.pin_memory,
            prefetch_factor=stock.prefetch_factor,
            persistent_workers=stock.persistent_workers,
            multiprocessing_context=stock.multiprocessing_context,
            worker_init_fn=stock.worker_init_fn,
        )
        refuse_stream(loader, "the Trainer")
        if self._sizing is not None:
            self._sizing(loader)
        self._elastic = (Home(), loader)
        return loader

    @property
    def _counts(self) -> bool:
        """Whether the Trainer counts items: the loss is then a mean over them."""
        return bool(self.model_accepts_loss_kwargs or self.compute_loss_func is not None)

    def _weigh(self, batch: Any) -> float:
        """The weight of a micro-batch: the number of items or samples that its loss averages."""
        if self._settings.batch_weight is not None:
            return float(self._settings.batch_weight(batch))
        items = self._items(batch, torch.device("cpu"))
        return float(_utils.find_batch_size(batch) if items is None else items)

    def _items(self, batch: Any, device: torch.device) -> Any:
        """Items that the Trainer counts in a micro-batch; None if its loss averages samples."""
        with self._by_micro_batch():
            return transformers_names.items_in(self, batch, device)

    @contextmanager
    def _by_micro_batch(self) -> Iterator[None]:
        """Count items per micro-batch: the weights of the step average over all micro-batches."""
        self.args.average_tokens_across_devices = False
        try:
            yield
        finally:
            self.args.average_tokens_across_devices = True

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], None]:
        """The first micro-batch of the next step; `training_step` fetches the others."""
        self._micro_batches = epoch_iterator
        batch = next(epoch_iterator, None)
        if batch is None:
            # The stock loop expects `len(dataloader)` batches, and there may be more or fewer.
            self.control.should_epoch_stop = True
        return ([] if batch is None else [batch]), None

    def _training_loader(self) -> AdaptiveDataLoader:
        loader = self.get_train_dataloader()
        if not isinstance(loader, AdaptiveDataLoader):
            raise ValueError(
                f"get_train_dataloader() returns a {type(loader).__name__}, and an elastic Trainer "
                "needs an AdaptiveDataLoader"
            )
        return loader
