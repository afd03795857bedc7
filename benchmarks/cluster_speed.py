"""Time of one decision, from 64 accelerators and jobs to 100,000 accelerators and 5,000 jobs.

    python benchmarks/cluster_speed.py [--quick] [--check]

Prints the CPU time of `decide` of our policy: cold (a new policy, no rows kept from earlier
decisions, all jobs wait) and warm (all jobs run, a tenth of them has new hints). It includes the
menu, the rows of goodput from the tables in the hints, values, prices, placement and the reasons of
all jobs; it does not include reading hints or the model fits, which the jobs do. Also prints the
largest gap between the solver and the optimum, over random instances with restart costs.
"""

from __future__ import annotations

import gc
import time
from dataclasses import replace

import numpy as np
from harness import finish, parse_args

from resilin.cluster.decision import ClusterStatus
from resilin.cluster.division.problem import Problem
from resilin.cluster.division.solve import exact, price
from resilin.cluster.job import JobSpec, JobStatus, Speeds
from resilin.cluster.menu import menus, sizes
from resilin.cluster.node import Node, free
from resilin.cluster.policies.by_name import by_name

SCALES = {"64x64": (64, 4, 64), "10kx1k": (10_000, 8, 1000), "100kx5k": (100_000, 8, 5000)}
"""Accelerators, accelerators of a host, jobs."""
LIMITS = {
    "64x64_cold_ms": 50,
    "64x64_warm_ms": 50,
    "10kx1k_cold_ms": 1000,
    "10kx1k_warm_ms": 100,
    "100kx5k_cold_ms": 5000,
    "100kx5k_warm_ms": 5000,
    "gap_percent": 0.5,
}
NOW = 100_000.0


def table(rng: np.random.Generator, offered: tuple[int, ...]) -> tuple[Speeds, ...]:
    """A job's goodput, as its hints tell it."""
    loss, power = rng.uniform(0, 0.2), rng.uniform(0.3, 1)
    goodput = tuple(float(size / (1 + loss * (size - 1) ** power)) for size in offered)
    return (Speeds(kind="gpu", sizes=offered, goodput=goodput),)


def waiting(accelerators: int, host: int, num_jobs: int) -> ClusterStatus:
    """A cluster whose jobs all wait."""
    rng = np.random.default_rng(num_jobs)
    nodes = tuple(
        Node(name=f"node-{i:05d}", accelerators=host) for i in range(accelerators // host)
    )
    offered = menus(nodes)["gpu"].sizes
    jobs = []
    for number in range(num_jobs):
        total = float(rng.lognormal(8, 2))
        jobs.append(
            JobStatus(
                spec=JobSpec(id=f"job-{number}", submitted=float(number), max_replicas=4096),
                speeds=table(rng, offered),
                profiled=int(2 ** rng.integers(0, 10)),
                done=total * float(rng.random()),
                total=total,
                waiting_since=NOW - 100,
            )
        )
    return ClusterStatus(now=NOW, nodes=nodes, jobs=tuple(jobs))


def decision_times(name: str, repeats: int) -> dict[str, float]:
    """Median CPU times of cold and warm decisions, in milliseconds."""
    status = waiting(*SCALES[name])
    offered = menus(status.nodes)["gpu"].sizes
    rng = np.random.default_rng(0)
    cold, warm = [], []
    for _ in range(repeats):
        policy = by_name("ours")
        gc.collect()
        start = time.process_time()
        decision = policy.decide(status, {})
        cold.append(time.process_time() - start)
        jobs = []
        for job in status.jobs:
            runs = decision.allocations.get(job.spec.id)
            speeds = table(rng, offered) if rng.random() < 0.1 else job.speeds
            since = None if runs else job.waiting_since
            jobs.append(replace(job, allocation=runs, speeds=speeds, waiting_since=since))
        busy = replace(status, now=NOW + 60, jobs=tuple(jobs))
        gc.collect()
        start = time.process_time()
        second = policy.decide(busy, {})
        warm.append(time.process_time() - start)
        free(status.nodes, second.allocations.values())
    return {
        f"{name}_cold_ms": 1e3 * float(np.median(cold)),
        f"{name}_warm_ms": 1e3 * float(np.median(warm)),
    }


def instance(seed: int) -> Problem:
    """Jobs with log values, restart costs, limits of growth, some of a fixed size."""
    rng = np.random.default_rng(seed)
    host = int(rng.choice([4, 8]))
    capacity = host * int(rng.integers(2, 33))
    num_jobs = int(rng.integers(2, 81))
    columns = np.array([0, *sizes(host, capacity)])
    power = rng.uniform(0.5, 1.1, (num_jobs, 1))
    loss = rng.uniform(0, 0.3, (num_jobs, 1)) * np.maximum(columns - 1, 0) ** power
    restart = np.repeat(rng.uniform(0.3, 1, (num_jobs, 1)), len(columns), axis=1)
    restart[np.arange(num_jobs), rng.integers(0, len(columns), num_jobs)] = 1
    weight = (rng.permutation(num_jobs) + 1.0)[:, None] / num_jobs
    values = weight * np.log(np.maximum(columns / (1 + loss) * restart, 1e-3))
    cap = rng.choice([1, 2, 4, 8, 16, 64, 10**6], num_jobs)
    values[(columns > cap[:, None]) & (columns > 0)] = -np.inf
    for row in np.flatnonzero(rng.random(num_jobs) < 0.15):
        can = np.flatnonzero(np.isfinite(values[row]))[1:]
        only = rng.choice(can)
        values[row, [each for each in can if each != only]] = -np.inf
    return Problem(
        values=values,
        sizes=columns,
        kind=np.where(columns > 0, 0, -1),
        capacity=np.array([capacity]),
        group=np.full(num_jobs, -1),
        limits=np.zeros(0, dtype=np.int64),
    )


def solver_gap(instances: int) -> dict[str, float]:
    """The largest gap, in percent of what the optimum adds to giving nobody anything."""
    gaps = []
    for seed in range(instances):
        problem = instance(seed)
        best = exact(problem).value(problem.values)
        found = price(problem).value(problem.values)
        gaps.append(100 * (best - found) / (best - float(problem.values[:, 0].sum())))
    return {
        "instances": instances,
        "gap_percent": max(gaps),
        "instances_at_optimum": int(sum(each < 1e-9 for each in gaps)),
    }


def main() -> None:
    args = parse_args(__doc__ or "")
    figures: dict[str, float] = {}
    for name in SCALES:
        figures |= decision_times(name, 3 if args.quick else 9)
    figures |= solver_gap(200)
    finish("cluster_speed", figures, LIMITS, check=args.check)


if __name__ == "__main__":
    main()
