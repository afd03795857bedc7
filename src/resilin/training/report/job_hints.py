"""Hints of a job: its measurements, its batch size and its progress as one `JobHints`."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from resilin.core.answer import Menu
from resilin.core.fit import Fitted, fit
from resilin.core.hints import End, JobHints
from resilin.core.plan import BatchBounds
from resilin.core.profile import StepProfile
from resilin.engine import devices, environment
from resilin.training.report.measured import Measured
from resilin.training.sizing.context import noise_of
from resilin.training.timeline import Timeline

if TYPE_CHECKING:
    from resilin.training.job import Job


def job_hints(job: Job, measured: Measured) -> JobHints:
    """The hints of a job, with tables over the menu that it was given.

    Args:
        job: The job, which has a loader that trains, or has made a step.
        measured: Its measurements.
    """
    engine, timeline = job.engine, job.timeline
    clock_name = "progress" if job.trained is None else job.trained.scaling.clock
    profiles = _profiles(job, measured)
    me, clock = engine.membership, timeline.clock
    reference, batch_size, bounds, fixed = _batch(job)
    per_replica = engine.processes_per_replica
    multiple = max(per_replica, engine.processes_per_copy)
    least, most = _replicas(bounds, batch_size, fixed=fixed)
    fits = {kind: fit(each.observations()) for kind, each in profiles.items()}
    total, end = _end(timeline, measured)
    present = fits.get(measured.kind)
    hints = JobHints(
        job=os.environ.get(environment.JOB),
        generation=me.generation,
        time=time.time(),
        accelerator=measured.kind,
        rescale_seconds=measured.rescale_seconds,
        hosts=me.num_hosts,
        replicas=me.num_replicas,
        accelerators_per_replica=per_replica,
        # Rounded inwards, to what the job can have.
        min_replicas=-(-least * per_replica // multiple) * multiple,
        max_replicas=most
        and max(-(-least * per_replica // multiple), most * per_replica // multiple) * multiple,
        size_multiple=multiple,
        profiled=_largest(profiles) * per_replica,
        reference=reference,
        batch_size=batch_size,
        fixed=fixed,
        bounds=bounds,
        steps=clock.steps,
        samples=clock.samples,
        progress=clock.progress if clock_name == "progress" else clock.sample_steps,
        total=total,
        end=end,
        clock=clock_name,
        noise=noise_of(job),
        throughput=None if present is None else present.model,
    )
    return hints.with_tables(measured.menu, _by_name(fits, measured.kind, measured.menu))


def accelerator() -> str:
    """Kind of accelerator that this process runs on: the cluster's name of it, or torch's."""
    named = os.environ.get(environment.ACCELERATOR, "").strip()
    if named:
        return named[:100]
    return devices.here().model()


def _batch(job: Job) -> tuple[int, int, BatchBounds, bool]:
    """Reference batch, batch size now, its bounds, and whether it stays what it is."""
    sizes, timeline = job.sizes, job.timeline
    if sizes is None:
        # A loader of a framework: the batch is what its steps have.
        assert timeline.last_step is not None
        samples = timeline.last_step.samples
        scale = 1.0 if job.trained is None else job.trained.scaling.last.scale
        return max(1, round(samples / scale)), samples, BatchBounds(samples), True
    if sizes.autoscaler is not None:
        chosen = sizes.autoscaler
        return chosen.reference, chosen.batch_size, chosen.bounds, False
    return *sizes.as_fixed(), True


def _replicas(bounds: BatchBounds, batch_size: int, *, fixed: bool) -> tuple[int, int | None]:
    """Smallest and largest number of replicas that have a plan, and samples for each of them."""
    lower, upper = bounds.local_bsz_bounds or (0, None)
    largest = batch_size if fixed else bounds.max_batch_size
    least = 1
    if fixed and upper is not None and not bounds.gradient_accumulation:
        least = -(-batch_size // upper)
    return least, None if largest is None else max(least, largest // max(1, lower))


def _profiles(job: Job, measured: Measured) -> dict[str, StepProfile]:
    """Step times by kind; those of an autoscaler are the means of all replicas."""
    profiles = dict(measured.profiles)
    sizes = job.sizes
    if sizes is not None and sizes.autoscaler is not None and sizes.autoscaler.profile.windows:
        profiles[measured.kind] = sizes.autoscaler.profile
    return {kind: each for kind, each in profiles.items() if each.windows}


def _largest(profiles: dict[str, StepProfile]) -> int:
    """The largest number of replicas at which steps were measured; 0 before the first one."""
    keys = (key for each in profiles.values() for key in each.windows)
    return max((key.replicas for key in keys), default=0)


def _end(timeline: Timeline, measured: Measured) -> tuple[float | None, End]:
    """Length of the run in reference steps, and how it is known."""
    if timeline.total_steps is not None:
        return timeline.total_steps, "declared"
    if timeline.total_epochs is None or measured.epochs is None:
        return None, "unknown"
    # Epochs of a stream are as long as those before them, as far as anyone knows.
    epochs, progress = measured.epochs
    return progress / epochs * timeline.total_epochs, "estimated"


def _by_name(fits: dict[str, Fitted], kind: str, menu: Menu) -> dict[str, Fitted]:
    """The fits by the names of the menu: in a cluster of one kind it may have another name."""
    if kind in fits and kind not in menu and len(menu) == 1:
        return {**fits, next(iter(menu)): fits[kind]}
    return fits
