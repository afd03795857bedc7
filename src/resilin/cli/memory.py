"""The in-memory directory of a job on one machine: created, locked while the job runs, removed.

It is `<parent>/<run id>`, so a job that is started again under its id finds its state. Each agent
of the job holds a shared lock on the directory itself. The kernel releases the lock with the
process, however that ends: a directory that can be locked exclusively belongs to nobody, without
process ids to compare or files to clean up.

Agents of one job share the directory; two jobs with the same id must not. They are distinguished by
their rendezvous endpoint, or the etcd of a live job, which each agent writes to a file beside the
state.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from resilin.engine import environment
from resilin.engine.processes import process_gone, process_start

_AGENT = "agent-"
"""Prefix of the files in which agents write their rendezvous endpoint."""
_ETCD = "://"
"""Part of the endpoints of live jobs over several machines, and of no other."""


class MemoryDirectory:
    """One job's directory on this machine, held from creation until `release`.

    Args:
        parent: Directory in which it is created.
        run_id: Id of the job; several agents of one job on a machine share the directory.
        meeting: Rendezvous endpoint of the job, as `host:port`, or the etcd of a live job, as
            `etcd://host:port`. With port 0 no other agent can know it, so the job has only this
            agent.

    Raises:
        ValueError: The id cannot name a directory, or a job with this id and another rendezvous
            endpoint is running on this machine.
        PermissionError: The directory belongs to another user.
    """

    def __init__(self, parent: Path, run_id: str, meeting: str = "localhost:0") -> None:
        if not re.fullmatch(r"[\w.:@+-]+", run_id) or run_id in {".", ".."}:
            raise ValueError(
                f"the run id ({run_id!r}) names a directory: it may contain only letters, digits "
                "and . : @ + - _"
            )
        parent = parent.absolute()
        self.path = parent / run_id
        self._is_default = parent == environment.memory_parent()
        while True:
            # An agent that exits may remove the directory at any moment before we hold the lock.
            with suppress(FileNotFoundError):
                if self._is_default:
                    _make(parent)
                else:
                    parent.mkdir(parents=True, exist_ok=True)
                _make(self.path)
                self._lock = os.open(self.path, os.O_RDONLY)
                fcntl.flock(self._lock, fcntl.LOCK_SH)
                if os.path.samestat(os.fstat(self._lock), self.path.stat()):
                    break
                os.close(self._lock)
        self._note = self.path / f"{_AGENT}{os.getpid()}"
        try:
            self._refuse_others(run_id, meeting)
            self._note.write_text(f"{process_start(os.getpid())} {meeting}")
        except BaseException:
            os.close(self._lock)
            raise

    def _refuse_others(self, run_id: str, meeting: str) -> None:
        """Raise if a live agent of another job uses the directory; remove files of dead agents."""
        for note in sorted(self.path.glob(f"{_AGENT}*")):
            pid = int(note.name.removeprefix(_AGENT))
            with suppress(FileNotFoundError, ValueError):
                started, other = note.read_text().split()
                if pid == os.getpid() or process_gone(pid, started):
                    note.unlink()
                elif not _same_place(meeting, other):
                    break
        else:
            return
        raise ValueError(
            f"job {run_id} is already running on this machine: process {pid}, with "
            f"{_named(other)}, keeps its state in {self.path}. This agent (process {os.getpid()}) "
            f"has {_named(meeting)}, so it belongs to another job, and two jobs cannot share an "
            "id: choose another --rdzv-id, or stop the other job first"
        )

    @property
    def holds_state(self) -> bool:
        """Whether the directory holds anything but the files of agents."""
        return any(not each.name.startswith(_AGENT) for each in self.path.iterdir())

    def release(self, *, remove: bool) -> bool:
        """Release the directory.

        Args:
            remove: Whether the state in it is no longer needed. It is kept while another agent
                holds the directory.

        Returns:
            Whether it was removed.
        """
        self._note.unlink(missing_ok=True)
        if remove := remove and _lock_alone(self._lock):
            with suppress(FileNotFoundError):
                shutil.rmtree(self.path)
            if self._is_default:
                with suppress(OSError):  # the directories of other jobs are in it
                    self.path.parent.rmdir()
        os.close(self._lock)
        return remove


def _same_place(one: str, other: str) -> bool:
    """Whether two endpoints are the same.

    Those of a rendezvous are compared by port: a host may have several names. All etcds have the
    same port, as a rule; there the names must be equal.
    """
    if _ETCD in one + other:
        return one == other
    ports = {place.rpartition(":")[2] for place in (one, other)}
    return len(ports) == 1 and ports != {"0"}


def _named(place: str) -> str:
    if _ETCD in place:
        return f"--membership {place}"
    return "a private rendezvous" if place.endswith(":0") else f"rendezvous endpoint {place}"


def abandoned(parent: Path) -> list[Path]:
    """Directories of jobs that no longer have a process on this machine.

    A worker may outlive its agent. Workers hold no lock, but have the directory in their
    environment, which is visible only on Linux.
    """
    if not parent.is_dir():
        return []
    in_use = _told_to_processes()
    return [
        path
        for path in sorted(parent.iterdir())
        if path.is_dir() and str(path) not in in_use and not _is_held(path)
    ]


def remove_abandoned(path: Path) -> bool:
    """Remove a directory that nobody holds.

    Returns:
        Whether it was removed; a job that was started meanwhile keeps it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        # Under the lock: a job that starts now waits for it, and then makes a new directory.
        if not _lock_alone(descriptor):
            return False
        shutil.rmtree(path)
    finally:
        os.close(descriptor)
    return True


def _make(path: Path) -> None:
    """Create a directory for this user alone, or accept an existing one."""
    path.mkdir(mode=0o700, exist_ok=True)
    # Anybody can write to /dev/shm, so another user may have created this name, or a link.
    status = path.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        raise PermissionError(
            f"{path} must be a directory of user {os.getuid()}; it belongs to user "
            f"{status.st_uid}, or is a link"
        )


def _is_held(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return not _lock_alone(descriptor)
    finally:
        os.close(descriptor)


def _lock_alone(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _told_to_processes() -> set[str]:
    """Memory directories named in the environments of this user's processes."""
    mark = f"{environment.MEMORY_DIR}=".encode()
    told = set()
    for file in Path("/proc").glob("[0-9]*/environ"):
        # A process may end while it is read, and those of other users cannot be read.
        with suppress(OSError):
            told |= {
                os.fsdecode(entry.removeprefix(mark))
                for entry in file.read_bytes().split(b"\0")
                if entry.startswith(mark)
            }
    return told
