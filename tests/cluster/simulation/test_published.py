"""Published simulations of the Pollux artifact, reproduced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from resilin.cluster.policies.by_name import by_name
from resilin.cluster.simulation import report
from resilin.cluster.simulation.run import Settings, simulate
from resilin.cluster.simulation.workload import read
from resilin.core.trace import CapacityTrace

ROOT = Path(__file__).parents[3]
DATA = Path(os.environ.get("RESILIN_DATA", ROOT.parent / "shared" / "data"))
POLLUX = DATA / "pollux"
pytestmark = pytest.mark.skipif(
    not POLLUX.is_dir(), reason=f"the Pollux artifact's data are not in {POLLUX} (RESILIN_DATA)"
)


def workload(number: int, load: str = ""):
    return read(POLLUX / f"workloads{load}" / f"workload-{number}.csv", POLLUX / "traces")


def published(policy: str, number: int, load: str = "1.0") -> dict[str, float]:
    path = POLLUX / "results-jobload" / f"{policy}-{load}" / "summary.json"
    return report.published(path)[f"workload-{number}"]


@pytest.mark.parametrize("policy", ["tiresias", "optimus"])
@pytest.mark.parametrize("number", [3, 6])
def test_every_job_takes_as_long_as_published_to_the_second(policy, number):
    found = simulate(workload(number), by_name(policy))
    assert report.times(found) == published(policy, number)


@pytest.mark.parametrize("policy", ["tiresias", "optimus"])
def test_other_loads_come_out_to_the_second_too(policy):
    found = simulate(workload(5, "-0.5"), by_name(policy))
    assert report.times(found) == published(policy, 5, "0.5")


def test_our_policy_is_faster_than_published_and_gives_the_same_bits_twice():
    jobs = workload(3, "-0.5")
    found = simulate(jobs, by_name("ours"))
    theirs = published("pollux", 3, "0.5")
    assert report.figures(found).mean < sum(theirs.values()) / len(theirs)
    assert simulate(jobs, by_name("ours")) == found
    first = min(job.submitted for job in found.jobs)
    last = max(job.finished for job in found.jobs)
    assert found.capacity == 64 * (last - first)
    assert sum(job.served for job in found.jobs) <= found.capacity


def test_recorded_jobs_finish_on_recorded_spot_capacity():
    path = DATA / "capacity" / "gcp_spot_a100.csv"
    trace = CapacityTrace.parse(path.read_text(), source=str(path), end="repeat").simplified()
    jobs = workload(3, "-0.5")[:20]
    found = simulate(jobs, by_name("ours"), Settings(trace=trace, end="unknown"))
    assert 0.1 < report.figures(found).use <= 1
    # The market never has more than the whole cluster would have, and at times less.
    first = min(job.submitted for job in found.jobs)
    last = max(job.finished for job in found.jobs)
    assert 0 < found.capacity < 64 * (last - first)
    assert all(job.stretches[-1].end == job.finished for job in found.jobs)
