"""Passes of a loader over its data: from the cursor to the micro-batches of each step.

Each step owns the positions `[cursor, cursor + B)` of the stream, and this replica fetches those
of them that are its own, in micro-batches that fit. The cursor moves when the step is committed,
and not before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from threading import get_ident
from typing import Any

from resilin.core._warn import warn
from resilin.core.clock import Clock, step_scale
from resilin.core.membership import Membership
from resilin.core.plan import BatchPlan
from resilin.engine import overrides
from resilin.training.data.copier import Copier, Fetched
from resilin.training.data.cursor import FormerNames, LoaderName
from resilin.training.data.iteration import Iteration
from resilin.training.data.planned import Planned
from resilin.training.data.reading import Handed, Reading
from resilin.training.data.sampled import reordered
from resilin.training.data.supply import Supply
from resilin.training.job import Job
from resilin.training.leaving import pass_is_over
from resilin.training.lifecycle import (
    end_epoch,
    end_pass,
    leave_out_pass,
)
from resilin.training.records import MicroBatch
from resilin.training.sizing.batch_size import PARTS
from resilin.training.start import start
from resilin.training.step import begin_step, end_lost_step
from resilin.training.step_plans import StepPlans

logger = logging.getLogger("resilin")

_OTHER_ORDER = (
    "the samples are in another order than {1}, as the entries of {0} tell: some are used twice "
    "and others left out. Files from a set or os.listdir(), or shuffled without a seed, have an "
    "order of their own in each process: sort them, or shuffle with a seed"
)
_END: Any = object()
"""Follows the last batch of a pass."""


class Passes:
    """The passes of one loader.

    Args:
        job: The job that the loader belongs to.
        supply: Its data.
        plans: The next batch size and its split.
        batch_weight: Gives the weight of a collated micro-batch; None weighs by samples.
    """

    def __init__(
        self,
        job: Job,
        supply: Supply,
        plans: StepPlans,
        batch_weight: Callable[[Any], Any] | None,
    ) -> None:
        self._job = job
        self._supply = supply
        self._plans = plans
        self._sizes = plans.sizes
        self._batch_weight = batch_weight
        self._name: LoaderName = job.iterations.cursors.name(supply.order.fingerprint)
        self._joined: tuple[Membership, int] | None = None
        self._stop_at = overrides.stop_at()
        self._latest: Iteration | None = None
        self.cursor = supply.new_cursor(self._name.text)
        """The position in the data."""
        self._iteration: Iteration | None = None
        self._depth: int | None = None
        self._compared = False

    @property
    def by_progress(self) -> bool:
        """Whether the rule of the model measures epochs by progress, and not by the data."""
        trained = self._job.trained
        return trained is not None and trained.scaling.clock == "progress"

    @property
    def iteration(self) -> Iteration | None:
        """The iteration over the loader that is under way, if any."""
        current = self._iteration
        return None if current is None or current.closed else current

    @property
    def samples(self) -> int:
        """Number of samples of the current micro-batch that count."""
        micro_batch = None if self.iteration is None else self.iteration.micro_batch
        return 0 if micro_batch is None else micro_batch.count

    @property
    def plan(self) -> BatchPlan | None:
        """The split of the current step; None before the first one."""
        return None if self.iteration is None else self.iteration.plan

    # A pass --------------------------------------------------------------------------------

    def run(self, loader: object, copier: Copier | None = None) -> Iterator[Any]:
        """One pass: the micro-batches of one epoch, for the loop of the script.

        Args:
            loader: The loader that is iterated; only its identity is used.
            copier: Copies its batches to a device; None leaves them where they are.
        """
        job = self._job
        training = job.trained is not None and job.trained.trains
        if training and not self._begin(loader):
            return
        current = self._open(loader, training=training)
        current.copier = copier
        outer, self._iteration = self._iteration, current
        if current.moves:
            self._latest = current
        current.steps = self._epoch(current)
        complete = False
        try:
            yield from self._read(current)
            complete = True
        finally:
            # Where the loop has read ahead, the last steps of the pass are still to come.
            if not (current.reading.over or current.closed):
                if not complete:
                    if training and current.made and self.is_over(current, current.position):
                        # It was left in the body of its last step.
                        self._end_pass(current)
                    self._supply.close(current, complete=False)
                job.iterations.end(current)
                if self._iteration is current:
                    self._iteration = outer
                if training:
                    pass_is_over(job)

    def _read(self, current: Iteration) -> Iterator[Any]:
        """The batches of a pass, as the loop asks for them."""
        reading = current.reading
        while True:
            if current.closed:
                raise RuntimeError(
                    f"this iteration over {self._name.text!r} was asked for a batch after a later "
                    "one over the same loader had begun: only one at a time can train"
                )
            with reading.lock:
                reading.requests += 1
                before = len(reading.ahead)
                if self._reads_ahead(current):
                    batch = self._take_ahead(current)
                    reading.over, reading.cut = batch is _END, False
                    if reading.over:
                        self._end_read_together(current, before)
                else:
                    batch = next(current.steps, _END)
            if batch is _END:
                if reading.one_by_one:
                    self._job.iterations.gone.clear()
                return
            yield batch

    def _end_read_together(self, current: Iteration, before: int) -> None:
        """Ends the loaders that were read together with one that is over, as `zip` does.

        `zip` does not ask those after it, and the loop may still train what it has read.

        Args:
            current: The pass that is over.
            before: Batches that it had ahead before it was asked for another one.
        """
        read = current.reading
        for each in self._job.iterations.training:
            other = each.reading
            together = (other.requests + 1, len(other.ahead)) == (read.requests, before)
            if together and before and not other.over:
                for _ in range(before - len(read.ahead)):
                    next(each.steps)
                other.over = other.cut = True

    def _reads_ahead(self, current: Iteration) -> bool:
        """Whether the loop asks for a batch and has another one that it has not trained.

        It reads ahead, or has left that one out: the next call of the model tells. Where no batch
        can be read before its step begins, it was left out.
        """
        job, reading = self._job, current.reading
        if not current.training or job.trained is None or current.micro_batch is None:
            return False
        trains, step = job.trained, job.trained.step
        in_loop = trains.thread in (None, get_ident())
        untouched = current.round == job.iterations.entries
        trained = in_loop and not untouched and step.leaves_batch
        if in_loop and not untouched and not reading.ahead and (trained or reading.trains_first):
            reading.trains_first = True
            return False  # without a backward pass, the batch was left out after its forward pass
        left = untouched and in_loop and reading.one_by_one and not reading.ahead
        if left or job.live is not None or self._foresee(current) is None:
            if untouched:
                job.iterations.gone += [current.handed(), *reading.ahead]
            while reading.ahead:
                next(current.steps)
            return False
        reading.first = current.handed()
        if trained:
            # What is done between two steps is done where the loop asks for data.
            next(current.steps)
        return True

    def _take_ahead(self, current: Iteration) -> Any:
        """A batch whose step has not begun, for the loop."""
        self._fetch(current)
        if not current.fetched:
            return _END
        fetched = current.fetched.popleft()
        batch = fetched.batch()
        current.reading.ahead.append(Handed.of(batch, fetched.span, fetched.weight))
        return batch

    def _fetch(self, current: Iteration) -> None:
        """Fetches the next batch, and those that are to be on their way to the device."""
        copier = current.copier
        while len(current.fetched) <= (0 if copier is None else copier.ahead):
            planned = self._foresee(current)
            if planned is None or planned.is_read:
                return
            count, batch = planned.sizes[planned.read], planned.fetch()
            weight = self._weigh(batch, count)
            current.fetched.append(Fetched.of(batch, planned.span, weight, copier))

    def _foresee(self, current: Iteration) -> Planned | None:
        """The step of the next batch that nobody has read.

        Returns:
            The step; one that was read whole if it is the last one of the pass, and None if the
            next one is not known before it begins.
        """
        last = self._read_steps(current)[-1]
        for each in self._read_steps(current):
            if not each.is_read:
                return each
        clock, position = self._clock_ahead(current), last.span.stop
        if self.is_over(current, position, clock):
            return last
        batch_size = self._sizes.now(clock)
        span = self._supply.span_ahead(position, batch_size)
        if span is None:
            return None
        current.planned.append(self._planned(current, span, batch_size))
        return current.planned[-1]

    def _clock_ahead(self, current: Iteration) -> Clock:
        """The clock after the steps that were read, each worth as little as it may be."""
        clock = self._job.clock
        for each in self._read_steps(current):
            if each.steps is not None and each.steps < self._job.clock.steps:
                continue  # committed
            scale = self._scale(each)
            clock = clock.advance(
                samples=len(each.span),
                scale=scale,
                gain=min(1.0, scale),
                sample_steps=self._supply.sample_steps(each.span, scale),
            )
        return clock

    def _read_steps(self, current: Iteration) -> list[Planned]:
        assert current.under_way is not None
        return [current.under_way, *current.planned]

    def _scale(self, planned: Planned) -> float:
        reference = self._supply.reference.batch_size
        return step_scale(len(planned.span), planned.batch_size, reference)

    def _begin(self, loader: object) -> bool:
        """Begins a pass that trains; whether there is anything to do in it."""
        job = self._job
        start(job)
        job.iterations.settle()
        for other in [each for each in job.iterations.training if each.loader is loader]:
            # It was left without being closed: by an exception that somebody keeps, for example.
            job.iterations.end(other)
        self._supply.renew(self.cursor)
        self.take_part()
        job.timeline.epoch_is_new = False
        passes = self.cursor.passes.begin(job.epoch, job.iterations.positions())
        self.cursor.passes = passes
        if passes.left_out:
            leave_out_pass(job)
        else:
            self._check_order()
        return not passes.left_out

    def _check_order(self) -> None:
        """Warns if samples are in another order than on other replicas, or earlier in this pass.

        That is no proof: the content may have changed, and not the order. So it is no error.
        """
        cursor, batches, engine = self.cursor, self._supply.batches, self._job.engine
        if batches is None:
            return
        before, now = cursor.sampled, self._supply.sampled()
        cursor.sampled, num = now, batches.stream.num_samples
        if cursor.position % num and (names := reordered(before, now)):
            warn(_OTHER_ORDER.format(names[0], "when this pass began"))
        if engine.membership.num_processes == 1 or self._compared or self._job.live is not None:
            return  # a member that joins a live job has the place of the others
        self._compared = True
        for process, (other_num, other) in enumerate(engine.gather([num, now])):
            if other_num != num:
                raise ValueError(
                    f"the dataset of {batches.stream.fingerprint!r} has {num} samples here and "
                    f"{other_num} in process {process}: all replicas need the same dataset"
                )
            if names := reordered(other, now):
                warn(_OTHER_ORDER.format(names[0], f"in process {process}"))
                return

    def _open(self, loader: object, *, training: bool) -> Iteration:
        job, membership = self._job, self._job.engine.membership
        moves = training or job.trained is None
        if not training and self.iteration is None:
            self._supply.renew(self.cursor)
            self.cursor.follow(self._supply.order)
        if moves:
            self._join(membership)
        place = self._supply.open(self.cursor, membership, job.epoch, moves=moves)
        current = Iteration(
            loader=loader,
            name=self._name.text,
            cursor=self.cursor,
            measured_forward=lambda: self._sizes.memory.measured(self.samples),
            training=training,
            moves=moves,
            reference=self._supply.reference,
            began=job.clock.progress - self.cursor.others,
            membership=membership,
            epoch=job.epoch,
            position=place.position,
            data_end=place.end,
            reading=Reading(self._depth),
        )
        if training:
            until = None if self.by_progress else current.data_end
            self.cursor.passes = replace(self.cursor.passes, until=until)
        job.iterations.begin(current)
        return current

    def _epoch(self, current: Iteration) -> Iterator[Any]:
        job = self._job
        while current.reading.ahead or not (
            current.reading.over or self.is_over(current, current.position)
        ):
            if current.training:
                _end_script(job, self._stop_at)
            membership = begin_step(job, current) if current.training else job.engine.membership
            if current.moves and self._join(membership):
                if current.reading.ahead:
                    raise RuntimeError(
                        f"the place of {self._name.text!r} was changed to {self.cursor.position} "
                        f"while the loop had read {len(current.reading.ahead)} batches ahead of "
                        f"{current.position}: load its state between two passes"
                    )
                current.drop_ahead()
                current.membership = membership
                current.position = self.cursor.position
                if self.is_over(current, current.position):
                    continue  # others have committed the step that was lost here
            if current.training and not self._sizes.memory.agree():
                continue
            planned = current.planned[0] if current.reading.ahead else None
            if planned is None:
                batch_size = self._sizes.now()
                span = self._supply.span(current, batch_size)
                if not span:
                    continue  # a replica was lost, or the data are over
                planned = current.foreseen(self._planned(current, span, batch_size))
            else:
                current.planned.popleft()
            yield from self._step(current, planned)
            end_lost_step(job)
            if job.iterations.must_reissue(current):
                continue
            if current.training:
                job.iterations.commit_zipped(current)
            current.advance(planned.span.stop)
            current.passed = True
        self._depth = current.reading.depth
        if current.reading.cut and not self.is_over(current, current.position):
            self._supply.close(current, complete=False)
            return
        if current.training:
            end_pass(job)
        by_data = self._goal(current, made=current.made) is None
        self._supply.close(current, complete=by_data)
        self._sizes.pause()
        if current.training:
            self._end_pass(current)
            end_epoch(job, current, at_once=not current.reading.over)

    def _end_pass(self, current: Iteration) -> None:
        positions = self._job.iterations.positions()
        self.cursor.passes = self.cursor.passes.end(current.enclosing, positions)

    def is_over(self, current: Iteration, position: int, clock: Clock | None = None) -> bool:
        """Whether its epoch ends at this position: by progress if there is a goal, else by data.

        Args:
            current: The pass.
            position: The position.
            clock: The clock there, if steps before it are still to be made.
        """
        # Steps to come may be made, unless those of this pass so far were left out.
        coming = clock is not None and current.training and not current.passed
        goal = self._goal(current, made=current.made or coming)
        batches = self._supply.batches
        if goal is None or batches is None:
            return self._supply.is_over(current, position, clock)
        return batches.reaches(current.own_progress(clock or self._job.clock), goal)

    def _goal(self, current: Iteration, *, made: bool) -> int | None:
        """Epochs of the reference run after which the epoch ends; None if its data say that.

        A step that the model makes makes this the training loader; its rule says whether an epoch
        is measured by the data or by progress.
        """
        batches = self._supply.batches
        if batches is None or not self.by_progress or not made:
            return None
        return batches.epochs_of_progress(current.began) + 1

    # A step --------------------------------------------------------------------------------

    def _planned(self, current: Iteration, span: range, batch_size: int) -> Planned:
        """A step at these positions, as it is split now."""
        job, training = self._job, current.training
        share = self._supply.share(current, span)
        plan = self._sizes.plan(len(span), batch_size, training=training, shares=share.shares)
        sizes = self._plans.split(plan, batch_size, training=training).micro_batches(share.slot)
        if not training:
            if job.trained is not None and job.trained.gradient.collective:
                _check_evaluation(plan, counted=share.shares is None)
            # Only a step of training needs every replica in every micro-batch.
            sizes = tuple(size for size in sizes if size)
        return Planned(span, batch_size, plan, share, sizes)

    def _step(self, current: Iteration, planned: Planned) -> Iterator[Any]:
        job, sizing, supply, span = self._job, self._sizes, self._supply, planned.span
        training, self._iteration = current.training, current
        if training:
            job.timeline.reference = supply.reference
        current.plan, current.span, current.under_way = planned.plan, span, planned
        planned.steps = job.clock.steps
        whole = training and len(span) == planned.batch_size
        sizing.begin_step(planned.plan, whole=whole)
        scale = self._scale(planned)
        common: dict[str, Any] = {
            "samples": len(span),
            "scale": scale,
            "sample_steps": supply.sample_steps(range(current.position, span.stop), scale),
        }
        index = 0
        while index < len(planned.sizes):
            count, last = planned.sizes[index], index + 1 == len(planned.sizes)
            self._hand_out(current, planned, count, index=index, last=last, **common)
            yield current.batch
            index += 1
            if current.repeats_below is not None:
                # This replica's part of the step, once more and in smaller pieces.
                most = max(1, current.repeats_below // 2)
                smaller = BatchPlan(sum(planned.sizes), 1, max_local_bsz=most)
                planned.again(smaller.micro_batches(0))
                current.drop_ahead()
                index, current.repeats_below = 0, None
        if job.trained is None:
            sizing.count_step(**common)

    def _hand_out(self, current: Iteration, planned: Planned, count: int, **facts: Any) -> None:
        reading = current.reading
        reading.first = reading.ahead.popleft() if reading.ahead else None
        if reading.first is not None:
            batch, weight = None, reading.first.weight
        else:
            self._fetch(current)
            fetched = current.fetched.popleft()
            batch, weight = fetched.batch(), fetched.weight
        current.batch = batch
        micro_batch = MicroBatch(
            number=self._job.iterations.next_number(),
            weight=weight,
            total_weight=float(facts["samples"]) if self._batch_weight is None else None,
            count=count,
            training=current.moves,
            **facts,
        )
        self._job.iterations.hand_out(current, micro_batch)

    def _weigh(self, batch: Any, count: int) -> float:
        if self._batch_weight is None or not count:
            return float(count)
        return float(self._batch_weight(batch))

    # Membership and state ------------------------------------------------------------------

    def take_part(self) -> None:
        """Makes this the loader that trains: its state belongs to that of the job from now on."""
        job, name, stream = self._job, self._name, self._supply.order
        cursors = job.iterations.cursors
        former = FormerNames(name.text, stream, job.epoch, cursors)
        self.cursor = cursors.get(name.text, stream, job.epoch, self._supply.new_cursor)
        self.cursor.epoch = job.epoch
        job.registry.add(name.text, self.cursor, ages=False, former=former.cursor)
        if self.cursor.owner is None and not self.cursor.num_loads:
            self.cursor.others = job.clock.progress  # all that was made before
        self.cursor.use(name, stream, job.epoch, made_within=name.made_within)
        if (batches := self._supply.batches) is not None:
            shorter = self.cursor.measure(batches.steps_per_epoch, job.clock.progress)
            job.timeline.more_steps += job.epoch * shorter
        parts = self._sizes.take_part(self.cursor, job.voters, made_within=name.made_within)
        _check_sizing(parts, job.engine.membership)
        job.autoscaler, job.sized_by_noise = self._sizes.autoscaler, bool(parts)
        job.sizes = self._sizes
        for part in PARTS:
            state = f"{name.text}/{part}"
            if part not in parts:
                job.registry.remove(state)
                continue
            # The user may have set another one since the last epoch.
            job.registry.release(state)
            job.registry.add(state, parts[part], ages=False, former=former.part(part))

    def commit(self) -> None:
        """Moves the cursor past the step that was handed out last."""
        if self._latest is not None:
            self._latest.advance(self._latest.span.stop)

    def _join(self, membership: Membership) -> bool:
        """Drops what was fetched ahead if the replicas have changed, or the cursor was restored.

        Returns whether: then positions have to be dealt out, from the committed cursor on.
        """
        present = (membership, self.cursor.num_loads)
        if self._joined == present:
            return False
        self._joined = present
        self._supply.begin(self.cursor)
        return True


def _check_evaluation(plan: BatchPlan, *, counted: bool) -> None:
    """Refuses a batch that leaves a replica out while the others call a sharded model.

    Args:
        plan: The plan of the batch.
        counted: Whether replicas have the same number of batches, since the data are counted.

    Raises:
        ValueError: It has fewer samples than there are micro-batches on all replicas, or replicas
            have different numbers of batches.
    """
    samples, replicas = plan.global_batch_size, plan.replicas
    if not counted and replicas > 1:
        raise ValueError(
            f"a sharded model cannot be evaluated on a stream by {replicas} replicas: each reads "
            "its own shards, which have different numbers of batches, and a forward pass needs all "
            "replicas; evaluate it on data with __len__ and __getitem__"
        )
    if samples // replicas < plan.steps:
        raise ValueError(
            f"an evaluation batch of {samples} samples leaves out some of {replicas} replicas, in "
            f"one of {plan.steps} micro-batches each, and a forward pass of a sharded model needs "
            "all of them: take drop_last=True, or a dataset whose remainder has a sample for each"
        )


def _check_sizing(parts: Collection[str], membership: Membership) -> None:
    """Refuses batch sizes that follow the noise where a replica has several processes.

    Raises:
        ValueError: There are such sizes: each process of replica 0 would propose one.
    """
    processes, replicas = membership.num_processes, membership.num_replicas
    if parts and processes > replicas:
        raise ValueError(
            f"a batch size that follows the noise ({', '.join(sorted(parts))}) is not supported "
            f"under tensor parallelism, and {processes} processes form {replicas} replicas: set "
            "the batch size with set_batch_size()"
        )


def _end_script(job: Job, stop_at: int | None) -> None:
    """Ends the script, with success, where the lab has said so; its last report is made then.

    All replicas have used the same number of samples, so all of them end here.
    """
    if stop_at is not None and job.clock.samples >= stop_at:
        logger.info("ended at sample %d, as asked for", job.clock.samples)
        raise SystemExit(0)
