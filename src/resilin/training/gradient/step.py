"""The gradient of one optimizer step: accumulated, weighted and reduced exactly.

After the backward pass of the last micro-batch, `.grad` is the mean gradient of the global batch,
whatever the split: each micro-batch counts by its weight (samples, or tokens) over all replicas.
Losses stay the user's own. A micro-batch counts when its backward pass begins: one that the loop
leaves out is not in the mean. The reduction is in `ddp`, the arithmetic of one replica in `local`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from resilin.compat.torch_names import after_backward
from resilin.engine import devices
from resilin.engine.base import Engine
from resilin.training.gradient import refusals
from resilin.training.gradient.ballot import Head, Said, check, pack, unpack
from resilin.training.gradient.calls import Calls
from resilin.training.gradient.ddp import DdpReducer
from resilin.training.gradient.local import LocalGradient
from resilin.training.gradient.norms import GroupNorms, noise_samples
from resilin.training.gradient.parameters import Parameters
from resilin.training.gradient.records import Part, Reduced, StepStart
from resilin.training.gradient.seal import Seal
from resilin.training.gradient.timing import SyncTimer

_SKIPPED = Reduced(weight=0.0, samples=0, skipped=True)


class StepGradient:
    """Accumulates, weighs, reduces and measures the gradient of one step after another."""

    def __init__(
        self,
        module: nn.Module,
        norms: GroupNorms,
        ddp_kwargs: dict[str, Any],
        engine: Engine,
        own_votes: Callable[[], Sequence[float]],
    ) -> None:
        self._module = module
        self._engine = engine
        self._norms = norms
        self._own_votes = own_votes
        self._parameters = Parameters(module)
        self._local = LocalGradient(self._parameters, norms)
        self._calls = Calls(self._backward_begins)
        self._ddp_kwargs = {"gradient_as_bucket_view": True, **ddp_kwargs}
        self._reducer: DdpReducer | None = None
        self._queued = False
        self._allowed = 0
        self._num_steps = 0
        self._used: Seal | None = None
        known = self._parameters.all
        place = known[0].device if known else torch.device("cpu")
        self._kind = devices.of(place)
        self.sync = SyncTimer(place)
        """Time that steps wait for their reduction."""
        self.reset()
        self._join()

    def reset(self) -> None:
        """Forgets the step, committed or not. Gradients are left as they are."""
        self.part: Part | None = None
        self.result: Reduced | None = None
        self.measure = False
        self._start = StepStart(measure=False, step_seconds=0.0, steps=0)
        self._backwards = 0
        self._weighed = False
        self._fresh = False
        self._samples = 0
        self._seal: Seal | None = None
        self._skips = self._changes = False
        self._head: Head | None = None
        self._said: Said | None = None
        self._num_votes = 0
        self._alone_votes: tuple[float, ...] = ()
        self._seconds = 0.0
        self._local.reset()
        self._calls.reset()
        if self._reducer is not None:
            self._reducer.reset()
        self.sync.dropped()

    def end(self) -> None:
        """Forgets a step that was made; `.grad` is the loop's to zero."""
        self._used = None
        if self.complete and self._thorough:
            self._used = Seal(self._local.tensors(), contents=False)
        self.reset()

    def drop(self) -> None:
        """Forgets the step, and what `.grad` holds of it."""
        if self._backwards or self._queued or not self._local.empty:
            self._local.clear()
        # A backward pass that failed has left its end to come.
        self._queued = False
        if self._reducer is not None:
            self._reducer.disarm()
        self.reset()

    def release(self) -> None:
        """Takes the hooks off."""
        self._parameters.release()

    def _join(self) -> None:
        """Wraps the module for the replicas that are present now, if they changed."""
        group = dist.group.WORLD if self._engine.membership.num_replicas > 1 else None
        if group is None:
            self._reducer = None
        elif self._reducer is None or self._reducer.group is not group:
            self._reducer = None  # The old one goes first: both have hooks on the parameters.
            self._reducer = DdpReducer(
                self._module, self._parameters, self._norms, self._ddp_kwargs, self
            )

    # Its state -----------------------------------------------------------------------------

    @property
    def shared(self) -> bool:
        """Whether other replicas have a part of the step from this one already."""
        return self.result is not None or (self._reducer is not None and self._reducer.reducing)

    @property
    def pending(self) -> bool:
        """Whether `.grad` holds a part of a step that was not made."""
        return self._backwards > 0 and (self.result is None or not self.result.skipped)

    @property
    def complete(self) -> bool:
        """Whether `.grad` is the mean over the global batch, and was not used yet."""
        return self.result is not None and not self.result.skipped

    @property
    def trained(self) -> bool:
        """Whether the micro-batch at hand had its backward pass."""
        return self._weighed

    @property
    def returned(self) -> str:
        """Type of the module's last output, if no tensor in it requires a gradient."""
        return self._calls.returned

    @property
    def ballot(self) -> Tensor | None:
        """The ballot of this step, if it was sent."""
        return None if self._reducer is None else self._reducer.ballot

    # One micro-batch -----------------------------------------------------------------------

    def begin(self, part: Part, start: StepStart | None) -> None:
        """Begins a micro-batch.

        Args:
            part: What its gradient counts for.
            start: What is known of the step, if a new one begins with it.

        Raises:
            RuntimeError: The step or the micro-batch before it was not ended as it should be.
        """
        if start is not None:
            self._begin_step(start)
        else:
            self._end_part()
            if names := self._parameters.changed():
                raise RuntimeError(
                    f"requires_grad of {self._parameters.describe(names)} was changed in the "
                    "middle of a step, between two of its micro-batches; freeze and unfreeze "
                    "between two optimizer steps"
                )
            self._calls.next_micro_batch()
        self.part = part
        self._weighed = False
        self._local.align(part.weight, copy=self._reducer is not None)
        if start is None:
            self._reseal()

    def _begin_step(self, start: StepStart) -> None:
        if self.complete:
            raise RuntimeError(refusals.NOT_STEPPED)
        if self.pending:
            warnings.warn(refusals.LEFT, stacklevel=5)
        self.drop()
        self._parameters.check()
        if self._parameters.changed():
            self._follow(start)
        self._join()
        self._start, self.measure = start, start.measure
        self._num_steps += 1

    def _follow(self, start: StepStart) -> None:
        """Takes over which parameters are trained now, together with all replicas."""
        self._parameters.update()
        self._norms.update(self._parameters.all)
        if self._reducer is not None and self._reducer.group is dist.group.WORLD:
            # In place of the reduction that the others expect, if they have not changed anything.
            self._start, self._changes = start, True
            self._take_part_empty()
            self.reset()
            self._reducer = None

    def _end_part(self) -> None:
        """Ends the micro-batch before another one: it was trained, or left out."""
        if self._queued:
            raise RuntimeError(refusals.FAILED)
        self.settle()
        self._local.merge(trained=False)

    def add_call(self, weight: float) -> None:
        """Announces another call of the module before the backward pass of a step.

        For steps of one micro-batch without a loader of ours. The step weighs what the largest
        call does that may take part in the backward pass.
        """
        assert self.part is not None
        self.part = replace(self.part, weight=weight, samples=round(weight))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module so that its backward pass belongs to the current micro-batch."""
        assert self.part is not None
        if self._reducer is None:
            output = self._module(*args, **kwargs)
        else:
            output = self._reducer.forward(self.part.last, *args, **kwargs)
        self._calls.add(output, self.part.weight)
        return output

    def _backward_begins(self) -> None:
        if self._queued:
            return
        self._queued = True
        after_backward(self._backward_ends)
        if self.part is None or self.result is not None:
            return  # Its end refuses it.
        self._verify()
        self._seal = None
        used, self._used = self._used, None
        if used is not None and (grads := self._local.tensors()) and used.holds(grads):
            raise RuntimeError(refusals.NOT_ZEROED)
        if self._weighed:
            return
        self._weighed = True
        weight = self._calls.weight()
        if weight > self.part.weight:
            self.part = replace(self.part, weight=weight, samples=round(weight))
        self._local.add_weight(self.part.weight)
        self._samples += self.part.samples

    def _backward_ends(self) -> None:
        self._queued = False
        if self.part is None:
            raise RuntimeError(refusals.STALE)
        self._calls.check()
        self._backwards += 1
        self._fresh = True
        if self.part.last:
            # DDP has queued its own end by now. Ours comes after it, when gradients are reduced.
            after_backward(self._conclude_in_backward)
            return
        self._local.merge(trained=True)
        self._reseal()

    def _conclude_in_backward(self) -> None:
        self.conclude()

    def settle(self) -> None:
        """Takes in the micro-batch that is over, before another one changes `.grad`.

        Raises:
            RuntimeError: Somebody changed the gradient.
        """
        self._verify()
        if not self._fresh or self.result is not None:
            return
        self._fresh = False
        self._kind.end_micro_batch()
        if self.measure and self._reducer is None and self.part is not None and self.part.weight:
            with self.timed():
                self._local.absorb(self.part.weight)
            self._reseal()

    # Changes by others ---------------------------------------------------------------------

    def _verify(self) -> None:
        if self._seal is None or (self._allowed and self.complete):
            return
        if not self._seal.holds(self._local.tensors()):
            complete = self.result is not None
            raise RuntimeError(refusals.CHANGED if complete else refusals.CHANGED_BETWEEN)

    @property
    def _thorough(self) -> bool:
        """Whether to look closely: in the first steps, and in ever fewer later ones."""
        return self._num_steps & (self._num_steps - 1) == 0

    def _reseal(self) -> None:
        self._seal = Seal(self._local.tensors(), contents=self._thorough)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Allows changes of a complete gradient within this block."""
        self._verify()
        self._allowed += 1
        try:
            yield
        finally:
            self._allowed -= 1
            if self.complete:
                self._reseal()

    # The whole step ------------------------------------------------------------------------

    def conclude(self) -> Reduced:
        """Completes the gradient: from here on, `.grad` is the mean over the global batch.

        Raises:
            RuntimeError: A second backward pass through the last micro-batch.
        """
        assert self.part is not None
        if self.result is not None and self._backwards > 1 and self.part.last:
            raise RuntimeError(refusals.SECOND)
        if self.result is None:
            self._backwards = 1
            self.result = self._conclude_alone() if self._reducer is None else self._conclude_all()
            self.sync.reduced()
            if self.complete:
                self._reseal()
        return self.result

    def conclude_without_backward(self) -> None:
        """Completes a step whose last micro-batch the loop has left out of the backward pass."""
        self._end_part()
        if self._reducer is not None:
            self._local.hold(0.0, copy=True)
            self._reducer.take_part(list(self._local.held or ()))
        self.conclude()

    def leave(self) -> None:
        """Leaves a step without its last backward pass: no replica makes it."""
        self._skips = True
        if self._reducer is not None:
            self._take_part_empty()
        self._local.clear()
        self.result = _SKIPPED

    def _take_part_empty(self) -> None:
        assert self._reducer is not None
        self._queued = False
        self._reducer.take_part()
        self._local.clear()
        self._count()

    def _conclude_alone(self) -> Reduced:
        local = self._local
        self._alone_votes = tuple(self._own_votes())
        local.merge(trained=self._fresh)
        if not local.weight:
            raise RuntimeError(refusals.WEIGHTLESS)
        if not local.num_measured:
            local.scale(local.unit / local.weight)
            return Reduced(weight=local.weight, samples=self._samples)
        assert self.part is not None
        with self.timed():
            if self._fresh and self.part.weight:
                local.absorb(self.part.weight)
            terms, means = local.take_mean()
        return Reduced(
            weight=local.weight,
            samples=self._samples,
            noise=noise_samples(local.weight, local.num_measured, terms, means),
            cost=self._seconds / max(self._start.step_seconds, 1e-9),
        )

    def _conclude_all(self) -> Reduced:
        assert self._reducer is not None
        # DDP leaves what no replica used alone: as it was before it was put aside.
        self._local.restore_unused()
        said = self._count()
        sums = said.head
        if sums.skips:
            self._local.clear()
            return _SKIPPED
        if not sums.weight:
            raise RuntimeError(refusals.WEIGHTLESS)
        self._reducer.completed(sums.weight)
        correction = self._assumed() / sums.weight
        self._local.scale(correction)
        noise = None
        if self.measure:
            means = (self._reducer.mean_norms() * (correction * correction)).tolist()
            noise = noise_samples(sums.weight, round(sums.members), said.terms, means)
        return Reduced(
            weight=sums.weight,
            samples=round(sums.samples),
            noise=noise,
            # The ballot left before the norms after the reduction, which cost as much again. Times
            # come from the ballot too: what decides on later steps must be the same everywhere.
            cost=2 * sums.seconds / max(sums.step_seconds, 1e-9) if self.measure else 0.0,
        )

    def _count(self) -> Said:
        """The ballot of the step, summed over all replicas, which make it alike."""
        assert self._reducer is not None
        assert self._head is not None
        self._said = unpack(self._reducer.counted(), self._num_votes)
        check(self._head, self._said.head, self._engine.membership.num_replicas)
        return self._said

    def votes(self) -> tuple[float, ...]:
        """Votes in the ballot of this step, summed over replicas; empty if there was no ballot."""
        if self._reducer is None:
            return self._alone_votes
        return () if self._said is None else self._said.votes

    # What the reduction asks ---------------------------------------------------------------

    @property
    def _is_empty(self) -> bool:
        """Whether this replica takes part in a reduction without a gradient."""
        return self._skips or self._changes

    def reduces(self) -> bool:
        """Whether a reduction is due: the micro-batch under way is the last one."""
        return self._is_empty or (self.part is not None and self.part.last)

    def local_weight(self) -> float:
        """Weight of this replica's micro-batches."""
        return 0.0 if self._is_empty else self._local.weight

    def computed(self) -> None:
        """This replica has computed all of its gradient."""
        self.sync.computed()

    def _assumed(self) -> float:
        """The total weight that replicas divide by before they know it; the same on all."""
        assert self._reducer is not None
        if self.part is not None and self.part.total is not None:
            return self.part.total
        return self._reducer.assumed or 1.0

    def weigh(self, bucket: Any) -> None:
        """Turns a bucket into this replica's share of the mean gradient, in place."""
        buffer, held = bucket.buffer(), self._local.held
        if self._is_empty:
            buffer.zero_()
            return
        if held is not None:
            if self._local.share:
                buffer.mul_(self._local.share)
            else:
                # Explicit zeros: a gradient that must not count may be infinite.
                buffer.zero_()
            for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
                if parameter in held:
                    grad.add_(held[parameter])
        buffer.mul_(self._local.unit / self._assumed())

    def make_ballot(self, norms: Tensor | None, like: Tensor) -> Tensor:
        """All that replicas must agree on, in one reduction after that of the last bucket."""
        votes = tuple(self._own_votes())
        self._num_votes = len(votes)
        weight = self.local_weight()
        empty = self._is_empty
        self._head = Head(
            weight=weight,
            samples=0.0 if empty else float(self._samples),
            members=float(weight > 0),
            seconds=self._seconds,
            step_seconds=self._start.step_seconds,
            steps=float(self._start.steps),
            assumed=0.0 if empty else self._assumed(),
            skips=float(self._skips),
            changes=float(self._changes),
            signature=float(self._parameters.signature),
        )
        if norms is None or not weight:
            terms = torch.zeros(self._norms.num_groups, dtype=torch.float64, device=like.device)
        else:
            terms = norms * (self._assumed() * self._assumed() / weight)
        return pack(self._head, votes, terms)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Adds the time spent in this block to what measuring has cost."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - start
