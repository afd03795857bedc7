"""`WandB`: logs events to a run of Weights & Biases that the script has.

A run of W&B has one counter of rows, which it calls its step, and drops whatever is logged for a
row behind it. So a sink that simply logs can push the counter past the steps that the script
itself logs for, and the script's numbers are lost. Here rows are numbered by the script. The
numbers of an event join the row that is open, under a step metric of their own over which W&B
draws them; a row that holds an earlier event is closed first, and only as long as W&B's counter
stays behind the optimizer steps of the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from resilin.core.events import Event
from resilin.telemetry.scalars import scalars, words

if TYPE_CHECKING:
    from wandb import Run


class WandB:
    """A sink that logs to a W&B run. Starting and finishing the run stays with the script.

    Args:
        run: What `wandb.init` returned.
        prefix: What the names begin with.
        rows: Whether the sink closes rows of its own. A script that gives `run.log` a `step` which
            counts something slower than optimizer steps, such as epochs, says False; then only
            those events are kept that are the last before a row of the script's. So does one whose
            run is in shared mode, which has no such rows.

    Raises:
        ValueError: There is no run.
    """

    def __init__(self, run: Run | None, prefix: str = "resilin/", *, rows: bool = True) -> None:
        if run is None:
            raise ValueError("run is None: call wandb.init() and pass what it returns")
        self._run = run
        self._prefix = prefix
        self._rows = rows
        self._row: int | None = None
        self._step = f"{prefix}step"
        run.define_metric(self._step, hidden=True)
        run.define_metric(f"{prefix}*", step_metric=self._step)

    def __call__(self, event: Event) -> None:
        """Logs the numbers of the event, and what it says in words."""
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
