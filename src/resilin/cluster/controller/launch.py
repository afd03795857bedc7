"""The command of a part: `resilin run`, joined to the rendezvous of its job's life."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from resilin.cluster.backends.base import Part
from resilin.cluster.controller.rules import Rules
from resilin.cluster.controller.state import Job, PartRecord, State

SCHEDULER = "RESILIN_SCHEDULER"
"""URL of the controller, for the hints of a job."""
SCHEDULER_TOKEN = "RESILIN_SCHEDULER_TOKEN"
"""Token for the hints of this job alone."""
SCHEDULER_CA = "RESILIN_SCHEDULER_CA"
"""File with the certificate that signs that of the controller."""
JOB = "RESILIN_JOB"
"""Id of the job in the cluster."""
ACCELERATOR = "RESILIN_ACCELERATOR"
"""Kind of accelerator of the node."""
RUN_DIR = "RESILIN_RUN_DIR"
"""Directory of the event log, if the user sets it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Face:
    """The controller as jobs reach it."""

    url: str
    """Its URL."""
    token: str
    """Token of the cluster; jobs get one derived from it."""
    ca: str = ""
    """File on the nodes with the certificate that signs that of the controller; empty for those
    that a system knows."""


def job_token(token: str, job: str) -> str:
    """The token of one job: it is good for its hints alone."""
    return hmac.new(token.encode(), job.encode(), hashlib.sha256).hexdigest()


def part_to_start(state: State, part: PartRecord, face: Face, rules: Rules) -> Part:
    """All that a backend needs to start a part that was announced."""
    job = state.jobs[part.job]
    assert state.meeting is not None, "parts are announced when there is a rendezvous store"
    environment = {
        **job.launch.environment,
        SCHEDULER: face.url,
        SCHEDULER_TOKEN: job_token(face.token, part.job),
        JOB: part.job,
        **({SCHEDULER_CA: face.ca} if face.ca else {}),
    }
    if part.node in state.nodes:
        # The tables of its hints have the names of the menu.
        environment[ACCELERATOR] = state.nodes[part.node].node.kind
    return Part(
        name=part.name,
        job=part.job,
        node=part.node,
        accelerators=part.accelerators,
        command=command(state.cluster, job, part, state.meeting.endpoint),
        environment=environment,
        directory=job.launch.directory,
        log=rules.log(part.name),
    )


def command(cluster: str, job: Job, part: PartRecord, endpoint: str) -> tuple[str, ...]:
    """The program and arguments of a part."""
    spec, launch = job.spec, job.launch
    # Agents of a job of a fixed size wait for each other; all others take who is there.
    nodes = f"1:{spec.max_replicas}" if spec.elastic else f"{job.hosts}:{job.hosts}"
    options = ["--nnodes", nodes, "--nproc", str(part.accelerators)]
    options += ["--rdzv-id", f"{cluster}-{part.job}-g{part.life}", "--rdzv-endpoint", endpoint]
    options += ["--rdzv-conf", "is_host=0"]
    # All lives of the job write to one log, and find the checkpoints of the former ones. A job that
    # is submitted later under the same name must not find those.
    own = f"{launch.directory}/resilin-runs/{part.job}-{spec.submitted:.0f}"
    options += ["--checkpoint-dir", launch.checkpoint_dir or f"{own}/checkpoints"]
    if RUN_DIR not in launch.environment:
        options += ["--run-dir", own]
    return (launch.python, "-m", "resilin.cli", "run", *options, *launch.options, *launch.script)
