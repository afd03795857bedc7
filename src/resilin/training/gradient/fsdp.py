"""The reducer of models that are sharded with `fully_shard`: FSDP2, HSDP, and both with TP.

FSDP keeps its own hooks and collectives: it reduces and scatters each micro-batch during the
backward pass, and under HSDP adds up copies with the last one. Only the reduce-scatter is replaced
(`unit_scatter`): there each micro-batch gets its weight, and its norm is measured. So each
micro-batch is a sample of the noise, also on one data-parallel member.

Forward and backward passes are collective. A micro-batch whose backward pass the loop leaves out on
this member has one with zeros, because others wait for it; one without a forward pass is refused.

In a live job copies come and go. There FSDP adds up within a copy alone, with each micro-batch. The
sum over copies is made here after the last one, and everything that the loss of another copy can
fail is waited for before the ballot: after it, only processes of one copy tell each other anything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from resilin.core.step import Share
from resilin.engine.copies import CopyGroups
from resilin.engine.devices import Fetched
from resilin.training.gradient import refusals
from resilin.training.gradient.copies import add_over_copies
from resilin.training.gradient.norms import total
from resilin.training.gradient.reducer import Model, fetch_norms
from resilin.training.gradient.sharding import Sharding, is_sharded
from resilin.training.gradient.shared_buffers import SharedBuffers
from resilin.training.gradient.timing import Stopwatch
from resilin.training.gradient.unit_scatter import UnitScatter, layout
from resilin.training.gradient.unsharded import Penalties, Unsharded
from resilin.training.tensors import tensors_in

logger = logging.getLogger("resilin")

_UNKNOWN = -(10**9)
"""Number of measured gradients of a process that could not measure: no process has a result."""


@dataclass(slots=True)
class _Step:
    """One step, as far as its gradient is reduced."""

    divisor: float | None = None
    """Total weight that all processes divide by; None before the first reduction."""
    terms: list[Tensor] = field(default_factory=list)
    """Weighted squared norms per parameter group, by unit and micro-batch."""
    num_measured: int = 0
    """Micro-batches that were measured."""
    unclear: bool = False
    """Whether a norm is unknown, so that the step counts as not measured."""
    fresh: bool = True
    """Whether no gradient was there when it began."""
    forwards: int = 0
    """Forward passes so far."""
    over: bool = False
    """Whether this process's part of it is complete."""
    watch: Stopwatch = field(default_factory=Stopwatch)
    """Time spent on norms."""
    summed: Tensor | None = None
    """The terms of all processes, in a live job."""


@dataclass(slots=True)
class _Micro:
    """One micro-batch."""

    forwards: int = 0
    """Its forward passes."""
    outputs: list[Tensor] = field(default_factory=list)
    """Their outputs that have a gradient, in case its backward pass is left out."""
    fills: bool = False
    """Whether a backward pass with zeros is under way."""


