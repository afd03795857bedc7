"""`SlurmOptions`: wishes of the operator of a cluster, and the arguments of `sbatch` they make."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from resilin.cluster.backends.base import BackendError, Part
from resilin.cluster.backends.slurm_answers import Machine
from resilin.core import _validate

NOTICE = 60
"""Seconds before its time limit at which a part is asked to save and leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """Options with which the parts of a cluster are submitted."""

    partition: str | None = None
    """Partition; None is the default one of the site."""
    account: str | None = None
    """Account that is charged."""
    qos: str | None = None
    """Quality of service."""
    reservation: str | None = None
    """Reservation whose nodes are used, and no others."""
    time: int | None = None
    """Time limit of a part, in minutes; None leaves it to the partition."""
    accelerators: int = 0
    """Accelerators of a node for which Slurm knows no GPUs: it is split into that many shares of
    CPUs and memory."""
    notice: int = NOTICE
    """Seconds before the time limit at which a part is asked to save and leave."""
    sbatch: tuple[str, ...] = ()
    """More arguments of `sbatch`."""

    def __post_init__(self) -> None:
        if self.time is not None:
            _validate.whole("time", self.time, at_least=1)
        _validate.whole("accelerators", self.accelerators, at_least=0)
        _validate.whole("notice", self.notice, at_least=1)

    def accelerators_of(self, machine: Machine) -> int:
        """Accelerators of a node."""
        return machine.gpus or self.accelerators

    def _share(self, machine: Machine) -> tuple[int, int]:
        """CPUs and megabytes of memory that go with one accelerator."""
        total = self.accelerators_of(machine)
        cpus = max(1, machine.cpus // total)
        if cpus >= machine.threads:
            cpus -= cpus % machine.threads
        return cpus, machine.memory // total

    def free(self, machine: Machine, ours: int) -> int:
        """Accelerators of a node that jobs of others leave."""
        total = self.accelerators_of(machine)
        cpus, memory = self._share(machine)
        left = [total - max(0, machine.gpus_used - ours)] if machine.gpus else [total]
        left.append((machine.cpus - max(0, machine.cpus_used - ours * cpus)) // cpus)
        if memory:
            left.append((machine.memory - max(0, machine.memory_used - ours * memory)) // memory)
        return max(0, min(left))

    def arguments(self, part: Part, machine: Machine, limit: int | None) -> Sequence[str]:
        """Arguments of `sbatch` for a part, but for its name.

        Args:
            part: The part.
            machine: Its node.
            limit: Time limit in minutes; None leaves it to the partition.

        Raises:
            BackendError: The node does not have as many accelerators.
        """
        total = self.accelerators_of(machine)
        if not 1 <= part.accelerators <= total:
            raise BackendError(
                f"{part.name} asks for {part.accelerators} accelerators, and {machine.name} has "
                f"{total}"
            )
        cpus, memory = self._share(machine)
        found = {
            "comment": comment(part.accelerators),
            "nodes": "1",
            "ntasks": "1",
            "nodelist": part.node,
            "cpus-per-task": str(cpus * part.accelerators),
            "dependency": "singleton",
            "signal": f"B:USR1@{self.notice}",
            "chdir": part.directory,
            # Slurm fills in what follows a percent sign.
            "output": part.log.replace("%", "%%") or os.devnull,
            "open-mode": "append",
            "export": "ALL",
        }
        if memory:
            found["mem"] = f"{memory * part.accelerators}M"
        if machine.gpus:
            of = f"{machine.kind}:" if machine.kind else ""
            found["gres"] = f"gpu:{of}{part.accelerators}"
        for name in ("partition", "account", "qos", "reservation"):
            if value := getattr(self, name):
                found[name] = value
        if limit is not None:
            found["time"] = str(limit)
        given = [f"--{name}={value}" for name, value in found.items()]
        return ["--parsable", "--no-requeue", *given, *self.sbatch]


def comment(accelerators: int) -> str:
    """The comment of the job of a part: it says how many accelerators it has."""
    return f"resilin accelerators={accelerators}"


def from_text(options: Mapping[str, str]) -> SlurmOptions:
    """Read the options of a command line.

    Args:
        options: Fields of `SlurmOptions` as text, such as `{"partition": "spot"}`.

    Raises:
        ValueError: An option is unknown, or not what it has to be.
    """
    known = SlurmOptions.__dataclass_fields__
    values: dict[str, object] = {}
    for name, text in options.items():
        if name not in known:
            raise ValueError(f"{name!r} is no option of Slurm: it has {', '.join(known)}")
        if name == "sbatch":
            values[name] = tuple(shlex.split(text))
        elif name in ("time", "accelerators", "notice"):
            if not text.isdecimal():
                raise ValueError(f"{name} ({text!r}) must be a whole number")
            values[name] = int(text)
        else:
            values[name] = text
    return SlurmOptions(**values)  # type: ignore[arg-type]
