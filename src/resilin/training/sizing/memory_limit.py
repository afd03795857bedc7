"""The largest micro-batch that fits into this replica's memory, learned from real steps.

There are no probes outside of the training, so neither its state nor its random numbers change.
Micro-batches start small and at most double; the memory of a larger size is extrapolated linearly
from that of two smaller ones. On accelerators the allocator's peak is read, which does not wait for
the device; on the CPU it is the bytes that the forward pass keeps for the backward pass, and the
user sets the budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from resilin.core import _validate
from resilin.engine import devices
from resilin.engine.base import Engine
from resilin.engine.lost import PeerLost

SHARE = 0.9
"""Fraction of a device's memory that micro-batches may take."""


class LocalLimit:
    """The largest micro-batch that this replica should run.

    Args:
        budget: Bytes that it may take; None means `SHARE` of the device's memory.
        start: Samples of the first micro-batch.

    Raises:
        ValueError: No budget, and no device that has one.
    """

    def __init__(self, budget: int | None, start: int) -> None:
        if budget is None:
            kind = devices.here()
            total = kind.total_memory()
            if total is None:
                raise ValueError(
                    f"max_local_bsz='auto' on a device ({kind.kind}) that does not say how much "
                    "memory it has needs memory_budget=, in bytes"
                )
            budget = int(SHARE * total)
        self.budget = _validate.whole("memory_budget", budget, at_least=1)
        """Bytes that a micro-batch may take, including everything else on an accelerator."""
        self._largest = max(1, start // 2)
        self._seen: dict[int, int] = {}
        self._ceiling: int | None = None

    @property
    def limit(self) -> int:
        """The largest micro-batch to run now: at most twice the largest so far, if that fits."""
        limit = 2 * self._largest
        fits = self._fits()
        if fits is not None:
            limit = min(limit, fits)
        if self._ceiling is not None:
            limit = min(limit, self._ceiling)
        return max(1, limit)

    def _fits(self) -> int | None:
        """By a straight line through the two largest sizes that were measured."""
        if not self._seen:
            return None
        sizes = sorted(self._seen)
        large = sizes[-1]
        if len(sizes) == 1:
            # Nothing is known of what does not grow: all of it may.
            return max(large * self.budget // max(self._seen[large], 1), 1)
        small = sizes[-2]
        slope = (self._seen[large] - self._seen[small]) / (large - small)
        if slope <= 0:
            return None
        return max(1, int(large + (self.budget - self._seen[large]) / slope))

    def measured(self, size: int, num_bytes: int) -> None:
        """Record the peak memory of a micro-batch of this size."""
        self._largest = max(self._largest, size)
        self._seen[size] = max(self._seen.get(size, 0), num_bytes)
        for small in sorted(self._seen)[:-3]:
            del self._seen[small]

    def failed(self, size: int) -> int:
        """A micro-batch of this size did not fit; returns the limit from now on."""
        self._ceiling = max(1, size // 2)
        self._seen = {seen: taken for seen, taken in self._seen.items() if seen <= self._ceiling}
        self._largest = min(self._largest, self._ceiling)
        return self.limit

    @contextmanager
    def measure(self, size: int) -> Iterator[None]:
        """Surrounds a forward pass with `size` samples, and learns from it.

        On accelerators the peak is that since the last forward pass began, so a backward pass
        counts for the micro-batch before: of the same size, but for the first of a larger one.
        """
        peak = devices.here().peak_memory()
        if peak is not None:
            if self._running is not None:
                self.measured(self._running, peak)
            self._running = size
            yield
            return
        taken: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            # By address, as several operations may keep one tensor. Not the whole storage, as a
            # micro-batch may be a view of a larger one.
            taken[tensor.data_ptr()] = max(taken.get(tensor.data_ptr(), 0), tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        self.measured(size, sum(taken.values()))

    _running: int | None = None


class SharedLimit:
    """The largest micro-batch that fits on every replica: the smallest of their limits.

    Replicas have to split a step alike, so none of them follows its own limit. Each votes whether
    its limit has changed; only after a step in which one did, all exchange them. A replica that
    begins to watch its memory after a failure, and not by `max_local_bsz="auto"`, is followed
    from the next step on.

    Args:
        engine: Who is in the job.
        local: What fits into the memory of this replica, if that is watched from the beginning.
    """

    def __init__(self, engine: Engine, local: LocalLimit | None) -> None:
        self._engine = engine
        self._local = local
        """Limit of the memory of this replica, if that is watched."""
        self.limit = self._told = self._own
        """The largest micro-batch; the same on all replicas. None if none of them has a limit."""
        self._exchanges = self._always = local is not None
        self._generation: int | None = None

    def measured(self, size: int) -> AbstractContextManager[None]:
        """Surrounds the forward pass of a micro-batch, to learn the memory that it takes.

        Args:
            size: Its samples; 0 for a filler batch, from which nothing is learned.
        """
        return nullcontext() if self._local is None or not size else self._local.measure(size)

    def failed(self, size: int, reference: int) -> int:
        """Takes up that a micro-batch did not fit, and watches the memory from now on.

        Args:
            size: Its samples.
            reference: The reference batch.

        Returns:
            The limit of this replica.
        """
        if self._local is None:
            self._local = LocalLimit(2**62, start=reference)
        return self._local.failed(size)

    @property
    def _own(self) -> int | None:
        return None if self._local is None else self._local.limit

    def agree(self) -> bool:
        """Called by all replicas before a step of training.

        Returns:
            Whether they agree; not if one was lost meanwhile.
        """
        if self._generation != self._engine.membership.generation:
            self._generation = self._engine.membership.generation
            # Replicas that have joined know no limit. All watch their memory, or the vote tells.
            self._told, self._exchanges = None, self._exchanges or self._always
        if not self._exchanges:
            return True
        self._exchanges, self._told = False, self._own
        try:
            limits = [limit for limit in self._engine.gather(self._told) if limit is not None]
        except PeerLost:
            return False  # the next generation exchanges again
        self.limit = min(limits, default=None)
        return True

    def vote(self) -> float:
        """Whether this replica's limit has changed, as a number."""
        return float(self._own != self._told)

    def counted(self, changes: float) -> None:
        """Takes up how many replicas have voted that theirs has."""
        self._exchanges = self._exchanges or changes > 0
