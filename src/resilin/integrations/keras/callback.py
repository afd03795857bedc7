"""`ReadOut`: what resilin knows of a step, in the logs of Keras."""

from __future__ import annotations

from typing import Any

import keras  # type: ignore[import-untyped]

from resilin.telemetry.tensorboard import PREFIX
from resilin.training.bridge.readout import read_out
from resilin.training.job import current_job

NAMES = ("batch_size", "gain", "noise_scale", "progress")
"""What is logged where nothing else is said."""


class ReadOut(keras.callbacks.Callback):  # type: ignore[misc]
    """Adds what resilin knows of the last step to the logs of steps and epochs.

    `Model.fit` puts one before all other callbacks by itself, so that History, CSVLogger,
    TensorBoard and the progress bar show it too; pass one of your own to change what it adds.

    Args:
        names: What to add, of what `resilin.training.bridge.readout.read_out` says; none is none.
            `noise_scale` is there as soon as it was measured.
        prefix: What the names begin with in the logs.
    """

    def __init__(self, names: tuple[str, ...] = NAMES, prefix: str = PREFIX) -> None:
        super().__init__()
        self._names = tuple(f"{prefix}{name}" for name in names)
        self._prefix = prefix
        # Kept with the job: a process that resumes at the end of an epoch has made no step.
        self._known: dict[str, Any] = {}

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """A step is over."""
        self._add(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """An epoch is over: its last step stands for it."""
        self._add(logs)

    def _add(self, logs: dict[str, Any] | None) -> None:
        if logs is not None:
            now = {} if current_job().timeline.last_step is None else read_out(self._prefix)
            self._known.update({name: now[name] for name in self._names if name in now})
            logs.update(self._known)
