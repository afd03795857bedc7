"""The reducer of several replicas, through DistributedDataParallel and its communication hook.

Only the last micro-batch of a replica synchronises. Its buckets are reduced while the backward pass
runs, and one ballot follows the last of them; there, all reductions are waited for. DDP gets each
bucket back at once, so nothing is called when a reduction ends. A replica that has no backward pass
to run takes part in the same collectives with zeros, so that nobody waits for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from resilin.compat.torch_names import (
    check_ddp,
    copies_of,
    finds_unused,
    prepare_backward,
    reset_reducer,
    set_reduces,
    wrap_outputs,
)
from resilin.core.step import Share
from resilin.engine.devices import Fetched
from resilin.training.gradient import refusals
from resilin.training.gradient.accumulation import Accumulation
from resilin.training.gradient.norms import total
from resilin.training.gradient.reducer import Model, copy_from, fetch_norms
from resilin.training.gradient.timing import Stopwatch


class _Sent(NamedTuple):
    """A bucket that is being reduced."""

    work: dist.Work
    buffer: Tensor
    parameters: Sequence[Tensor]
    """Parameters of its gradients; empty if its norm needs no such distinction."""
    grads: Sequence[Tensor]
    """Its gradients, likewise."""


@dataclass(slots=True)
class _Reduction:
    """The reduction of one step."""

    begun: bool = False
    """Whether a bucket was sent."""
    complete: bool = False
    """Whether the last one was, and the ballot."""
    divisor: float = 1.0
    """Total weight that all replicas divide by."""
    sent: list[_Sent] = field(default_factory=list)
    """Buckets in the order in which they were sent."""
    before: list[Tensor] = field(default_factory=list)
    """Squared norms of this replica's share, by bucket."""
    after: list[Tensor] = field(default_factory=list)
    """Squared norms of the sum over all replicas, by bucket."""
    watch: Stopwatch = field(default_factory=Stopwatch)
    """Time spent on norms."""


