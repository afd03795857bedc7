"""Checkpoint files that a lost process has written after the state that the job resumes from.

ModelCheckpoint writes beside a file that exists already, as `name-v1.ckpt`. When a step is made
again after a restart, the file of the lost process is there and belongs to nothing: it is written
over, so that the files are those of a run that lost nobody. Files that were there before the run
began stay, as without resilin.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from lightning.pytorch import Trainer


class WrittenFiles:
    """Which checkpoint files there were before the fit, and which it has written since."""

    def __init__(self) -> None:
        self._before: set[str] | None = None
        self._written: set[str] = set()

    def wrote(self, path: Any) -> None:
        """A file was written."""
        self._written.add(str(path))

    def removed(self, path: Any) -> None:
        """A file was removed."""
        self._written.discard(str(path))

    def begin(self, trainer: Trainer) -> None:
        """Looks which files there are, or from which ones the fit resumes. Collective."""
        keepers = [each for each in trainer.callbacks if _names_files(each)]  # type: ignore[attr-defined]
        if self._before is None:
            found: list[str] = []
            if trainer.is_global_zero:
                for keeper in keepers:
                    if keeper._fs.exists(keeper.dirpath):
                        names = map(os.path.basename, keeper._fs.ls(keeper.dirpath, detail=False))
                        found += [os.path.join(keeper.dirpath, name) for name in names]
            self._before = set(trainer.strategy.broadcast(found))
            return
        for keeper in keepers:
            keeper.file_exists = partial(_exists, self, type(keeper).file_exists, keeper)

    def is_left_over(self, path: Any) -> bool:
        """Whether a file that exists was written by a process that is lost, and not since."""
        known = self._written | (self._before or set())
        return str(path) not in known

    def state_dict(self) -> dict[str, Any]:
        """Both lists."""
        return {"before": sorted(self._before or ()), "written": sorted(self._written)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` returned."""
        self._before, self._written = set(state["before"]), set(state["written"])


def end(trainer: Trainer) -> None:
    """Gives callbacks their own way to look for files back."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        vars(callback).pop("file_exists", None)


def _names_files(callback: Any) -> bool:
    """Whether a callback writes files under names that it chooses by what exists."""
    return hasattr(type(callback), "file_exists") and getattr(callback, "dirpath", None) is not None


def _exists(files: WrittenFiles, ask: Any, keeper: Any, path: Any, trainer: Trainer) -> bool:
    exists = bool(ask(keeper, path, trainer))
    return exists and not files.is_left_over(path)
