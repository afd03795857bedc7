"""The reduction over replicas, through DistributedDataParallel and its communication hook.

Only the last micro-batch of a replica synchronises. Its buckets are reduced while the backward pass
runs, and one ballot follows the last of them. A replica that has no backward pass to run takes part
in the same collectives with zeros, so that nobody waits for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from resilin.compat.torch_names import (
    check_ddp,
    finds_unused,
    prepare_backward,
    reset_reducer,
    set_reduces,
    wrap_outputs,
)
from resilin.training.gradient.norms import GroupNorms
from resilin.training.gradient.parameters import Parameters


class Source(Protocol):
    """The step, as far as the reduction asks for it."""

    @property
    def measure(self) -> bool:
        """Whether the step is measured."""
        ...

    def reduces(self) -> bool:
        """Whether a reduction is due: the micro-batch under way is the last one."""
        ...

    def local_weight(self) -> float:
        """Weight of this replica's micro-batches."""
        ...

    def weigh(self, bucket: Any) -> None:
        """Turns a bucket into this replica's share of the mean gradient, in place."""
        ...

    def make_ballot(self, norms: Tensor | None, like: Tensor) -> Tensor:
        """Report of this replica, given the squared norms of its share."""
        ...

    def timed(self) -> Any:
        """A context whose duration counts as time spent on measuring."""
        ...

    def computed(self) -> None:
        """The replica has computed all of its gradient."""
        ...


class DdpReducer:
    """One module in DDP, for one set of replicas and one set of trained parameters."""

    def __init__(
        self,
        module: nn.Module,
        parameters: Parameters,
        norms: GroupNorms,
        ddp_kwargs: dict[str, Any],
        source: Source,
    ) -> None:
        self.group = dist.group.WORLD
        """The replicas."""
        self._norms = norms
        self._source = source
        self._parameters = list(parameters.trained)
        self._ddp = DistributedDataParallel(module, **ddp_kwargs)
        check_ddp(self._ddp)
        # DDP keeps its hook where no garbage collector looks, so the hook must not keep DDP. It has
        # no annotations: DDP compares them with classes, and ours are strings.
        own = weakref.ref(self)

        def reduce_bucket(_, bucket):  # type: ignore[no-untyped-def]
            reducer = own()
            assert reducer is not None
            return reducer._reduce_bucket(bucket)

        self._ddp.register_comm_hook(None, reduce_bucket)
        self._half = any(p.dtype is torch.float16 for p in self._parameters)
        self._armed = self._synced = False
        self._weight_before = 0.0
        self.assumed: float | None = None
        """Total weight that replicas divide by when nobody knows it beforehand."""
        self.reset()

    def reset(self) -> None:
        """Forgets the step."""
        self.reducing = False
        self._before: dict[int, Tensor] = {}
        self._after: dict[int, Tensor] = {}
        self._ballot: Tensor | None = None
        self._ballot_work: dist.Work | None = None
        self.assumed = None

    @property
    def ballot(self) -> Tensor | None:
        """The ballot of this step, if it was sent."""
        return self._ballot

    # Forward and backward ------------------------------------------------------------------

    def forward(self, last: bool, *args: Any, **kwargs: Any) -> Any:
        """Calls the module; `last` says whether its backward pass reduces."""
        set_reduces(self._ddp, last)
        output = self._ddp(*args, **kwargs)
        self._armed = self._armed or last
        return output

    def take_part(self, used: Sequence[Tensor] = ()) -> None:
        """Takes part in the reduction of the step without a backward pass of the user's.

        The collectives are those of a forward and a backward pass of the others.

        Args:
            used: Parameters that have a gradient from earlier micro-batches of the step.
        """
        frozen = {p: p.grad for p in self._parameters if not p.requires_grad}
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
        wanted = self._parameters
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

    def disarm(self) -> None:
        """Undoes the effect of a forward pass on DDP whose backward pass never ended.

        DDP would reduce in the next backward pass, whichever that is.
        """
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
        source, buffer = self._source, bucket.buffer()
        if not source.reduces():
            # Armed by a forward pass that was given up: not yet, and never in part.
            self._armed = False
            as_it_is: torch.futures.Future[Tensor] = torch.futures.Future()
            as_it_is.set_result(buffer)
            return as_it_is
        if not self.reducing:
            self.reducing = True
            self._assume(buffer)
        measure, index = source.measure, bucket.index()
        source.weigh(bucket)
        parameters: Sequence[Tensor] = bucket.parameters() if measure else ()
        grads: Sequence[Tensor] = bucket.gradients() if measure else ()
        if measure:
            with source.timed():
                self._before[index] = self._norms.of(parameters, grads, buffer)
        future = dist.all_reduce(buffer, group=self.group, async_op=True).get_future()
        if bucket.is_last():
            source.computed()
            own = _in_order(self._before) if measure else None
            self._ballot = source.make_ballot(own, buffer)
            self._ballot_work = dist.all_reduce(self._ballot, group=self.group, async_op=True)

        def reduced(done: torch.futures.Future[list[Tensor]]) -> Tensor:
            tensor = done.value()[0]
            if measure:
                # In a thread of the backend, one of several: each bucket has a place of its own.
                self._after[index] = self._norms.of(parameters, grads, tensor)
            return tensor

        result: torch.futures.Future[Tensor] = future.then(reduced)
        return result

    def _assume(self, like: Tensor) -> None:
        """Chooses a total weight for steps in which nobody knows it beforehand.

        That of the step before is the best guess: while batches stay as they are, nothing needs a
        correction. In half precision a bad guess could overflow, so the weights are added up.
        """
        self.assumed = self._weight_before
        if self._half or not self._weight_before:
            weight = torch.tensor(
                [self._source.local_weight()], dtype=torch.float64, device=like.device
            )
            dist.all_reduce(weight, group=self.group)
            self.assumed = weight.item() or 1.0

    # After the reduction -------------------------------------------------------------------

    def counted(self) -> list[float]:
        """The ballot of the step, summed over all replicas."""
        assert self._ballot is not None
        assert self._ballot_work is not None
        self._ballot_work.wait()
        self._armed, self._synced = False, True
        return self._ballot.tolist()

    def completed(self, weight: float) -> None:
        """Remembers the total weight of a step."""
        self._weight_before = weight

    def mean_norms(self) -> Tensor:
        """Squared norms of the reduced gradient per group: those of replica 0, on all replicas.

        Replicas have the same gradient, but machines may add up its squares in different orders.
        """
        norms = _in_order(self._after)
        dist.broadcast(norms, 0, group=self.group)
        return norms


def _in_order(norms: dict[int, Tensor]) -> Tensor:
    """The sum over buckets, always in the same order."""
    total = norms[min(norms)].clone()
    for index in sorted(norms)[1:]:
        total += norms[index]
    return total


def _nothing(parameter: Tensor) -> Tensor:
    """A number whose gradient is 0 for this parameter."""
    real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
    return real.reshape(-1)[:1].sum() * 0
