"""`Training`: what a simulated job does with its accelerators.

`RecordedTraining` follows the records of an `Application`: true step times and gradient statistics
come from them, while a policy sees what the job itself would know, a model fitted to the steps that
it has run. `GivenTraining` has the speed at each size written down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple, Protocol

import numpy as np

from resilin.cluster.job import Speeds
from resilin.cluster.simulation.applications import MOST_REPLICAS, Application
from resilin.core.fit import StepTime, fit
from resilin.core.goodput import Candidates
from resilin.core.noise import Noise
from resilin.core.plan import BatchBounds
from resilin.core.throughput import Floats, ThroughputModel

HYSTERESIS = 0.05
"""Gain of goodput that a job changes its batch for, as `core.tuner` has it."""
_EDGE = 1e-8
"""Tolerance of divisions that are rounded up."""


class Offer(NamedTuple):
    """Sizes that a policy is told the speed of, for one kind of accelerator."""

    kind: str
    """Kind of accelerator."""
    sizes: tuple[int, ...]
    """Numbers of replicas, ascending."""
    hosts: tuple[int, ...]
    """Nodes of each: as few as possible."""

    @classmethod
    def of(cls, kind: str, sizes: Sequence[int], per_node: int) -> Offer:
        """These sizes, on nodes with so many accelerators."""
        return cls(kind, tuple(sizes), tuple(-(-size // per_node) for size in sizes))


class Training(Protocol):
    """The work of one job."""

    @property
    def profiled(self) -> int:
        """Largest size at which it has run."""

    @property
    def done(self) -> float:
        """Work done, in the unit of its goodput times seconds."""

    @property
    def total(self) -> float:
        """Work of the whole job in that unit."""

    def place(self, kind: str, counts: tuple[int, ...]) -> None:
        """Run on this many accelerators of each node from now on."""

    def run(self, seconds: float) -> tuple[float, bool]:
        """Train for at most this long; the seconds that it took, and whether it has finished."""

    def speeds(self, offers: Sequence[Offer]) -> tuple[Speeds, ...]:
        """The speeds that it reports to a policy; empty before it has measured any."""


class RecordedTraining:
    """The training of a recorded application.

    Args:
        application: Its records.
        batch_size: A global batch that never changes; None lets it follow goodput.
        oracle: Whether the policy sees true steps per second, and work in steps, in place of the
            goodput of a fitted model. It needs `batch_size`.
    """

    def __init__(
        self, application: Application, *, batch_size: int | None, oracle: bool = False
    ) -> None:
        assert batch_size is not None or not oracle
        self._application = application
        self._batch_size = batch_size
        self._oracle = oracle
        self._counts: tuple[int, ...] = ()
        self._plan = (0, 0, 0)  # global batch, micro-batch, micro-batches of a step
        self._epoch = 0
        self._progress = 0.0
        self._noise: Noise | None = None
        self._profile: dict[tuple[int, int, int], StepTime] = {}
        self._fitted = _Fitted()
        self._choice: dict[int, int] = {}  # index of the batch, by the replicas it is for

    @property
    def profiled(self) -> int:
        """Largest size at which it has run."""
        return max((replicas for _, replicas, _ in self._profile), default=0)

    @property
    def done(self) -> float:
        """Reference samples, or for an oracle steps, that were trained on."""
        if not self._oracle:
            return self._progress * self._application.reference
        assert self._batch_size is not None
        # Whole epochs, as the steps to go were counted in the published comparison.
        if self._epoch >= self._application.max_epochs - 1:
            return self.total - 1
        return self._application.iteration(self._batch_size, self._epoch)

    @property
    def total(self) -> float:
        """Reference samples, or for an oracle steps, of the whole job."""
        app = self._application
        if not self._oracle:
            return app.progress(app.max_epochs) * app.reference
        assert self._batch_size is not None
        return app.iteration(self._batch_size, app.max_epochs - 1)

    def place(self, kind: str, counts: tuple[int, ...]) -> None:
        """Run on this many accelerators of each node from now on."""
        del kind  # the records are of one kind
        self._counts = counts
        self._replan()

    def run(self, seconds: float) -> tuple[float, bool]:
        """Train for at most this long; the seconds that it took, and whether it has finished."""
        app, left = self._application, seconds
        while left > 0:
            batch, local, steps = self._plan
            step, sync = app.step_seconds(self._counts, local)
            sqr_norm, variance = app.statistics(batch, self._epoch)
            self._observe(local, step, sync, sqr_norm, variance)
            gain = (variance + sqr_norm) / (variance / (batch / app.reference) + sqr_norm)
            rate = gain / (step + (step - sync) * (steps - 1))
            end = app.progress(self._epoch + 1)
            if self._progress + rate * left < end:
                self._progress += rate * left
                left = 0
            else:
                # The end of an epoch is rounded to a second, as in the published simulation.
                left -= round((end - self._progress) / rate)
                self._progress = end
                self._epoch += 1
                if self._epoch == app.max_epochs:
                    return seconds - left, True
            self._replan()
        return seconds, False

    def speeds(self, offers: Sequence[Offer]) -> tuple[Speeds, ...]:
        """The speeds that it reports to a policy; empty before it has measured any."""
        if self._oracle:
            assert self._batch_size is not None
            return tuple(_true_speeds(self._application, self._batch_size, each) for each in offers)
        if not self._profile or not offers:
            return ()
        fitted, found = self._fit(), []
        for offer in offers:
            candidates = _candidates(self._application, self._batch_size, offer.sizes)
            values = fitted.goodput(candidates, self._noise, offer.hosts).max(axis=1)
            found.append(Speeds(kind=offer.kind, sizes=offer.sizes, goodput=tuple(values.tolist())))
        return tuple(found)

    def _observe(
        self, local_bsz: int, step: float, sync: float, sqr_norm: float, variance: float
    ) -> None:
        """Take note of a step and of the gradient, as the job's own profile does."""
        key = len(self._counts), sum(self._counts), local_bsz
        if key not in self._profile:
            self._profile[key] = StepTime(
                hosts=key[0],
                replicas=key[1],
                local_bsz=local_bsz,
                compute_seconds=step - sync,
                sync_seconds=sync,
            )
        if self._batch_size is None or not self._oracle:
            self._noise = Noise(sqr_norm, variance * self._application.reference)

    def _fit(self) -> _Fitted:
        if self._fitted.points != len(self._profile):
            self._fitted = _Fitted(fit(self._profile.values()).model, len(self._profile))
        return self._fitted

    def _replan(self) -> None:
        """Choose the batch for the next stretch."""
        app, replicas = self._application, sum(self._counts)
        if self._batch_size is not None:
            self._plan = _split(app, self._batch_size, replicas)
        elif not self._profile:
            lower, _ = app.local_bsz_bounds
            self._plan = _split(app, max(app.reference, lower * replicas), replicas)
        else:
            candidates = _candidates(app, None, (replicas,))
            values = self._fit().goodput(candidates, self._noise, (len(self._counts),))[0]
            best = int(values.argmax())
            last = self._choice.get(replicas, best)
            if values[best] < (1 + HYSTERESIS) * values[last]:
                best = last
            self._choice = {replicas: best}
            batch, local, steps = (
                int(column[0, best])
                for column in (candidates.sizes, candidates.local_bsz, candidates.steps)
            )
            self._plan = batch, local, steps


