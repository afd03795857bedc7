"""The solver of `fit`: damped Gauss-Newton with an exact Jacobian, over all starts at once.

It minimises the negative log posterior of the logs of the model's parameters, together with the
spread of the residuals. For eight parameters a general solver would spend most of its time on
bookkeeping, and a fit must be cheap enough to run during training.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from resilin.core.throughput import MAX_OVERLAP, PARAMETERS, Floats, SyncShape, step_parts

TAIL = 4.0
"""Degrees of freedom of the residuals: at 4, an outlier's pull fades beyond twice the spread."""
TRIALS = 5
"""Iterations after which only the best start is continued."""
ITERATIONS = 100
"""Largest number of iterations of a fit; about 15 are typical."""
TOLERANCE = 1e-6
"""Change of the log posterior below which the fit ends."""
_NEVER = -1e3
_LOWER = np.array([-40.0] * 6 + [0.0, math.log(1e-3)])
_UPPER = np.array([25.0] * 6 + [math.log(MAX_OVERLAP), 0.0])


class Steps(NamedTuple):
    """The steps to predict, one entry each."""

    shape: SyncShape
    local_bsz: Floats
    more: Floats
    """Micro-batches before the one that synchronises."""

    def predict(self, logs: Floats) -> tuple[Floats, Floats]:
        """Logs of micro-batch and step times, and their derivatives by the logs of parameters.

        Args:
            logs: Logs of the parameters, a row for each model.

        Returns:
            Shapes (models, 2 x steps) and (models, parameters, 2 x steps): the micro-batches of
            all steps first, then the steps.
        """
        values = np.exp(logs).T[:, :, None]
        start, per_sample, local, local_growth, host, host_growth, overlap, ring = values
        compute, sync, last = step_parts(values, self.shape, self.local_bsz)
        step = self.more * compute + last
        log_compute, log_step, log_last = np.log(compute), np.log(step), np.log(last)
        count = len(self.local_bsz)
        jacobian = np.zeros((len(logs), len(PARAMETERS), 2 * count))
        jacobian[:, 0, :count] = start / compute
        jacobian[:, 1, :count] = per_sample * self.local_bsz / compute
        by_compute = self.more + np.exp((overlap - 1) * (log_compute - log_last))
        jacobian[:, :2, count:] = jacobian[:, :2, :count] * (by_compute * compute / step)[:, None]
        log_sync = np.log(sync, out=np.full_like(sync, _NEVER), where=sync > 0)
        by_sync = self.shape.any * np.exp((overlap - 1) * (log_sync - log_last)) / step
        by_local, by_host = by_sync * self.shape.within, by_sync * ~self.shape.within
        traffic = self.shape.any + ring * self.shape.traffic
        jacobian[:, 2, count:] = by_local * local * traffic
        jacobian[:, 3, count:] = by_local * local_growth * self.shape.beyond_two
        jacobian[:, 4, count:] = by_host * host * traffic
        jacobian[:, 5, count:] = by_host * host_growth * self.shape.beyond_two
        jacobian[:, 7, count:] = (by_local * local + by_host * host) * ring * self.shape.traffic
        log_ratio = -np.abs(log_compute - log_sync)
        power = np.exp(overlap * log_ratio)
        jacobian[:, 6, count:] = (last / step) * (
            power / (1 + power) * log_ratio - np.log1p(power) / overlap
        )
        return np.concatenate([log_compute, log_step], axis=1), jacobian


