"""Replays a trace on a script: what would a cluster that breathes like this do to my model?

A batch-size trace is followed on whatever there is, by accumulation: the gradient of a step is the
one that a cluster of that size would have computed, to rounding. A capacity trace becomes such a
trace, given what each replica holds and how long a step takes; or it is followed for real, with
processes that come and go: `resilin.lab.capacity`.
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
    """The script ended well, but did not train as it was told to."""


def read_trace(
    path: str | os.PathLike[str], *, end: TraceEnd = "hold", restarts: TraceRestarts = "error"
) -> BatchTrace | CapacityTrace:
    """Reads a trace of either kind from a file.

    Raises:
        TraceError: It is not a trace; names the line.
        OSError: The file cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not a text: {error}") from None
    return parse_trace(text, source=os.fspath(path), end=end, restarts=restarts)


def as_batches(
    trace: BatchTrace | CapacityTrace,
    *,
    local_bsz: int | None = None,
    step_seconds: float | None = None,
    max_replicas: int | None = None,
    name: str = "the trace",
) -> BatchTrace:
    """The batch sizes that a trace of either kind stands for.

    Args:
        trace: A batch-size trace is returned as it is; the other arguments do not concern it.
        local_bsz: Samples of each replica in one step.
        step_seconds: Seconds of the trace that one step takes.
        max_replicas: Map the counts onto at most this many replicas first.
        name: What errors call the trace.

    Raises:
        ValueError: A capacity trace without the two values that it needs.
    """
    if isinstance(trace, BatchTrace):
        return trace
    if local_bsz is None or step_seconds is None:
        raise ValueError(
            f"{name} tells of replicas over time: batch sizes follow from local_bsz ({local_bsz}), "
            f"the samples of each replica in a step, and step_seconds ({step_seconds}), the time "
            "that a step takes"
        )
    return trace.batches(local_bsz, step_seconds=step_seconds, max_replicas=max_replicas)


def new_run_dir(path: str | os.PathLike[str] | None = None, kind: str = "replay") -> Path:
    """Makes the directory of a run.

    Args:
        path: Where; None finds a new name in `resilin-runs`, from the kind and the time.
        kind: What the name of such a directory begins with.

    Raises:
        ValueError: There is something in it already: runs do not share a directory.
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
    """Writes the trace that a run follows into its directory, and returns the file."""
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
    """Runs a script whose training follows a batch-size trace, whatever it asks for itself.

    The sizes need not divide anything. Micro-batches stay what the script allows at most, and what
    is beyond is accumulated. The trace is in steps of the optimizer, so a script trains for as
    long as it would without: by its own epochs.

    Args:
        trace: The batch sizes.
        script: A script that trains with an `AdaptiveDataLoader` and an `AdaptiveDataParallel`.
        arguments: What the script is given.
        run_dir: An empty directory for events, checkpoints and the trace itself.
        replicas: Processes that `resilin run` starts on this machine; None runs the plain script.
        rule: Scaling rule in place of the script's: a name, or `package.module:attribute`.
        seed: Seed of the order of samples, where the script gives none, and of the generators.

    Returns:
        The exit code of the script.

    Raises:
        ValueError: There is no such script or rule.
        NotTakenUp: The script ended well, but no training in it followed the trace.
    """
    script = launch.check_script(script)
    if rule is not None:
        launch.check_rule(rule)
    options: list[str] | None = None
    if replicas is not None:
        # A replay that fails is to be looked at, and not to be begun again behind its trace.
        options = ["--nproc", str(replicas), "--max-restarts", "0", "--memory-dir", "off"]
    env = launch.surroundings(
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
    """Looks whether a run that ended well did what it was to do.

    Args:
        run_dir: Its directory.
        traced: Whether a batch-size trace was to be followed.

    Raises:
        NotTakenUp: No training was told of, or none that followed the trace.
    """
    try:
        starts = [event for event in read_events(run_dir) if isinstance(event, StartEvent)]
    except ValueError:
        if any(run_dir.glob("events-*")):
            raise
        starts = []
    if not starts:
        raise NotTakenUp(
            "the script did not take up the trace: it ended without a step of a model in "
            "AdaptiveDataParallel on batches of an AdaptiveDataLoader"
        )
    if traced and not all(start.replays for start in starts):
        raise NotTakenUp(
            "the script did not take up the trace: it trained, but not on the batches of an "
            "AdaptiveDataLoader, which follows the trace"
        )
