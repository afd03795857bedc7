"""A simulated job per model and placement: the tuner against fixed batch sizes and Pollux's rule.

    RESILIN_DATA=../shared/data python benchmarks/tuner.py [--quick] [--check]

Step times and gradient statistics are those that the Pollux artifact measured on real hardware
(six models; 1, 4 and 16 GPUs). A job trains until it has made all the progress that the traces
cover. Each step takes the measured time of its placement, interpolated between measured
micro-batches, and makes the progress that the noise of that moment allows at its batch size.

What a rule gets to see is not the truth: single step times jitter by 5%, each noise estimate by
10%. The statistics in the traces are moving averages already (AdaptDL's, over about 1000 reference
batches), so they lag as those of a live job do, and are not averaged again.

The ratio of a rule is its time to the target over that of the best fixed batch, which only
hindsight knows. The oracle has the best batch at each moment and never errs. Pollux's rule is
written from its equations (OSDI 2021): a least-squares fit of its step-time model, the largest
goodput on the grid, growth of at most two.
"""

from __future__ import annotations

import csv
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from harness import finish, parse_args
from scipy.optimize import minimize

from resilin.core import BatchBounds, Noise
from resilin.core.events import Candidate
from resilin.core.fit import StepTime
from resilin.core.goodput import best_plan, efficiency
from resilin.core.profile import StepProfile
from resilin.core.throughput import ThroughputModel
from resilin.core.tuner import Tuner

DATA = Path(os.environ.get("RESILIN_DATA", Path(__file__).parents[2] / "shared" / "data"))
TRACES = DATA / "pollux" / "traces"
MODELS = ("bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3")
PLACEMENTS = ("1", "4", "4444")
"""GPUs on each host: 1, 4 and 16 replicas."""
STEP_JITTER, NOISE_JITTER = 0.05, 0.1
FIRST, TRIAL = 10, 5
"""Steps until the first decision, and steps from a change to the next one."""
LIMIT = 1.05


class Truth:
    """Data of the traces for one model on one placement."""

    def __init__(self, model: str, placement: str) -> None:
        self.hosts, self.replicas = len(placement), sum(map(int, placement))
        times = defaultdict(list)
        with (TRACES / model / "placements.csv").open() as file:
            for row in csv.DictReader(file):
                if row["placement"] == placement:
                    step, sync = float(row["step_time"]), float(row["sync_time"])
                    times[int(row["local_bsz"])].append((step - sync, sync))
        self.local = np.array(sorted(times), float)
        self.compute, self.sync = np.array([np.mean(times[m], axis=0) for m in sorted(times)]).T
        runs = {}
        for path in (TRACES / model).glob("validation-*.csv"):
            rows = np.loadtxt(path, delimiter=",", skiprows=1, ndmin=2)
            sqr_norm, variance = rows[:, 3:5].T
            # Where an estimate was clipped to 0, any small number says as much.
            stats = np.log([np.maximum(sqr_norm, 1e-4 * variance), variance])
            runs[int(path.stem.split("-")[1])] = rows[:, 0], stats
        self.reference = min(runs)
        self.target = float(runs[self.reference][0][-1])
        self.run_sizes = np.log(sorted(runs))
        # A row per run: logs of squared norm and of variance at a reference batch, by progress.
        self.progress = (np.arange(2000) + 0.5) * (self.target / 2000)
        self.stats = np.array(
            [
                [np.interp(self.progress, runs[size][0], column) for column in runs[size][1]]
                for size in sorted(runs)
            ]
        )
        self.bounds = BatchBounds(max(runs), (int(self.local[0]), int(self.local[-1])))

    def step_time(self, batch_size: int) -> StepTime:
        plan = self.bounds.plan(batch_size, self.replicas)
        local = batch_size / self.replicas / plan.steps
        return StepTime(
            hosts=self.hosts,
            replicas=self.replicas,
            local_bsz=local,
            accumulation_steps=plan.steps,
            compute_seconds=float(np.interp(plan.batch_size, self.local, self.compute)),
            sync_seconds=float(np.interp(plan.batch_size, self.local, self.sync)),
        )

    def noise(self, progress: float, batch_size: int) -> Noise:
        """Noise at this point of training, as measured in runs of about this batch size."""
        sqr_norm, trace = self.noise_along(batch_size)
        at = min(int(progress / self.target * len(self.progress)), len(self.progress) - 1)
        return Noise(float(sqr_norm[at]), float(trace[at]))

    @cache  # noqa: B019  # a truth lives as long as its row of the table
    def noise_along(self, batch_size: int) -> np.ndarray:
        """Squared norm and trace at each point of `progress`."""
        place = np.interp(np.log(batch_size), self.run_sizes, np.arange(len(self.run_sizes)))
        low = min(int(place), len(self.run_sizes) - 2)
        logs = self.stats[low] * (low + 1 - place) + self.stats[low + 1] * (place - low)
        return np.exp(logs) * [[1], [self.reference]]

    def seconds_per_step(self, batch_size: int) -> np.ndarray:
        """Seconds per reference step of progress, at each point of `progress`."""
        sqr_norm, trace = self.noise_along(batch_size)
        gain = (sqr_norm + trace / self.reference) / (sqr_norm + trace / batch_size)
        return self.step_time(batch_size).step_seconds / gain

    @cached_property
    def grid(self) -> tuple[Candidate, ...]:
        """Every batch size that is compared; the times in it mean nothing."""
        any_model = ThroughputModel(
            compute_start=1.0, compute_per_sample=0.0, local_sync=0.0, local_growth=0.0,
            host_sync=0.0, host_growth=0.0, overlap=1.0,
        )  # fmt: skip
        return best_plan(
            any_model, None, self.reference, self.bounds, self.hosts, self.replicas
        ).candidates

    def fixed_seconds(self, batch_size: int) -> float:
        """Seconds to the target at one batch size throughout."""
        return self.target * float(self.seconds_per_step(batch_size).mean())

    def oracle_seconds(self) -> float:
        """Seconds to the target with the best batch of the grid at each moment."""
        each = [self.seconds_per_step(c.batch_size) for c in self.grid]
        return self.target * float(np.min(each, axis=0).mean())


