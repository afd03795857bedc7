"""The core at full size: 10^10 samples in a stream, 10^5 replicas in a plan.

    python benchmarks/core_scale.py [--quick] [--check]

Prints the time and memory of the first index and of 10k-slices anywhere in an epoch of 10^10
samples, the time of one replica's share of a plan for 10^5 replicas, and how many samples were
repeated or missed over random histories of batch sizes, world sizes and aborted steps.
"""

from __future__ import annotations

import random
import statistics
import tracemalloc

import numpy as np
from harness import finish, parse_args, seconds

from resilin.core import BatchPlan, Ownership, SampleStream

NUM_SAMPLES = 10**10
SLICE = 10_000


def stream_cost(repeats: int) -> dict[str, float]:
    rng = random.Random(0)
    # A new seed each time: nothing may come from a cache.
    first = seconds(
        lambda: SampleStream(NUM_SAMPLES, seed=rng.getrandbits(64)).indices(range(1)), repeats
    )

    def any_slice() -> None:
        start = rng.randrange(NUM_SAMPLES - SLICE)
        SampleStream(NUM_SAMPLES, seed=rng.getrandbits(64)).indices(range(start, start + SLICE))

    slices = seconds(any_slice, repeats)
    tracemalloc.start()
    any_slice()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "first_index_ms": 1e3 * statistics.median(first),
        "slice_ms": 1e3 * statistics.median(slices),
        "slice_ms_p90": 1e3 * slices[int(0.9 * repeats)],
        "slice_peak_mb": peak / 1e6,
    }


def plan_cost(repeats: int) -> dict[str, float]:
    times = seconds(lambda: BatchPlan(10**6, 10**5, max_local_bsz=8).micro_batches(99_999), repeats)
    return {
        "plan_us": 1e6 * statistics.median(times),
        "plan_us_p90": 1e6 * times[int(0.9 * repeats)],
    }


def exactness(num_seeds: int) -> dict[str, int]:
    """Trains five epochs under a random history for each seed and counts the samples used."""
    repeated = missing = steps = aborted = 0
    for seed in range(num_seeds):
        rng = random.Random(seed)
        num_samples = rng.randint(1, 3000)
        stream, cursor = SampleStream(num_samples, seed=seed), 0
        used = np.zeros((5, num_samples), dtype=int)
        owners = Ownership(0, rng.randint(1, 64))
        while cursor < 5 * num_samples:
            if rng.random() < 0.1:
                owners = Ownership(cursor, rng.randint(1, 64))
            span = stream.batch(cursor, rng.randint(1, 300))
            plan = BatchPlan(len(span), owners.replicas, max_local_bsz=rng.randint(1, 16))
            fetched = []
            for replica in range(owners.replicas):
                mine = owners.positions(replica, span)
                micro = plan.micro_batches(owners.slot(replica, span.start))
                assert sum(micro) == len(mine)
                fetched.append(stream.indices(mine))
            steps += 1
            if rng.random() < 0.1:
                aborted += 1
                continue
            used[cursor // num_samples] += np.bincount(
                np.concatenate(fetched), minlength=num_samples
            )
            cursor = span.stop
        repeated += int((used > 1).sum())
        missing += int((used == 0).sum())
    return {
        "histories": num_seeds,
        "history_steps": steps,
        "aborted_steps": aborted,
        "repeated": repeated,
        "missing": missing,
    }


def main() -> None:
    args = parse_args(__doc__ or "")
    repeats = 200 if args.quick else 1000
    figures = {**stream_cost(repeats), **plan_cost(repeats), **exactness(200)}
    limits = {
        "first_index_ms": 5.0,
        "slice_ms": 5.0,
        "slice_peak_mb": 10.0,
        "plan_us": 100.0,
        "repeated": 0,
        "missing": 0,
    }
    finish("core_scale", figures, limits, check=args.check)


if __name__ == "__main__":
    main()