class DdpReducer:
    """One module in DDP, for one set of replicas and one set of trained parameters."""

    group: dist.ProcessGroup | None = None

    def __init__(self, model: Model) -> None:
        self._model = model
        self._exchange = model.exchange
        self._sum = Accumulation(model.parameters, model.exchange, views=True)
        self._trained = list(model.parameters.trained)
        self._half = any(p.dtype is torch.float16 for p in self._trained)
        self._armed = self._synced = False
        self._weight_before = 0.0

    @classmethod
    def fits(cls, model: Model, group: dist.ProcessGroup | None) -> bool:
        """Whether there are other replicas."""
        return group is not None

    # Its replicas --------------------------------------------------------------------------

    def attach(self, group: dist.ProcessGroup | None, *, source: int | None) -> None:
        """Wraps the module. DDP itself could only copy from replica 0."""
        assert group is not None
        if source:
            copy_from(source, self._model, group)
        self.group = group
        arguments = {
            "gradient_as_bucket_view": True,
            "process_group": group,
            "init_sync": source == 0,
            **self._model.options,
        }
        with copies_of(self._model.module):
            self._ddp = DistributedDataParallel(self._model.module, **arguments)
        check_ddp(self._ddp)
        # DDP keeps its hook where no garbage collector looks, so the hook must not keep DDP. It has
        # no annotations: DDP compares them with classes, and ours are strings.
        own = weakref.ref(self)

        def reduce_bucket(_, bucket):  # type: ignore[no-untyped-def]
            reducer = own()
            assert reducer is not None
            return reducer._reduce_bucket(bucket)

        self._ddp.register_comm_hook(None, reduce_bucket)

    def detach(self) -> None:
        """Gives DDP up: its hooks on the parameters go with it."""
        del self._ddp
        self.group = None

    # Forward and backward ------------------------------------------------------------------

    def begin_step(self) -> None:
        """Forgets the step before. Gradients are left as they are."""
        self._sum.begin_step()
        self._now = _Reduction()

    @property
    def shared(self) -> bool:
        """Whether other replicas have a part of the step from this one already."""
        return self._now.begun

    def begin(self) -> None:
        """Prepares `.grad` for the micro-batch at hand."""
        self._sum.begin()

    def forward(self, call: Callable[[nn.Module], Any], *, last: bool) -> Any:
        """Calls the module in DDP; the backward pass of the last micro-batch reduces."""
        set_reduces(self._ddp, last)
        output = call(self._ddp)
        self._armed = self._armed or last
        return output

    def end_micro_batch(self, *, trained: bool) -> bool:
        """Takes in a micro-batch that is not the last one."""
        return self._sum.end_micro_batch(trained=trained)

    def finish(self, *, trained: bool) -> None:
        """Ends this replica's part; without a backward pass of the user's, with one of its own."""
        if not trained:
            used: Sequence[Tensor] = ()
            if not self._exchange.step.empty:
                self._sum.hold(0.0)
                used = list(self._sum.held or ())
            self._take_part(used)
        if not self._now.complete:
            parameters = self._model.parameters
            without = [parameters.name(p) for p in self._trained if p.grad is None]
            missing = f"{parameters.describe(without)} has none" if without else "none in this pass"
            raise RuntimeError(refusals.not_reduced_by_ddp(missing))
        # DDP leaves what no replica used alone: as it was before it was put aside.
        self._sum.restore_unused()
        self._armed, self._synced = False, True

    def _take_part(self, used: Sequence[Tensor]) -> None:
        """Takes part in the reduction of the step without a backward pass of the user's.

        The collectives are those of a forward and a backward pass of the others.

        Args:
            used: Parameters that have a gradient from earlier micro-batches of the step.
        """
        frozen = {p: p.grad for p in self._trained if not p.requires_grad}
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            with torch.enable_grad():
                self._run_without_output(used)
        finally:
            for parameter, grad in frozen.items():
                parameter.requires_grad_(False)
                parameter.grad = grad

    def _run_without_output(self, used: Sequence[Tensor]) -> None:
        wanted = self._trained
        if finds_unused(self._ddp):
            # One starts the reduction. DDP knows which others were used before, and the rest must
            # stay unused.
            wanted = [*used, *wanted][:1]
        roots: Sequence[Tensor] = [_nothing(parameter) for parameter in wanted]
        ddp = self._ddp
        if self._armed:
            # A forward pass came, and its backward pass will not.
            prepare_backward(ddp, roots if finds_unused(ddp) else [])
        else:
            set_reduces(ddp, True)
            roots = wrap_outputs(ddp, roots)
            self._armed = True
        torch.autograd.backward(list(roots))

    def abandon(self) -> None:
        """Undoes the effect of a forward pass on DDP whose backward pass never ended.

        DDP would reduce in the next backward pass, whichever that is.
        """
        self._sum.abandon()
        if not self._armed:
            return
        if not self._synced:
            # Also forgets which order of buckets it has agreed upon: nobody has, yet.
            reset_reducer(self._ddp)
            self._armed = False
        elif not finds_unused(self._ddp):
            # Whatever a part of a backward pass has marked as ready. It stays armed: what it
            # reduces before the last micro-batch, the hook leaves as it is.
            prepare_backward(self._ddp, [])

    # DDP's hook ----------------------------------------------------------------------------

    def _reduce_bucket(self, bucket: Any) -> torch.futures.Future[Tensor]:
        buffer: Tensor = bucket.buffer()
        if self._exchange.step.reduces:
            self._send_bucket(bucket, buffer)
            if bucket.is_last():
                self._now.complete = True
                self._send_ballot()
                self._await_buckets()
        else:
            # Armed by a forward pass that was given up: not yet, and never in part.
            self._armed = False
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future

    def _send_bucket(self, bucket: Any, buffer: Tensor) -> None:
        now = self._now
        if not now.begun:
            now.begun = True
            now.divisor = self._choose_divisor()
        self._weigh(bucket, buffer)
        parameters: Sequence[Tensor] = ()
        grads: Sequence[Tensor] = ()
        if self._exchange.step.measure:
            norms = self._model.norms
            with now.watch:
                if not norms.one_group:
                    parameters, grads = bucket.parameters(), bucket.gradients()
                now.before.append(norms.of(parameters, grads, buffer))
        work = dist.all_reduce(buffer, group=self.group, async_op=True)
        now.sent.append(_Sent(work, buffer, parameters, grads))

    def _send_ballot(self) -> None:
        now = self._now
        self._exchange.sync.computed()
        share = Share(
            divisor=now.divisor,
            num_gradients=int(self._exchange.step.own_weight > 0),
            # The norms after the reduction are still to come, and cost as much again.
            seconds=2 * now.watch.seconds,
        )
        self._exchange.send(share)

    def _await_buckets(self) -> None:
        """Waits for all reductions: the host if it is the one that reduces, else the device."""
        now, norms = self._now, self._model.norms
        for sent in now.sent:
            sent.work.wait()
            if self._exchange.step.measure:
                now.after.append(norms.of(sent.parameters, sent.grads, sent.buffer))
        # DDP may replace the buckets before the next step.
        now.sent.clear()

    def _choose_divisor(self) -> float:
        """The total weight, or a guess of it in steps in which nobody knows it beforehand.

        That of the step before is the best guess: while batches stay as they are, nothing needs a
        correction. In half precision a bad guess could overflow, so the weights are added up.
        """
        guess = self._weight_before
        if self._half or not guess:
            guess = self._exchange.sum_of_weights()
        total = self._exchange.step.total
        return (guess if total is None else total) or 1.0

    def _weigh(self, bucket: Any, buffer: Tensor) -> None:
        """Turns a bucket into this replica's share of the mean gradient, in place."""
        held = self._sum.held
        if self._exchange.step.empty:
            buffer.zero_()
            return
        if held is not None:
            if self._sum.share:
                buffer.mul_(self._sum.share)
            else:
                # Explicit zeros: a gradient that must not count may be infinite.
                buffer.zero_()
            for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
                if parameter in held:
                    grad.add_(held[parameter])
        buffer.mul_(self._sum.unit / self._now.divisor)

    # After the reduction -------------------------------------------------------------------

    def rescale(self, weight: float) -> Fetched | None:
        """Corrects the guess of the total weight, if it was one."""
        now, own = self._now, self._exchange.step.own_weight
        self._weight_before = weight
        correction = now.divisor / weight
        self._model.parameters.scale_grads(correction)
        if not self._exchange.step.measure:
            return None
        terms = total(now.before) * (now.divisor * now.divisor / own if own else 0.0)
        means = total(now.after) * (correction * correction)
        return fetch_norms(terms, means, self.group)


def _nothing(parameter: Tensor) -> Tensor:
    """A number whose gradient is 0 for this parameter."""
    real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
    return real.reshape(-1)[:1].sum() * 0
