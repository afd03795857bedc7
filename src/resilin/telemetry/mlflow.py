"""`MLflow`: logs events to a run of MLflow that the script has.

All numbers of an event go in one request, which waits for the server: its time counts as telling,
so a slow server makes for fewer told steps and not for a slower job. MLflow has no texts along a
run; the last of each kind is a tag.
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
    """A sink that logs to an MLflow run. Starting and ending the run stays with the script.

    Args:
        run_id: The run; the active one of this thread if None.
        client: The client to log with; one for the current tracking server if None.
        prefix: What the names of metrics begin with.

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
        # A wrong id is known now, and not at the first event.
        self._run_id = self._client.get_run(run_id).info.run_id
        self._prefix = prefix

    def __call__(self, event: Event) -> None:
        """Logs the numbers of the event, and what it says in words."""
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
    """The name with what MLflow forbids replaced: it takes names for paths of files."""
    parts = _FORBIDDEN.sub("_", name)[:_MAX_KEY].split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)
