"""Checks of the storage of state: the in-memory directory and the checkpoint directory.

They do what a job does there: write, flush and rename a file; put, fetch and delete an object.
They remove everything they create.
"""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path

from resilin.cli.finding import GIB, Finding, Options, installed, space
from resilin.cli.memory import abandoned

MIN_FREE = 2 * GIB
"""Free space below which a directory for state is worth a warning."""


def memory(options: Options) -> Finding:
    """Space for in-memory copies of the latest state."""
    place = options.memory_parent
    while not place.exists():
        place = place.parent
    found = f"{space(place)} in {options.memory_parent}"
    if shutil.disk_usage(place).free < MIN_FREE:
        advice = "give the container more (docker run --shm-size), or set --memory-dir DIR|off"
        return Finding(verdict="warn", found=found, advice=advice)
    return Finding(verdict="ok", found=found)


def leftovers(options: Options) -> Finding:
    """In-memory state of jobs that no longer run."""
    stale = abandoned(options.memory_parent)
    if not stale:
        return Finding(verdict="ok", found="no state of dead jobs in memory")
    size = sum(file.stat().st_size for path in stale for file in path.rglob("*") if file.is_file())
    return Finding(
        verdict="warn",
        found=f"dead jobs left state in memory: {len(stale)}, {size / GIB:.2f} GiB",
        advice="resume one with resilin run --rdzv-id NAME, or remove them: resilin clean",
    )


def checkpoint(options: Options) -> Finding:
    """A file or object that is created, replaced, read and removed in the checkpoint directory."""
    url = options.checkpoint_dir
    if url is None:
        return Finding(verdict="ok", found="skipped: no --checkpoint-dir")
    if "://" in url and not url.startswith("file://"):
        return _checkpoint_objects(url)
    return _checkpoint_files(Path(url.removeprefix("file://")))


def _checkpoint_files(directory: Path) -> Finding:
    name = f".resilin-doctor-{uuid.uuid4().hex}"
    new, old = directory / f"{name}.new", directory / name
    try:
        old.write_bytes(b"old")
        with new.open("wb") as file:
            file.write(b"new")
            file.flush()
            os.fsync(file.fileno())
        new.replace(old)
        whole = old.read_bytes() == b"new" and not new.exists()
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        return Finding(
            verdict="fail",
            found=f"{directory}: {error.strerror or error}",
            advice=f"create a directory that this user can write to: mkdir -p {directory}",
        )
    finally:
        for leftover in (new, old):
            # If nothing could be created, there is nothing to remove.
            if os.access(leftover, os.F_OK):
                leftover.unlink()
    found = f"write, fsync and rename work in {directory}, {space(directory)}"
    if not whole:
        advice = "use a file system with atomic renames"
        found = f"{directory}: renaming a file onto another one does not replace it"
        return Finding(verdict="fail", found=found, advice=advice)
    if shutil.disk_usage(directory).free < MIN_FREE:
        advice = "free some space: a checkpoint is as large as the model and its optimizer state"
        return Finding(verdict="warn", found=found, advice=advice)
    return Finding(verdict="ok", found=found)


def _checkpoint_objects(url: str) -> Finding:
    if installed("fsspec") is None:
        return Finding(
            verdict="fail",
            found=f"{url} needs fsspec",
            advice="pip install fsspec",
        )
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    name = f"{url.rstrip('/')}/resilin-doctor-{uuid.uuid4().hex}"
    try:
        files, path = url_to_fs(name)
        files.pipe_file(path, b"resilin")
        content = files.cat_file(path)
        files.rm_file(path)
    # Each store raises its own errors, from missing drivers to refused credentials.
    except Exception as error:
        advice = "install the driver that the message names, or fix the permissions"
        found = f"{url}: {type(error).__name__}: {error}"
        return Finding(verdict="fail", found=found, advice=advice)
    if content != b"resilin":
        advice = "use a store that returns what was written"
        found = f"{url}: wrote {b'resilin'!r}, read {content!r}"
        return Finding(verdict="fail", found=found, advice=advice)
    return Finding(verdict="ok", found=f"put, get and delete work in {url}")
