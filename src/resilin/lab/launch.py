"""Start, control and stop the scripts of the lab.

A script is controlled through environment variables only, so it needs no code for the lab. Run as
`python -m resilin.lab.launch script.py arguments`, this module seeds the generators of Python,
numpy and torch with `RESILIN_SEED`, and then runs the script as `python script.py arguments` would.
"""

from __future__ import annotations

import os
import random
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from resilin.core.rules import get_rule
from resilin.core.trace import TraceEnd
from resilin.engine import environment

OWN = (
    environment.AGENT,
    environment.BATCH_TRACE,
    environment.BATCH_TRACE_END,
    environment.CHECKPOINT_DIR,
    environment.LAB,
    environment.MEMORY_DIR,
    environment.RULE,
    environment.RUN_DIR,
    environment.SEED,
    environment.STOP_AT,
)
"""Environment variables that the lab sets for a run, or removes from its environment."""
AGENT_GRACE = 45.0
"""Seconds for an agent to stop: its workers get 30 of them to save."""
SCRIPT_GRACE = 10.0
"""Seconds for a script to stop."""


def check_rule(rule: str) -> str:
    """Return the rule if it is valid: a name, or `package.module:attribute`.

    The import itself is left to the process of the script, which has the right path.

    Raises:
        ValueError: The name is unknown, or the rule of this name needs parameters.
    """
    module, colon, attribute = rule.partition(":")
    if not colon:
        get_rule(rule)
    elif not (module and attribute):
        raise ValueError(f"rule ({rule!r}) must be a name or package.module:attribute")
    return rule


def check_script(script: str | os.PathLike[str]) -> Path:
    """Return the script as a path.

    Raises:
        ValueError: There is no such file.
    """
    path = Path(script)
    if not path.is_file():
        raise ValueError(f"there is no script {str(path)!r}")
    return path


def command(
    script: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    *,
    seeded: bool = False,
    run_options: Sequence[str] | None = None,
) -> list[str]:
    """The command line that runs a script.

    Args:
        script: The script.
        arguments: Its arguments.
        seeded: Whether generators are seeded before it starts.
        run_options: Options of `resilin run`, if the script is started by it.
    """
    start = [sys.executable]
    if run_options is not None:
        start += ["-m", "resilin.cli", "run", *run_options]
    if seeded:
        start += ["-m", "resilin.lab.launch"]
    return [*start, os.fspath(script), *arguments]


def environment_of(
    run_dir: Path,
    *,
    trace: Path | None = None,
    end: TraceEnd = "hold",
    rule: str | None = None,
    seed: int | None = None,
    stop_at: int | None = None,
) -> dict[str, str]:
    """The environment of a run, which controls its training.

    Args:
        run_dir: Directory for events, and for checkpoints if the script makes any.
        trace: File with a batch-size trace to follow.
        end: Behaviour after the end of the trace.
        rule: Scaling rule, overriding the script's.
        seed: Seed of the order of samples, unless the script sets one, and of generators.
        stop_at: Samples on the clock of the job at which the script is ended.
    """
    env = {name: value for name, value in os.environ.items() if name not in OWN}
    env[environment.RUN_DIR] = str(run_dir.absolute())
    env[environment.LAB] = "1"
    if trace is not None:
        env[environment.BATCH_TRACE] = str(trace.absolute())
        env[environment.BATCH_TRACE_END] = end
    if rule is not None:
        env[environment.RULE] = rule
    if seed is not None:
        env[environment.SEED] = str(seed)
    if stop_at is not None:
        env[environment.STOP_AT] = str(stop_at)
    return env


def begin(line: Sequence[str], env: dict[str, str], output: Any = None) -> subprocess.Popen[bytes]:
    """Start a process that signals of the terminal do not reach: only the caller stops it.

    Args:
        line: Its command line.
        env: Its environment.
        output: A file for its output; None inherits ours.
    """
    return subprocess.Popen(
        line,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        start_new_session=True,
    )


def end(processes: Sequence[subprocess.Popen[bytes]], grace: float) -> None:
    """Ask processes to stop, kill those that have not ended in time, and reap all of them.

    Args:
        processes: Processes of `begin`; some may have ended already.
        grace: Seconds that they get. A second Ctrl-C cuts this short.
    """
    try:
        for process in processes:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + grace
        with suppress(subprocess.TimeoutExpired):
            for process in processes:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            if process.poll() is None:
                # The whole group, as a script may have its own workers.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def exit_code(process: subprocess.Popen[bytes]) -> int:
    """The exit code as a shell reports it: 128 + N if signal N ended the process."""
    code = process.returncode
    return 128 - code if code < 0 else code


@contextmanager
def stoppable() -> Iterator[None]:
    """Make SIGTERM leave this block like Ctrl-C, so that processes started in it are stopped."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)  # the cleanup must not be interrupted
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def seed_generators(seed: int) -> None:
    """Seeds the global generators of Python, numpy and torch."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**64)


def main() -> None:
    """Runs the script that the command line names."""
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m resilin.lab.launch script.py [arguments]")
    del sys.argv[0]
    script = sys.argv[0]
    if not getattr(sys.flags, "safe_path", False):
        # `python script.py` looks for modules there first; this entry was the working directory.
        sys.path[0] = str(Path(script).resolve().parent)
    if seed := os.environ.get(environment.SEED):
        seed_generators(int(seed))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
