"""Fit a `ThroughputModel`, with its uncertainty, to measured step times.

The fit is the most probable model given measurements and weak priors. Errors are relative, so
everything is in logarithms: residuals are log ratios, priors are log-normal. For a placement that
was never measured, the prior answers, and the interval shows how little is known.

Three things keep it robust:

- Residuals follow a Student t, so an outlier hardly counts.
- Steps of one placement share its peculiarities (a slow link, an uneven split), so many of them
  count as few, and the predicted interval is that of a placement not yet seen.
- The spread of residuals is fitted too, with a prior that a handful of points cannot override.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from resilin.core import _validate
from resilin.core._solver import Problem, Steps
from resilin.core.throughput import PARAMETERS, Floats, SyncShape, ThroughputModel

SHARED = 0.5
"""Correlation among residuals of one placement: all its steps together count as 1 / SHARED."""
STARTS = (1.2, 2.0, 5.0)
"""Overlaps to start from: the one parameter in which there may be several optima."""
NORMAL = 1.2
"""Standard deviation of normal residuals over the scale of the Student t that fits them best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A measured step, or the summary of similar ones."""

    hosts: int
    """Machines that the replicas ran on."""
    replicas: int
    """Data-parallel members."""
    local_bsz: float
    """Samples of a micro-batch; the mean, if they were uneven."""
    compute_seconds: float
    """Seconds of one micro-batch, without any wait for the reduction."""
    sync_seconds: float | None = None
    """Seconds that the step waited for the reduction after backward; None if not measured."""
    accumulation_steps: int = 1
    """Micro-batches that each replica ran in the step."""
    weight: float = 1.0
    """Number of measurements that this one represents; it may have decayed below 1."""

    def __post_init__(self) -> None:
        hosts = _validate.whole("hosts", self.hosts, at_least=1)
        if _validate.whole("replicas", self.replicas, at_least=1) < hosts:
            raise ValueError(f"replicas ({self.replicas}) must be at least hosts ({hosts})")
        _validate.real("local_bsz", self.local_bsz, above=0)
        _validate.real("compute_seconds", self.compute_seconds, above=0)
        if self.sync_seconds is not None:
            _validate.real("sync_seconds", self.sync_seconds, at_least=0)
        _validate.whole("accumulation_steps", self.accumulation_steps, at_least=1)
        _validate.real("weight", self.weight, at_least=0)

    @property
    def step_seconds(self) -> float | None:
        """Seconds of the whole step; None if the wait was not measured."""
        if self.sync_seconds is None:
            return None
        return self.accumulation_steps * self.compute_seconds + self.sync_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """Priors of the parameters: each a median, and its spread in logarithms.

    Times are relative to a typical measured micro-batch, so the priors suit any hardware.
    """

    compute_start: tuple[float, float] = (0.3, 1.5)
    """Share of a typical micro-batch that does not depend on its samples."""
    compute_per_sample: tuple[float, float] = (0.7, 1.5)
    """Share of a typical micro-batch that is proportional to its samples."""
    local_sync: tuple[float, float] = (0.3, 1.5)
    """Reduction between two replicas on one host, over a typical micro-batch."""
    host_sync: tuple[float, float] = (1.0, 1.5)
    """Reduction between two hosts, over a typical micro-batch."""
    host_over_local: tuple[float, float] = (3.0, 1.0)
    """Reduction between two hosts, over that within one."""
    growth: tuple[float, float] = (0.01, 1.0)
    """Time that each further replica adds, relative to the reduction between two."""
    overlap: tuple[float, float] = (2.0, 0.5)
    """Exponent of the overlap."""
    ring: tuple[float, float] = (0.5, 0.5)
    """Share of the reduction that is traffic."""
    noise: float = 0.1
    """Spread of the log of a step time around the model."""
    noise_weight: float = 4.0
    """Weight of the prior of `noise`, in measurements."""

    def __post_init__(self) -> None:
        for name in ("noise", "noise_weight"):
            _validate.real(name, getattr(self, name), above=0)
        for field in fields(self)[:-2]:
            for number in getattr(self, field.name):
                _validate.real(f"median and spread of {field.name}", number, above=0)

    def rows(self, seconds: float, local_bsz: float) -> tuple[Floats, Floats]:
        """The priors as residuals `matrix @ log_parameters - centre`, each of unit spread."""
        unit = dict(zip(PARAMETERS, np.eye(len(PARAMETERS)), strict=True))
        beliefs = [
            (unit["compute_start"], seconds, self.compute_start),
            (unit["compute_per_sample"], seconds / local_bsz, self.compute_per_sample),
            (unit["local_sync"], seconds, self.local_sync),
            (unit["host_sync"], seconds, self.host_sync),
            (unit["host_sync"] - unit["local_sync"], 1.0, self.host_over_local),
            (unit["local_growth"] - unit["local_sync"], 1.0, self.growth),
            (unit["host_growth"] - unit["host_sync"], 1.0, self.growth),
            (unit["overlap"], 1.0, self.overlap),
            (unit["ring"], 1.0, self.ring),
        ]
        matrix = np.array([row / spread for row, _, (_, spread) in beliefs])
        centre = [math.log(scale * median) / spread for _, scale, (median, spread) in beliefs]
        return matrix, np.array(centre)


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """A model with its uncertainty."""

    model: ThroughputModel
    """The most probable model."""
    covariance: Floats
    """Of the logs of the model's parameters, in the order of `PARAMETERS` (Laplace)."""
    noise: float
    """Spread of the log of a measured step time around the model."""
    compute_noise: float
    """The same for the time of a micro-batch."""

    def spread(
        self,
        hosts: ArrayLike,
        replicas: ArrayLike,
        local_bsz: ArrayLike,
        accumulation_steps: ArrayLike = 1,
    ) -> Floats:
        """Standard deviation of the log of a future step time; arrays broadcast.

        Errors at one placement have a common part, which cancels when two batch sizes on that
        placement are compared: then this overstates the uncertainty.
        """
        parts = np.broadcast_arrays(hosts, replicas, local_bsz, accumulation_steps)
        host, count, local, steps = (part.astype(np.float64).reshape(-1) for part in parts)
        _, jacobian = Steps(SyncShape.of(host, count), local, steps - 1).predict(
            np.log(np.maximum(self.model.parameters, 1e-300))[None]
        )
        slope = jacobian[0, :, len(host) :]
        variance = (slope * (self.covariance @ slope)).sum(axis=0) + self.noise**2
        return np.asarray(np.sqrt(variance).reshape(parts[0].shape))

    def interval(
        self,
        hosts: ArrayLike,
        replicas: ArrayLike,
        local_bsz: ArrayLike,
        accumulation_steps: ArrayLike = 1,
        *,
        level: float = 0.9,
    ) -> tuple[Floats, Floats]:
        """Bounds of a future step time that hold with probability `level`."""
        if not 0 < _validate.real("level", level) < 1:
            raise ValueError(f"level ({level}) must be between 0 and 1")
        middle = self.model.step_seconds(hosts, replicas, local_bsz, accumulation_steps)
        width = NormalDist().inv_cdf((1 + level) / 2)
        ratio = np.exp(width * self.spread(hosts, replicas, local_bsz, accumulation_steps))
        return middle / ratio, middle * ratio


