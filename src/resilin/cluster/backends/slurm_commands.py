"""Calls of the commands of Slurm, and the batch script of a part."""

from __future__ import annotations

import os
import re
import shlex
import subprocess

from resilin.cluster.backends.base import BackendError, Part

TIMEOUT = 60.0
"""Seconds after which a command counts as unanswered; the controller of a busy site takes many."""
FORGOTTEN = re.compile(
    r"(SLURM|SQUEUE|SCANCEL|SCONTROL)_(?!CONF)|SBATCH_(WAIT|EXPORT)$|RESILIN_.*TOKEN"
)
"""Variables that the commands do not get: those of a Slurm job that the controller may run in, what
changes their answers, and secrets, which a job would inherit."""


def script(part: Part) -> str:
    """The batch script: it becomes the part, so that signals to the script reach the part.

    Raises:
        BackendError: A variable has a name that no shell takes.
    """
    lines = ["#!/bin/sh"]
    for name, value in part.environment.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise BackendError(f"{name!r} cannot be the name of a variable of {part.name}")
        # Not as an argument of sbatch, which everybody on this machine can read.
        lines.append(f"export {name}={shlex.quote(value)}")
    return "\n".join([*lines, f"exec {shlex.join(part.command)}", ""])


def change(*command: str) -> None:
    """Call a command for a job that may have ended meanwhile.

    Raises:
        BackendError: It failed for another reason.
    """
    try:
        call(*command)
    except BackendError as error:
        if not re.search("already complet|not running|nvalid job id", str(error)):
            raise


def call(*command: str, text: str = "") -> str:
    """Output of a command of Slurm.

    Raises:
        BackendError: It failed, or did not end in time.
    """
    keeps = {name: value for name, value in os.environ.items() if not FORGOTTEN.match(name)}
    try:
        done = subprocess.run(
            command,
            env={**keeps, "SLURM_TIME_FORMAT": "standard", "LC_ALL": "C.UTF-8"},
            input=text,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        raise BackendError(f"{command[0]} gave no answer in {TIMEOUT:.0f} s") from None
    except OSError as error:
        raise BackendError(f"{command[0]} cannot be called: {error.strerror}") from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise BackendError(f"{' '.join(command[:3])}: {said}")
    return done.stdout
