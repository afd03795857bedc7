"""Texts of several versions of Slurm, read without one."""

from __future__ import annotations

import signal
from datetime import datetime

import pytest

from resilin.cluster.backends import slurm_answers as answers
from resilin.cluster.backends.base import PartState

NODE = (
    "NodeName=gpu-1 Arch=x86_64 CoresPerSocket=32 CPUAlloc=16 CPUEfctv=126 CPUTot=128 CPULoad=3.1 "
    "AvailableFeatures=nvme Gres=gpu:a100:4(S:0-1),gpu:v100:2(S:0),shard:8 GresDrain=N/A "
    "GresUsed=gpu:a100:3(IDX:0-2),gpu:v100:1(IDX:0),shard:0(0/2,0/2) "
    "NodeAddr=gpu-1 Version=24.05.1 OS=Linux 6.1 #1 SMP RealMemory=512000 AllocMem=64000 "
    "MemSpecLimit=2000 ThreadsPerCore=2 State={state} Partitions=gpu,spot "
    "CfgTRES=cpu=126 {reason}"
)


def machine(state="MIXED", reason=""):
    (found,) = answers.machines(NODE.format(state=state, reason=reason) + "\n\n")
    return found


def job(state="RUNNING", status="0", **more):
    cells = {
        "number": "17",
        "name": "ours.job-g1-0",
        "state": state,
        "node": "n1",
        "wanted": "n1",
        "status": status,
        "started": "2026-03-01T10:00:00",
        "limit": "UNLIMITED",
        "comment": "resilin accelerators=3",
        "reason": "None",
        **more,
    }
    (found,) = answers.jobs("|".join(cells.values()) + "|\n")
    return found


def test_the_kind_that_a_node_has_most_of_counts():
    found = machine()
    assert (found.kind, found.gpus, found.gpus_used) == ("a100", 4, 3)
    assert (found.cpus, found.cpus_used, found.threads) == (126, 16, 2)
    assert (found.memory, found.memory_used) == (510000, 64000)
    assert found.partitions == {"gpu", "spot"}
    assert found.up
    assert not found.leaving
    assert found.since is None


@pytest.mark.parametrize(
    ("text", "count"),
    [("gpu:2", 2), ("gpu:(null):2(IDX:0-1)", 2), ("gpu:8(S:0-1)", 8), ("(null)", 0), ("mps:9", 0)],
)
def test_gpus_without_a_kind(text, count):
    line = f"NodeName=n1 CPUTot=8 Gres={text} GresUsed={text} State=IDLE RealMemory=1"
    (found,) = answers.machines(line)
    assert (found.kind, found.gpus, found.gpus_used) == ("", count, count)


@pytest.mark.parametrize(
    ("state", "up", "leaving"),
    [
        ("IDLE", True, False),
        ("MIXED+PLANNED", True, False),
        ("IDLE+CLOUD+POWERED_DOWN", True, False),
        ("ALLOCATED+DRAIN", True, True),
        ("IDLE+DRAIN+MAINTENANCE", True, True),
        ("MIXED+FAILING", True, True),
        ("DOWN*", False, False),
        ("DOWN+NOT_RESPONDING", False, False),
        ("IDLE*", False, False),
        ("IDLE*+DRAIN", False, True),
        ("IDLE+POWERING_DOWN", False, False),
        ("FUTURE", False, False),
    ],
)
def test_states_of_nodes(state, up, leaving):
    found = machine(state)
    assert (found.up, found.leaving) == (up, leaving)


def test_a_reason_is_free_text():
    found = machine(
        "IDLE+DRAIN", "Reason=State=DOWN? NodeName=x fan broken [bob@2026-03-01T10:00:00]"
    )
    assert found.name == "gpu-1"
    assert found.up
    assert found.since == datetime(2026, 3, 1, 10).timestamp()


@pytest.mark.parametrize(
    ("state", "status", "phase", "code"),
    [
        ("PENDING", "0", PartState.PENDING, None),
        ("CONFIGURING", "0", PartState.PENDING, None),
        ("RUNNING", "0", PartState.RUNNING, None),
        ("COMPLETING", "0", PartState.RUNNING, None),
        ("SUSPENDED", "0", PartState.RUNNING, None),
        ("SOMETHING_NEW", "0", PartState.RUNNING, None),
        ("COMPLETED", "0", PartState.ENDED, 0),
        ("FAILED", "768", PartState.ENDED, 3),
        ("FAILED", "3:0", PartState.ENDED, 3),
        ("FAILED", "0:9", PartState.ENDED, 128 + signal.SIGKILL),
        ("FAILED", "9", PartState.ENDED, 128 + signal.SIGKILL),
        ("FAILED", str(143 << 8), PartState.ENDED, None),
        ("FAILED", "0", PartState.ENDED, None),
        ("OUT_OF_MEMORY", "0:125", PartState.ENDED, 128 + 125),
        ("CANCELLED", "0", PartState.ENDED, None),
        ("TIMEOUT", "15", PartState.ENDED, None),
        ("NODE_FAIL", "0", PartState.ENDED, None),
        ("PREEMPTED", "9", PartState.ENDED, None),
    ],
)
def test_states_of_jobs(state, status, phase, code):
    part = job(state, status).part("job-g1-0")
    assert (part.state, part.code) == (phase, code)
    assert part.reason == state


def test_what_a_job_says():
    found = job()
    assert (found.number, found.name, found.node, found.accelerators) == (
        17,
        "ours.job-g1-0",
        "n1",
        3,
    )
    assert found.started == datetime(2026, 3, 1, 10).timestamp()
    assert not found.asked
    waits = job("PENDING", node="", started="N/A", reason="ReqNodeNotAvail, UnavailableNodes:n1")
    assert (waits.node, waits.started) == ("n1", None)
    assert waits.part("x").reason == "PENDING: ReqNodeNotAvail, UnavailableNodes:n1"
    others = job(comment="what | a | comment asked")
    assert (others.accelerators, others.reason, others.asked) == (0, "None", True)


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("UNLIMITED", None), ("INVALID", None), ("1:00", 1), ("1:30:00", 90), ("2-01:05:00", 2945)],
)
def test_time_limits(text, minutes):
    assert job(limit=text).limit == minutes


def test_what_is_no_job_is_an_error():
    assert list(answers.jobs("\n")) == []
    with pytest.raises(ValueError, match="squeue printed 'slurm_load_jobs error'"):
        list(answers.jobs("slurm_load_jobs error"))


def test_reservations_and_partitions():
    text = (
        "ReservationName=upkeep StartTime=2026-03-01T10:00:00 EndTime=2026-03-01T12:00:00 "
        "Duration=02:00:00 Nodes=n[1-2] NodeCnt=2 Flags=MAINT,SPEC_NODES\n\n"
    )
    (found,) = answers.reservations(text)
    assert (found.name, found.nodes, found.end - found.start) == ("upkeep", "n[1-2]", 7200)
    assert list(answers.reservations("No reservations in the system\n")) == []
    partitions = "PartitionName=a Default=NO Nodes=n1\nPartitionName=b Default=YES Nodes=n2\n"
    assert answers.default_partition(partitions) == "b"
    assert answers.default_partition("PartitionName=a Default=NO\n") is None
