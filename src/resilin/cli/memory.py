"""The directory in memory that a job has on one machine: made, held while the job lives, removed.

It is `<parent>/<run id>`, so that a job which is started again under its id finds what it left.
Whoever runs the job holds a shared lock on the directory itself. The kernel drops the lock with
the process, however that ended: a directory whose lock can be had for oneself alone belongs to
nobody, with no process numbers to compare and no file to clean up.

Agents of one job share the directory; those of two jobs with one id must not. They are told apart
by where they meet, which each notes in a file beside the state.
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
"""How the files begin in which agents note where they meet."""


class MemoryDirectory:
    """One job's directory on this machine, held from creation until `release`.

    Args:
        parent: Where it is made.
        run_id: The job; several agents of one job on a machine share the directory.
        meeting: Where the agents of the job meet, as `host:port`. With port 0 nobody else can know
            the place, so the job has but this agent.

    Raises:
        ValueError: The id cannot name a directory, or a job of this id that meets elsewhere is
            alive on this machine.
        PermissionError: The directory belongs to somebody else.
    """

    def __init__(self, parent: Path, run_id: str, meeting: str = "localhost:0") -> None:
        if not re.fullmatch(r"[\w.:@+-]+", run_id) or run_id in {".", ".."}:
            raise ValueError(
                f"the run id ({run_id!r}) names a directory: it must be made of letters, digits "
                "and . : @ + - _"
            )
        parent = parent.absolute()
        self.path = parent / run_id
        self._is_default = parent == environment.memory_parent()
        while True:
            # An agent that ends may remove what is here at any moment before the lock is ours.
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
        """Raises if a living agent of another job has the directory; removes notes of dead ones."""
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
            f"job {run_id} is alive on this machine: process {pid}, which meets at "
            f"{_named(other)}, keeps its state in {self.path}. This one (process {os.getpid()}) "
            f"meets at {_named(meeting)}, so it is another job, and two jobs cannot have one id: "
            "give it another --rdzv-id, or stop "
            "the other one first"
        )

    @property
    def holds_state(self) -> bool:
        """Whether there is anything in it but what agents noted."""
        return any(not each.name.startswith(_AGENT) for each in self.path.iterdir())

    def release(self, *, remove: bool) -> bool:
        """Lets go of the directory.

        Args:
            remove: Whether the state in it is needed no more. It stays all the same while another
                agent holds it.

        Returns:
            Whether it was removed.
        """
        self._note.unlink(missing_ok=True)
        if remove := remove and _lock_alone(self._lock):
            with suppress(FileNotFoundError):
                shutil.rmtree(self.path)
            if self._is_default:
                with suppress(OSError):  # other jobs are there
                    self.path.parent.rmdir()
        os.close(self._lock)
        return remove


def _same_place(one: str, other: str) -> bool:
    """Whether two agents meet at one place. Its name may be written in several ways."""
    ports = {place.rpartition(":")[2] for place in (one, other)}
    return len(ports) == 1 and ports != {"0"}


def _named(place: str) -> str:
    return "a place of its own" if place.endswith(":0") else place


def abandoned(parent: Path) -> list[Path]:
    """The directories of jobs that nothing on this machine belongs to any more.

    A worker may outlive its agent. Workers hold no lock, but were told the directory when they
    were started, which only Linux lets us see.
    """
    if not parent.is_dir():
        return []
    in_use = _told_to_processes()
    return [
        path
        for path in sorted(parent.iterdir())
        if path.is_dir() and str(path) not in in_use and not _is_held(path)
    ]


def _make(path: Path) -> None:
    """Makes a directory for this user alone, or takes one that is."""
    path.mkdir(mode=0o700, exist_ok=True)
    # Anybody may write to /dev/shm, hence may have made this name, or a link of it, before us.
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
    """The memory directories in the environments of this user's processes."""
    mark = f"{environment.MEMORY_DIR}=".encode()
    told = set()
    for file in Path("/proc").glob("[0-9]*/environ"):
        # A process may end while it is looked at, and those of others cannot be read.
        with suppress(OSError):
            told |= {
                os.fsdecode(entry.removeprefix(mark))
                for entry in file.read_bytes().split(b"\0")
                if entry.startswith(mark)
            }
    return told
