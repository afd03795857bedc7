"""`AdaptiveDataLoader`: the sample stream over a stock DataLoader.

Each step owns the positions `[cursor, cursor + B)` of the stream, and this replica fetches those
of them that are its own, in micro-batches that fit. The loop body never asks for a batch size, so
a stale one cannot be used. The cursor moves when the step is committed, and not before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.data import IterableDataset

from resilin.core import _validate
from resilin.core.clock import Clock, Reference, step_scale
from resilin.core.events import FaultEvent
from resilin.core.plan import BatchBounds, BatchPlan
from resilin.core.stream import TAILS, Ownership, SampleStream, Tail
from resilin.engine import devices
from resilin.engine.base import Engine
from resilin.telemetry.tensorboard import PREFIX, SummaryWriter, write_scalars
from resilin.training import steering
from resilin.training.autoscale import Autoscaler
from resilin.training.boundaries import begin_step, end_epoch, start
from resilin.training.fetching import Fetcher
from resilin.training.job import MicroBatch, current_job
from resilin.training.room import Room
from resilin.training.sizes import BatchSize, BatchSizes

_OWN = {
    "sampler": "the order is that of the sample stream",
    "batch_sampler": "batches are cut by the plan of each step",
}


class _Epoch(NamedTuple):
    """An epoch that is being iterated."""

    began: Clock
    """Where the clock stood when it began, or went on."""
    data_end: int
    """Where its data end in the stream."""


class AdaptiveDataLoader:
    """Loads each sample exactly once per epoch, at any batch size and any number of replicas.

    Use it as a DataLoader. `batch_size` is the global batch over all replicas that the learning
    rate was tuned for; `set_batch_size` and `autoscale_batch_size` change the current one, from
    the next step on, in the middle of an epoch. What an iteration yields are micro-batches: where
    a step needs several, model and optimizer wait for the last one.

    With a rule that follows progress, an epoch of the loop lasts until a reference epoch of
    progress is made, which may take more samples than the dataset has; with other rules, and
    without an `AdaptiveDataParallel`, it is one pass over the data.

    When the last batch of an epoch has fewer samples than there are replicas, some replicas train
    on a sample that is not theirs, whose gradient counts nothing; `current_samples` is 0 then.

    Args:
        dataset: Anything with `__len__` and `__getitem__`.
        batch_size: The reference batch.
        shuffle: Whether each epoch has an order of its own.
        drop_last: Whether to drop the remainder of an epoch, once for all replicas.
        max_local_bsz: Most samples in a micro-batch; more are accumulated. `auto` finds out what
            fits into memory, from micro-batches that begin small and at most double.
        memory_budget: Bytes that a micro-batch may take under `auto`; None takes 90% of the
            device's memory. On the CPU it bounds what the forward pass keeps for backward.
        seed: Chooses the order. None takes it from `generator=` if there is one, else from the
            environment (`RESILIN_SEED`), else 0.
        tail: `short`, `straddle` or `drop`, which is what `drop_last` says, too. See
            `resilin.core.stream`.
        batch_weight: Gives the weight of a collated micro-batch, such as its number of tokens;
            the gradient is then the weighted mean. None weighs by samples.
        fingerprint: What identifies the dataset in checkpoints; None takes its class and length.
        **dataloader_kwargs: Any other argument of `torch.utils.data.DataLoader`.

    Raises:
        ValueError: A setting that the sample stream cannot honour.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        drop_last: bool = False,
        max_local_bsz: int | Literal["auto"] | None = None,
        memory_budget: int | None = None,
        seed: int | None = None,
        tail: Tail | None = None,
        batch_weight: Callable[[Any], Any] | None = None,
        fingerprint: str | None = None,
        **dataloader_kwargs: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset):
            raise ValueError(
                "an IterableDataset has no random access, so its samples cannot follow a changing "
                "number of replicas; use a dataset with __len__ and __getitem__"
            )
        for name, reason in _OWN.items():
            if dataloader_kwargs.pop(name, None) is not None:
                raise ValueError(f"{name} cannot be honoured: {reason}; use seed= and shuffle=")
        if seed is None:
            generator = dataloader_kwargs.get("generator")
            seed = generator.initial_seed() % 2**64 if generator else steering.seed() or 0
        self.dataset = dataset
        self.batch_size = _validate.whole("batch_size", batch_size, at_least=1)
        """The reference batch."""
        if drop_last and tail not in (None, "drop"):
            raise ValueError(f"drop_last (True) and tail ({tail!r}) contradict each other: say one")
        if len(dataset) == 0:
            raise ValueError("the dataset is empty: len(dataset) must be at least 1, and is 0")
        self._tail: Tail = tail or ("drop" if drop_last else "short")
        _validate.one_of("tail", self._tail, TAILS)
        self._stream = SampleStream(
            len(dataset),
            seed=seed,
            shuffle=shuffle,
            fingerprint=fingerprint or f"{type(dataset).__qualname__}[{len(dataset)}]",
        )
        room: Room | None = None
        if max_local_bsz == "auto":
            room = Room(memory_budget, start=max(1, self.batch_size // 8))
            max_local_bsz = None
        elif memory_budget is not None:
            raise ValueError(
                f"memory_budget ({memory_budget}) is for max_local_bsz='auto', which is "
                f"{max_local_bsz!r}"
            )
        if max_local_bsz is not None:
            _validate.whole("max_local_bsz", max_local_bsz, at_least=1)
        self._sizes = BatchSizes(self._reference(), max_local_bsz, room)
        self._failed: str | None = None
        self._batch_weight = batch_weight
        self._cursor = 0
        self._span = range(0)
        self._ended: int | None = None
        self._skip: int | None = None
        self._under_way: _Epoch | None = None
        self._name = f"loader/{current_job().num_loaders}"
        current_job().num_loaders += 1
        self._owners = Ownership(0, self._engine.num_replicas)
        self._rank = self._engine.replica
        self._plan: BatchPlan | None = None
        self._current_samples = 0
        self._fetcher = Fetcher(dataset, self._stream, self._cut, dataloader_kwargs)

    # The batch size ------------------------------------------------------------------------

    def set_batch_size(self, batch_size: BatchSize) -> None:
        """Sets the global batch size from the next step on.

        Args:
            batch_size: A number, a `BatchTrace` (by optimizer step), a `Schedule`, or a function
                of the clock. The learning rate follows by the rule of the model.
        """
        self._sizes.set(batch_size)

    def autoscale_batch_size(
        self,
        max_batch_size: int,
        local_bsz_bounds: tuple[int, int] | None = None,
        gradient_accumulation: bool = True,
    ) -> None:
        """Lets resilin choose the global batch size while it trains, within bounds.

        Chosen is what learns fastest: samples per second, as measured, times progress per sample,
        as the noise of the gradient tells. It begins at `batch_size` and may change between any
        two steps, at most to the double at once. Decisions are events, with what was compared.

        Args:
            max_batch_size: Upper limit of the global batch; at least `batch_size`.
            local_bsz_bounds: Smallest and largest micro-batch; `max_local_bsz` still holds.
            gradient_accumulation: Whether a replica may run more than one micro-batch in a step.
        """
        bounds = BatchBounds(max_batch_size, local_bsz_bounds, gradient_accumulation)
        self._sizes.autoscale(bounds)

    @property
    def autoscaler(self) -> Autoscaler | None:
        """What chooses the batch size, if anything does."""
        return self._sizes.autoscaler

    @property
    def current_batch_size(self) -> int:
        """The global batch size of the next step."""
        return self._sizes.now()

    @property
    def _engine(self) -> Engine:
        return current_job().engine

    @property
    def current_local_bsz(self) -> int:
        """The largest micro-batch of the current step."""
        return self._current_plan().batch_size

    @property
    def accumulation_steps(self) -> int:
        """The most micro-batches that a replica runs in the current step."""
        return self._current_plan().steps

    @property
    def current_samples(self) -> int:
        """Samples of the micro-batch at hand that count; 0 if it is only there to take part."""
        return self._current_samples

    def example(self) -> Any:
        """A batch of one sample, to build a model with, such as one of lazy modules.

        It is fetched in this process, and is no part of the order: nothing is used up by it.
        """
        return self._fetcher.one(0)

    def to_tensorboard(self, writer: SummaryWriter, step: int, prefix: str = PREFIX) -> None:
        """Writes the sizes of the current step.

        Args:
            writer: A SummaryWriter, of torch or tensorboardX.
            step: Where it is on the axis.
            prefix: What the tags begin with.
        """
        values = {
            "batch_size": self._current_plan().global_batch_size,
            "local_bsz": self.current_local_bsz,
            "accumulation_steps": self.accumulation_steps,
            "replicas": self._engine.num_replicas,
        }
        write_scalars(writer, values, step, prefix)

    def _current_plan(self) -> BatchPlan:
        if self._plan is None:
            return self._sizes.plan(self.current_batch_size, self.current_batch_size)
        return self._plan

    # Ahead of the step ---------------------------------------------------------------------

    def _cut(self, position: int) -> tuple[list[range], int]:
        """What a step at this position would be by the sizes of now, and where it would end."""
        batch_size = self.current_batch_size
        span = self._stream.batch(position, batch_size, tail=self._tail)
        plan = self._split_plan(self._sizes.plan(len(span), batch_size), batch_size)
        mine = self._owners.positions(self._engine.replica, span)
        sizes = plan.micro_batches(self._owners.slot(self._engine.replica, span.start))
        ends = accumulate(sizes)
        return [mine[end - size : end] for size, end in zip(sizes, ends, strict=True)], span.stop

    def _split_plan(self, plan: BatchPlan, batch_size: int) -> BatchPlan:
        """Splits a step of one replica in two if its noise is to be measured.

        Losses that couple samples change with the split, so the reference batch is left whole
        unless somebody needs its noise. No piece has one sample, unless the reference batch has.
        """
        model = current_job().model
        samples = plan.global_batch_size
        pieces = samples // 2 >= min(2, self.batch_size)
        alone = plan.replicas == 1 and plan.steps == 1 and samples > 1
        if alone and pieces and model is not None and model.training:
            scale = step_scale(samples, batch_size, self.batch_size)
            if model.splits_next(scale):
                return BatchPlan(samples, 1, max_local_bsz=-(-plan.batch_size // 2))
        return plan

    # Iterating -----------------------------------------------------------------------------

    def __len__(self) -> int:
        """Reference steps in one epoch: what a plain DataLoader at `batch_size` would say."""
        return int(-(-self._steps_per_epoch() // 1))

    def _steps_per_epoch(self) -> float:
        return self._stream.steps_per_epoch(self.batch_size, tail=self._tail)

    def _reference_steps(self, cursor: int) -> float:
        return self._stream.reference_steps(cursor, self.batch_size, tail=self._tail)

    def _reference(self) -> Reference:
        return Reference(self.batch_size, steps_per_epoch=self._steps_per_epoch() or None)

    def __iter__(self) -> Iterator[Any]:
        job = current_job()
        outer = (job.loader, job.micro_batch)
        job.loader = self
        try:
            yield from self._epoch()
        finally:
            job.loader, job.micro_batch = outer
            self._plan = self._under_way = None

    def _epoch(self) -> Iterator[Any]:
        job, stream = current_job(), self._stream
        training = job.model is not None and job.model.training
        if training:
            start(job)
            self.take_part()
            job.epoch_is_new = False
            skipped, self._skip, self._ended = self._skip, None, None
            if skipped == job.epoch:
                self._ended = job.epoch
                return
        elif job.model is not None:
            # An evaluation that was left early does not go on later; it begins again.
            self._cursor -= self._cursor % stream.num_samples
        # The epoch is that of the next batch: the cursor may stand before a tail to be dropped.
        first = stream.batch(self._cursor, self.current_batch_size, tail=self._tail).start
        data_end = (first // stream.num_samples + 1) * stream.num_samples
        epoch = self._under_way = _Epoch(job.clock, data_end)
        while not self._is_over(epoch, self._cursor):
            if training:
                begin_step(job)
            if (self._owners.replicas, self._rank) != (
                self._engine.num_replicas,
                self._engine.replica,
            ):
                self._join()
            batch_size = self.current_batch_size
            span = stream.batch(self._cursor, batch_size, tail=self._tail)
            yield from self._step(span, batch_size)
            self._cursor = span.stop
        if self._goal(epoch) is None:
            # Behind a tail that was dropped.
            self._cursor = max(self._cursor, data_end)
        self._sizes.pause()
        if training:
            self._ended = job.epoch
            end_epoch(job)

    def take_part(self) -> None:
        """Makes this the loader that trains: its state belongs to that of the job from now on.

        Iterating over it does that by itself. A loop that has to know where it goes on, before it
        begins, calls it earlier.
        """
        job = current_job()
        job.registry.add(self._name, self, ages=False)
        self._sizes.take_part(job, f"{self._name}/autoscale")

    @property
    def epochs_done(self) -> int:
        """Epochs that are over: the number, from 0, of the one that the next step belongs to."""
        if self._by_progress():
            return math.floor((current_job().clock.progress + 1e-6) / self._steps_per_epoch())
        batch = self._stream.batch(self._cursor, self.current_batch_size, tail=self._tail)
        return batch.start // self._stream.num_samples

    @property
    def ends_epoch(self) -> bool:
        """Whether the epoch is over with the current step, once that is committed.

        For loops that have to know it before they ask for the next batch.
        """
        return self._under_way is not None and self._is_over(self._under_way, self._span.stop)

    def _is_over(self, epoch: _Epoch, position: int) -> bool:
        """Whether it ends at this position: by progress if there is a goal, else by the data.

        A tail that is to be dropped belongs to no batch of this epoch.
        """
        goal = self._goal(epoch)
        if goal is not None:
            return current_job().clock.progress >= goal - 1e-6
        if position >= epoch.data_end:
            return True
        span = self._stream.batch(position, self.current_batch_size, tail=self._tail)
        return span.start >= epoch.data_end

    def _goal(self, epoch: _Epoch) -> float | None:
        """The progress at which the epoch ends; None if its data say that."""
        # A step that the model committed makes this the training loader; its rule says whether
        # an epoch is measured by the data or by progress.
        if current_job().clock.steps <= epoch.began.steps or not self._by_progress():
            return None
        per_epoch = self._steps_per_epoch()
        return (math.floor((epoch.began.progress + 1e-6) / per_epoch) + 1) * per_epoch

    def _by_progress(self) -> bool:
        model = current_job().model
        return model is not None and model.rule.clock == "progress"

    def _step(self, span: range, batch_size: int) -> Iterator[Any]:
        job = current_job()
        training = job.model is not None and job.model.training
        if training:
            job.reference = self._reference()
        self._plan = self._sizes.plan(len(span), batch_size)
        self._sizes.begin_step(self._plan, whole=training and len(span) == batch_size)
        limit = self._split_plan(self._plan, batch_size).batch_size
        mine = self._owners.positions(self._engine.replica, span)
        common: dict[str, Any] = {
            "samples": len(span),
            "scale": step_scale(len(span), batch_size, self.batch_size),
            "sample_steps": self._reference_steps(span.stop) - self._reference_steps(self._cursor),
        }
        self._span = span
        if not mine and training:
            batch = self._fetcher.one(span.start)
            yield self._hand_out(batch, 0, index=0, last=True, **common)
        index, rest = 0, mine
        while rest:
            room = self._sizes.room if training else None
            most = limit if room is None else min(limit, room.limit)
            batch, count = self._fetcher.take(rest, most, behind=span.stop)
            rest = rest[count:]
            yield self._hand_out(batch, count, index=index, last=not rest, **common)
            index += 1
            if self._failed is not None:
                # This replica's part of the step, once more and in smaller pieces.
                limit, self._failed = max(1, count // 2), None
                index, rest = 0, mine
        if job.model is None:
            self._sizes.count_step(**common)

    def _hand_out(self, batch: Any, count: int, **facts: Any) -> Any:
        weight, total = float(count), float(facts["samples"])
        if self._batch_weight is not None:
            weight = float(self._batch_weight(batch)) if count else 0.0
        self._current_samples = count
        current_job().micro_batch = MicroBatch(
            weight=weight, total_weight=total if self._batch_weight is None else None, **facts
        )
        return batch

    def measured_forward(self) -> AbstractContextManager[None]:
        """Surrounds the forward pass of the current micro-batch, to learn what it takes."""
        if self._sizes.room is None or not self._current_samples:
            return nullcontext()
        return self._sizes.room.measure(self._current_samples)

    @contextmanager
    def retry_smaller(self) -> Iterator[None]:
        """Surround the body of the training loop with it, and running out of memory is no end.

        This replica's part of the step is then repeated with micro-batches of half the size, from
        now on; the global batch stays. It cannot help when other replicas have received a part of
        the gradient already, late in the backward pass, or in the optimizer: then the error goes
        on, as without this.
        """
        job = current_job()
        try:
            yield
        except torch.OutOfMemoryError as error:
            size = self._current_samples
            if job.model is None or size < 2 or not job.model.drop_step():
                raise
            self._failed = str(error).partition("\n")[0]
        if self._failed is None:
            return
        # Out of the handler: the traceback holds on to what has to be freed.
        devices.here().release_memory()
        if self._sizes.room is None:
            self._sizes.room = Room(2**62, start=self.batch_size)
        limit = self._sizes.room.failed(size)
        job.emit(
            FaultEvent(
                **job.stamp(),
                kind="out_of_memory",
                detail=f"a micro-batch of {size} samples did not fit: {self._failed}; the step is "
                f"repeated with at most {limit}",
                replica=job.engine.replica,
            )
        )

    def commit(self) -> None:
        """Moves the cursor behind the current step; called when the model has committed it."""
        self._cursor = self._span.stop

    # Membership and state ------------------------------------------------------------------

    def _join(self) -> None:
        """A new generation: positions are dealt out anew from the cursor on."""
        self._owners = Ownership(self._cursor, self._engine.num_replicas)
        self._rank = self._engine.replica
        self._fetcher.begin(self._cursor)

    def state_dict(self) -> dict[str, Any]:
        """The data state: which stream, where in it, and which epoch it has ended, if any."""
        return {**self._stream.state(self._cursor), "ended": self._ended}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where a saved loader was, at whatever number of replicas there is now.

        Raises:
            ValueError: The state belongs to another dataset or order; the message says which.
        """
        self._cursor = self._stream.resume(state)
        # An epoch whose data are done is not begun again; the loop goes on behind it.
        self._ended = self._skip = state.get("ended")
        self._join()
