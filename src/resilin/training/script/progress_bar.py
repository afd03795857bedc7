"""`progress_bar`: the progress bar of the user's loop, fed by the clocks of the job."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TextIO

from resilin.telemetry.progress import Display
from resilin.training.job import Job
from resilin.training.loader import AdaptiveDataLoader


def progress_bar(loader: AdaptiveDataLoader, *, stream: TextIO | None = None) -> Iterator[Any]:
    """Iterate over a loader, and show the progress of training.

    Write `for x, y in resilin.progress_bar(loader):`. It counts reference steps, by the clock in
    which the rule measures the run, so it stays right when the batch size changes. It covers the
    whole job if the number of epochs is known from `remaining_epochs_until`, else the epoch. For a
    loader that does not train (an evaluation) it covers one pass over the data. Replica 0 shows it.

    Args:
        loader: The loader.
        stream: Output stream; None uses stderr. If it is not a terminal, a line is written once a
            minute.
    """
    job = loader.job
    if not job.engine.membership.is_first:
        yield from loader
        return
    shown = _Pass(job, loader)
    display = Display(stream=stream)
    try:
        for batch in loader:
            if display.due():
                shown.update(display)
            yield batch
            shown.count(loader.current_samples)
        if display.live:
            shown.update(display)
    finally:
        display.close()


class _Pass:
    """The display of one loop over a loader."""

    def __init__(self, job: Job, loader: AdaptiveDataLoader) -> None:
        self._job = job
        self._loader = loader
        self._trains = job.trained is not None and job.trained.trains
        self._seen = 0
        self._base: float | None = None

    def count(self, samples: int) -> None:
        """Count samples that this replica received."""
        self._seen += samples

    def update(self, display: Display) -> None:
        """Show the current position of the loop."""
        job, loader = self._job, self._loader
        replicas = job.engine.membership.num_replicas
        whole = float(len(loader)) if loader.has_index else None
        if not self._trains:
            display.total_steps = whole
            steps = self._seen * replicas / loader.batch_size
            shown = steps if whole is None else min(steps, whole)
            display.update(progress=shown, replicas=replicas)
            return
        assert job.trained is not None
        clock = job.clock
        steps = clock.progress if job.trained.scaling.clock == "progress" else clock.sample_steps
        # The loader sets the reference of the job with the first step.
        known = None if job.timeline.reference is None else job.timeline.reference.steps_per_epoch
        per_epoch = known or whole
        if per_epoch is None:
            display.total_steps = None
        elif job.timeline.total_epochs is None:
            if self._base is None:
                self._base = math.floor(steps / per_epoch + 1e-6) * per_epoch
            steps -= self._base
            display.total_steps = per_epoch
        else:
            display.total_steps = per_epoch * job.timeline.total_epochs
        display.update(
            progress=steps,
            epoch=""
            if job.timeline.total_epochs is None
            else f"{job.epoch + 1}/{job.timeline.total_epochs}",
            batch_size=loader.current_batch_size,
            replicas=replicas,
            gain=job.trained.scaling.last.gain if clock.steps else None,
        )
