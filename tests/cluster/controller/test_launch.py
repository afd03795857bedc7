"""The command and the environment of a part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from resilin.cluster.backends.base import Part
from resilin.cluster.controller import records as r
from resilin.cluster.controller.changes import apply
from resilin.cluster.controller.launch import Face, job_token, part_to_start
from resilin.cluster.controller.rules import Rules
from resilin.cluster.controller.state import State
from resilin.cluster.node import Node
from tests.cluster.controller.made import submitted

FACE = Face(url="https://head:1", token="secret")


def started(face: Face = FACE, when: float = 1700000000.0, **launch: Any) -> Part:
    """The part of a job that was submitted then, on a node with an H100."""
    job = submitted("job", when, max_replicas=4)
    node = Node(name="n1", accelerators=2, kind="h100")
    announced = r.Announced(
        time=1.0, name="job-g3-1", job="job", life=3, node="n1", accelerators=2, hosts=1
    )
    state = State(cluster="c1")
    for record in (
        r.Met(time=0.0, endpoint="store:29500", number=1),
        replace(job, launch=replace(job.launch, **launch)),
        r.NodeSeen(time=0.5, node=node),
        announced,
    ):
        state = apply(state, record)
    return part_to_start(state, state.parts["job-g3-1"], face, Rules(logs="/logs"))


def option(part: Part, name: str) -> str:
    return part.command[part.command.index(name) + 1]


def test_a_part_joins_the_rendezvous_of_its_life_with_its_own_workers():
    part = started(options=("--warm",), script=("train.py", "--lr", "1"))
    assert option(part, "--rdzv-id") == "c1-job-g3"
    assert option(part, "--rdzv-endpoint") == "store:29500"
    assert option(part, "--nproc") == "2"
    assert part.command[-4:] == ("--warm", "train.py", "--lr", "1")
    assert (part.node, part.log) == ("n1", "/logs/job-g3-1.log")


def test_it_knows_its_controller_and_the_kind_of_its_node():
    told = started(environment={"MINE": "1", "RESILIN_JOB": "another"}).environment
    assert told["RESILIN_SCHEDULER"] == "https://head:1"
    assert told["RESILIN_SCHEDULER_TOKEN"] == job_token("secret", "job") != "secret"
    assert (told["RESILIN_JOB"], told["MINE"]) == ("job", "1")
    assert told["RESILIN_ACCELERATOR"] == "h100"
    assert "RESILIN_SCHEDULER_CA" not in told
    signed = started(replace(FACE, ca="/shared/ca.pem")).environment
    assert signed["RESILIN_SCHEDULER_CA"] == "/shared/ca.pem"


def test_checkpoints_are_found_by_later_lives_and_by_no_later_job_of_the_name():
    first, again = started(), started(when=1700000500.0)
    assert option(first, "--checkpoint-dir") == "/work/resilin-runs/job-1700000000/checkpoints"
    assert option(again, "--checkpoint-dir") != option(first, "--checkpoint-dir")
    assert option(first, "--run-dir") == "/work/resilin-runs/job-1700000000"
    chosen = started(checkpoint_dir="s3://b/x", environment={"RESILIN_RUN_DIR": "off"})
    assert option(chosen, "--checkpoint-dir") == "s3://b/x"
    assert "--run-dir" not in chosen.command
