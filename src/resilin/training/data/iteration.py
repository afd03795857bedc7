"""Iterations over loaders: whose batch the loop works on.

A script may nest loaders, zip them, leave one by `break`, or keep a generator that it never closes.
So each iteration over a loader is a record of its own. The job's slots (`job.loader` and
`job.micro_batch`) belong to the iteration that handed out the latest batch, and only that one gives
them back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from resilin.core.clock import Clock
from resilin.core.plan import BatchPlan
from resilin.core.stream import Ownership
from resilin.training.job import CommittingLoader, Job, MicroBatch


@dataclass(slots=True, eq=False, kw_only=True)
class Iteration:
    """One iteration over a loader, from its first batch to its end."""

    loader: CommittingLoader
    """The loader that is iterated."""
    name: str
    """Its name in the state of the job."""
    training: bool
    """Whether it trains; decided once, when the iteration begins."""
    moves: bool
    """Whether it moves the cursor of the loader; an evaluation does not."""
    began: Clock
    """The clock when it began."""
    owners: Ownership
    """Which replica owns which positions."""
    position: int
    """Where the next step begins."""
    data_end: int
    """Where the data of its epoch end in the stream."""
    outer: Iteration | None = None
    """The iteration in whose body this one began, if any."""
    micro_batch: MicroBatch | None = None
    """The micro-batch that was handed out last."""
    span: range = range(0)
    """The positions of the current step."""
    plan: BatchPlan | None = None
    """How that step is split."""
    handed_out_at: int | None = None
    """Steps committed when the last micro-batch of the current step was handed out."""
    closed: bool = False
    """Whether it is over: exhausted, left, or superseded by a later one."""
    enclosing: dict[str, int] = field(default_factory=dict)
    """Positions of the training iterations that were open when this one began, by loader."""


def begin(job: Job, iteration: Iteration) -> None:
    """Opens an iteration."""
    outer: Any = job.iteration
    while outer is not None and outer.closed:
        outer = outer.outer
    iteration.outer = outer
    if iteration.training:
        iteration.enclosing = positions(job)
        job.training_passes.append(iteration)


def positions(job: Job) -> dict[str, int]:
    """Where the open training iterations stand, by the names of their loaders."""
    return {each.name: each.span.start for each in job.training_passes}


def hand_out(job: Job, iteration: Iteration, micro_batch: MicroBatch) -> None:
    """Makes this the micro-batch that the loop works on."""
    iteration.micro_batch = micro_batch
    iteration.handed_out_at = job.clock.steps if micro_batch.last else None
    job.iteration, job.loader, job.micro_batch = iteration, iteration.loader, micro_batch


def used_up(job: Job, iteration: Iteration) -> list[Iteration]:
    """Later training iterations whose current step was committed, although they were not asked on.

    `zip(a, b, c)` asks `a` first. What `b` and `c` have handed out went into the same step, so
    their cursors move before the state is taken, too. In nested loops the inner iterations are
    closed by the time the outer one is asked.
    """
    after = job.training_passes[job.training_passes.index(iteration) + 1 :]
    return [
        each
        for each in after
        if each.handed_out_at is not None and job.clock.steps > each.handed_out_at
    ]


def end(job: Job, iteration: Iteration) -> None:
    """Closes an iteration; the slots go back to the enclosing one if they are still its own."""
    if iteration.closed:
        return
    iteration.closed = True
    if iteration in job.training_passes:
        job.training_passes.remove(iteration)
    if job.iteration is not iteration:
        return
    outer = iteration.outer
    while outer is not None and outer.closed:
        outer = outer.outer
    job.iteration = outer
    job.loader = None if outer is None else outer.loader
    job.micro_batch = None if outer is None else outer.micro_batch
