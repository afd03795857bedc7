"""The reducer of replicas that may come and go: its own buckets, and no DistributedDataParallel.

DDP waits for other replicas where nothing can make it give up. Here every wait is a call of
`model.wait`, which raises `PeerLost` once a replica is gone, and none is within the user's code:
hooks of the backward pass only begin reductions, and `finish` raises what a forward pass has lost.

Only the last micro-batch of a replica synchronises. Its buckets are reduced while the backward pass
runs, always in the same order. In each step, the collectives of a replica are these: the buffers of
replica 0, the sum of the weights if nobody can guess it, the buckets, the norms if the step is
measured, the ballot. The ballot commits the step, so nothing comes after it. A replica without a
backward pass makes the same ones, with zeros.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from resilin.compat.torch_names import first_bucket_bytes, ignored_by_ddp
from resilin.core.step import Share
from resilin.engine.devices import Fetched
from resilin.training.gradient.accumulation import Accumulation
from resilin.training.gradient.bucket_options import BucketOptions
from resilin.training.gradient.norms import total
from resilin.training.gradient.packs import Bucket, assign, kept_alike, send
from resilin.training.gradient.reducer import Model
from resilin.training.gradient.timing import Stopwatch


@dataclass(slots=True)
class _Reduction:
    """The reduction of one step."""

    missing: list[int]
    """Gradients that are still to come, by bucket."""
    there: bytearray
    """1 for each parameter whose gradient is there."""
    ready: bool = False
    """Whether a bucket has become complete since the last time that one was looked for."""
    divisor: float = 0.0
    """Total weight that all replicas divide by; 0 until the first bucket."""
    sent: list[dist.Work] = field(default_factory=list)
    """Reductions of the buckets so far, in their order."""
    over: bool = False
    """Whether all of them are complete."""
    lost: RuntimeError | None = None
    """An error from where it must not be raised."""
    before: list[Tensor] = field(default_factory=list)
    """Squared norms of this replica's share, by bucket."""
    norms: Tensor | None = None
    """Norms of all replicas, and after them those of the sum, divided by the divisor."""
    watch: Stopwatch = field(default_factory=Stopwatch)
    """Time spent on norms."""