class FsdpReducer:
    """Reduces the gradients of a sharded model, through FSDP's own collectives."""

    group: dist.ProcessGroup | None = None

    def __init__(self, model: Model) -> None:
        assert model.sharding is not None
        self._model = model
        self._exchange = model.exchange
        self._sharding: Sharding = model.sharding
        plain = [p for p in model.parameters.trained if not is_sharded(p)]
        self._plain = Unsharded(plain, self._sharding, model.norms, model.wait)
        self._buffers = SharedBuffers(model.module, self._sharding, model.wait)
        self._copies = model.sharding.copy_groups
        self._scatters: list[UnitScatter] = []
        self._penalties = Penalties([])
        self._hooks: list[RemovableHandle] = []
        self._ran: set[Any] = set()
        self._micro: _Micro | None = None
        self._weight_before = 0.0
        self._warned = False

    @classmethod
    def fits(cls, model: Model, group: dist.ProcessGroup | None) -> bool:
        """Whether the model is sharded."""
        return model.sharding is not None

    # Its replicas --------------------------------------------------------------------------

    def attach(self, group: dist.ProcessGroup | None, *, source: int | None) -> None:
        """Takes the place of FSDP's reduce-scatter; what has copies is made the same."""
        self.group = group
        sharding, norms = self._sharding, self._model.norms
        if source is not None:
            self._copy_first()
        for unit in sharding.units:
            trained = [p for p in unit.parameters if p.requires_grad]
            columns = layout(unit, trained, norms, sharding)
            scatter = UnitScatter(unit, trained, columns, norms.num_groups, self._weigh)
            self._scatters.append(scatter)
            # Modules of one call share it: to set it for one of them sets it for all.
            unit.modules[0].set_custom_reduce_scatter(scatter)
            unit.modules[0].set_gradient_divide_factor(1.0)
        self._penalties = Penalties([p for s in self._scatters for p in s.parameters])
        for root in sharding.roots:
            hook = root.register_forward_pre_hook(lambda module, _: self._ran.add(module))
            self._hooks.append(hook)

    def _copy_first(self) -> None:
        """Gives copies of shards, plain parameters and buffers the numbers of the first member."""
        module, mesh = self._model.module, self._sharding.mesh
        with torch.no_grad():
            for tensor in [*module.parameters(), *module.buffers()]:
                place: Any = tensor
                if not is_sharded(tensor):
                    for dim in reversed(range(mesh.ndim)):
                        self._broadcast(tensor.detach(), mesh.get_group(dim))
                elif mesh.ndim > 1 and place.device_mesh.ndim > 1:
                    self._broadcast(place.to_local(), mesh.get_group(0))

    def _broadcast(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        if not tensor.numel():
            return
        dense = tensor.contiguous()
        raw = torch.view_as_real(dense) if dense.is_complex() else dense
        source = dist.get_process_group_ranks(group)[0]
        self._model.wait(dist.broadcast(raw, source, group=group, async_op=True))
        if dense is not tensor:
            tensor.copy_(dense)

    def detach(self) -> None:
        """Lets FSDP average on its own again; a step that is not complete is forgotten."""
        self.abandon()
        self._penalties.release()
        for hook in self._hooks:
            hook.remove()
        for scatter in self._scatters:
            scatter.release()
            scatter.unit.modules[0].set_gradient_divide_factor(None)
        self._scatters, self._hooks = [], []
        self.group = None

    # Forward and backward ------------------------------------------------------------------

    def begin_step(self) -> None:
        """Forgets the step before. Gradients are left as they are."""
        self._now = _Step()
        self._micro = None
        self._ran.clear()
        self._plain.begin_step()
        self._penalties.begin_step()

    @property
    def shared(self) -> bool:
        """Whether other processes have a part of the step: from the first forward pass on."""
        return self.group is not None and self._now.forwards > 0

    def begin(self) -> None:
        """Prepares for the micro-batch at hand: each unit has not reduced anything of it."""
        if not self._now.forwards:
            # Only those whose order is still to be compared are looked at.
            unchecked = (p for s in self._scatters if not s.checked for p in s.parameters)
            self._now.fresh = all(p.grad is None for p in unchecked)
        self._micro = _Micro()
        for scatter in self._scatters:
            scatter.reductions = 0

    def forward(self, call: Callable[[nn.Module], Any], *, last: bool) -> Any:
        """Calls the module; its backward pass reduces, and over copies if it is the last one."""
        for scatter in self._scatters:
            module = scatter.unit.modules[0]
            # Whatever the loop has set: micro-batches are weighed as they are reduced.
            module.set_requires_gradient_sync(True, recurse=False)
            if self._reduces_copies(scatter) and not last:
                module.set_requires_all_reduce(False, recurse=False)
        assert self._micro is not None
        self._now.forwards += 1
        self._micro.forwards += 1
        output = call(self._model.module)
        self._micro.outputs.extend(t for t in tensors_in(output) if t.requires_grad)
        return output

    def end_micro_batch(self, *, trained: bool) -> bool:
        """Takes in a micro-batch that is over, once."""
        micro, step, now = self._micro, self._exchange.step, self._now
        if micro is None:
            return False
        if not trained:
            self._pass_zeros(micro)
        self._micro = None
        expected = any(scatter.parameters for scatter in self._scatters)
        if trained and expected and not any(scatter.reductions for scatter in self._scatters):
            raise RuntimeError(refusals.NOT_REDUCED)
        self._follow_copies()
        assert step.part is not None
        weight = step.part.weight if trained and not step.empty else 0.0
        divisor = self._divide_by()
        term = self._plain.take(weight / divisor, measure=step.measure)
        if term is not None:
            now.terms.append(term * (divisor * divisor / weight))
        if weight:
            now.num_measured += 1
        self._penalties.end_micro_batch()
        return True

    def _reduces_copies(self, scatter: UnitScatter) -> bool:
        """Whether FSDP itself reduces over copies."""
        return scatter.unit.replicates and self._copies is None

    def _follow_copies(self) -> None:
        """Refuses a step in which a sum of earlier micro-batches would never be reduced."""
        last = self._exchange.step.reduces
        for scatter in self._scatters:
            if not self._reduces_copies(scatter):
                continue
            if scatter.reductions:
                scatter.held_back = not last
            elif last and scatter.held_back:
                raise RuntimeError(refusals.unused_at_last(type(scatter.unit.modules[0]).__name__))

    def _pass_zeros(self, micro: _Micro) -> None:
        """Runs the backward pass of a micro-batch that the loop leaves out, with zeros."""
        if not micro.forwards:
            if self.group is None:
                return
            raise RuntimeError(refusals.NO_FORWARD)
        if any(scatter.reductions for scatter in self._scatters):
            raise RuntimeError(refusals.FAILED)
        micro.fills = True
        outputs = micro.outputs
        torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs])

    def finish(self, *, trained: bool) -> None:
        """Ends this process's part: unsharded gradients are reduced, and the ballot is sent."""
        step, now = self._exchange.step, self._now
        if not step.changes:
            self.end_micro_batch(trained=trained)
            self._exchange.sync.computed()
            self._plain.reduce(self._exchange, None if self._copies is None else self.group)
            if self._copies is not None:
                self._add_copies(self._copies)
        self._buffers.share(self.group)
        self._exchange.send(
            Share(
                divisor=0.0 if step.changes else self._divide_by(),
                num_gradients=_UNKNOWN if now.unclear else now.num_measured,
                seconds=2 * now.watch.seconds,
            )
        )
        now.over = True

    def _add_copies(self, groups: CopyGroups) -> None:
        """Adds up the gradients of all copies, and the terms of the noise.

        Raises:
            PeerLost: A copy was lost.
        """
        model, now = self._model, self._now
        shards = [p for scatter in self._scatters for p in scatter.parameters]
        add_over_copies(shards, groups.copies, model.wait)
        if self._exchange.step.measure:
            none = torch.zeros(model.norms.num_groups, dtype=torch.float64)
            now.summed = total(now.terms) if now.terms else none
            model.wait(dist.all_reduce(now.summed, group=self.group, async_op=True))

    def abandon(self) -> None:
        """Makes FSDP forget a step that was not completed."""
        for scatter in self._scatters:
            scatter.reset()
        if not self._now.over:
            for root in self._ran:
                root.reset_iter_state()
        self._ran.clear()

    # FSDP's reduce-scatter -----------------------------------------------------------------

    def _weigh(self, scatter: UnitScatter, flat: Tensor) -> None:
        """Turns a flat gradient into this micro-batch's share of the mean, in place."""
        step, now, micro = self._exchange.step, self._now, self._micro
        fills = micro is not None and micro.fills
        if step.part is None or not (step.trained or fills):
            raise RuntimeError(refusals.BARE)
        divisor = self._divide_by()
        weight = 0.0 if fills or step.empty else step.part.weight
        if not weight:
            flat.zero_()
            return
        flat.mul_(weight / divisor)
        if not step.measure:
            return
        with now.watch:
            norms = scatter.norms(flat)
        if norms is None or scatter.reductions > 1:
            now.unclear = True
            self._warn(scatter, partial=norms is None)
        else:
            now.terms.append(norms * (divisor * divisor / weight))

    def _warn(self, scatter: UnitScatter, *, partial: bool) -> None:
        if self._warned:
            return
        self._warned = True
        logger.warning(
            "noise is not measured in steps in which %s of %s: norms per parameter group are "
            "unknown there",
            "some parameters have no gradient" if partial else "there are several backward passes",
            type(scatter.unit.modules[0]).__name__,
        )

    def _divide_by(self) -> float:
        """The total weight, or a guess of it in steps in which nobody knows it beforehand."""
        now = self._now
        if now.divisor is None:
            known = self._exchange.step.total
            guess = self._weight_before if known is None else known
            if not guess and self._copies is None:
                # Not in a live job: this may be within the backward pass, where nothing may fail.
                guess = self._exchange.sum_of_weights()
            now.divisor = guess or 1.0
        return now.divisor

    # After the reduction -------------------------------------------------------------------

    def rescale(self, weight: float) -> Fetched | None:
        """Corrects the guess of the total weight, if it was one, and adds penalties."""
        now, model = self._now, self._model
        if now.fresh and not self._penalties:
            for scatter in self._scatters:
                scatter.check_order()
        self._weight_before = weight
        model.parameters.scale_grads(self._divide_by() / weight)
        if not self._exchange.step.measure:
            self._penalties.add()
            return None
        means = self._means()
        terms = total(now.terms) if now.terms and self._copies is None else torch.zeros_like(means)
        if self._penalties:
            self._penalties.add()
            # All gradients are moved by the penalty: their mean is, and their spread is not.
            moved = self._means()
            terms, means = terms + weight * (moved - means), moved
        if self._copies is None:
            return fetch_norms(terms.to(means.device), means, self.group, divided=True)
        norms = torch.cat([terms, means])
        dist.all_reduce(norms, group=self._copies.shards)
        assert now.summed is not None
        norms[: len(terms)] += now.summed
        return Fetched(norms)

    def _means(self) -> Tensor:
        """Squared norms per parameter group of the mean gradient, this process's part of them.

        In a live job, those of one copy of it: all copies have the same.
        """
        grads = self._model.parameters.grads_by_parameter()
        sharding = self._sharding if self._copies is None else self._sharding.within_copy
        shares = [1 / sharding.copies(parameter) for parameter in grads]
        local = self._model.parameters.local(grads.values())
        return self._model.norms.of(list(grads), local, shares=shares)
