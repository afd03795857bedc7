"""`ReadOut`: metrics of a step, in the logs of Keras."""

from __future__ import annotations

from typing import Any

import keras  # type: ignore[import-untyped]

from resilin.telemetry.tensorboard import PREFIX
from resilin.training.bridge.home import Home
from resilin.training.bridge.readout import read_out

NAMES = ("batch_size", "gain", "noise_scale", "progress")
"""Metrics that are logged by default."""


class ReadOut(keras.callbacks.Callback):  # type: ignore[misc]
    """Adds metrics of the last step to the logs of steps and epochs.

    `Model.fit` automatically puts one before all other callbacks, so that History, CSVLogger,
    TensorBoard and the progress bar show it too; pass one of your own to change what it adds.

    Args:
        names: Metrics to add, of those of `resilin.training.bridge.readout.read_out`.
            `noise_scale` is there once it was measured.
        prefix: Prefix of the names in the logs.
    """

    def __init__(self, names: tuple[str, ...] = NAMES, prefix: str = PREFIX) -> None:
        super().__init__()
        self._names = tuple(f"{prefix}{name}" for name in names)
        self._prefix = prefix
        # Part of the state of the job: a process that resumes at the end of an epoch has no step.
        self._known: dict[str, Any] = {}

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the metrics of the step."""
        self._add(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the metrics of the last step of the epoch."""
        self._add(logs)

    def _add(self, logs: dict[str, Any] | None) -> None:
        if logs is not None:
            now = {} if Home().last_step is None else read_out(self._prefix)
            self._known.update({name: now[name] for name in self._names if name in now})
            logs.update(self._known)
