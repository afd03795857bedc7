"""`.grad` of a model: weighed, accumulated and reduced exactly.

After the backward pass of the last micro-batch, `.grad` is the mean gradient of the global batch,
whatever the split: each micro-batch counts by its weight (samples, or tokens) over all replicas.
`training.step` decides when; a `Reducer` does the arithmetic on gradients and the collectives.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from resilin.core.step import SKIPPED, Head, Reduced
from resilin.engine import devices
from resilin.engine.base import Engine
from resilin.engine.lost import PeerLost
from resilin.training.ballot import Ballot
from resilin.training.gradient import refusals
from resilin.training.gradient.calls import Calls
from resilin.training.gradient.clipping import clip_sharded
from resilin.training.gradient.copies import follow
from resilin.training.gradient.exchange import Exchange
from resilin.training.gradient.norms import GroupNorms, Measured
from resilin.training.gradient.parameter_hooks import ParameterHooks
from resilin.training.gradient.parameters import Parameters
from resilin.training.gradient.reducer import Model, Reducer
from resilin.training.gradient.reducer_choice import attached, choose
from resilin.training.gradient.seal import Seals
from resilin.training.gradient.sharding import Sharding
from resilin.training.gradient.timing import SyncTimer

logger = logging.getLogger("resilin")


class Gradient:
    """The gradient of one step after another.

    Args:
        module: The module that is trained.
        norms: Norms per parameter group of its optimizer.
        options: Arguments of the user for DistributedDataParallel.
        engine: Who is in the job.
        ballot: What replicas agree on in a step.
        sharding: Division of the parameters among processes, if they are sharded.
        backward_begins: Called when a backward pass reaches the output of a call.
    """

    def __init__(
        self,
        module: nn.Module,
        norms: GroupNorms,
        options: Mapping[str, Any],
        engine: Engine,
        ballot: Ballot,
        sharding: Sharding | None = None,
        *,
        backward_begins: Callable[[], None],
    ) -> None:
        self.parameters = Parameters(module)
        place = self.parameters.all[0].device if self.parameters.all else torch.device("cpu")
        self.sync = SyncTimer(place)
        """Time that steps wait for their reduction."""
        self.exchange = Exchange(ballot, self.parameters, self.sync, engine.wait)
        self._model = Model(
            module=module,
            parameters=self.parameters,
            norms=norms,
            exchange=self.exchange,
            options=options,
            wait=engine.wait,
            refused=engine.refused,
            sharding=sharding,
            live=engine.live,
        )
        self._engine = engine
        self.calls = Calls(backward_begins)
        self._kind = devices.of(place)
        self.seals = Seals(self.parameters, queues=self._kind.queues)
        units = () if sharding is None else sharding.units
        sharded = {p for unit in units for p in unit.parameters}
        self.hooks = ParameterHooks(self.parameters, sharded)
        self.follow_copies()
        try:
            self._reducer: Reducer = attached(self._model, engine.gradient_group(), joined=False)
        except BaseException:
            self.parameters.release()
            raise
        self.exchange.group = engine.host_group()
        self.forget()

    def forget(self) -> None:
        """Forgets the step that is over. Gradients are left as they are."""
        self._reducer.begin_step()
        self.exchange.ballot.forget()
        self.calls.reset()
        self.hooks.wait = False
        self.seals.open()
        self.sync.dropped()

    def abandon(self) -> None:
        """Forgets a step that was given up, as far as it has not reached `.grad`."""
        self._reducer.abandon()

    def let_go(self) -> None:
        """Gives up the replicas of a generation that is over."""
        self._reducer.detach()
        self._reducer = choose(self._model, None)
        self.exchange.group = None
        self.forget()

    def follow_copies(self) -> None:
        """Gives a sharded model of a live job the groups of the present generation."""
        sharding = self._model.sharding
        groups = None if sharding is None else self._engine.copy_groups()
        if sharding is not None and groups is not None:
            followed = follow(self._model.module, sharding, groups, self._engine.membership)
            self._model = replace(self._model, sharding=followed)

    def release(self) -> None:
        """Takes the hooks off; a sharded module is FSDP's own again."""
        self.parameters.release()
        self.hooks.release()
        if self._model.sharding is not None:
            self._reducer.detach()

    @property
    def shared(self) -> bool:
        """Whether other replicas have a part of the step from this one already."""
        return self._reducer.shared

    @property
    def collective(self) -> bool:
        """Whether each forward pass is a collective: all replicas have to run equally many."""
        return self._model.sharding is not None

    # Who takes part ------------------------------------------------------------------------

    def has_other_members(self) -> bool:
        """Whether the replicas are others than in the step before."""
        return self._engine.gradient_group() is not self._reducer.group

    def update(self) -> None:
        """Takes over which parameters are trained now."""
        self.parameters.update()
        self._model.norms.update(self.parameters.all)

    def attach(self) -> None:
        """Makes the reducer of the present replicas and of the parameters that are trained now."""
        group = self._engine.gradient_group()
        same = group is self._reducer.group
        # The old one goes first: both may have hooks on the parameters.
        self._reducer.detach()
        if same:
            self._reducer = choose(self._model, group)
            self._reducer.attach(group, source=None)
        else:
            self._reducer = attached(self._model, group, joined=True)
            self.exchange.group = self._engine.host_group()
        self.forget()

    # One micro-batch -----------------------------------------------------------------------

    def begin(self) -> None:
        """Prepares `.grad` for the micro-batch at hand."""
        self._reducer.begin()

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the module so that its backward pass belongs to the current micro-batch."""
        part = self.exchange.step.part
        assert part is not None
        output = self._reducer.forward(lambda module: module(*args, **kwargs), last=part.last)
        self.calls.add(output, part.weight)
        return output

    def take_in(self) -> None:
        """Takes in the micro-batch that is over, before another one changes `.grad`."""
        self._kind.end_micro_batch()
        if self._reducer.end_micro_batch(trained=True):
            self.seals.close()

    def leave_out(self) -> None:
        """Ends a micro-batch that the loop has left out, if it was."""
        with self.calls.quiet():
            self._reducer.end_micro_batch(trained=False)

    # The whole step ------------------------------------------------------------------------

    def take_part(self, *, trained: bool) -> Head | None:
        """Completes the collectives of a step, without an error in the user's code.

        Args:
            trained: Whether the last micro-batch had a backward pass.

        Returns:
            The sums of all replicas; None if a member was lost before they were complete, here or
            for another process that continues with this one.
        """
        head: Head | None = None
        try:
            self._reducer.finish(trained=trained)
            head = self.exchange.ballot.sums()
        except RuntimeError as error:
            # A group that is broken may refuse to begin a collective.
            lost = self._model.refused(error)
            if not isinstance(lost, PeerLost):
                raise
            logger.debug("step %d: %s", self.exchange.step.steps, lost)
        if self._engine.all_took_part(head is not None):
            return head
        self.parameters.clear_grads()
        return None

    def take_part_empty(self) -> Head | None:
        """Takes part in the reduction of a step that this replica has no gradient for."""
        with self.calls.quiet():
            head = self.take_part(trained=False)
        self.parameters.clear_grads()
        return head

    def complete(self, head: Head) -> Reduced:
        """Makes `.grad` the mean, by what all replicas say of their parts."""
        if head.skips:
            self.parameters.clear_grads()
            return SKIPPED
        if not head.weight:
            raise RuntimeError(refusals.WEIGHTLESS)
        norms = self._reducer.rescale(head.weight)
        self.hooks.call()
        noise = None
        if norms is not None:
            noise = Measured(norms, weight=head.weight, num=round(head.gradients))
        return Reduced(
            weight=head.weight,
            samples=round(head.samples),
            noise=noise,
            # Times come from the ballot too: what decides on later steps must be the same
            # everywhere.
            cost=head.seconds / max(head.step_seconds, 1e-9),
        )

    @contextmanager
    def changing(self) -> Iterator[bool]:
        """Allows changes of a complete `.grad` within this block; yields whether it is complete."""
        self.seals.verify(complete=self.exchange.step.complete)
        self.seals.allow()
        try:
            yield self.exchange.step.complete
        finally:
            self.seals.forbid()
            if self.exchange.step.complete and not self.exchange.step.turns:
                self.seals.close()

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
        groups, group = sharding.copy_groups, self._reducer.group
        if groups is not None:
            # All copies have the same gradient; one that is lost now must not be waited for.
            sharding, group = sharding.within_copy, groups.shards
        return clip_sharded(self.parameters.trained, max_norm, norm_type, sharding, group)
