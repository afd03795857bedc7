"""Twelve made-up jobs on a cluster of eight nodes: first come, first served against shared sizes.

    python examples/cluster_policies.py

No machine and no data are needed: the speed of each job at each size is written down. Under FIFO
each job has the size that its user asked for, until it ends. Under our policy sizes follow what the
jobs make of them, and what they have left; with `unknown`, nobody knows what is left.
"""

from __future__ import annotations

import random

from resilin.cluster.job import JobSpec, Speeds
from resilin.cluster.policies.by_name import by_name
from resilin.cluster.simulation.report import fairness, figures, times
from resilin.cluster.simulation.run import Result, Settings, simulate
from resilin.cluster.simulation.workload import GivenJob

NODES, PER_NODE = 8, 4
SIZES = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32)


def make_job(number: int, chance: random.Random) -> GivenJob:
    """A job of 10 minutes to 10 hours on one accelerator, that scales well or badly."""
    loss = chance.choice([0.01, 0.05, 0.2])
    goodput = tuple(size / (1 + loss * (size - 1)) for size in SIZES)
    return GivenJob(
        wishes=JobSpec(
            id=f"job-{number:02}", submitted=float(chance.randrange(7200)), max_replicas=32
        ),
        work=600.0 * 60 ** chance.random(),
        speeds=(Speeds(kind="gpu", sizes=SIZES, goodput=goodput),),
        replicas=chance.choice([4, 8, 16]),
    )


def line(name: str, result: Result, other: Result) -> str:
    told = figures(result)
    fair = fairness([(times(result), times(other))])
    return (
        f"{name:<14}{told.mean:>8.0f}{told.p99:>8.0f}{told.makespan:>10.0f}{told.restarts:>10.1f}"
        f"{told.use:>7.0%}{fair.no_slower:>11.0%}"
    )


def main() -> None:
    chance = random.Random(7)
    jobs = [make_job(number, chance) for number in range(12)]
    jobs.sort(key=lambda job: job.wishes.submitted)
    cluster = {"nodes": NODES, "per_node": PER_NODE}
    fifo = simulate(jobs, by_name("fifo"), Settings(**cluster))
    known = simulate(jobs, by_name("ours"), Settings(**cluster))
    unknown = simulate(jobs, by_name("ours"), Settings(**cluster, end="unknown"))
    print("policy            mean     p99  makespan  restarts    use  no slower")
    print(line("fifo", fifo, fifo))
    print(line("ours, known", known, fifo))
    print(line("ours, unknown", unknown, fifo))


if __name__ == "__main__":
    main()
