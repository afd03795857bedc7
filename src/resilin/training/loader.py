"""`AdaptiveDataLoader`: the sample stream over a stock DataLoader.

Each step owns the positions `[cursor, cursor + B)` of the stream, and this replica fetches those
of them that are its own, in micro-batches that fit. The loop body never asks for a batch size, so
a stale one cannot be used. The cursor moves when the step is committed, and not before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal

from torch.utils.data import IterableDataset

from resilin.core import _validate
from resilin.core.clock import Reference, step_scale
from resilin.core.membership import Membership
from resilin.core.noise import Noise
from resilin.core.plan import BatchPlan
from resilin.core.stream import TAILS, Ownership, SampleStream, Tail
from resilin.engine import overrides
from resilin.training.data.cursor import Cursor, former_name, refuse_other_data
from resilin.training.data.fetching import Fetcher
from resilin.training.data.iteration import Iteration
from resilin.training.job import Job, current_job
from resilin.training.lifecycle import begin_step, end_epoch, leave_out_pass, start
from resilin.training.records import MicroBatch
from resilin.training.sized import SizedLoader
from resilin.training.sizing.batch_size import BatchSizes
from resilin.training.sizing.memory_limit import Room
from resilin.training.sizing.surroundings import Surroundings

_OWN = {
    "sampler": "the order is that of the sample stream",
    "batch_sampler": "batches are cut by the plan of each step",
}


class AdaptiveDataLoader(SizedLoader):
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
            seed = generator.initial_seed() % 2**64 if generator else overrides.seed() or 0
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
        job = current_job()
        sizes = BatchSizes(_surroundings(job), self.reference_run(), max_local_bsz, room)
        super().__init__(job, self.batch_size, sizes)
        self._batch_weight = batch_weight
        cursors = self.job.iterations.cursors
        self._name = cursors.name(self._stream.fingerprint)
        self._made_within = cursors.in_epoch
        self._identity = object()
        self._cursor = Cursor(self._name, self._stream)
        self._joined: tuple[Membership, int] | None = None
        self._latest: Iteration | None = None
        self._fetcher = Fetcher(dataset, self._stream, self._cut, dataloader_kwargs)

    def example(self) -> Any:
        """A batch of one sample, to build a model with, such as one of lazy modules.

        It is fetched in this process, and is no part of the order: nothing is used up by it.
        """
        return self._fetcher.one(0)

    # Ahead of the step ---------------------------------------------------------------------

    def _cut(self, position: int) -> tuple[list[range], int]:
        """A step at this position with the current sizes, and its end."""
        batch_size = self.current_batch_size
        span = self._stream.batch(position, batch_size, tail=self._tail)
        assert self._iteration is not None
        owners, replica = self._iteration.owners, self._iteration.membership.replica
        plan = self._sizes.plan(len(span), batch_size, training=self._iteration.training)
        plan = self._split_plan(plan, batch_size)
        mine = owners.positions(replica, span)
        sizes = plan.micro_batches(owners.slot(replica, span.start))
        ends = accumulate(sizes)
        parts = [mine[end - size : end] for size, end in zip(sizes, ends, strict=True) if size]
        return parts, span.stop

    def _split_plan(self, plan: BatchPlan, batch_size: int) -> BatchPlan:
        """Splits a step of one replica in two if its noise is to be measured.

        Losses that couple samples change with the split, so the reference batch is left whole
        unless somebody needs its noise. No piece has one sample, unless the reference batch has.
        """
        job = self.job
        samples = plan.global_batch_size
        pieces = samples // 2 >= min(2, self.batch_size)
        alone = plan.replicas == 1 and plan.steps == 1 and samples > 1
        training = self._iteration is not None and self._iteration.training
        if alone and pieces and training and job.trained is not None:
            scale = step_scale(samples, batch_size, self.batch_size)
            estimates = job.trained.scaling.estimates
            if estimates.due(autoscaled=job.autoscaler is not None, split_at=scale):
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

    def reference_run(self) -> Reference:
        """The run that the learning rate was tuned for: its batch, and its steps per epoch."""
        return Reference(self.batch_size, steps_per_epoch=self._steps_per_epoch() or None)

    def __iter__(self) -> Iterator[Any]:
        job = self.job
        training = job.trained is not None and job.trained.trains
        if training and not self._begin_pass(job):
            return
        current = self._begin_iteration(job, training=training)
        outer, self._iteration = self._iteration, current
        if current.moves:
            self._latest = current
        try:
            yield from self._epoch(job, current)
        finally:
            job.iterations.end(current)
            if self._iteration is current:
                self._iteration = None if outer is None or outer.closed else outer

    def _begin_pass(self, job: Job) -> bool:
        """Begins a pass that trains; whether there is anything to do in it."""
        start(job)
        self.take_part()
        job.timeline.epoch_is_new = False
        for other in [each for each in job.iterations.training if each.loader is self]:
            # It was left without being closed: by an exception that somebody keeps, for example.
            job.iterations.end(other)
        self._cursor.passes = self._cursor.passes.begin(job.epoch, job.iterations.positions())
        if self._cursor.passes.left_out:
            leave_out_pass(job)
        return not self._cursor.passes.left_out

    def _begin_iteration(self, job: Job, *, training: bool) -> Iteration:
        stream, membership = self._stream, self._engine.membership
        evaluates = job.trained is not None and not training
        if evaluates:
            # Apart from the cursor, and the same after a restart: it depends on the epoch alone.
            position = job.epoch * stream.num_samples
            owners = Ownership(0, membership.num_replicas)
        else:
            position = self._cursor.position
            self._join(membership)
            owners = self._cursor.deal(membership)
        self._fetcher.expect(position)
        # The epoch is that of the next batch: the cursor may stand before a tail to be dropped.
        first = stream.batch(position, self.current_batch_size, tail=self._tail).start
        current = Iteration(
            loader=self,
            name=self._name,
            cursor=self._cursor,
            measured_forward=self.measured_forward,
            training=training,
            moves=not evaluates,
            began=job.clock,
            membership=membership,
            owners=owners,
            position=position,
            data_end=(first // stream.num_samples + 1) * stream.num_samples,
        )
        if training:
            until = None if self._by_progress() else current.data_end
            self._cursor.passes = replace(self._cursor.passes, until=until)
        job.iterations.begin(current)
        return current

    def _epoch(self, job: Job, current: Iteration) -> Iterator[Any]:
        while not self._is_over(current, current.position):
            membership = begin_step(job, current) if current.training else self._engine.membership
            if current.moves and self._join(membership):
                current.membership, current.owners = membership, self._cursor.deal(membership)
                current.position = self._cursor.position
            batch_size = self.current_batch_size
            span = self._stream.batch(current.position, batch_size, tail=self._tail)
            yield from self._step(job, current, span, batch_size)
            if current.closed:
                raise RuntimeError(
                    f"this iteration over {self._name!r} was asked for a batch after a later one "
                    "over the same loader had begun: only one at a time can train"
                )
            if job.iterations.must_reissue(current):
                continue
            if current.training:
                job.iterations.commit_zipped(current)
            current.advance(span.stop)
        if current.moves and self._goal(current) is None:
            # After a tail that was dropped.
            current.advance(max(current.position, current.data_end))
        self._sizes.pause()
        if current.training:
            passes = self._cursor.passes
            self._cursor.passes = passes.end(current.enclosing, job.iterations.positions())
            end_epoch(job, current)

    def take_part(self) -> None:
        """Makes this the loader that trains: its state belongs to that of the job from now on.

        Iterating over it does this automatically. A loop that needs the position before it
        begins, calls it earlier.
        """
        job = self.job
        first = job.iterations.cursors.none_used
        self._cursor = job.iterations.cursors.get(self._name, self._stream, job.epoch)
        self._cursor.epoch = job.epoch
        former: list[str | None] = []

        def find(parts: Mapping[str, Any]) -> str | None:
            former[:] = [former_name(self._name, self._stream, parts, job.iterations.cursors.made)]
            if former[0] is None and first:
                refuse_other_data(
                    self._name, self._stream, parts, job.epoch, job.iterations.cursors.made
                )
            return former[0]

        def autoscaler_of(parts: Mapping[str, Any]) -> str | None:
            name = f"{former[0]}/autoscale" if former and former[0] else None
            return name if name in parts else None

        job.registry.add(self._name, self._cursor, ages=False, former=find)
        self._cursor.use(self._identity, self._stream, job.epoch, made_within=self._made_within)
        autoscaler = self._sizes.take_part(self._cursor, job.voters, made_within=self._made_within)
        job.autoscaler = autoscaler
        name = f"{self._name}/autoscale"
        if autoscaler is None:
            job.registry.remove(name)
        else:
            # The user may have set another one since the last epoch.
            job.registry.release(name)
            job.registry.add(name, autoscaler, ages=False, former=autoscaler_of)

    @property
    def epochs_done(self) -> int:
        """Epochs that are over: the number, from 0, of the one that the next step belongs to."""
        if self._by_progress():
            return math.floor((self.job.clock.progress + 1e-6) / self._steps_per_epoch())
        position = self._cursor.position
        batch = self._stream.batch(position, self.current_batch_size, tail=self._tail)
        return batch.start // self._stream.num_samples

    def has_passed(self, epoch: int) -> bool:
        """Whether the job resumes after the last step of this epoch: its next pass is left out.

        For loops of frameworks that do more at the end of an epoch; call `take_part` before.
        """
        passes = self._cursor.passes
        return passes.epoch == epoch and passes.seen < passes.complete

    @property
    def ends_epoch(self) -> bool:
        """Whether the epoch is over with the current step, once that is committed.

        For loops that have to know it before they ask for the next batch.
        """
        current = self._iteration
        return current is not None and self._is_over(current, current.span.stop)

    def _is_over(self, epoch: Iteration, position: int) -> bool:
        """Whether it ends at this position: by progress if there is a goal, else by the data.

        A tail that is to be dropped belongs to no batch of this epoch.
        """
        goal = self._goal(epoch)
        if goal is not None:
            return self.job.clock.progress >= goal - 1e-6
        if position >= epoch.data_end:
            return True
        span = self._stream.batch(position, self.current_batch_size, tail=self._tail)
        return span.start >= epoch.data_end

    def _goal(self, epoch: Iteration) -> float | None:
        """The progress at which the epoch ends; None if its data say that."""
        # A step that the model committed makes this the training loader; its rule says whether
        # an epoch is measured by the data or by progress.
        if self.job.clock.steps <= epoch.began.steps or not self._by_progress():
            return None
        per_epoch = self._steps_per_epoch()
        return (math.floor((epoch.began.progress + 1e-6) / per_epoch) + 1) * per_epoch

    def _by_progress(self) -> bool:
        trained = self.job.trained
        return trained is not None and trained.rule.clock == "progress"

    def _step(self, job: Job, current: Iteration, span: range, batch_size: int) -> Iterator[Any]:
        training, self._iteration = current.training, current
        if training:
            job.timeline.reference = self.reference_run()
            self._sizes.memory.agree()
        plan = current.plan = self._sizes.plan(len(span), batch_size, training=training)
        self._sizes.begin_step(plan, whole=training and len(span) == batch_size)
        mine = current.owners.positions(current.membership.replica, span)
        slot = current.owners.slot(current.membership.replica, span.start)
        sizes = self._split_plan(plan, batch_size).micro_batches(slot)
        if not training:
            # Only a step of training needs every replica in every micro-batch.
            sizes = tuple(size for size in sizes if size)
        steps = self._reference_steps(span.stop) - self._reference_steps(current.position)
        common: dict[str, Any] = {
            "samples": len(span),
            "scale": step_scale(len(span), batch_size, self.batch_size),
            "sample_steps": steps,
        }
        current.span = span
        index, rest = 0, mine
        while index < len(sizes):
            count, last = sizes[index], index + 1 == len(sizes)
            if count:
                batch = self._fetcher.take(rest, sizes[index:], behind=span.stop)
            else:
                batch = self._fetcher.one(span.start)
            rest = rest[count:]
            yield self._hand_out(job, current, batch, count, index=index, last=last, **common)
            index += 1
            if self._failed is not None:
                # This replica's part of the step, once more and in smaller pieces.
                smaller = BatchPlan(len(mine), 1, max_local_bsz=max(1, count // 2))
                sizes, self._failed = smaller.micro_batches(0), None
                index, rest = 0, mine
        if job.trained is None:
            self._sizes.count_step(**common)

    def _hand_out(self, job: Job, current: Iteration, batch: Any, count: int, **facts: Any) -> Any:
        weight, total = float(count), float(facts["samples"])
        if self._batch_weight is not None:
            weight = float(self._batch_weight(batch)) if count else 0.0
        self._current_samples = count
        micro_batch = MicroBatch(
            number=job.iterations.next_number(),
            weight=weight,
            total_weight=total if self._batch_weight is None else None,
            count=count,
            training=current.moves,
            **facts,
        )
        job.iterations.hand_out(current, micro_batch)
        return batch

    def commit(self) -> None:
        """Moves the cursor past the step that was handed out last.

        Committing a step does this automatically. A loop without an `AdaptiveDataParallel` calls it
        before it takes the state.
        """
        if self._latest is not None:
            self._latest.advance(self._latest.span.stop)

    # Membership and state ------------------------------------------------------------------

    def _join(self, membership: Membership) -> bool:
        """Drops what was fetched ahead, if the replicas have changed or the cursor was restored.

        Returns:
            Whether they have: then positions have to be dealt out, from the committed cursor on.
        """
        present = (membership, self._cursor.num_loads)
        if self._joined == present:
            return False
        self._joined = present
        self._fetcher.begin(self._cursor.position)
        return True

    def state_dict(self) -> dict[str, Any]:
        """The data state: which stream, where in it, and which passes of the epoch are complete."""
        return self._cursor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes where a saved loader was, at whatever number of replicas there is now.

        Raises:
            ValueError: The state belongs to another dataset or order; the message says which.
        """
        self._cursor.load_state_dict(state)


def _surroundings(job: Job) -> Surroundings:
    """Parts of its job that the batch sizes of a loader need."""

    def tokens_per_step() -> float | None:
        return None if job.trained is None else job.trained.scaling.reference.tokens_per_step

    def noise() -> Noise | None:
        return None if job.trained is None else job.trained.scaling.sample_noise

    def sync_seconds() -> float | None:
        return None if job.trained is None else job.trained.gradient.sync.seconds()

    return Surroundings(
        engine=job.engine,
        timeline=job.timeline,
        events=job.events,
        has_model=lambda: job.trained is not None,
        tokens_per_step=tokens_per_step,
        noise=noise,
        sync_seconds=sync_seconds,
        has_started=lambda: job.recovery is not None,
    )
