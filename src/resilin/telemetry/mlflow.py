"""`MLflow`: log events to an MLflow run of the script.

All numbers of an event are sent in one request, which waits for the server. Its time counts
towards the reporting budget, so a slow server leads to fewer reported steps, not to a slower job.
MLflow has no texts along a run; the last text of each kind is a tag.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from resilin.core.events import Event
from resilin.telemetry.extras import load
from resilin.telemetry.scalars import scalars, words

if TYPE_CHECKING:
    from mlflow import MlflowClient

_FORBIDDEN = re.compile(r"[^\w./ -]")
_MAX_KEY, _MAX_TAG = 240, 5000


class MLflow:
    """A sink that logs to an MLflow run. The script starts and ends the run.

    Args:
        run_id: The run; the active one of this thread if None.
        client: The client to log with; one for the current tracking server if None.
        prefix: Prefix of the names of metrics.

    Raises:
        ValueError: No run is active, and none was given.
        ImportError: MLflow is not installed.
    """

    def __init__(
        self,
        run_id: str | None = None,
        client: MlflowClient | None = None,
        prefix: str = "resilin/",
    ) -> None:
        mlflow = load("mlflow", "mlflow", "MLflow")
        if run_id is None:
            active = mlflow.active_run()
            if active is None:
                raise ValueError(
                    "run_id is None and no MLflow run is active: call mlflow.start_run() before, "
                    "or pass the id of a run"
                )
            run_id = str(active.info.run_id)
        self._entities = load("mlflow.entities", "mlflow", "MLflow")
        self._client: MlflowClient = mlflow.MlflowClient() if client is None else client
        # A wrong id must fail now, not at the first event.
        self._run_id = self._client.get_run(run_id).info.run_id
        self._prefix = prefix

    def __call__(self, event: Event) -> None:
        """Log the numbers of the event and its description."""
        milliseconds = round(event.time * 1000)
        metrics = [
            self._entities.Metric(_key(self._prefix + name), number, milliseconds, event.step)
            for name, number in scalars(event).items()
        ]
        text = words(event)
        tags = []
        if text is not None:
            line = f"step {event.step}: {text}"
            tags.append(self._entities.RunTag(f"resilin.last_{event.name}", line[:_MAX_TAG]))
        if metrics or tags:
            self._client.log_batch(self._run_id, metrics=metrics, tags=tags)


def _key(name: str) -> str:
    """The name without characters that MLflow forbids: it treats names as file paths."""
    parts = _FORBIDDEN.sub("_", name)[:_MAX_KEY].split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)
