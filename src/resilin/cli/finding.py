"""Input and output of the checks of `resilin doctor`, and helpers that several of them use."""

from __future__ import annotations

import importlib.metadata
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    verdict: Literal["ok", "warn", "fail"]
    """`warn`: a job runs, but may be slow or limited. `fail`: a job needs it."""
    found: str
    """The observation."""
    advice: str = ""
    """The remedy, if one is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of the checks."""

    checkpoint_dir: str | None = None
    """Directory for checkpoints: a path or an fsspec URL."""
    memory_parent: Path
    """Parent of the in-memory directories of jobs."""


def installed(package: str) -> str | None:
    """The version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def space(path: Path) -> str:
    """Free and total space of a file system, as text."""
    usage = shutil.disk_usage(path)
    return f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"