class Problem(NamedTuple):
    """The function to minimise: Student t residuals of the data, squared ones of the priors."""

    steps: Steps
    target: Floats
    weights: Floats
    matrix: Floats
    centre: Floats
    noise: float
    noise_weight: float

    def solve(self, logs: Floats) -> tuple[Floats, Floats, Floats]:
        """Parameters, spreads of the two kinds of residuals, and curvature at the best optimum.

        Args:
            logs: Starting points: logs of the parameters, one row per start.
        """
        damping = np.full(len(logs), 1e-3)
        residual, jacobian = self._residuals(logs)
        # Wide at first: from far away, all measurements look like outliers.
        variance = self._variance(residual, np.full((len(logs), 2), np.inf))
        diagonal = np.arange(len(PARAMETERS))
        for iteration in range(ITERATIONS):
            variance = self._variance(residual, variance)
            cost = self._cost(logs, residual, variance)
            if iteration == TRIALS:
                # All starts were tried for a few iterations; only the best is continued.
                best = [int(np.argmin(cost))]
                logs, residual, jacobian = logs[best], residual[best], jacobian[best]
                variance, cost, damping = variance[best], cost[best], damping[best]
            gradient, curvature = self._slopes(logs, variance, residual, jacobian)
            # A parameter that is held at its bound takes no part in this step.
            free = ~((logs <= _LOWER) & (gradient > 0) | (logs >= _UPPER) & (gradient < 0))
            damped = curvature * (free[:, :, None] & free[:, None, :])
            damped[:, diagonal, diagonal] *= 1 + damping[:, None]
            damped[:, diagonal, diagonal] += ~free
            move = np.linalg.solve(damped, (gradient * free)[:, :, None])[:, :, 0]
            tried = np.minimum(np.maximum(logs - move, _LOWER), _UPPER)
            new_residual, new_jacobian = self._residuals(tried)
            new_cost = self._cost(tried, new_residual, variance)
            better = new_cost < cost
            damping = np.where(better, np.maximum(damping / 10, 1e-9), damping * 10)
            logs = np.where(better[:, None], tried, logs)
            residual = np.where(better[:, None], new_residual, residual)
            jacobian = np.where(better[:, None, None], new_jacobian, jacobian)
            if iteration > TRIALS and (abs(new_cost - cost) < TOLERANCE or damping > 1e9):
                break
        return logs[0], np.sqrt(variance[0]), self._slopes(logs, variance, residual, jacobian)[1][0]

    def _residuals(self, logs: Floats) -> tuple[Floats, Floats]:
        predicted, jacobian = self.steps.predict(logs)
        return predicted - self.target, jacobian

    def _variance(self, residual: Floats, variance: Floats) -> Floats:
        """One step towards the most probable variance of each kind of residual."""
        square = residual.reshape(len(residual), 2, -1) ** 2
        weight = self.weights.reshape(2, -1)
        pull = weight * (TAIL + 1) / (TAIL + square / variance[:, :, None])
        known = self.noise_weight * self.noise + (pull * square).sum(axis=2)
        return np.asarray(known / (self.noise_weight + weight.sum(axis=1)))

    def _cost(self, logs: Floats, residual: Floats, variance: Floats) -> Floats:
        square = residual.reshape(len(residual), 2, -1) ** 2
        weight = self.weights.reshape(2, -1)
        data = (TAIL + 1) * weight * np.log1p(square / (TAIL * variance[:, :, None]))
        belief = logs @ self.matrix.T - self.centre
        total = self.noise_weight + weight.sum(axis=1)
        spread = total * np.log(variance) + self.noise_weight * self.noise / variance
        parts = data.sum(axis=(1, 2)) + (belief**2).sum(axis=1) + spread.sum(axis=1)
        return np.asarray(parts / 2)

    def _slopes(
        self, logs: Floats, variance: Floats, residual: Floats, jacobian: Floats
    ) -> tuple[Floats, Floats]:
        """Gradient and Gauss-Newton curvature of the cost."""
        each = np.repeat(variance, len(self.steps.local_bsz), axis=1)
        pull = self.weights * (TAIL + 1) / (TAIL * each + residual**2)
        weighted = jacobian * pull[:, None]
        gradient = (weighted @ residual[:, :, None])[:, :, 0]
        gradient += (logs @ self.matrix.T - self.centre) @ self.matrix
        curvature = weighted @ jacobian.transpose(0, 2, 1) + self.matrix.T @ self.matrix
        return gradient, curvature
