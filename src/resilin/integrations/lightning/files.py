"""Checkpoint files that a lost process has written after the state that the job resumes from.

ModelCheckpoint never overwrites a file: it writes `name-v1.ckpt` beside it. When a step is repeated
after a restart, the file of the lost process is overwritten, so that the files are those of a run
without a fault. Files from before the run are kept, as without resilin.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from lightning.pytorch import Trainer

from resilin.compat.lightning_names import list_files


class WrittenFiles:
    """Checkpoint files from before the fit, and those that it has written since."""

    def __init__(self) -> None:
        self._before: set[str] | None = None
        self._written: set[str] = set()

    def wrote(self, path: Any) -> None:
        """Note that a file was written."""
        self._written.add(str(path))

    def removed(self, path: Any) -> None:
        """Note that a file was removed."""
        self._written.discard(str(path))

    def begin(self, trainer: Trainer) -> None:
        """List the files, or take the list that the fit resumes with. Collective."""
        keepers = [each for each in trainer.callbacks if _names_files(each)]  # type: ignore[attr-defined]
        if self._before is None:
            found: list[str] = []
            if trainer.is_global_zero:
                for keeper in keepers:
                    names = map(os.path.basename, list_files(keeper))
                    found += [os.path.join(keeper.dirpath, name) for name in names]
            self._before = set(trainer.strategy.broadcast(found))
            return
        for keeper in keepers:
            keeper.file_exists = partial(_exists, self, type(keeper).file_exists, keeper)

    def is_left_over(self, path: Any) -> bool:
        """Whether a lost process has written a file, and this one has not."""
        known = self._written | (self._before or set())
        return str(path) not in known

    def state_dict(self) -> dict[str, Any]:
        """Both lists."""
        return {"before": sorted(self._before or ()), "written": sorted(self._written)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self._before, self._written = set(state["before"]), set(state["written"])


def end(trainer: Trainer) -> None:
    """Undo the changes of `begin` to callbacks."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        vars(callback).pop("file_exists", None)


def _names_files(callback: Any) -> bool:
    """Whether a callback chooses the names of its files by the files that exist."""
    return hasattr(type(callback), "file_exists") and getattr(callback, "dirpath", None) is not None


def _exists(files: WrittenFiles, ask: Any, keeper: Any, path: Any, trainer: Trainer) -> bool:
    exists = bool(ask(keeper, path, trainer))
    return exists and not files.is_left_over(path)