class State(NamedTuple):
    """Input of a decision rule."""

    profile: StepProfile
    noise: Noise
    batch_size: int
    explored: float


Rule = Callable[[State], tuple[int, bool]]


class Result(NamedTuple):
    seconds: float
    changes: int
    trials: int
    explored: float
    last: int


def simulate(truth: Truth, rule: Rule, begin: int, longest: float, seed: int = 0) -> Result:
    """Trains to the target; decisions are `longest` of the progress apart, closer at first."""
    rng = np.random.default_rng(seed)
    profile = StepProfile()
    size, trial, wait = begin, False, FIRST
    seconds = explored = progress = 0.0
    count = Counter[str]()
    num_steps = 0
    while progress < truth.target:
        time, noise = truth.step_time(size), truth.noise(progress, size)
        gain = noise.gain(size, truth.reference)
        steps = int(min(wait, np.ceil((truth.target - progress) / gain)))
        progress += steps * gain
        seconds += steps * time.step_seconds
        explored += steps * time.step_seconds * trial
        num_steps += steps
        for jitter in np.exp(STEP_JITTER * rng.standard_normal((min(steps, 50), 2))):
            profile = profile.observe(
                StepTime(
                    hosts=time.hosts,
                    replicas=time.replicas,
                    local_bsz=time.local_bsz,
                    accumulation_steps=time.accumulation_steps,
                    compute_seconds=time.compute_seconds * jitter[0],
                    sync_seconds=time.sync_seconds * jitter[1],
                )
            )
        sqr, trace = np.exp(NOISE_JITTER * rng.standard_normal(2))
        seen = Noise(noise.sqr_norm * sqr, noise.trace * trace)
        new, trial = rule(State(profile, seen, size, explored / seconds))
        count["changes"] += new != size
        count["trials"] += trial
        changed, size = new != size, new
        reach = truth.noise(progress, size).gain(size, truth.reference)
        wait = int(min(max(FIRST, 0.1 * num_steps), max(FIRST, longest * truth.target / reach)))
        wait = TRIAL if changed else wait
    return Result(seconds, count["changes"], count["trials"], explored / seconds, size)


def tuned(truth: Truth) -> tuple[Rule, int]:
    tuner = Tuner(reference=truth.reference, bounds=truth.bounds)

    def rule(state: State) -> tuple[int, bool]:
        decision = tuner.decide(
            profile=state.profile,
            noise=state.noise,
            hosts=truth.hosts,
            replicas=truth.replicas,
            batch_size=state.batch_size,
            explored=state.explored,
        )
        return decision.batch_size, decision.explores

    begin = tuner.decide(
        profile=StepProfile(),
        noise=None,
        hosts=truth.hosts,
        replicas=truth.replicas,
        batch_size=truth.reference,
    )
    return rule, begin.batch_size


