"""`WandB`: log events to a Weights & Biases run of the script.

A W&B run has one counter of rows, which it calls its step, and drops values that are logged for an
earlier row. So a sink that simply logs can push the counter past the steps that the script itself
logs, and the script's numbers are lost. Here the script numbers the rows. The numbers of an event
are added to the open row, with a separate step metric for their axis. A row that already holds an
event is closed first, but only while W&B's counter stays below the optimizer steps of the job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from resilin.core.events import Event, StepEvent
from resilin.telemetry.opening import opens
from resilin.telemetry.scalars import scalars, words

if TYPE_CHECKING:
    from wandb import Run


class WandB:
    """A sink that logs to a W&B run. The script starts it, or says how.

    Steps that the run has already are left out: in a run that was resumed, steps that are redone
    after a restart are not logged twice. The run's summary says which these are. In offline mode
    W&B knows nothing of what was logged before, so there they are in the files of both processes.

    Args:
        run: The return value of `wandb.init`; the script finishes it. Or a function that returns
            it: it is called with the first event, on the process that reports. Such a run is
            finished by W&B when the process exits.
        prefix: Prefix of the names.
        rows: Whether the sink closes rows itself. Set it to False if the script passes `run.log` a
            `step` that counts something slower than optimizer steps, such as epochs; then only the
            last event before each row of the script is kept. Also set it to False for a run in
            shared mode, which has no such rows.

    Raises:
        ValueError: There is no run.
    """

    def __init__(
        self,
        run: Run | Callable[[], Run] | None,
        prefix: str = "resilin/",
        *,
        rows: bool = True,
    ) -> None:
        self._prefix = prefix
        self._rows = rows
        self._row: int | None = None
        self._step = f"{prefix}step"
        self._logged = 0
        self._run: Run | None = None
        self._open: Callable[[], Run] | None = None
        if run is None or hasattr(run, "define_metric"):
            self._begin(run)
        else:
            self._open = run

    def _begin(self, run: Any) -> None:
        if run is None:
            raise ValueError("run is None: call wandb.init() and pass its return value")
        self._run = run
        run.define_metric(self._step, hidden=True)
        run.define_metric(f"{self._prefix}*", step_metric=self._step)
        self._logged = int(run.summary.get(self._step) or 0)

    def __call__(self, event: Event) -> None:
        """Log the numbers of the event and its description."""
        if self._run is None and self._open is not None and opens(event):
            self._begin(self._open())
        if isinstance(event, StepEvent) and event.step <= self._logged:
            return
        values: dict[str, float | str] = dict(scalars(event))
        text = words(event)
        if text is not None:
            values[event.name] = text
        if values and self._run is not None:
            named = {self._prefix + name: value for name, value in values.items()}
            self._log(self._run, named, event.step)

    def _log(self, run: Run, values: Mapping[str, float | str], step: int) -> None:
        if self._rows:
            row = run.step
            # A script that counts its steps from 0 logs step n - 1 when n are done.
            if row == self._row and row < step - 1:
                run.log({}, commit=True)
                row += 1
            self._row = row
        run.log({self._step: step, **values}, commit=False)
