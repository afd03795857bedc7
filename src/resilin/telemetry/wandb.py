"""`WandB`: log events to a Weights & Biases run of the script.

A W&B run has one counter of rows, which it calls its step, and drops values that are logged for an
earlier row. So a sink that simply logs can push the counter past the steps that the script itself
logs, and the script's numbers are lost. Here the script numbers the rows. The numbers of an event
are added to the open row, with a separate step metric for their axis. A row that already holds an
event is closed first, but only while W&B's counter stays below the optimizer steps of the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from resilin.core.events import Event
from resilin.telemetry.scalars import scalars, words

if TYPE_CHECKING:
    from wandb import Run


class WandB:
    """A sink that logs to a W&B run. The script starts and finishes the run.

    Args:
        run: The return value of `wandb.init`.
        prefix: Prefix of the names.
        rows: Whether the sink closes rows itself. Set it to False if the script passes `run.log` a
            `step` that counts something slower than optimizer steps, such as epochs; then only the
            last event before each row of the script is kept. Also set it to False for a run in
            shared mode, which has no such rows.

    Raises:
        ValueError: There is no run.
    """

    def __init__(self, run: Run | None, prefix: str = "resilin/", *, rows: bool = True) -> None:
        if run is None:
            raise ValueError("run is None: call wandb.init() and pass its return value")
        self._run = run
        self._prefix = prefix
        self._rows = rows
        self._row: int | None = None
        self._step = f"{prefix}step"
        run.define_metric(self._step, hidden=True)
        run.define_metric(f"{prefix}*", step_metric=self._step)

    def __call__(self, event: Event) -> None:
        """Log the numbers of the event and its description."""
        values: dict[str, float | str] = dict(scalars(event))
        text = words(event)
        if text is not None:
            values[event.name] = text
        if values:
            self._log({self._prefix + name: value for name, value in values.items()}, event.step)

    def _log(self, values: Mapping[str, float | str], step: int) -> None:
        if self._rows:
            row = self._run.step
            # A script that counts its steps from 0 logs step n - 1 when n are done.
            if row == self._row and row < step - 1:
                self._run.log({}, commit=True)
                row += 1
            self._row = row
        self._run.log({self._step: step, **values}, commit=False)
