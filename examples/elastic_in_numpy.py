"""The whole elastic step in numpy: what resilin does to a training loop, with nothing hidden.

    python examples/elastic_in_numpy.py

A logistic regression is trained twice: by a fixed cluster at the reference batch of 32, and by
a cluster whose replicas come and go, which follows them with its batch size. The replicas are
simulated one after another; plan, sample stream, noise, rule and clock are the ones that every
other part of resilin uses. Both runs should end with about the same test loss, the elastic one
after fewer optimizer steps.
"""

from __future__ import annotations

import numpy as np

from resilin.core import (
    BatchBounds,
    CapacityTrace,
    Clock,
    NoiseAverage,
    Ownership,
    Reference,
    SampleStream,
    step_scale,
)
from resilin.core.clock import Budget
from resilin.core.noise import default_horizon, from_micro_batches, gain
from resilin.core.rules import get_rule, group_factors

REFERENCE = Reference(batch_size=32)
BOUNDS = BatchBounds(max_batch_size=512, local_bsz_bounds=(8, 48))
BUDGET = Budget(reference_steps=400)


def make_data(num: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    x = rng.standard_normal((num, 20))
    y = (x @ np.linspace(-2, 2, 20) + 2 * rng.standard_normal(num) > 0).astype(float)
    return x, y


def gradient(weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Mean gradient of the logistic loss."""
    return x.T @ (1 / (1 + np.exp(-(x @ weights))) - y) / len(y)


def loss(weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
    z = x @ weights
    return float(np.mean(np.logaddexp(0, z) - y * z))


def train(x: np.ndarray, y: np.ndarray, capacity: CapacityTrace | None) -> tuple[np.ndarray, Clock]:
    weights, clock, cursor = np.zeros(x.shape[1]), Clock(), 0
    stream, rule = SampleStream(len(y), seed=1), get_rule("adascale")
    average = NoiseAverage(horizon=default_horizon(32, BUDGET.reference_steps))
    owners = Ownership(base=0, replicas=1)
    while BUDGET.spent(clock, REFERENCE) is None:
        # When the replicas change, positions are assigned again from the cursor on.
        replicas = capacity.at(clock.steps) if capacity else 1
        if replicas != owners.replicas:
            owners = Ownership(base=cursor, replicas=replicas)
        batch = 32 * replicas

        # Plan and data: nothing has to divide, and each replica finds its own positions.
        span = stream.batch(cursor, batch)
        sizes, gradients = [], []
        for replica in range(replicas):
            mine = stream.indices(owners.positions(replica, span))
            if len(span) == batch:
                micro = BOUNDS.plan(batch, replicas).micro_batches(owners.slot(replica, span.start))
            else:
                micro = (len(mine),) if len(mine) else ()
            for part in np.split(mine, np.cumsum(micro)[:-1]) if micro else ():
                sizes.append(len(part))
                gradients.append(gradient(weights, x[part], y[part]))

        # Each micro-batch weighs its share of the samples: the mean over the whole batch.
        mean = np.average(gradients, axis=0, weights=sizes)
        whole = stream.indices(span)
        assert np.allclose(mean, gradient(weights, x[whole], y[whole]))

        # Noise, gain, factors.
        if len(sizes) > 1:
            norms = [float(g @ g) for g in gradients]
            average = average.update(from_micro_batches(sizes, norms, float(mean @ mean)))
        scale = step_scale(len(span), batch, REFERENCE.batch_size)
        r = gain(average.noise, scale * REFERENCE.batch_size, REFERENCE.batch_size)
        (factors,) = group_factors(
            rule,
            batch_size=scale * REFERENCE.batch_size,
            reference=REFERENCE.batch_size,
            noise=[average.noise],
            elapsed=clock.progress,
        )
        schedule = 0.5 * (1 + np.cos(np.pi * min(1, clock.progress / BUDGET.reference_steps)))
        weights = weights - 0.5 * schedule * factors.lr * mean

        # Commit: cursor and clock advance together, once.
        clock = clock.advance(samples=len(span), scale=scale, gain=r)
        cursor = span.stop
    return weights, clock


def main() -> None:
    rng = np.random.default_rng(0)
    data, test = make_data(2000, rng), make_data(5000, rng)
    capacity = CapacityTrace.spot(8, duration=400, seed=4, min_replicas=1, mean_hold=10)
    print(f"{'run':<10}{'steps':>6}{'samples':>9}{'progress':>10}{'test loss':>11}")
    for name, trace in (("reference", None), ("elastic", capacity)):
        weights, clock = train(*data, trace)
        print(
            f"{name:<10}{clock.steps:>6}{clock.samples:>9}{clock.progress:>10.1f}"
            f"{loss(weights, *test):>11.4f}"
        )


if __name__ == "__main__":
    main()
