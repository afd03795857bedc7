"""The start of a job: it refuses a memory that another job uses, and resumes the newest state."""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import dataclass

from resilin.engine.base import Engine
from resilin.training.state.checkpoint import Checkpoints
from resilin.training.state.memory import MemoryCopies
from resilin.training.state.memory_file import Writer, in_use
from resilin.training.state.registry import Registry
from resilin.training.state.replica_parts import of_process
from resilin.training.state.restore import newest_state
from resilin.training.state.snapshot import Version

logger = logging.getLogger("resilin")

PATIENCE = 30.0
"""Seconds in which other processes that write to this job's memory have to be gone.

As long as an agent gives its workers to end. After it they are taken for those of another job.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start of a job."""

    branch: int = 0
    """Random number of this start, the same on all replicas."""
    resumed: Version | None = None
    """The state that the job resumed from; None for a new job."""
    source: str = ""
    """Its storage: `memory`, `checkpoint`, or empty."""
    in_memory: bool = False
    """Whether every host that keeps copies has it in its memory."""


def start(
    engine: Engine,
    registry: Registry,
    memory: MemoryCopies | None,
    checkpoints: Checkpoints | None,
    *,
    steps: int,
) -> Start:
    """Restores the newest state that any replica can find. Collective.

    Args:
        engine: Who is in the job.
        registry: Gets the state.
        memory: The copies of this host.
        checkpoints: Those of the job.
        steps: Steps that the job has made already: an older state is left alone.

    Raises:
        RuntimeError: A process that is none of this job's writes to the same memory.
        CheckpointError: There are checkpoints, and none can be read.
        ValueError: One was written by a newer resilin, or belongs to another model.
    """
    began = time.monotonic()
    branch = _begin_branch(engine, memory)
    newest = newest_state(engine, memory, checkpoints, wanted=registry.wanted)
    snapshot, source = newest.snapshot, newest.source
    # What the job does from here on is newer than whatever it has left before.
    engine.raise_generation(newest.generation)
    if snapshot is None or snapshot.version.step < steps:
        # The checkpoint of another framework may have brought the job further already.
        _log(engine, "started", f"at step {steps}")
        return Start(branch=branch)
    mine = of_process(snapshot, engine.membership.process, engine.membership.num_replicas)
    registry.restore(mine, first_replica=engine.membership.is_first)
    seconds = time.monotonic() - began
    version = snapshot.version
    _log(engine, "resumed", f"at step {version.step} from {source} (restored in {seconds:.2f} s)")
    in_memory = source == "memory" and all(engine.gather(newest.in_memory))
    return Start(branch=branch, resumed=version, source=source, in_memory=in_memory)


def _begin_branch(engine: Engine, memory: MemoryCopies | None) -> int:
    """Draws this start's number, and refuses to mix with a job that is alive. Collective."""
    everyone = engine.gather([*Writer.here(), secrets.randbits(62)])
    if memory is not None:
        ours = {Writer(pid, started) for pid, started, _ in everyone}
        deadline = time.monotonic() + PATIENCE
        while others := memory.scan().writers() - ours:
            # Workers of this job that their agent has not ended yet, or that notice that it died.
            if time.monotonic() > deadline:
                raise RuntimeError(in_use(memory.directory, min(others)))
            time.sleep(0.1)
    return int(everyone[0][2])


def _log(engine: Engine, verb: str, rest: str) -> None:
    if engine.membership.is_first:
        num = engine.membership.num_replicas
        logger.info("%s %d replica%s %s", verb, num, "s" if num > 1 else "", rest)
