"""Replay a trace on a script, to see the effect of a changing cluster on a model.

A batch-size trace is followed on the available hardware, by accumulation: the gradient of a step is
the one that a cluster of that size would have computed, up to rounding. A capacity trace is turned
into such a trace, given the samples per replica and the duration of a step; or it is followed by
real processes that join and leave: `resilin.lab.capacity`.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path

from resilin.core.events import StartEvent
from resilin.core.trace import (
    BatchTrace,
    CapacityTrace,
    TraceEnd,
    TraceError,
    TraceRestarts,
    parse_trace,
)
from resilin.engine import environment
from resilin.lab import launch
from resilin.telemetry.read import read_events

TRACE = "trace.csv"
"""The batch-size trace that a run follows, in its run directory."""


class NotTakenUp(ValueError):
    """The script succeeded, but did not follow the trace."""


def read_trace(
    path: str | os.PathLike[str], *, end: TraceEnd = "hold", restarts: TraceRestarts = "error"
) -> BatchTrace | CapacityTrace:
    """Reads a trace of either kind from a file.

    Raises:
        TraceError: The file is not a trace; the message names the line.
        OSError: The file cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not a text file: {error}") from None
    return parse_trace(text, source=os.fspath(path), end=end, restarts=restarts)


def as_batches(
    trace: BatchTrace | CapacityTrace,
    *,
    local_bsz: int | None = None,
    step_seconds: float | None = None,
    max_replicas: int | None = None,
    name: str = "the trace",
) -> BatchTrace:
    """The batch sizes of a trace of either kind.

    Args:
        trace: A batch-size trace is returned unchanged; the other arguments are ignored for it.
        local_bsz: Samples per replica and step.
        step_seconds: Duration of a step in seconds of the trace.
        max_replicas: First scale the counts to at most this many replicas.
        name: Name of the trace in errors.

    Raises:
        ValueError: A capacity trace without the two values that it needs.
    """
    if isinstance(trace, BatchTrace):
        return trace
    if local_bsz is None or step_seconds is None:
        raise ValueError(
            f"{name} has replicas over time: turning them into batch sizes needs local_bsz "
            f"({local_bsz}), the samples per replica and step, and step_seconds ({step_seconds}), "
            "the duration of a step"
        )
    return trace.batches(local_bsz, step_seconds=step_seconds, max_replicas=max_replicas)


def new_run_dir(path: str | os.PathLike[str] | None = None, kind: str = "replay") -> Path:
    """Create the directory of a run.

    Args:
        path: The directory; None chooses a new name in `resilin-runs`, from the kind and the time.
        kind: Prefix of such a name.

    Raises:
        ValueError: The directory is not empty: runs do not share a directory.
    """
    if path is not None:
        made = Path(path)
        made.mkdir(parents=True, exist_ok=True)
        if any(made.iterdir()):
            raise ValueError(f"run directory {str(made)!r} is not empty: choose a new one")
        return made
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        made = Path(environment.RUNS) / (
            f"{kind}-{stamp}" if number == 1 else f"{kind}-{stamp}-{number}"
        )
        try:
            made.mkdir(parents=True)
            break
        except FileExistsError:
            continue
    return made


def write_trace(trace: BatchTrace, run_dir: Path) -> Path:
    """Write the trace of a run to its directory, and return the file."""
    path = run_dir / TRACE
    path.write_text(trace.format(), encoding="utf-8")
    return path


def replay_batches(
    trace: BatchTrace,
    script: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    *,
    run_dir: Path,
    replicas: int | None = None,
    rule: str | None = None,
    seed: int | None = None,
) -> int:
    """Run a script whose training follows a batch-size trace, whatever size the script asks for.

    The sizes need not divide anything. Micro-batches are at most as large as the script allows; the
    rest is accumulated. The trace is in optimizer steps, and the length of the training still
    follows from the epochs of the script.

    Args:
        trace: The batch sizes.
        script: A script that trains with an `AdaptiveDataLoader` and an `AdaptiveDataParallel`.
        arguments: Arguments of the script.
        run_dir: An empty directory for events, checkpoints and the trace itself.
        replicas: Workers that `resilin run` starts on this machine; None runs the plain script.
        rule: Scaling rule, overriding the script's: a name, or `package.module:attribute`.
        seed: Seed of the order of samples, unless the script sets one, and of random generators.

    Returns:
        The exit code of the script.

    Raises:
        ValueError: There is no such script or rule.
        NotTakenUp: The script succeeded, but no training in it followed the trace.
    """
    script = launch.check_script(script)
    if rule is not None:
        launch.check_rule(rule)
    options: list[str] | None = None
    if replicas is not None:
        # A failed replay should be examined, not restarted in the middle of its trace.
        options = ["--nproc", str(replicas), "--max-restarts", "0", "--memory-dir", "off"]
    env = launch.environment_of(
        run_dir, trace=write_trace(trace, run_dir), end=trace.end, rule=rule, seed=seed
    )
    line = launch.command(script, arguments, seeded=seed is not None, run_options=options)
    process = launch.begin(line, env)
    try:
        process.wait()
    finally:
        launch.end([process], launch.SCRIPT_GRACE if options is None else launch.AGENT_GRACE)
    code = launch.exit_code(process)
    if code == 0:
        check_taken_up(run_dir, traced=True)
    return code


def check_taken_up(run_dir: Path, *, traced: bool) -> None:
    """Check whether a successful run trained as intended.

    Args:
        run_dir: Its directory.
        traced: Whether it had to follow a batch-size trace.

    Raises:
        NotTakenUp: No training was reported, or none that followed the trace.
    """
    try:
        starts = [event for event in read_events(run_dir) if isinstance(event, StartEvent)]
    except ValueError:
        if any(run_dir.glob("events-*")):
            raise
        starts = []
    if not starts:
        raise NotTakenUp(
            "the script did not follow the trace: it ended without a step of a model in "
            "AdaptiveDataParallel on batches of an AdaptiveDataLoader"
        )
    if traced and not all(start.replays for start in starts):
        raise NotTakenUp(
            "the script did not follow the trace: it trained, but not on the batches of an "
            "AdaptiveDataLoader, which follows the trace"
        )
