"""`SimulatedJob`: a job in the cluster: when it ran on what, and what it tells the policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from resilin.cluster.job import JobSpec, JobStatus
from resilin.cluster.node import Allocation
from resilin.cluster.simulation.training import Offer, Training


class Stretch(NamedTuple):
    """A time during which a job had one allocation."""

    start: float
    """Time at which it began, in seconds."""
    end: float
    """Time at which it ended."""
    allocation: Allocation
    """Accelerators that the job had."""


class Costs(NamedTuple):
    """Seconds without progress."""

    start: float
    """After a start from nothing, or on other nodes only."""
    rescale: float
    """After any other change of a running job."""


class SimulatedJob:
    """A job from its submission to its end.

    Args:
        spec: The wishes of its user.
        training: Its work.
        costs: Seconds without progress after changes.
        total: Work that the job declares; None if its end is unknown.
    """

    def __init__(
        self, spec: JobSpec, training: Training, costs: Costs, total: float | None
    ) -> None:
        self.spec = spec
        self.allocation: Allocation | None = None
        self.finished: float | None = None
        self.started: float | None = None
        self.restarts = 0
        self.served = 0.0
        self.stretches: list[Stretch] = []
        self._training = training
        self._costs = costs
        self._total = total
        self._delay = 0.0
        self._changed: float | None = None
        self._waits_since: float | None = spec.submitted

    def advance(self, now: float, seconds: float) -> None:
        """Let time pass from `now` on, until the job finishes."""
        if self.allocation is None or self.finished is not None:
            return
        delay = min(self._delay, seconds)
        self._delay -= delay
        used, is_done = self._training.run(seconds - delay) if delay < seconds else (0, False)
        self.served += (delay + used) * self.allocation.size
        if is_done:
            self.finished = now + delay + used
            self._close(self.finished)

    def reallocate(self, now: float, allocation: Allocation | None) -> None:
        """Give the job this from now on. The same nodes and counts in another order stay as is."""
        before = self.allocation
        if _counts(before) == _counts(allocation):
            return
        self._close(now)
        self.allocation = allocation
        if allocation is None:
            self._waits_since = now
            return
        nodes = {name for name, _ in before.shares} if before else set()
        keeps = any(name in nodes for name, _ in allocation.shares)
        self._delay = self._costs.rescale if keeps else self._costs.start
        if self.started is None:
            self.started = now
        else:
            self.restarts += 1
        self._changed, self._waits_since = now, None
        self._training.place(allocation.kind, allocation.counts)

    def status(self, offers: Sequence[Offer], nodes: set[str]) -> JobStatus:
        """The job as a policy sees it.

        Args:
            offers: Sizes to report the speed of.
            nodes: Nodes that are up: what the job had on others is lost.
        """
        return JobStatus(
            spec=self.spec,
            allocation=_kept(self.allocation, nodes),
            speeds=self._training.speeds(offers),
            profiled=self._training.profiled,
            rescale_seconds=self._costs.rescale,
            done=self._training.done,
            total=self._total,
            restarts=self.restarts,
            served=self.served,
            waiting_since=self._waits_since,
            changed=self._changed,
        )

    def _close(self, now: float) -> None:
        """End the stretch that lasts, if there is one."""
        if self.allocation is not None and self._changed is not None:
            self.stretches.append(Stretch(self._changed, now, self.allocation))
        self.allocation = None


def _counts(allocation: Allocation | None) -> tuple[str, dict[str, int]] | None:
    return None if allocation is None else (allocation.kind, dict(allocation.shares))


def _kept(allocation: Allocation | None, nodes: set[str]) -> Allocation | None:
    """The part of an allocation on nodes that are up."""
    if allocation is None or all(name in nodes for name, _ in allocation.shares):
        return allocation
    shares = tuple(share for share in allocation.shares if share[0] in nodes)
    return Allocation(kind=allocation.kind, shares=shares) if shares else None