class _Fitted:
    """A fitted model, with the predicted seconds of candidates that were asked for before."""

    def __init__(self, model: ThroughputModel | None = None, points: int = 0) -> None:
        self.points = points
        self._model = model
        self._seconds: dict[tuple[int, tuple[int, ...]], Floats] = {}

    def goodput(
        self, candidates: Candidates, noise: Noise | None, hosts: tuple[int, ...]
    ) -> Floats:
        assert self._model is not None
        key = id(candidates), hosts  # they are kept for good, so their ids stay apart
        if key not in self._seconds:
            self._seconds[key] = candidates.seconds(self._model, hosts)
        return candidates.goodput(noise, self._seconds[key])


@cache
def _candidates(
    application: Application, batch_size: int | None, replicas: tuple[int, ...]
) -> Candidates:
    bounds: BatchBounds = application.bounds
    if batch_size is not None:
        bounds = replace(bounds, max_batch_size=batch_size)
    return Candidates.of(application.reference, bounds, np.array(replicas), batch_size)


@cache
def _split(
    application: Application, batch_size: int, replicas: int, *, accumulate: bool = False
) -> tuple[int, int, int]:
    """Global batch, micro-batch and micro-batches of a step, as in the published simulation.

    One replica splits a batch above the reference in two at least, to see the noise between them.
    """
    share = math.ceil(batch_size / replicas - _EDGE)
    steps = math.ceil(share / application.local_bsz_bounds[1] - _EDGE)
    if replicas == 1 and (accumulate or batch_size > application.reference):
        steps = max(2, steps)
    local = math.ceil(share / steps - _EDGE)
    local = min(local, application.max_batch_size // (replicas * steps))
    return replicas * local * steps, local, steps


@cache
def _true_speeds(application: Application, batch_size: int, offer: Offer) -> Speeds:
    """True steps per second at one global batch."""
    per_node = max(-(-size // hosts) for size, hosts in zip(offer.sizes, offer.hosts, strict=True))
    sizes, rates = [], []
    for size in offer.sizes:
        if size * application.local_bsz_bounds[0] > batch_size or size > MOST_REPLICAS:
            break
        whole, rest = divmod(size, per_node)
        counts = (per_node,) * whole + ((rest,) if rest else ())
        # One replica always accumulates here: so its steps were predicted in the published
        # comparison, even where they were then run in one go.
        _, local, steps = _split(application, batch_size, size, accumulate=True)
        step, sync = application.step_seconds(counts, local)
        sizes.append(size)
        rates.append(1 / (step + (step - sync) * (steps - 1)))
    return Speeds(kind=offer.kind, sizes=tuple(sizes), goodput=tuple(rates))


class GivenTraining:
    """Training at given speeds, which do not change and do not depend on the nodes.

    Args:
        work: Work of the whole job, in the unit of goodput times seconds.
        speeds: Goodput by kind and size. Between two sizes it is interpolated, beyond the last it
            stays.
    """

    def __init__(self, work: float, speeds: tuple[Speeds, ...]) -> None:
        self.total = work
        self.done = 0.0
        self.profiled = 0
        self._speeds = speeds
        self._rate = 0.0

    def place(self, kind: str, counts: tuple[int, ...]) -> None:
        """Run on this many accelerators of each node from now on."""
        size = sum(counts)
        table = next((each for each in self._speeds if each.kind == kind), None)
        if table is None:
            kinds = ", ".join(each.kind for each in self._speeds)
            raise ValueError(f"kind ({kind}) must be one that the job has speeds for: {kinds}")
        self._rate = float(np.interp(size, (0, *table.sizes), (0.0, *table.goodput)))
        self.profiled = max(self.profiled, size)

    def run(self, seconds: float) -> tuple[float, bool]:
        """Train for at most this long; the seconds that it took, and whether it has finished."""
        if self.done + self._rate * seconds < self.total:
            self.done += self._rate * seconds
            return seconds, False
        needed = (self.total - self.done) / self._rate
        self.done = self.total
        return min(needed, seconds), True

    def speeds(self, offers: Sequence[Offer]) -> tuple[Speeds, ...]:
        """The given speeds: such a job knows them from the start."""
        del offers
        return self._speeds
