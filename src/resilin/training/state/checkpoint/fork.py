"""Copies of one checkpoint for other jobs, which may begin further on in the data."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from resilin.core.passes import PassCount
from resilin.training.state.checkpoint.catalogue import scan
from resilin.training.state.checkpoint.commit import COMMIT_FILE, Commit, encode, is_attempt
from resilin.training.state.checkpoint.storage import Storage, open_storage
from resilin.training.state.registry import CURSORS


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """One checkpoint that other jobs begin from. It is only read."""

    storage: Storage
    """Its storage."""
    commit: Commit
    """Its contents, but for the tensors."""

    @classmethod
    def find(cls, url: str | os.PathLike[str]) -> Fork:
        """Find a checkpoint by its own directory, or the newest in a directory of checkpoints.

        Raises:
            ValueError: There is none, or it is damaged, or only a newer resilin can read it.
        """
        text = os.fspath(url).rstrip("/")
        parent, _, last = text.rpartition("/")
        wanted = last if is_attempt(last) else None
        storage = open_storage((parent or "/" if "/" in text else ".") if wanted else text)
        found = scan(storage)
        commits = [each for each in found.commits if wanted in (None, each.name)]
        if found.too_new and not (wanted and commits):
            raise found.too_new[0]
        if not commits:
            damaged = f": {'; '.join(found.damaged)}" if found.damaged else ""
            raise ValueError(
                f"there is no checkpoint of resilin in {text!r}{damaged}; name a directory of "
                f"checkpoints, or one checkpoint in it (step-...), with its {COMMIT_FILE}"
            )
        return cls(storage=storage, commit=commits[0])

    @property
    def step(self) -> int:
        """Optimizer steps made before it."""
        return self.commit.version.step

    @property
    def samples(self) -> int:
        """Samples used before it."""
        return int(self.commit.tree["job"]["clock"]["samples"])

    @property
    def num_replicas(self) -> int:
        """Replicas of the job that saved it."""
        return int(self.commit.tree["job"]["replicas"])

    @property
    def reference(self) -> int | None:
        """The reference batch; None if an older resilin saved it, or no loader of resilin."""
        size = self.commit.tree["job"].get("reference")
        return None if size is None else int(size)

    @property
    def seed(self) -> int | None:
        """Seed of the order of samples; None if there is no order of one loader."""
        cursors = self._cursors()
        return int(next(iter(cursors.values()))["seed"]) if len(cursors) == 1 else None

    def room(self) -> int | None:
        """Samples that a job may begin later, in the same pass over the data; None has no limit.

        An epoch that lasts until some progress is made goes through the data as often as needed.
        resilin 0.1 did not say so in a checkpoint: there the limit is the pass.

        Raises:
            ValueError: The checkpoint has not one loader, but none or several.
        """
        cursor = self._cursor()[1]
        num, position = int(cursor["num_samples"]), int(cursor["cursor"])
        passes = PassCount.from_state(cursor, position)
        if passes.under_way and passes.until is None:
            return None
        return num - position % num

    def copy_to(self, directory: Path, *, skip: int = 0) -> None:
        """Write a copy, as a directory of checkpoints with nothing else in it.

        Args:
            directory: A directory that does not exist.
            skip: Samples that the copy is further on in the data. All else in it is the same: no
                clock counts them.

        Raises:
            ValueError: Samples are to be skipped, and the checkpoint has not one loader.
        """
        place = directory / self.commit.name
        place.mkdir(parents=True)
        for name in self.commit.files:
            source = self.storage.open(self.commit.name, name)
            with source, (place / name).open("xb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
        commit = self.commit
        if skip:
            name, cursor = self._cursor()
            moved = {**cursor, "cursor": int(cursor["cursor"]) + skip}
            commit = replace(commit, tree={**commit.tree, name: moved})
        (place / COMMIT_FILE).write_bytes(encode(commit))

    def _cursors(self) -> dict[str, Mapping[str, Any]]:
        return {
            name: part
            for name, part in self.commit.tree.items()
            if name.startswith(CURSORS) and isinstance(part, Mapping) and "cursor" in part
        }

    def _cursor(self) -> tuple[str, Mapping[str, Any]]:
        cursors = self._cursors()
        if len(cursors) != 1:
            raise ValueError(
                f"{self.commit.path} has the positions of {len(cursors)} loaders "
                f"({', '.join(sorted(cursors)) or 'none'}): a later place in the data is known "
                "with one alone"
            )
        name, cursor = next(iter(cursors.items()))
        if "num_samples" not in cursor:
            raise ValueError(
                f"{self.commit.path} has the position of a stream ({name}): a later place in it is "
                "known only when it was read, so no samples can be skipped"
            )
        return name, cursor
