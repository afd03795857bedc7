"""`SlurmOptions`: what the operator of a cluster says about its jobs in Slurm."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

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
