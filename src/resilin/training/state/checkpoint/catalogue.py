"""Contents of storage: committed attempts, those to remove, and leftovers."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from resilin.training.state.checkpoint.commit import COMMIT_FILE, Commit, decode
from resilin.training.state.checkpoint.errors import CorruptCheckpoint
from resilin.training.state.checkpoint.retention import kept
from resilin.training.state.checkpoint.storage import Storage

logger = logging.getLogger("resilin.checkpoint")


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All attempts there are."""

    commits: list[Commit] = field(default_factory=list)
    """Those with a whole `COMMIT.json`, newest first."""
    damaged: list[str] = field(default_factory=list)
    """Reasons why others are not among them."""
    too_new: list[ValueError] = field(default_factory=list)
    """Reasons why others cannot be read by this version of resilin."""
    uncommitted: list[str] = field(default_factory=list)
    """Names of attempts that did not come to their end, or whose removal did not."""


def scan(storage: Storage) -> Catalogue:
    """Looks at all attempts; reads their commit files and nothing else."""
    found = Catalogue()
    for name in sorted(storage.attempts(), reverse=True):
        _sort_in(storage, name, found)
    found.commits.sort(key=lambda commit: commit.version, reverse=True)
    return found


def _sort_in(storage: Storage, name: str, found: Catalogue) -> None:
    try:
        with storage.open(name, COMMIT_FILE) as stream:
            data = stream.read()
    except FileNotFoundError:
        found.uncommitted.append(name)
        return
    try:
        found.commits.append(decode(data, name, storage.path(name)))
    except CorruptCheckpoint as error:
        found.damaged.append(str(error))
    except ValueError as error:
        found.too_new.append(error)


def clear(storage: Storage, newest: Commit, *, keep: int, keep_every: int | None) -> None:
    """Removes what is no longer kept, and what was never committed.

    What is damaged or too new stays: someone may still make something of it. That a removal fails
    is a warning and no more, since the checkpoint that was saved does not depend on it.
    """
    try:
        found = scan(storage)
    except Exception as error:
        logger.warning("old checkpoints were not cleared away: %s", error)
        return
    versions = {each.name: each.version for each in found.commits}
    # The one just saved stays even if it is the oldest: a job may have started from scratch here.
    staying = {newest.name, *kept(versions, keep=keep, keep_every=keep_every)}
    for each in found.commits:
        if each.name not in staying:
            remove(storage, each.name)
    for name in found.uncommitted:
        remove(storage, name)


def remove(storage: Storage, name: str) -> None:
    """Removes an attempt, its commit file first, as far as possible."""
    try:
        storage.remove(name, COMMIT_FILE)
    except FileNotFoundError:
        return
    except Exception as error:
        logger.warning("%s was not removed: %s", storage.path(name), error)
