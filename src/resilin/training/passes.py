"""Passes of a loader over its data: from the cursor to the micro-batches of each step.

Each step owns the positions `[cursor, cursor + B)` of the stream, and this replica fetches those
of them that are its own, in micro-batches that fit. The cursor moves when the step is committed,
and not before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

from resilin.core.clock import step_scale
from resilin.core.membership import Membership
from resilin.core.plan import BatchPlan
from resilin.engine import overrides
from resilin.training.data.cursor import FormerNames, LoaderName
from resilin.training.data.iteration import Iteration
from resilin.training.data.supply import Supply
from resilin.training.job import Job
from resilin.training.lifecycle import (
    begin_step,
    end_epoch,
    end_lost_step,
    end_pass,
    leave_out_pass,
    start,
)
from resilin.training.records import MicroBatch
from resilin.training.sizing.batch_size import PARTS
from resilin.training.step_plans import StepPlans

logger = logging.getLogger("resilin")


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
        self.iteration: Iteration | None = None
        """The iteration over the loader that is under way, if any."""

    @property
    def by_progress(self) -> bool:
        """Whether the rule of the model measures epochs by progress, and not by the data."""
        trained = self._job.trained
        return trained is not None and trained.rule.clock == "progress"

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

    def run(self, loader: object) -> Iterator[Any]:
        """One pass: the micro-batches of one epoch, for the loop of the script.

        Args:
            loader: The loader that is iterated; only its identity is used.
        """
        job = self._job
        training = job.trained is not None and job.trained.trains
        if training and not self._begin(loader):
            return
        current = self._open(loader, training=training)
        outer, self.iteration = self.iteration, current
        if current.moves:
            self._latest = current
        complete = False
        try:
            yield from self._epoch(current)
            complete = True
        finally:
            if not complete:
                self._supply.close(current, complete=False)
            job.iterations.end(current)
            if self.iteration is current:
                self.iteration = None if outer is None or outer.closed else outer

    def _begin(self, loader: object) -> bool:
        """Begins a pass that trains; whether there is anything to do in it."""
        job = self._job
        start(job)
        self.take_part()
        job.timeline.epoch_is_new = False
        for other in [each for each in job.iterations.training if each.loader is loader]:
            # It was left without being closed: by an exception that somebody keeps, for example.
            job.iterations.end(other)
        passes = self.cursor.passes.begin(job.epoch, job.iterations.positions())
        self.cursor.passes = passes
        if passes.left_out:
            leave_out_pass(job)
        return not passes.left_out

    def _open(self, loader: object, *, training: bool) -> Iteration:
        job, membership = self._job, self._job.engine.membership
        moves = training or job.trained is None
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
            began=job.clock,
            membership=membership,
            epoch=job.epoch,
            position=place.position,
            data_end=place.end,
        )
        if training:
            until = None if self.by_progress else current.data_end
            self.cursor.passes = replace(self.cursor.passes, until=until)
        job.iterations.begin(current)
        return current

    def _epoch(self, current: Iteration) -> Iterator[Any]:
        job = self._job
        while not self.is_over(current, current.position):
            if current.training:
                _end_script(job, self._stop_at)
            membership = begin_step(job, current) if current.training else job.engine.membership
            if current.moves and self._join(membership):
                current.membership = membership
                current.position = self.cursor.position
                if self.is_over(current, current.position):
                    continue  # others have committed the step that was lost here
            if current.training and not self._sizes.memory.agree():
                continue
            batch_size = self._sizes.now()
            span = self._supply.span(current, batch_size)
            if not span:
                continue  # a replica was lost, or the data are over
            yield from self._step(current, span, batch_size)
            end_lost_step(job)
            if current.closed:
                raise RuntimeError(
                    f"this iteration over {self._name.text!r} was asked for a batch after a later "
                    "one over the same loader had begun: only one at a time can train"
                )
            if job.iterations.must_reissue(current):
                continue
            if current.training:
                job.iterations.commit_zipped(current)
            current.advance(span.stop)
        if current.training:
            end_pass(job)
        self._supply.close(current, complete=self._goal(current) is None)
        self._sizes.pause()
        if current.training:
            passes = self.cursor.passes
            self.cursor.passes = passes.end(current.enclosing, job.iterations.positions())
            end_epoch(job, current)

    def is_over(self, current: Iteration, position: int) -> bool:
        """Whether its epoch ends at this position: by progress if there is a goal, else by data."""
        goal, batches = self._goal(current), self._supply.batches
        if goal is None or batches is None:
            return self._supply.is_over(current, position)
        return batches.reaches(self._job.clock.progress, goal)

    def _goal(self, current: Iteration) -> int | None:
        """Epochs of the reference run after which the epoch ends; None if its data say that."""
        batches = self._supply.batches
        # A step that the model committed makes this the training loader; its rule says whether
        # an epoch is measured by the data or by progress.
        if batches is None or not self.by_progress:
            return None
        if self._job.clock.steps <= current.began.steps:
            return None
        return batches.epochs_of_progress(current.began.progress) + 1

    # A step --------------------------------------------------------------------------------

    def _step(self, current: Iteration, span: range, batch_size: int) -> Iterator[Any]:
        job, sizing, supply = self._job, self._sizes, self._supply
        training, self.iteration = current.training, current
        if training:
            job.timeline.reference = supply.reference
        share = supply.share(current, span)
        plan = sizing.plan(len(span), batch_size, training=training, shares=share.shares)
        current.plan = plan
        sizing.begin_step(plan, whole=training and len(span) == batch_size)
        sizes = self._plans.split(plan, batch_size, training=training).micro_batches(share.slot)
        if not training:
            if job.trained is not None and job.trained.gradient.collective:
                _check_evaluation(plan, counted=share.shares is None)
            # Only a step of training needs every replica in every micro-batch.
            sizes = tuple(size for size in sizes if size)
        scale = step_scale(len(span), batch_size, supply.reference.batch_size)
        common: dict[str, Any] = {
            "samples": len(span),
            "scale": scale,
            "sample_steps": supply.sample_steps(range(current.position, span.stop), scale),
        }
        current.span = span
        index, used, num = 0, 0, sum(sizes)
        while index < len(sizes):
            count, last = sizes[index], index + 1 == len(sizes)
            batch = share.take(used, sizes[index:]) if count else share.filler()
            used += count
            self._hand_out(current, batch, count, index=index, last=last, **common)
            yield batch
            index += 1
            if current.repeats_below is not None:
                # This replica's part of the step, once more and in smaller pieces.
                smaller = BatchPlan(num, 1, max_local_bsz=max(1, current.repeats_below // 2))
                sizes, current.repeats_below = smaller.micro_batches(0), None
                index, used = 0, 0
        if job.trained is None:
            sizing.count_step(**common)

    def _hand_out(self, current: Iteration, batch: Any, count: int, **facts: Any) -> None:
        weight, total = float(count), float(facts["samples"])
        if self._batch_weight is not None:
            weight = float(self._batch_weight(batch)) if count else 0.0
        micro_batch = MicroBatch(
            number=self._job.iterations.next_number(),
            weight=weight,
            total_weight=total if self._batch_weight is None else None,
            count=count,
            training=current.moves,
            **facts,
        )
        self._job.iterations.hand_out(current, micro_batch)

    # Membership and state ------------------------------------------------------------------

    def take_part(self) -> None:
        """Makes this the loader that trains: its state belongs to that of the job from now on."""
        job, name, stream = self._job, self._name, self._supply.order
        cursors = job.iterations.cursors
        former = FormerNames(name.text, stream, job.epoch, cursors)
        self.cursor = cursors.get(name.text, stream, job.epoch, self._supply.new_cursor)
        self.cursor.epoch = job.epoch
        job.registry.add(name.text, self.cursor, ages=False, former=former.cursor)
        self.cursor.use(name, stream, job.epoch, made_within=name.made_within)
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