class BucketReducer:
    """One module, for one set of replicas and one set of trained parameters."""

    group: dist.ProcessGroup | None = None

    def __init__(self, model: Model) -> None:
        self._model = model
        self._exchange = model.exchange
        self._options = BucketOptions.of(model)
        self._sum = Accumulation(model.parameters, model.exchange, views=True)
        ignored = ignored_by_ddp(model.module)
        names: dict[Tensor, str] = {p: name for name, p in model.module.named_parameters()}
        self._trained = [p for p in model.parameters.trained if names.get(p) not in ignored]
        self._half = any(p.dtype is torch.float16 for p in self._trained)
        # Autograd has a thread per device, and these would begin reductions in any order.
        self._overlaps = not self._half and len({p.device for p in self._trained}) == 1
        self._buckets: list[Bucket] = []
        self._bucket_of: list[int] = []
        self._weight_before = 0.0
        self._sends_buffers = self._has_buffers = False
        self._now = _Reduction([], bytearray())

    @classmethod
    def fits(cls, model: Model, group: dist.ProcessGroup | None) -> bool:
        """Whether there are other replicas, which may come and go."""
        return group is not None and model.live

    # Its replicas --------------------------------------------------------------------------

    def attach(self, group: dist.ProcessGroup | None, *, source: int | None) -> None:
        """Deals the parameters out to buckets, and hangs hooks on them."""
        assert group is not None
        module, options = self._model.module, self._options
        if source is not None and (source or options.init_sync):
            named: list[tuple[str, Tensor]] = list(module.named_parameters())
            if options.init_buffers:
                named += module.named_buffers()
            send(kept_alike(named, module), source, group, self._model.wait)
        self.group = group
        self._weight_before = 0.0
        self._buckets = assign(self._trained, first_bucket_bytes(), options.bucket_bytes)
        self._has_buffers = options.buffers and bool(kept_alike(module.named_buffers(), module))
        self._sends_buffers = self._has_buffers
        self._now = self._new()
        own, handles, self._bucket_of = weakref.ref(self), [], []
        for index, bucket in enumerate(self._buckets):
            for parameter in bucket.parameters:
                hook = _hook(own, len(self._bucket_of))
                handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
                self._bucket_of.append(index)
        self._unhook = weakref.finalize(self, _remove, handles)

    def detach(self) -> None:
        """Takes the hooks off, and lets go of the group and of all memory."""
        self._unhook()
        self.group = None
        self._buckets, self._bucket_of = [], []
        self._now = self._new()

    def _new(self) -> _Reduction:
        missing = [len(bucket.parameters) for bucket in self._buckets]
        return _Reduction(missing, bytearray(sum(missing)))

    # Forward and backward ------------------------------------------------------------------

    def begin_step(self) -> None:
        """Forgets the step before. Gradients are left as they are."""
        self._forget()
        self._sum.begin_step()

    def _forget(self) -> bool:
        """Forgets the reduction under way.

        Returns:
            Whether it was given up: then its memory is, too, as it may still be written to.
        """
        now, self._now = self._now, self._new()
        given_up = now.lost is not None or (bool(now.sent) and not now.over)
        if given_up:
            for bucket in self._buckets:
                bucket.drop()
        if given_up or now.over:
            self._sends_buffers = self._has_buffers
        return given_up

    def abandon(self) -> None:
        """Gives up a step that was not finished, with the reductions that are under way.

        Buffers that were sent for it count for the next one: other replicas may have them.
        """
        self._sum.abandon()
        if self._forget():
            self._model.parameters.clear_grads()

    @property
    def shared(self) -> bool:
        """Whether other replicas have a part of the step from this one already."""
        return bool(self._now.divisor)

    def begin(self) -> None:
        """Prepares `.grad` for the micro-batch at hand."""
        self._sum.begin()

    def forward(self, call: Callable[[nn.Module], Any], *, last: bool) -> Any:
        """Calls the module, before the first time in a step with the buffers of replica 0."""
        self._take_buffers()
        return call(self._model.module)

    def _take_buffers(self) -> None:
        module = self._model.module
        if not self._sends_buffers or self._now.lost is not None:
            return
        assert self.group is not None
        self._sends_buffers = False
        try:
            send(kept_alike(module.named_buffers(), module), 0, self.group, self._model.wait)
        except RuntimeError as error:
            # The user's code continues with the buffers that it has, and the step is given up.
            self._now.lost = error

    def end_micro_batch(self, *, trained: bool) -> bool:
        """Takes in a micro-batch that is not the last one."""
        return self._sum.end_micro_batch(trained=trained)

    def _arrive(self, position: int) -> None:
        """Called when the gradient of a parameter is there, within the backward pass."""
        step, now = self._exchange.step, self._now
        part = step.part
        if part is None or not part.last or not step.trained or step.result is not None:
            return
        # Before it counts itself: other hooks of its parameter are still to be called.
        if now.ready:
            self._begin_ready()
        bucket = self._bucket_of[position]
        if now.there[position]:
            if bucket < len(now.sent):
                raise RuntimeError(_TWICE)
            return
        now.there[position] = 1
        now.missing[bucket] -= 1
        now.ready = now.ready or not now.missing[bucket]

    def _begin_ready(self) -> None:
        """Begins to reduce buckets that are complete, without waiting for anything."""
        now = self._now
        if not self._overlaps or not self._weight_before or self._sends_buffers:
            return
        while len(now.sent) < len(self._buckets) and not now.missing[len(now.sent)]:
            if now.lost is not None:
                return
            now.divisor = now.divisor or self._choose_divisor(self._weight_before)
            self._begin_next()
        now.ready = False

    def _begin_next(self) -> None:
        """Begins to reduce the next bucket."""
        now, bucket = self._now, self._buckets[len(self._now.sent)]
        if self._exchange.step.empty:
            bucket.pack_nothing()
        else:
            bucket.pack(self._sum.unit / now.divisor, self._sum.share, self._sum.held)
        if self._exchange.step.measure:
            with now.watch:
                now.before.append(self._norms(bucket))
        try:
            now.sent.append(dist.all_reduce(bucket.flat, group=self.group, async_op=True))
        except RuntimeError as error:
            # A group that is broken may refuse it, and this may be within the backward pass.
            now.lost = self._model.refused(error)

    def _norms(self, bucket: Bucket) -> Tensor:
        return self._model.norms.of(bucket.parameters, bucket.views, bucket.gradients)

    def _choose_divisor(self, guess: float) -> float:
        """The total weight, or that of the step before where nobody knows it beforehand."""
        known = self._exchange.step.total
        return (guess if known is None else known) or 1.0

    # The whole step ------------------------------------------------------------------------

    def finish(self, *, trained: bool) -> None:
        """Ends this replica's part; without a backward pass, with what it has, or with zeros.

        Raises:
            PeerLost: A replica is gone; the step has to be given up.
        """
        step, now, wait = self._exchange.step, self._now, self._model.wait
        if not trained and not step.empty:
            self._sum.hold(0.0)
        self._take_buffers()
        self._raise_lost()
        if not now.divisor:
            # In half precision a bad guess could overflow.
            guess = 0.0 if self._half else self._weight_before
            now.divisor = self._choose_divisor(guess or self._exchange.sum_of_weights())
        while len(now.sent) < len(self._buckets):
            self._begin_next()
            self._raise_lost()
        self._exchange.sync.computed()
        if not step.measure:
            self._send_ballot()
        for work in now.sent:
            wait(work)
        if step.measure:
            self._measure()
            self._send_ballot()
        if not step.empty:
            for bucket in self._buckets:
                bucket.give()
        now.over = True

    def _raise_lost(self) -> None:
        if self._now.lost is not None:
            raise self._now.lost

    def _send_ballot(self) -> None:
        share = Share(
            divisor=self._now.divisor,
            num_gradients=int(self._exchange.step.own_weight > 0),
            seconds=self._now.watch.seconds,
        )
        self._exchange.send(share)

    def _measure(self) -> None:
        """Reduces the norms, and waits for them: after the ballot it would be too late."""
        now, own = self._now, self._exchange.step.own_weight
        with now.watch:
            none = torch.zeros(self._model.norms.num_groups, dtype=torch.float64)
            means = total([self._norms(bucket) for bucket in self._buckets] or [none])
            terms = total(now.before or [none]) * (now.divisor**2 / own if own else 0.0)
            if dist.get_rank(self.group) > 0:
                # Machines may add up the same squares in different orders: replica 0 counts.
                means = torch.zeros_like(means)
            now.norms = torch.cat([terms, means])
        self._model.wait(dist.all_reduce(now.norms, group=self.group, async_op=True))

    def rescale(self, weight: float) -> Fetched | None:
        """Corrects the guess of the total weight, if it was one."""
        now, self._weight_before = self._now, weight
        correction = now.divisor / weight
        self._model.parameters.scale_grads(correction)
        if now.norms is None:
            return None
        terms, means = now.norms.chunk(2)
        return Fetched(torch.cat([terms, means * correction**2]))


_TWICE = (
    "a parameter got a gradient twice in one backward pass, and the first one is with the other "
    "replicas already: it is used in several checkpointed functions; take use_reentrant=False for "
    "torch.utils.checkpoint"
)


def _hook(own: weakref.ref[BucketReducer], position: int) -> Callable[[Tensor], None]:
    """The hook of one parameter. It must not keep the reducer: parameters outlive it."""

    def arrive(_: Tensor) -> None:
        reducer = own()
        if reducer is not None:
            reducer._arrive(position)

    return arrive


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
