"""`AdaptiveDataLoader`: the sample stream over a stock DataLoader, as a script sees it.

The loop body never asks for a batch size, so a stale one cannot be used. What happens in a pass
over the data is in `passes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from resilin.core import _validate
from resilin.core.batches import Batches
from resilin.core.clock import Reference
from resilin.core.events import FaultEvent
from resilin.core.plan import BatchBounds, BatchPlan
from resilin.core.stream import TAILS, Tail
from resilin.engine import devices, overrides
from resilin.streams.adapt import as_stream
from resilin.telemetry.tensorboard import PREFIX, SummaryWriter, write_scalars
from resilin.training.data.copier import Copier
from resilin.training.data.indexed import IndexedSupply, batches_of
from resilin.training.data.order import DataOrder
from resilin.training.data.shards.cursor import ShardCursor
from resilin.training.data.shards.supply import StreamSupply
from resilin.training.data.supply import Supply
from resilin.training.job import current_job
from resilin.training.passes import Passes
from resilin.training.sizing.autoscale import Autoscaler
from resilin.training.sizing.batch_size import BatchSize, BatchSizes
from resilin.training.sizing.memory_limit import LocalLimit
from resilin.training.step_plans import StepPlans

_OWN = {
    "sampler": "the order is that of the sample stream",
    "batch_sampler": "batches are cut by the plan of each step",
}

_INSTEAD = {
    "batch_size": "loader.set_batch_size() sets that of the next step, and the rule follows",
    "dataset": "make another loader over it. A dataset that is itself changed between epochs is "
    "used as it is then",
    "sampler": "the order is that of the sample stream, by seed= and shuffle=",
    "batch_sampler": "batches are cut by the plan of each step; see loader.set_batch_size()",
}
"""What to do in place of setting an attribute."""


class AdaptiveDataLoader:
    """Loads each sample exactly once per epoch, at any batch size and any number of replicas.

    Use it as a DataLoader. `batch_size` is the global batch over all replicas that the learning
    rate was tuned for; `set_batch_size` and `autoscale_batch_size` change the current one, from
    the next step on, in the middle of an epoch. What an iteration yields are micro-batches: where
    a step needs several, model and optimizer wait for the last one.

    With a rule that follows progress, an epoch of the loop lasts until a reference epoch of
    progress is made, which may take more samples than the dataset has; with other rules, and
    without an `AdaptiveDataParallel`, it is one pass over the data.

    All replicas run the same number of micro-batches in a step of training. One that has fewer
    samples than that, as in a last batch with fewer samples than replicas, also trains on a sample
    that is not its own, whose gradient has weight 0; `current_samples` is 0 then.

    Args:
        dataset: Anything with `__len__` and `__getitem__`; or a stream, whose shards are read in
            order: see `resilin.streams`. A streaming dataset of Hugging Face is one.
        batch_size: The reference batch.
        shuffle: Whether each epoch has an order of its own; of a stream, the order of its shards.
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
        noise_cap: Whether a batch is only as large as the noise allows, for SGD over many epochs:
            `floor(gain(k))` of the k reference batches offered; see `resilin.core.noise_cap`.
        fingerprint: What identifies the dataset in checkpoints; None takes its class and length,
            or what a stream says of itself.
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
        noise_cap: bool = False,
        fingerprint: str | None = None,
        **dataloader_kwargs: Any,
    ) -> None:
        for name, reason in _OWN.items():
            if dataloader_kwargs.pop(name, None) is not None:
                raise ValueError(f"{name} cannot be honoured: {reason}; use seed= and shuffle=")
        seed = _seed(dataloader_kwargs.get("generator")) if seed is None else seed
        self.dataset = dataset
        self.batch_size = _validate.whole("batch_size", batch_size, at_least=1)
        """The reference batch."""
        if drop_last and tail not in (None, "drop"):
            raise ValueError(f"drop_last (True) and tail ({tail!r}) contradict each other: say one")
        tail = tail or ("drop" if drop_last else "short")
        _validate.one_of("tail", tail, TAILS)
        most, limit = _local_limit(max_local_bsz, memory_budget, self.batch_size)
        self.job = current_job()
        """The job that it belongs to: the one that was current when it was made."""
        order = DataOrder(seed, shuffle, tail, fingerprint)
        stream = as_stream(dataset)
        batches = None if stream is not None else batches_of(dataset, batch_size, order)
        reference = Reference(batch_size) if batches is None else batches.reference
        self._sizes = BatchSizes(
            self.job,
            reference,
            most,
            limit,
            weighs=batch_weight is not None,
            capped=noise_cap,
        )
        plans = StepPlans(self.job, self._sizes, self.batch_size)
        self._supply: Supply
        if batches is not None:
            self._supply = IndexedSupply(
                dataset, batches, plans, dataloader_kwargs, by_samples=batch_weight is None
            )
        else:
            assert stream is not None
            engine = self.job.engine
            self._supply = StreamSupply(
                stream,
                order,
                reference,
                plans,
                engine,
                dataloader_kwargs,
                by_samples=batch_weight is None,
            )
        self.job.iterations.fetchers.add(self._supply.fetcher)
        self._passes = Passes(self.job, self._supply, plans, batch_weight)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in SETTINGS and "_passes" in vars(self):
            plain = isinstance(value, bool | int | str | None)
            values = f", from {getattr(self, name, None)!r} to {value!r}" if plain else ""
            instead = _INSTEAD.get(name, "make another loader with it")
            raise ValueError(
                f"{name} of an AdaptiveDataLoader cannot be set once it is made{values}: {instead}"
            )
        super().__setattr__(name, value)

    @property
    def _batches(self) -> Batches | None:
        return self._supply.batches

    def example(self) -> Any:
        """A batch of one sample, to build a model with, such as one of lazy modules.

        It is fetched in this process, and is no part of the order: nothing is used up by it.
        """
        return self._supply.example()

    # Iterating -----------------------------------------------------------------------------

    def __len__(self) -> int:
        """Reference steps in one epoch: what a plain DataLoader at `batch_size` would say.

        Raises:
            TypeError: It loads a stream, whose length nobody knows.
        """
        if self._batches is None:
            raise TypeError(
                "a loader of a stream has no len(): nobody knows how long its shards are"
            )
        return int(-(-self._batches.steps_per_epoch // 1))

    def __iter__(self) -> Iterator[Any]:
        self._check_job()
        yield from self._passes.run(self)

    def prefetch(self, device: torch.device | str, ahead: int = 2) -> Iterator[Any]:
        """One pass, as iterating gives it, with each batch on a device before it is asked for.

        Copies run beside the computation: from pinned memory, in a stream of their own. A batch
        that is copied early is not used early: a kill loses none, and a change of size or of
        replicas copies again. The batches of a stream are copied when their step begins.

        Args:
            device: Where to. On a CPU batches are only fetched early.
            ahead: Batches that are on their way while the loop has one.
        """
        copier = Copier.to(device, _validate.whole("ahead", ahead, at_least=0))
        self._check_job()
        yield from self._passes.run(self, copier)

    def _check_job(self) -> None:
        if self.job is not current_job():
            # The model of another job would take its batches for those of a plain DataLoader.
            raise RuntimeError(
                "this AdaptiveDataLoader belongs to a job that reset_job() has ended: a loader and "
                "the model that trains on it have to be of one job; make the loader again"
            )

    @property
    def has_index(self) -> bool:
        """Whether its data have an index and a length; a stream has not."""
        return self._batches is not None

    def reference_run(self) -> Reference:
        """The run that the learning rate was tuned for: its batch, and its steps per epoch."""
        return self._supply.reference

    def take_part(self) -> None:
        """Makes this the loader that trains: its state belongs to that of the job from now on.

        Iterating over it does this. A loop that needs the position before calls it earlier.
        """
        self._passes.take_part()

    @property
    def epochs_done(self) -> int:
        """Epochs that are over: the number, from 0, of the one that the next step belongs to."""
        if self._batches is None:
            assert isinstance(self._passes.cursor, ShardCursor)
            return self._passes.cursor.number
        if self._passes.by_progress:
            progress = self.job.clock.progress - self._passes.cursor.others
            return self._batches.epochs_of_progress(progress)
        return self._batches.epoch(self._passes.cursor.position, self.current_batch_size)

    def has_passed(self, epoch: int) -> bool:
        """Whether the job resumes after the last step of this epoch; call `take_part` before.

        For loops of frameworks that do more at the end of an epoch.
        """
        passes = self._passes.cursor.passes
        return passes.epoch == epoch and passes.seen < passes.complete

    @property
    def ends_epoch(self) -> bool:
        """Whether the epoch is over with the current step, for loops that have to know it early."""
        current = self._passes.iteration
        return current is not None and self._passes.is_over(current, current.span.stop)

    def commit(self) -> None:
        """Moves the cursor past the step that was handed out last.

        Committing a step does this automatically. A loop without an `AdaptiveDataParallel` calls it
        before it takes the state.
        """
        self._passes.commit()

    def state_dict(self) -> dict[str, Any]:
        """The data state: which stream, where in it, and which passes of the epoch are complete."""
        return self._passes.cursor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes where a saved loader was, at whatever number of replicas there is now.

        Raises:
            ValueError: The state belongs to another dataset or order; the message says which.
        """
        self._passes.cursor.load_state_dict(state)

    # Batch sizes ---------------------------------------------------------------------------

    def set_batch_size(self, batch_size: BatchSize) -> None:
        """Sets the global batch size from the next step on.

        A number that is set while the job runs is part of its state. Anything else that is set
        then has to be set again by a resumed job, or its first step is an error: set it before the
        loop over epochs, or at the beginning of every epoch.

        Args:
            batch_size: A number, a `BatchTrace` (by optimizer step), a `BatchSchedule` (by tokens
                or samples), a `Schedule`, a function of the clock, or a `NoiseRamp`. The learning
                rate follows by the rule of the model.
        """
        self._sizes.set(batch_size)

    def autoscale_batch_size(
        self,
        max_batch_size: int,
        local_bsz_bounds: tuple[int, int] | None = None,
        gradient_accumulation: bool = True,
    ) -> None:
        """Let resilin choose the global batch size during training, within bounds.

        It chooses the size that learns fastest: measured samples per second times progress per
        sample, which follows from the noise of the gradient. It starts at `batch_size` and may
        change between any two steps, at most doubling each time. Decisions are events, with all
        candidates.

        Args:
            max_batch_size: Upper limit of the global batch; at least `batch_size`.
            local_bsz_bounds: Smallest and largest micro-batch; `max_local_bsz` still holds.
            gradient_accumulation: Whether a replica may run more than one micro-batch in a step.
        """
        bounds = BatchBounds(max_batch_size, local_bsz_bounds, gradient_accumulation)
        self._sizes.autoscale(bounds)

    @property
    def autoscaler(self) -> Autoscaler | None:
        """The autoscaler, if the batch size is chosen automatically."""
        return self._sizes.autoscaler

    @property
    def current_batch_size(self) -> int:
        """The global batch size of the next step."""
        return self._sizes.now()

    @property
    def current_local_bsz(self) -> int:
        """The largest micro-batch of the current step."""
        return self._current_plan().batch_size

    @property
    def accumulation_steps(self) -> int:
        """The micro-batches that each replica runs in the current step."""
        return self._current_plan().steps

    @property
    def current_samples(self) -> int:
        """Number of samples of the current micro-batch that count; 0 for a filler batch."""
        return self._passes.samples

    def to_tensorboard(self, writer: SummaryWriter, step: int, prefix: str = PREFIX) -> None:
        """Writes the sizes of the current step.

        Args:
            writer: A SummaryWriter, of torch or tensorboardX.
            step: Its position on the axis.
            prefix: Prefix of the tags.
        """
        values = {
            "batch_size": self._current_plan().global_batch_size,
            "local_bsz": self.current_local_bsz,
            "accumulation_steps": self.accumulation_steps,
            "replicas": self.job.engine.membership.num_replicas,
        }
        write_scalars(writer, values, step, prefix)

    def _current_plan(self) -> BatchPlan:
        size = self.current_batch_size
        return self._passes.plan or self._sizes.plan(size, size)

    @contextmanager
    def retry_smaller(self) -> Iterator[None]:
        """Surround the body of the training loop with it, and running out of memory is no end.

        This replica's part of the step is then repeated with micro-batches of half the size, from
        now on; the global batch stays. It cannot help when other replicas have received a part of
        the gradient already, late in the backward pass, or in the optimizer: then the error is
        raised, as without this. The repeated step has more micro-batches on this replica than on
        the others, so a module with collectives in its forward pass cannot repeat one. Nor can a
        loop that has read later batches: they are there in the size that was too large.
        """
        try:
            yield
            return
        except torch.OutOfMemoryError as error:
            size, iteration = self.current_samples, self._passes.iteration
            trained = self.job.trained
            if trained is None or iteration is None or size < 2 or iteration.reading.ahead:
                raise
            if not trained.drop_step():
                raise
            reason = str(error).partition("\n")[0]
        # Out of the handler: the traceback holds on to what has to be freed.
        devices.here().release_memory()
        iteration.repeats_below = size
        limit = self._sizes.memory.failed(size, self.batch_size)
        self.job.events.emit(
            FaultEvent(
                **self.job.events.stamp(),
                kind="out_of_memory",
                detail=f"a micro-batch of {size} samples did not fit: {reason}; the step is "
                f"repeated with at most {limit}",
                replica=self.job.engine.membership.replica,
            )
        )


SETTINGS = frozenset([*signature(AdaptiveDataLoader).parameters, *signature(DataLoader).parameters])
"""Arguments of a loader, which have no effect once it is made."""


def _seed(generator: torch.Generator | None) -> int:
    """The seed of the order where the user has not set one."""
    return generator.initial_seed() % 2**64 if generator else overrides.seed() or 0


def _local_limit(
    max_local_bsz: int | Literal["auto"] | None, memory_budget: int | None, batch_size: int
) -> tuple[int | None, LocalLimit | None]:
    """The largest micro-batch that the user has set, or else the limit that finds it out."""
    if max_local_bsz == "auto":
        return None, LocalLimit(memory_budget, start=max(1, batch_size // 8))
    if memory_budget is not None:
        raise ValueError(
            f"memory_budget ({memory_budget}) is for max_local_bsz='auto', which is "
            f"{max_local_bsz!r}"
        )
    if max_local_bsz is not None:
        _validate.whole("max_local_bsz", max_local_bsz, at_least=1)
    return max_local_bsz, None
