"""The gradient of one optimizer step: weighed, accumulated and reduced exactly.

After the backward pass of the last micro-batch, `.grad` is the mean gradient of the global batch,
whatever the split: each micro-batch counts by its weight (samples, or tokens) over all replicas.
Losses stay the user's own. A micro-batch counts when its backward pass begins: one that the loop
leaves out is not in the mean. A `Reducer` does the arithmetic on gradients and the collectives.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from resilin.compat.torch_names import after_backward
from resilin.core._warn import warn
from resilin.engine import devices
from resilin.engine.base import Engine
from resilin.engine.devices import Fetched
from resilin.engine.lost import PeerLost
from resilin.training.ballot import Ballot, Head
from resilin.training.gradient import refusals
from resilin.training.gradient.calls import Calls
from resilin.training.gradient.clipping import clip_sharded
from resilin.training.gradient.copies import follow
from resilin.training.gradient.norms import GroupNorms, Measured
from resilin.training.gradient.open_step import OpenStep
from resilin.training.gradient.parameter_hooks import ParameterHooks
from resilin.training.gradient.parameters import Parameters
from resilin.training.gradient.records import Part, Reduced, StepStart
from resilin.training.gradient.reducer import Model, Reducer
from resilin.training.gradient.reducer_choice import attached, choose
from resilin.training.gradient.seal import Seals
from resilin.training.gradient.sharding import Sharding
from resilin.training.gradient.timing import SyncTimer

logger = logging.getLogger("resilin")

_SKIPPED = Reduced(weight=0.0, samples=0, skipped=True)
_LOST = Reduced(weight=0.0, samples=0, skipped=True, lost=True)


class StepGradient:
    """Weighs, reduces and measures the gradient of one step after another.

    Its methods follow the order of a step.

    Args:
        module: The module that is trained.
        norms: Norms per parameter group of its optimizer.
        options: Arguments of the user for DistributedDataParallel.
        engine: Who is in the job.
        ballot: What replicas agree on in a step.
        sharding: Division of the parameters among processes, if they are sharded.
    """

    def __init__(
        self,
        module: nn.Module,
        norms: GroupNorms,
        options: Mapping[str, Any],
        engine: Engine,
        ballot: Ballot,
        sharding: Sharding | None = None,
    ) -> None:
        parameters = Parameters(module)
        self._model = Model(
            module=module,
            parameters=parameters,
            norms=norms,
            options=options,
            wait=engine.wait,
            refused=engine.refused,
            sharding=sharding,
            live=engine.live,
        )
        self._engine = engine
        self._ballot = ballot
        self._calls = Calls(self._backward_begins)
        self._queued = False
        place = parameters.all[0].device if parameters.all else torch.device("cpu")
        self._kind = devices.of(place)
        self._seals = Seals(parameters, queues=self._kind.queues)
        units = () if sharding is None else sharding.units
        self._hooks = ParameterHooks(parameters, {p for unit in units for p in unit.parameters})
        self.sync = SyncTimer(place)
        """Time that steps wait for their reduction."""
        self.follow_copies()
        try:
            self._reducer: Reducer = attached(self._model, engine.gradient_group(), joined=False)
        except BaseException:
            parameters.release()
            raise
        self._host_group = engine.host_group()
        self._reset()

    def _reset(self) -> None:
        """Makes the record of the next step. Gradients are left as they are."""
        self.step = OpenStep(
            self._model.parameters, self._ballot, self._host_group, self.sync, self._model.wait
        )
        """The step under way, or the one to come."""
        self._reducer.begin_step(self.step)
        self._ballot.forget()
        self._calls.reset()
        self._hooks.wait = False
        self._seals.open()
        self.sync.dropped()

    def end(self) -> None:
        """Ends a step that was made, skipped or left; `.grad` is the loop's to zero."""
        if self.step.complete:
            self._seals.use()
        else:
            self._seals.forget_used()
        self._reset()

    def drop(self) -> None:
        """Forgets the step, and what `.grad` holds of it."""
        if self.step.untouched and not self._queued:
            return
        if self.step.backwards or self._queued:
            self._model.parameters.clear_grads()
        # A backward pass that failed has left its end to come.
        self._queued = False
        self._reducer.abandon()
        self._reset()

    def let_go(self) -> None:
        """Gives up the replicas of a generation that is over, and the step that was lost in it."""
        self.drop()
        self._reducer.detach()
        self._reducer = choose(self._model, None)
        self._host_group = None
        self._reset()

    def follow_copies(self) -> None:
        """Gives a sharded model of a live job the groups of the present generation."""
        sharding = self._model.sharding
        groups = None if sharding is None else self._engine.copy_groups()
        if sharding is not None and groups is not None:
            followed = follow(self._model.module, sharding, groups, self._engine.membership)
            self._model = replace(self._model, sharding=followed)

    def release(self) -> None:
        """Takes the hooks off; a sharded module is FSDP's own again."""
        self._model.parameters.release()
        self._hooks.release()
        if self._model.sharding is not None:
            self._reducer.detach()

    # Its state -----------------------------------------------------------------------------

    @property
    def shared(self) -> bool:
        """Whether other replicas have a part of the step from this one already."""
        return self.step.result is not None or self._reducer.shared

    @property
    def collective(self) -> bool:
        """Whether each forward pass is a collective: all replicas have to run equally many."""
        return self._model.sharding is not None

    @property
    def returned(self) -> str:
        """Type of the module's last output, if no tensor in it requires a gradient."""
        return self._calls.returned

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
            self._end_micro_batch()
            parameters = self._model.parameters
            if names := parameters.changed():
                raise RuntimeError(
                    f"requires_grad of {parameters.describe(names)} was changed in the middle of "
                    "a step, between two of its micro-batches; freeze and unfreeze between two "
                    "optimizer steps"
                )
            self._calls.next_micro_batch()
        self.step.begin(part)
        self._reducer.begin()
        if start is None:
            self._seals.close()

    def _begin_step(self, start: StepStart) -> None:
        if self.step.complete:
            raise RuntimeError(refusals.NOT_STEPPED)
        if self.step.pending:
            warn(refusals.LEFT)
        self.drop()
        self._follow(start)
        self.step.start = start
        self._hooks.begin_step()
        self._seals.begin_step()

    def _follow(self, start: StepStart) -> None:
        """Takes over which parameters are trained now, and which replicas are present."""
        parameters, group = self._model.parameters, self._engine.gradient_group()
        parameters.check()
        same, changed = group is self._reducer.group, bool(parameters.changed())
        if same and not changed:
            return
        if changed:
            parameters.update()
            self._model.norms.update(parameters.all)
        if same and group is not None:
            # In place of the reduction that the others expect, if they have not changed anything.
            self.step.start, self.step.changes = start, True
            self._take_part_empty()
        # The old one goes first: both may have hooks on the parameters.
        self._reducer.detach()
        if same:
            self._reducer = choose(self._model, group)
            self._reducer.attach(group, source=None)
        else:
            self._reducer = attached(self._model, group, joined=True)
            self._host_group = self._engine.host_group()
        self._reset()

    def _end_micro_batch(self) -> None:
        """Ends the micro-batch before another one: it was trained, or left out."""
        if self._queued:
            raise RuntimeError(refusals.FAILED)
        self.settle()
        with self._calls.quiet():
            self._reducer.end_micro_batch(trained=False)

    def add_call(self, weight: float) -> None:
        """Announces another call of the module before the backward pass of a step.

        For steps of one micro-batch without a loader of ours. The step weighs what the largest
        call does that may take part in the backward pass.
        """
        self.step.reweigh(weight)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module so that its backward pass belongs to the current micro-batch."""
        part = self.step.part
        assert part is not None
        output = self._reducer.forward(lambda module: module(*args, **kwargs), last=part.last)
        self._calls.add(output, part.weight)
        return output

    def _backward_begins(self) -> None:
        if self._queued:
            return
        self._queued = True
        after_backward(self._backward_ends)
        step = self.step
        if step.part is None or step.result is not None:
            return  # Its end refuses it.
        self._seals.verify(complete=False)
        self._seals.open()
        self._seals.check_zeroed()
        if step.trained:
            if step.waited:
                raise RuntimeError(refusals.TWICE)
            return
        weight = self._calls.weight()
        if weight > step.part.weight:
            step.reweigh(weight)
        step.count()

    def _backward_ends(self) -> None:
        self._queued = False
        step = self.step
        if step.part is None:
            raise RuntimeError(refusals.STALE)
        self._calls.check()
        step.backwards += 1
        step.fresh = True
        if step.part.last:
            # DDP has queued its own end by now. Ours comes after it, when gradients are reduced.
            after_backward(self._conclude_in_backward)
            return
        # FSDP may queue its own ends later than ours, and change gradients there.
        after_backward(self._seals.close)

    def _conclude_in_backward(self) -> None:
        self.conclude()

    def settle(self) -> None:
        """Takes in the micro-batch that is over, before another one changes `.grad`.

        Raises:
            RuntimeError: Somebody changed the gradient.
        """
        step = self.step
        self._seals.verify(complete=self.step.complete)
        if not step.fresh or step.result is not None:
            return
        step.fresh = False
        self._kind.end_micro_batch()
        if self._reducer.end_micro_batch(trained=True):
            self._seals.close()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Allows changes of a complete gradient within this block."""
        self._seals.verify(complete=self.step.complete)
        self._seals.allow()
        try:
            yield
        finally:
            self._seals.forbid()
            if self.step.complete:
                self._seals.close()

    # The whole step ------------------------------------------------------------------------

    def conclude(self) -> Reduced:
        """Completes the gradient: from here on, `.grad` is the mean over the global batch.

        Raises:
            RuntimeError: A second backward pass through the last micro-batch.
        """
        step = self.step
        assert step.part is not None
        if step.result is not None and step.backwards > 1 and step.part.last:
            raise RuntimeError(refusals.SECOND)
        if step.result is None:
            step.backwards = 1
            head = self._take_part(trained=step.fresh)
            step.result = _LOST if head is None else self._complete(head)
            self.sync.reduced()
            if self.step.complete:
                self._seals.close()
        assert step.result is not None
        return step.result

    def conclude_without_backward(self) -> None:
        """Completes a step whose last micro-batch the loop has left out of the backward pass."""
        self._end_micro_batch()
        self.conclude()

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        """Clips the norm of the complete gradient; returns the norm before. Collective if sharded.

        Args:
            max_norm: Largest norm.
            norm_type: Order of the norm.
        """
        sharding = self._model.sharding
        if sharding is None:
            parameters = self._model.module.parameters()
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        trained = self._model.parameters.trained
        groups, group = sharding.copy_groups, self._reducer.group
        if groups is not None:
            # All copies have the same gradient; one that is lost now must not be waited for.
            sharding, group = sharding.within_copy, groups.shards
        return clip_sharded(trained, max_norm, norm_type, sharding, group)

    def leave(self) -> None:
        """Leaves a step without its last backward pass: no replica makes it."""
        self.step.skips = True
        self.step.result = _SKIPPED
        self._take_part_empty()

    def _take_part_empty(self) -> None:
        """Takes part in the reduction of a step that this replica has no gradient for."""
        self._queued = False
        with self._calls.quiet():
            head = self._take_part(trained=False)
        self._model.parameters.clear_grads()
        if head is None:
            self.step.result = _LOST

    def _take_part(self, *, trained: bool) -> Head | None:
        """Completes the collectives of a step, without an error in the user's code.

        Returns:
            The sums of all replicas; None if a member was lost before they were complete, here or
            for another process that continues with this one.
        """
        head: Head | None = None
        try:
            self._reducer.finish(trained=trained)
            head = self._ballot.sums()
        except RuntimeError as error:
            # A group that is broken may refuse to begin a collective.
            lost = self._model.refused(error)
            if not isinstance(lost, PeerLost):
                raise
            logger.debug("step %d: %s", self.step.start.steps, lost)
        if self._engine.all_took_part(head is not None):
            return head
        self._model.parameters.clear_grads()
        return None

    def _complete(self, head: Head) -> Reduced:
        """Makes `.grad` the mean, by what all replicas say of their parts."""
        if head.skips:
            self._model.parameters.clear_grads()
            return _SKIPPED
        if not head.weight:
            raise RuntimeError(refusals.WEIGHTLESS)
        norms = self._reducer.rescale(head.weight)
        self._hooks.call()
        return _reduced(head, norms)


def _reduced(head: Head, norms: Fetched | None) -> Reduced:
    """The result of a step, by the sums over all replicas."""
    noise = None
    if norms is not None:
        noise = Measured(norms, weight=head.weight, num=round(head.gradients))
    return Reduced(
        weight=head.weight,
        samples=round(head.samples),
        noise=noise,
        # Times come from the ballot too: what decides on later steps must be the same everywhere.
        cost=head.seconds / max(head.step_seconds, 1e-9),
    )
