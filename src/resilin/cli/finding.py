"""What a check of the machine gets and gives, and what several of them ask."""

from __future__ import annotations

import importlib.metadata
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found."""

    verdict: Literal["ok", "warn", "fail"]
    """`warn` is for what a job may run without, or slowly; `fail` for what it needs."""
    found: str
    """What was seen."""
    advice: str = ""
    """What to do about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the checks are about."""

    checkpoint_dir: str | None = None
    """Where checkpoints are to go: a path or an fsspec URL."""
    memory_parent: Path
    """Where the directories in memory are made."""


def installed(package: str) -> str | None:
    """The version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def space(path: Path) -> str:
    """How much room a file system has, in words."""
    usage = shutil.disk_usage(path)
    return f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"