@dataclass
class Pollux:
    """The published rule for one job whose placement does not change."""

    truth: Truth
    keys: int = 0
    parameters: np.ndarray = field(default_factory=lambda: np.array([0.1, 0.01, 0.1, 1.5]))

    def __call__(self, state: State) -> tuple[int, bool]:
        seen = state.profile.observations()
        if len(seen) != self.keys:
            self.keys = len(seen)
            self.fit(seen)
        largest = state.profile.largest_batch(self.truth.replicas)
        table = [c for c in self.truth.grid if c.batch_size <= max(2 * largest, 1)]
        size, local, steps = np.array(
            [(c.batch_size, c.local_bsz, c.accumulation_steps) for c in table], float
        ).T
        seconds = self.seconds(self.parameters, local, steps)[1]
        value = size * efficiency(state.noise, size, self.truth.reference) / seconds
        return int(size[np.argmax(value)]), False

    def seconds(self, parameters, local, steps):
        start, per_sample, sync, overlap = parameters
        compute = start + per_sample * local
        sync = sync * (self.truth.replicas > 1)
        last = (compute**overlap + sync**overlap) ** (1 / overlap)
        return compute, (steps - 1) * compute + last

    def fit(self, seen: tuple[StepTime, ...]) -> None:
        local, steps, compute, whole = np.array(
            [(t.local_bsz, t.accumulation_steps, t.compute_seconds, t.step_seconds) for t in seen]
        ).T
        if self.truth.replicas == 1:
            whole = steps * compute

        def loss(parameters):
            micro, step = self.seconds(parameters, local, steps)
            errors = [np.log(micro / compute), np.log(step / whole)]
            return sum(np.sqrt(np.mean(e**2)) for e in errors) + 1e-3 * (parameters[3] - 1) ** 2

        bounds = [(1e-8, None)] * 3 + [(1, 10)]
        starts = [np.array([0.1, 0.01, 0.1, 1.5]), self.parameters]
        found = [minimize(loss, start, method="L-BFGS-B", bounds=bounds) for start in starts]
        self.parameters = min(found, key=lambda result: result.fun).x


def main() -> None:
    args = parse_args("Time to the target of a simulated job: tuner, fixed batches, Pollux's rule.")
    if not TRACES.exists():
        raise SystemExit(f"no traces in {TRACES}: set RESILIN_DATA to the directory of the data")
    longest = 0.005 if args.quick else 0.002
    seeds = range(1 if args.quick else 3)
    print(
        f"{'model':<12}{'replicas':>8}{'best fixed':>12}{'reference':>10}{'oracle':>8}{'pollux':>8}"
        f"{'tuner':>8}{'changes':>8}{'trials':>8}{'trying':>8}{'last':>7}",
        file=sys.stderr,
    )
    ratios, pollux, explored = {}, {}, 0.0
    for model in MODELS:
        for placement in PLACEMENTS:
            truth = Truth(model, placement)
            sizes = [c.batch_size for c in truth.grid]
            fixed = {size: truth.fixed_seconds(size) for size in sizes}
            best = min(fixed, key=fixed.__getitem__)
            name = f"{model}/{truth.replicas}"
            rule, begin = tuned(truth)
            results = [simulate(truth, rule, begin, longest, seed) for seed in seeds]
            other = [simulate(truth, Pollux(truth), begin, longest, seed) for seed in seeds]
            worst = max(results)
            ratios[name] = round(worst.seconds / fixed[best], 4)
            pollux[name] = round(max(other).seconds / fixed[best], 4)
            explored = max(explored, *(result.explored for result in results))
            print(
                f"{model:<12}{truth.replicas:>8}{best:>12}{fixed[sizes[0]] / fixed[best]:>10.3f}"
                f"{truth.oracle_seconds() / fixed[best]:>8.3f}{pollux[name]:>8.3f}"
                f"{ratios[name]:>8.3f}{worst.changes:>8}{worst.trials:>8}{worst.explored:>8.2%}"
                f"{worst.last:>7}",
                file=sys.stderr,
            )
    figures = {
        "worst_ratio": max(ratios.values()),
        "mean_ratio": round(float(np.mean(list(ratios.values()))), 4),
        "worst_ratio_pollux": max(pollux.values()),
        "mean_ratio_pollux": round(float(np.mean(list(pollux.values()))), 4),
        "explored": round(explored, 4),
        "ratios": ratios,
        "ratios_pollux": pollux,
    }
    finish("tuner", figures, {"worst_ratio": LIMIT}, check=args.check)


if __name__ == "__main__":
    main()
