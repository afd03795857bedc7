"""The gradient of one optimizer step: accumulated, weighted and reduced exactly.

After the backward pass of the last micro-batch, `.grad` is the mean gradient of the global batch,
whatever the split: each micro-batch counts by its weight (samples, or tokens) over all replicas.
Losses stay the user's own. Within a replica, `.grad` is kept in units of the current micro-batch's
weight, so equal micro-batches cost nothing; DDP's communication hook turns it into this replica's
share and sums. Only the last micro-batch of a replica synchronises.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from resilin.core.noise import NoiseSample, from_sums
from resilin.engine import devices
from resilin.engine.base import Engine
from resilin.training.gradstats import GroupNorms
from resilin.training.timing import SyncTimer

_HEAD = 4
"""Numbers at the head of a ballot that concern the gradient: weight, members, and two times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One micro-batch of this replica, as far as its gradient is concerned."""

    weight: float
    """By how much it counts; 0 if it must not count at all."""
    last: bool
    """Whether this replica's part of the step ends with it."""
    total: float | None
    """Weight of all micro-batches of all replicas; None if only a reduction can tell."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """What is known of a step once its gradient is complete; the same on all replicas."""

    weight: float
    """Weight of all micro-batches of all replicas."""
    samples: tuple[NoiseSample, ...] | None
    """Noise per parameter group; None if the step was not measured or cannot tell."""
    cost: float
    """Time that measuring took, as a fraction of the step; a mean over the replicas."""


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
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._ddp_kwargs = {"gradient_as_bucket_view": True, **ddp_kwargs}
        self._ddp: DistributedDataParallel | None = None
        self._group: dist.ProcessGroup | None = None
        self._queued = False
        self._armed = False
        self._synced = False
        self._last_weight = 0.0
        place = self._parameters[0].device if self._parameters else torch.device("cpu")
        self._kind = devices.of(place)
        self.sync = SyncTimer(place)
        """How long steps wait for their reduction."""
        self.reset()
        self.join()

    def reset(self) -> None:
        """Forgets the step, committed or not. Gradients are left as they are."""
        self.part: Part | None = None
        self.result: Reduced | None = None
        self.measure = False
        self._backwards = 0
        self._unit = 0.0
        self._local = 0.0
        self._version: tuple[int, int] | None = None
        self._held: dict[Tensor, Tensor] | None = None
        self._mean: dict[Tensor, Tensor] = {}
        self._mean_weight = 0.0
        self._micro_terms: Tensor | None = None
        self._num_micro = 0
        self._local_norms: Tensor | None = None
        self._mean_norms: Tensor | None = None
        self._ballot: Tensor | None = None
        self._num_votes = 0
        self._alone_votes: tuple[float, ...] = ()
        self._ballot_work: dist.Work | None = None
        self._seconds = 0.0
        self._step_seconds = 0.0
        self._reducing = False
        self.sync.dropped()

    def drop(self) -> None:
        """Forgets the step, and what `.grad` holds of it."""
        if self._backwards or self._mean or self._held is not None or self._queued:
            self._clear_grads()
        # A backward pass that failed has left its end to come.
        self._queued = False
        self._disarm()
        self.reset()

    def _disarm(self) -> None:
        """Undoes what a forward pass has told DDP whose backward pass never ended.

        DDP would reduce in the next backward pass, whichever that is.
        """
        if self._ddp is None or not self._armed:
            return
        if not self._synced:
            # Also forgets which order of buckets it has agreed upon: nobody has, yet.
            self._ddp.reducer._reset_state()
            self._armed = False
        elif not self._ddp.find_unused_parameters:
            # Whatever a part of a backward pass has marked as ready. It stays armed: what it
            # reduces before the last micro-batch, `_reduce_bucket` leaves as it is.
            self._ddp.reducer.prepare_for_backward([])

    def join(self) -> None:
        """Wraps the module for the replicas that are present now, if they changed."""
        group = dist.group.WORLD if self._engine.num_replicas > 1 else None
        if group is self._group:
            return
        self._group = group
        self._last_weight = 0.0
        self._armed = self._synced = False
        self._ddp = None
        if group is not None:
            self._ddp = DistributedDataParallel(self._module, **self._ddp_kwargs)
            # A lambda: DDP compares a hook's annotations with classes, and ours are strings.
            self._ddp.register_comm_hook(None, lambda _, bucket: self._reduce_bucket(bucket))

    @property
    def shared(self) -> bool:
        """Whether other replicas have a part of the step from this one already."""
        return self.result is not None or self._reducing

    @property
    def pending(self) -> bool:
        """Whether `.grad` holds a part of a step that is not complete."""
        return self._backwards > 0

    # One micro-batch -----------------------------------------------------------------------

    def begin(self, part: Part, *, first: bool, measure: bool, step_seconds: float) -> None:
        """A new micro-batch comes.

        Args:
            part: What its gradient counts for.
            first: Whether a new step begins with it.
            measure: Whether to measure the step; all replicas must say the same.
            step_seconds: How long steps take on this replica.
        """
        if first:
            if self.pending:
                warnings.warn(
                    "a step was begun and left without optimizer.step(); its gradient is dropped, "
                    "and its samples do not count",
                    stacklevel=4,
                )
            self.drop()
            self.join()
            self.measure = measure
            self._step_seconds = step_seconds
        else:
            self.settle()
        self.part = part
        if part.weight == 0:
            self._held = self._take_grads()
        elif self._unit:
            self._scale_grads(self._unit / part.weight)
        if part.weight:
            self._unit = part.weight
            self._local += part.weight

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module so that its backward pass belongs to the current micro-batch."""
        assert self.part is not None
        if self._ddp is None:
            output = self._module(*args, **kwargs)
        else:
            self._ddp.require_backward_grad_sync = self.part.last
            output = self._ddp(*args, **kwargs)
            self._armed = self._armed or self.part.last
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._backward_begins)  # type: ignore[no-untyped-call]
        return output

    def _backward_begins(self, grad: Tensor) -> None:
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        self._queued = False
        assert self.part is not None
        self._backwards += 1
        if self.part.last:
            # DDP has queued its own end by now. Ours goes behind it, where gradients are reduced.
            torch.autograd.Variable._execution_engine.queue_callback(self._conclude_in_backward)
            return
        if self._held is not None:
            self._drop_unweighted()
        self._version = self._versions()

    def _conclude_in_backward(self) -> None:
        self.conclude()

    def settle(self) -> None:
        """Takes in the micro-batch that is over, before another one changes `.grad`.

        Raises:
            RuntimeError: Somebody changed the gradient in the middle of the accumulation.
        """
        if self._version is None:
            return
        if self._version != self._versions():
            raise RuntimeError(
                "the gradient was changed in the middle of an accumulation, before the other "
                "micro-batches of the step were added; call model.clip_grad_norm_() instead of "
                "torch.nn.utils.clip_grad_norm_()"
            )
        self._version = None
        self._kind.end_micro_batch()
        if self.measure and self._group is None and self.part is not None and self.part.weight:
            self._absorb(self._take_grads(), self.part.weight)
            self._unit = 0.0

    # The whole step ------------------------------------------------------------------------

    def conclude(self) -> Reduced:
        """Completes the gradient: from here on, `.grad` is the mean over the global batch.

        Raises:
            RuntimeError: A second backward pass through the last micro-batch.
        """
        assert self.part is not None
        if self.result is not None and self._backwards > 1 and self.part.last:
            raise RuntimeError(
                "a second backward pass came after the gradient of the step was complete; add up "
                "the losses of a micro-batch and call backward() once"
            )
        if self.result is None:
            self._backwards = 1
            self.result = self._conclude_alone() if self._group is None else self._conclude_all()
            self.sync.reduced()
        return self.result

    def _conclude_alone(self) -> Reduced:
        assert self.part is not None
        self._alone_votes = tuple(self._own_votes())
        if self._held is not None:
            self._drop_unweighted()
        if not self._local:
            raise RuntimeError("the weights of a step's micro-batches add up to 0")
        if not self._num_micro:
            self._scale_grads(self._unit / self._local)
            return Reduced(self._local, None, 0.0)
        if self.part.weight:
            self._absorb(self._take_grads(), self.part.weight)
        for parameter, grad in self._mean.items():
            parameter.grad = grad
        with self._timed():
            mean = self._norms.of(list(self._mean), list(self._mean.values()))
        assert self._micro_terms is not None
        terms, means = self._micro_terms.tolist(), mean.tolist()
        samples = self._noise(self._local, self._num_micro, terms, means)
        return Reduced(self._local, samples, self._seconds / max(self._step_seconds, 1e-9))

    def _conclude_all(self) -> Reduced:
        assert self.part is not None
        self._armed, self._synced = False, True
        for parameter, grad in (self._held or {}).items():
            if parameter.grad is None:
                # No replica used it, so DDP left it alone: as it was before it was put aside.
                parameter.grad = grad
        if self.part.total is not None and not self.measure:
            # Nothing in the ballot, if there is one, is needed for the gradient.
            return Reduced(self.part.total, None, 0.0)
        weight, num, seconds, step_seconds, *terms = self._counted()
        terms = terms[self._num_votes :]
        if not weight:
            raise RuntimeError("the weights of a step's micro-batches add up to 0")
        correction = self._assumed() / weight
        self._scale_grads(correction)
        self._last_weight = weight
        samples = None
        if self._mean_norms is not None:
            means = (self._mean_norms * correction**2).tolist()
            samples = self._noise(weight, round(num), terms, means)
        # The ballot left before the norms behind the reduction, which cost as much again. Times
        # come from the ballot too: what decides on later steps must be the same everywhere.
        return Reduced(weight, samples, 2 * seconds / max(step_seconds, 1e-9))

    def _counted(self) -> list[float]:
        """The ballot of the step, summed over all replicas."""
        assert self._ballot is not None
        assert self._ballot_work is not None
        self._ballot_work.wait()
        return self._ballot.tolist()

    def votes(self) -> tuple[float, ...]:
        """What all replicas together said in the ballot of this step, besides the gradient.

        Empty if there was none: no backward pass, or nobody has anything to say.
        """
        if self._group is None:
            return self._alone_votes
        if self._ballot is None:
            return ()
        return tuple(self._counted()[_HEAD : _HEAD + self._num_votes])

    def _noise(
        self, weight: float, num: int, terms: Sequence[float], means: Sequence[float]
    ) -> tuple[NoiseSample, ...] | None:
        if num < 2:
            return None
        return tuple(
            from_sums(
                batch_size=weight,
                num_micro_batches=num,
                weighted_sqr_norm=term / weight,
                mean_sqr_norm=mean,
            )
            for term, mean in zip(terms, means, strict=True)
        )

    def _assumed(self) -> float:
        """The total weight that replicas divide by before they know it; the same on all.

        The last step's is the best guess: while batches stay as they are, nothing needs correction.
        """
        assert self.part is not None
        if self.part.total is not None:
            return self.part.total
        return self._last_weight or float(self._engine.num_replicas)

    # DDP's hook ----------------------------------------------------------------------------

    def _reduce_bucket(self, bucket: Any) -> torch.futures.Future[Tensor]:
        assert self.part is not None
        if not self.part.last:
            # Armed by a forward pass that was given up: not yet, and never in part.
            self._armed = False
            as_it_is: torch.futures.Future[Tensor] = torch.futures.Future()
            as_it_is.set_result(bucket.buffer())
            return as_it_is
        self._reducing = True
        buffer, measure = bucket.buffer(), self.measure
        parameters: Sequence[Tensor] = bucket.parameters() if measure else ()
        grads: Sequence[Tensor] = bucket.gradients() if measure else ()
        if self._held is not None:
            # Explicit zeros: a gradient that must not count may be infinite, and 0 * inf is not 0.
            buffer.zero_()
            for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
                if parameter in self._held:
                    grad.copy_(self._held[parameter])
        buffer.mul_(self._unit / self._assumed())
        if measure:
            with self._timed():
                self._local_norms = _plus(
                    self._local_norms, self._norms.of(parameters, grads, buffer)
                )
        future = dist.all_reduce(buffer, group=self._group, async_op=True).get_future()
        if bucket.is_last():
            self.sync.computed()
            votes = self._own_votes()
            if measure or votes or self.part.total is None:
                self._send_ballot(buffer, votes)

        def reduced(done: torch.futures.Future[list[Tensor]]) -> Tensor:
            tensor = done.value()[0]
            if measure:
                with self._timed():
                    self._mean_norms = _plus(
                        self._mean_norms, self._norms.of(parameters, grads, tensor)
                    )
            return tensor

        result: torch.futures.Future[Tensor] = future.then(reduced)
        return result

    def _send_ballot(self, like: Tensor, votes: Sequence[float]) -> None:
        """All that replicas must agree on, in one reduction behind that of the last bucket."""
        self._num_votes = len(votes)
        head = torch.tensor(
            [self._local, float(self._local > 0), self._seconds, self._step_seconds, *votes],
            dtype=torch.float64,
            device=like.device,
        )
        terms = self._local_norms
        if terms is None or not self._local:
            terms = torch.zeros(self._norms.num_groups, dtype=torch.float64, device=like.device)
        else:
            terms = terms * (self._assumed() ** 2 / self._local)
        self._ballot = torch.cat([head, terms])
        self._ballot_work = dist.all_reduce(self._ballot, group=self._group, async_op=True)

    # Gradients -----------------------------------------------------------------------------

    def _grads(self) -> dict[Tensor, Tensor]:
        return {p: p.grad for p in self._parameters if p.grad is not None}

    def _scale_grads(self, factor: float) -> None:
        grads = self._grads()
        if factor != 1 and grads:
            torch._foreach_mul_(list(grads.values()), factor)

    def _take_grads(self) -> dict[Tensor, Tensor]:
        grads = self._grads()
        self._clear_grads()
        return grads

    def _clear_grads(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _drop_unweighted(self) -> None:
        assert self._held is not None
        self._clear_grads()
        for parameter, grad in self._held.items():
            parameter.grad = grad
        self._held = None

    def _absorb(self, grads: dict[Tensor, Tensor], weight: float) -> None:
        """Measures one micro-gradient and adds it to the weighted running mean."""
        with self._timed():
            term = weight * self._norms.of(list(grads), list(grads.values()))
            self._micro_terms = _plus(self._micro_terms, term)
        self._num_micro += 1
        self._mean_weight += weight
        share = weight / self._mean_weight
        both = [p for p in grads if p in self._mean]
        if both:
            torch._foreach_lerp_([self._mean[p] for p in both], [grads[p] for p in both], share)
        for parameter, mean in self._mean.items():
            if parameter not in grads:
                mean.mul_(1 - share)
        for parameter, grad in grads.items():
            if parameter not in self._mean:
                self._mean[parameter] = grad if share == 1 else grad.mul_(share)

    def _versions(self) -> tuple[int, int]:
        # Every change in place of a tensor raises its version; a gradient may also be gone.
        grads = self._grads()
        return len(grads), sum(grad._version for grad in grads.values())

    def _timed(self) -> _Timer:
        return _Timer(self)


class _Timer:
    """Adds the time spent in it to what measuring has cost."""

    def __init__(self, step: StepGradient) -> None:
        self._step = step

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._step._seconds += time.perf_counter() - self._start


def _plus(total: Tensor | None, term: Tensor) -> Tensor:
    return term if total is None else total + term


def tensors_in(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Tensors among the arguments of a forward pass."""
    return (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