def fit(observations: Iterable[StepTime], prior: Prior | None = None) -> Fitted:
    """The most probable model for these measurements. The same input gives the same output.

    The age of a measurement is ignored: give old ones less weight.

    Args:
        observations: At least one with a weight above 0, in any order.
        prior: Priors for missing measurements; None uses the defaults.

    Raises:
        ValueError: Nothing was measured.
    """
    seen = [step for step in observations if step.weight > 0]
    if not seen:
        raise ValueError("need at least one observation with a weight above 0, got none")
    prior = prior or Prior()
    hosts, replicas, local_bsz, num_steps, weight, compute = np.array(
        [
            (s.hosts, s.replicas, s.local_bsz, s.accumulation_steps, s.weight, s.compute_seconds)
            for s in seen
        ],
        np.float64,
    ).T
    whole = [step.step_seconds for step in seen]
    # Missing measurements have weight 0, so any number can stand for them.
    seconds = np.concatenate([compute, [1.0 if time is None else time for time in whole]])
    weight = _effective(hosts, replicas, weight)
    typical = np.exp(np.average(np.log([compute, local_bsz]), axis=1, weights=weight))
    problem = Problem(
        Steps(SyncShape.of(hosts, replicas), local_bsz, num_steps - 1),
        np.log(seconds),
        np.concatenate([weight, weight * [time is not None for time in whole]]),
        *prior.rows(*typical.tolist()),
        prior.noise**2,
        prior.noise_weight,
    )
    start = np.linalg.lstsq(problem.matrix, problem.centre, rcond=None)[0]
    starts = np.repeat(start[None], len(STARTS), axis=0)
    starts[:, PARAMETERS.index("overlap")] = np.log(STARTS)
    logs, spread, curvature = problem.solve(starts)
    return Fitted(
        ThroughputModel(**dict(zip(PARAMETERS, np.exp(logs).tolist(), strict=True))),
        np.asarray(np.linalg.inv(curvature), np.float64),
        noise=NORMAL * float(spread[1]),
        compute_noise=NORMAL * float(spread[0]),
    )


def _effective(hosts: Floats, replicas: Floats, weight: Floats) -> Floats:
    """Weights corrected for the correlation within each placement."""
    _, placement = np.unique(hosts + 1j * replicas, return_inverse=True)
    total = np.bincount(placement, weight)[placement]
    return weight / (1 + SHARED * np.maximum(total - 1, 0.0))
