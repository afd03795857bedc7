"""The tuner: choice of the next batch size, with a reason.

A tuner is a function of plain values: from the step-time profile, the noise and the placement to a
decision. It has no state between decisions, so replicas with the same values make the same
decision, and a replay decides as the live job did.

How it compares batch sizes. The fitted model counts all steps of one placement as few, because
they share the peculiarities of that placement. Between two batch sizes on the current placement
these cancel, and measurements are more informative than the model. So the fit is the prior of the
curve of step time against batch size, with the uncertainty of its parameters and a little of its
form; the measurements on the placement then condition that curve. Close to a measured batch it
follows the measurement; far from it, it follows the model, with a large uncertainty.

How it decides:

- It changes the batch only if the improvement is certain enough: its lower confidence bound must
  reach `hysteresis`. Fluctuating estimates do not trigger a change.
- A candidate that may be better but is uncertain is tried, if not too much is at stake. A trial
  that is expected to cost goodput starts only while the share of time spent on trials is below
  `explore_budget`.
- It never grows by more than `max_growth` over the largest batch that was run with this number of
  replicas.
- While the noise is unknown it does not exceed the reference batch.

The confidence covers step times only. The noise is used as given: it is an average over a long
horizon, and hysteresis covers its remaining fluctuations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from resilin.core import _validate
from resilin.core._solver import Steps
from resilin.core.events import Candidate
from resilin.core.fit import Fitted, StepTime, fit
from resilin.core.goodput import best_plan, efficiency
from resilin.core.noise import Noise
from resilin.core.plan import BatchBounds
from resilin.core.profile import StepProfile
from resilin.core.throughput import Floats, SyncShape, ThroughputModel
from resilin.core.time_share import is_within

CONFIDENCE = 0.9
"""Probability that a bound of the gain holds, on its side."""
MEASURED = 0.05
"""Spread of the log of one measured step time around the typical one of its key."""
FORM = 0.05
"""Smallest spread of the log of step times around the form of the model, at one batch size."""
REACH = math.log(2.0)
"""Distance in the log of the batch size over which deviations from the form are correlated."""
MAX_LOSS = 0.5
"""Share of the goodput that a trial may lose while it lasts, at its lower confidence bound."""
_ANY = ThroughputModel(
    compute_start=1.0,
    compute_per_sample=0.0,
    local_sync=0.0,
    local_growth=0.0,
    host_sync=0.0,
    host_growth=0.0,
    overlap=1.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A chosen batch size, with the reason."""

    batch_size: int
    """Global batch size from the next step on."""
    reason: str
    """Reason for the change, or for keeping it, with the numbers."""
    candidates: tuple[Candidate, ...]
    """Candidates by batch size; empty while no step time is known."""
    explores: bool = False
    """Whether it is a trial to measure the step time; decide again after a few steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuner:
    """Settings of the choice. They do not change during a run; `decide` has no state.

    Raises:
        ValueError: A setting is out of its range, or the bounds do not limit the batch.
    """

    reference: int
    """The reference batch size."""
    bounds: BatchBounds
    """Bounds set by the user. They must limit the batch size."""
    hysteresis: float = 0.05
    """Share by which a change must raise the goodput, at the lower confidence bound."""
    max_growth: float = 2.0
    """Largest ratio of a batch to the largest that was run with this number of replicas."""
    explore_budget: float = 0.02
    """Share of the time for trials with an expected loss; 0 turns all trials off."""

    def __post_init__(self) -> None:
        _validate.whole("reference", self.reference, at_least=1)
        _validate.real("hysteresis", self.hysteresis, at_least=0)
        _validate.real("max_growth", self.max_growth, above=1)
        if _validate.real("explore_budget", self.explore_budget, at_least=0) > 1:
            raise ValueError(f"explore_budget ({self.explore_budget}) must be at most 1")
        local = self.bounds.local_bsz_bounds is not None and not self.bounds.gradient_accumulation
        if self.bounds.max_batch_size is None and not local:
            raise ValueError(
                f"max_batch_size ({self.bounds.max_batch_size}) must be set: nothing else in "
                f"{self.bounds} limits the batch"
            )

    def decide(
        self,
        *,
        profile: StepProfile,
        noise: Noise | None,
        hosts: int,
        replicas: int,
        batch_size: int,
        explored: float = 0.0,
    ) -> Decision:
        """The batch size for the next steps. The same input gives the same output.

        Args:
            profile: Step times seen so far, on any placement.
            noise: Noise of the gradient now; None while it is unknown.
            hosts: Machines that the replicas run on.
            replicas: Data-parallel members.
            batch_size: The global batch size so far.
            explored: Share of the time so far that was spent on trials.

        Raises:
            PlanError: No batch within the bounds can be split over this many replicas.
        """
        _validate.whole("batch_size", batch_size, at_least=1)
        _validate.real("explored", explored, at_least=0)
        seen = [time for time in profile.observations() if time.weight > 0]
        if not seen:
            return self._begin(hosts, replicas)
        fitted = fit(seen)
        grid = self._candidates(fitted.model, noise, hosts, replicas)
        allowed = self._allowed(batch_size, replicas, grid)
        here = [time for time in seen if (time.hosts, time.replicas) == (hosts, replicas)]
        ceiling = self._ceiling(profile, noise, replicas, allowed, grid[0].batch_size)
        table = self._within(grid, allowed, replicas, ceiling)
        curve = _Curve.of(fitted, here, hosts, replicas, table)
        compared = self._compared(table, curve, noise)
        current = [item.batch_size for item in compared].index(allowed)
        gain, spread = _gains(compared, curve, current)
        width = NormalDist().inv_cdf(CONFIDENCE)
        choice = self._choose(compared, gain, width * spread, current, explored)
        if allowed == batch_size:
            return choice
        return Decision(
            batch_size=choice.batch_size,
            reason=f"{batch_size} is not allowed with {replicas} replicas; {allowed} is the "
            f"nearest allowed size; {choice.reason}",
            candidates=choice.candidates,
            explores=choice.explores,
        )

    def _begin(self, hosts: int, replicas: int) -> Decision:
        table = self._candidates(_ANY, None, hosts, replicas)
        size = self._allowed(self.reference, replicas, table)
        named = "the reference batch" if size == self.reference else "nearest to the reference"
        return Decision(
            batch_size=size,
            reason=f"starts at {size}, {named} ({self.reference}): no step was measured yet",
            candidates=(),
        )

    def _candidates(
        self, model: ThroughputModel, noise: Noise | None, hosts: int, replicas: int
    ) -> tuple[Candidate, ...]:
        return best_plan(model, noise, self.reference, self.bounds, hosts, replicas).candidates

    def _allowed(self, size: int, replicas: int, table: tuple[Candidate, ...]) -> int:
        """`size`, or the nearest batch that the bounds allow."""
        sizes = [item.batch_size for item in table]
        if sizes[0] <= size <= sizes[-1] and self.bounds.possible_replicas(size, [replicas]):
            return size
        return min(sizes, key=lambda other: abs(math.log(other / size)))

    def _ceiling(
        self, profile: StepProfile, noise: Noise | None, replicas: int, current: int, least: int
    ) -> float:
        if noise is None:
            return max(self.reference, least)
        largest = profile.largest_batch(replicas)
        # A size that was never run with this number of replicas is measured before growing further.
        return max(self.max_growth * largest, least) if largest else max(current, least)

    def _within(
        self, table: tuple[Candidate, ...], current: int, replicas: int, ceiling: float
    ) -> list[Candidate]:
        """The candidates up to the ceiling, always including the current batch."""
        kept = {item.batch_size: item for item in table if item.batch_size <= ceiling}
        plan = self.bounds.plan(current, replicas)
        kept[current] = Candidate(
            batch_size=current,
            local_bsz=plan.batch_size,
            accumulation_steps=plan.steps,
            goodput=0.0,
        )
        return [kept[size] for size in sorted(kept)]

    def _compared(
        self, table: list[Candidate], curve: _Curve, noise: Noise | None
    ) -> tuple[Candidate, ...]:
        """The candidates with their goodput by the step times of the curve."""
        sizes = np.array([item.batch_size for item in table], np.float64)
        seconds = np.exp(curve.log_seconds)
        goodput = sizes * efficiency(noise, sizes, self.reference) / seconds
        return tuple(
            replace(item, goodput=value)
            for item, value in zip(table, goodput.tolist(), strict=True)
        )

    def _choose(
        self,
        compared: tuple[Candidate, ...],
        gain: Floats,
        margin: Floats,
        current: int,
        explored: float,
    ) -> Decision:
        size = compared[current].batch_size
        needed = math.log1p(self.hysteresis)
        low, high = gain - margin, gain + margin
        low[current] = high[current] = 0.0
        best = int(np.argmax(low))
        if low[best] >= needed and best != current:
            new = compared[best].batch_size
            reason = f"{size} -> {new}: promises {_promise(gain, margin, best)}"
            return Decision(batch_size=new, reason=reason, candidates=compared)
        likely = int(np.argmax(gain))
        kept = f"keeps {size}"
        if likely == current:
            kept += ": no allowed batch promises more goodput"
        else:
            kept += (
                f": {compared[likely].batch_size} promises "
                f"{_promise(gain, margin, likely)}; a change needs {self.hysteresis:.1%}"
            )
        # A trial must be able to pay off, and must not risk too much.
        open_to = (high >= needed) & (low >= math.log1p(-MAX_LOSS))
        budget = f"{explored:.2%} of the time so far was spent on trials"
        if not is_within(explored, 1.0, self.explore_budget) and open_to.any():
            # A trial that is expected to cost nothing does not wait for the budget.
            budget += (
                f"; above {self.explore_budget:.2%} a trial starts only if it is expected to cost "
                "nothing"
            )
            kept = f"{kept}; {budget}"
            open_to &= gain >= 0
        if not open_to.any() or not self.explore_budget:
            return Decision(batch_size=size, reason=kept, candidates=compared)
        trial = int(np.argmax(np.where(open_to, high, -np.inf)))
        new = compared[trial].batch_size
        loss = max(0.0, -math.expm1(float(low[trial])))
        return Decision(
            batch_size=new,
            reason=f"tries {new} instead of {size}: it may give {_promise(gain, margin, trial)}, "
            f"so it costs at most {loss:.1%} of the goodput while it lasts; {budget}",
            candidates=compared,
            explores=True,
        )


def _promise(gain: Floats, margin: Floats, index: int) -> str:
    middle, low, high = np.expm1(
        [gain[index], gain[index] - margin[index], gain[index] + margin[index]]
    )
    return f"{middle:+.1%} goodput ({low:+.1%} to {high:+.1%})"


def _gains(compared: tuple[Candidate, ...], curve: _Curve, current: int) -> tuple[Floats, Floats]:
    """Log ratio of each goodput to the current one, and its spread."""
    value = np.log([item.goodput for item in compared])
    covariance = curve.covariance
    variance = np.diag(covariance) + covariance[current, current] - 2 * covariance[current]
    return value - value[current], np.sqrt(np.maximum(variance, 0.0))


@dataclass(frozen=True, slots=True, eq=False)
class _Curve:
    """Step time against batch size on one placement, at the candidates."""

    log_seconds: Floats
    covariance: Floats

    @classmethod
    def of(
        cls,
        fitted: Fitted,
        here: list[StepTime],
        hosts: int,
        replicas: int,
        table: list[Candidate],
    ) -> _Curve:
        """The fit's curve, conditioned on the measurements on this placement."""
        # One replica never waits, whether or not that was measured.
        whole = [
            (time, time.accumulation_steps * time.compute_seconds)
            if replicas == 1
            else (time, time.step_seconds)
            for time in here
        ]
        known = [(time, seconds) for time, seconds in whole if seconds is not None]
        num = len(known)
        local = np.array([t.local_bsz for t, _ in known] + [c.local_bsz for c in table], np.float64)
        steps = np.array(
            [t.accumulation_steps for t, _ in known] + [c.accumulation_steps for c in table],
            np.float64,
        )
        shape = SyncShape.of(np.full(len(local), hosts), np.full(len(local), replicas))
        logs = np.log(np.maximum(fitted.model.parameters, 1e-300))[None]
        predicted, jacobian = Steps(shape, local, steps - 1).predict(logs)
        mean, slope = predicted[0, len(local) :], jacobian[0, :, len(local) :]
        place = np.log(local * steps)
        distance = (place[:, None] - place) / REACH
        weight = np.array([time.weight for time, _ in known])
        error = np.log([seconds for _, seconds in known]) - mean[:num]
        # If the model cannot match the measurements, its form gets less confidence.
        form = FORM
        if num:
            rest = error - np.average(error, weights=weight)
            form = max(FORM, math.sqrt(float(np.average(rest**2, weights=weight))))
        # The common error of the placement, of the parameters, and of the form.
        prior = fitted.noise**2 + slope.T @ fitted.covariance @ slope
        prior += form**2 * np.exp(-(distance**2) / 2)
        if not num:
            return cls(mean, prior)
        inner = prior[:num, :num] + np.diag(MEASURED**2 / weight)
        pull = np.linalg.solve(inner, prior[:num, num:]).T
        return cls(mean[num:] + pull @ error, prior[num:, num:] - pull @ prior[:num, num:])
