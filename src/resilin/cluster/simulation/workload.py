"""`Submission`: one line of a workload, and its reader.

A workload is a CSV file with the columns `name`, `time`, `application`, `num_replicas` and
`batch_size` of the Pollux artifact. The columns `tenant`, `priority`, `min_replicas`,
`max_replicas` and `preemptible` are optional.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from resilin.cluster.job import JobSpec, Speeds
from resilin.cluster.simulation.applications import MOST_REPLICAS, Application, load, names
from resilin.cluster.simulation.training import GivenTraining, RecordedTraining, Training

Adapts = Literal["nothing", "size", "all"]
"""Parts of a job that may change: nothing (size and batch as submitted), its size (the batch is as
submitted, and the policy is told true step times), or its size and batch."""
ADAPTS: tuple[Adapts, ...] = ("nothing", "size", "all")
"""Values of `Adapts`."""
ONE_REPLICA = {"ncf": 32768}
"""Applications that run on one accelerator, with their batch: as in the published simulation."""
COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")
"""Columns that a workload must have."""


class Submission(Protocol):
    """A job, as it is submitted."""

    def spec(self, adapts: Adapts) -> JobSpec:
        """The wishes of its user."""

    def training(self, adapts: Adapts) -> Training:
        """Its work, from the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedJob:
    """A job that trains a recorded application."""

    wishes: JobSpec
    """Name, time and rules; its sizes hold where the application allows them."""
    application: Application
    """The model it trains."""
    replicas: int
    """Size that its user asked for."""
    batch_size: int
    """Global batch that its user asked for."""

    def spec(self, adapts: Adapts) -> JobSpec:
        """The wishes of its user, within what the application can do."""
        given, app = self.wishes, self.application
        least, most = given.min_replicas, min(given.max_replicas, MOST_REPLICAS)
        if adapts == "nothing":
            least = most = self.replicas
        else:
            if app.name in ONE_REPLICA:
                most = 1
            batch = self.batch_size if adapts == "size" else app.max_batch_size
            most = max(1, min(most, batch // app.local_bsz_bounds[0]))
        return replace(given, min_replicas=min(least, most), max_replicas=most)

    def training(self, adapts: Adapts) -> Training:
        """Its work, from the start."""
        if adapts == "all":
            fixed = ONE_REPLICA.get(self.application.name)
            return RecordedTraining(self.application, batch_size=fixed)
        return RecordedTraining(
            self.application, batch_size=self.batch_size, oracle=adapts == "size"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenJob:
    """A job whose speed at each size is known."""

    wishes: JobSpec
    """The wishes of its user."""
    work: float
    """Work of the whole job, in the unit of goodput times seconds."""
    speeds: tuple[Speeds, ...]
    """Goodput by kind and size."""
    replicas: int | None = None
    """Size that its user asked for, where jobs do not adapt; None means any that it may have."""

    def __post_init__(self) -> None:
        if not self.work > 0:
            raise ValueError(f"work ({self.work}) must be above 0")
        if not self.speeds or not all(any(each.goodput) for each in self.speeds):
            raise ValueError(f"speeds {self.speeds} must have a goodput above 0 for each kind")

    def spec(self, adapts: Adapts) -> JobSpec:
        """The wishes of its user."""
        if adapts != "nothing" or self.replicas is None:
            return self.wishes
        return replace(self.wishes, min_replicas=self.replicas, max_replicas=self.replicas)

    def training(self, adapts: Adapts) -> Training:
        """Its work, from the start."""
        del adapts
        return GivenTraining(self.work, self.speeds)


def read(path: Path, traces: Path) -> tuple[RecordedJob, ...]:
    """The jobs of a workload, in the order of their submission.

    Args:
        path: The CSV file.
        traces: Directory with a directory of records for each application.

    Raises:
        ValueError: The file is no workload, or names an application without records.
    """
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{path}: must have the columns {', '.join(COLUMNS)}: no {missing[0]}")
        try:
            jobs = [_job(row, traces) for row in reader]
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}:{reader.line_num}: {error}") from None
    if not jobs:
        raise ValueError(f"{path}: must have at least one job")
    ids = [job.wishes.id for job in jobs]
    if len(set(ids)) != len(ids):
        double = next(name for name in ids if ids.count(name) > 1)
        raise ValueError(f"{path}: two jobs have the name {double}; each must have its own")
    # A stable sort: of two that came at once, the first in the file is the first.
    return tuple(sorted(jobs, key=lambda job: job.wishes.submitted))


def _job(row: Mapping[str, str], traces: Path) -> RecordedJob:
    name = row["application"]
    if name not in (known := tuple(names(traces))):
        raise ValueError(
            f"application ({name}) must be one that has records in {traces}: "
            f"{', '.join(known) or 'there are none'}"
        )
    replicas = int(row["num_replicas"])
    batch_size = int(row["batch_size"])
    application = load(str(traces / name))
    low, high = application.reference, application.max_batch_size
    if not low <= batch_size <= high:
        raise ValueError(f"batch_size ({batch_size}) must be from {low} to {high} for {name}")
    if not 1 <= replicas <= MOST_REPLICAS:
        raise ValueError(f"num_replicas ({replicas}) must be from 1 to {MOST_REPLICAS}")
    preemptible = row.get("preemptible") or "true"
    if preemptible not in ("true", "false"):
        raise ValueError(f"preemptible ({preemptible}) must be true or false")
    return RecordedJob(
        wishes=JobSpec(
            id=row["name"],
            submitted=float(row["time"]),
            tenant=row.get("tenant") or "default",
            priority=int(row.get("priority") or 0),
            min_replicas=int(row.get("min_replicas") or 1),
            max_replicas=int(row.get("max_replicas") or MOST_REPLICAS),
            preemptible=preemptible == "true",
        ),
        application=application,
        replicas=replicas,
        batch_size=batch_size,
    )
