"""`Summary`: a run in a few numbers, for a table or for `--json`."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from resilin.core.events import ENDS
from resilin.lab.curves import Array
from resilin.telemetry.run import Run
from resilin.telemetry.wording import amount, extent, span

TAIL = 50
"""The final loss is the mean over the last 1/`TAIL` of the reported steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The numbers of one run; None if unknown."""

    name: str
    """Last part of its directory."""
    script: str = ""
    """The script."""
    began: float | None = None
    """When it began, in seconds since 1970."""
    ended: str = ""
    """End of its launcher, if the job was stopped or given up: a sentence."""
    rule: str = ""
    """The scaling rule."""
    optimizer: str = ""
    """Class of the optimizer."""
    software: str = ""
    """Versions of resilin, torch and Python."""
    replays: str = ""
    """The batch-size trace that was replayed, if any."""
    reference: int | None = None
    """The reference batch."""
    seconds: float
    """Seconds from the first event to the last, including all pauses."""
    steps: int
    """Optimizer steps."""
    samples: int
    """Samples used."""
    progress: float
    """Completed reference steps, by accumulated gain."""
    steps_done: float
    """Completed reference steps, by the clock in which the rule measures the run."""
    total_steps: float | None = None
    """Length of the run in reference steps."""
    generations: int
    """Periods with a fixed set of replicas."""
    replicas: tuple[int, int] | None = None
    """Smallest and largest number of replicas."""
    batch_size: tuple[int, int] | None = None
    """Smallest and largest batch size, without remainders of epochs."""
    goodput: float | None = None
    """Reference samples per second over the whole time, pauses included."""
    throughput: float | None = None
    """Samples per second over the whole time, pauses included."""
    paused_seconds: float
    """Time without steps between generations."""
    repeated_steps: int
    """Steps that were repeated, because a generation resumed from an older state."""
    rescales: int
    """Number of times that the set of replicas changed or was restarted."""
    faults: int
    """Number of faults."""
    starts_without_step: int = 0
    """Number of times that workers were started and lost before they made a step."""
    checkpoints_saved: int
    """Checkpoints that were written."""
    checkpoints_failed: int
    """Checkpoints that could not be written or read."""
    loss: float | None = None
    """Final loss: the mean over the last 2% of the reported steps."""
    metrics: dict[str, float | None] = field(default_factory=dict)
    """The last value of each metric."""
    damaged_lines: int = 0
    """Lines of the log that could not be read."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        """Names and values as text."""
        total = "" if self.total_steps is None else f" of {amount(self.total_steps)}"
        failed = f", {self.checkpoints_failed:,} failed" if self.checkpoints_failed else ""
        rows = [
            ("script", self.script or "-"),
            ("rule", ", ".join(filter(None, (self.rule, self.optimizer))) or "-"),
            *([("replayed trace", self.replays)] if self.replays else []),
            *([("ended", self.ended)] if self.ended else []),
            ("duration", span(self.seconds)),
            ("completed (reference steps)", amount(self.steps_done) + total),
            ("progress (reference steps)", amount(self.progress)),
            ("optimizer steps", f"{self.steps:,}"),
            ("samples", amount(self.samples)),
            ("reference batch (samples)", amount(self.reference)),
            ("batch size (samples)", extent(self.batch_size or ())),
            ("replicas", extent(self.replicas or ())),
            ("generations", f"{self.generations:,}"),
            ("mean goodput (reference samples/s)", amount(self.goodput)),
            ("mean throughput (samples/s)", amount(self.throughput)),
            ("time without steps", span(self.paused_seconds)),
            ("repeated steps", f"{self.repeated_steps:,}"),
            ("faults", f"{self.faults:,}"),
            *(
                [("starts without a step", f"{self.starts_without_step:,}")]
                if self.starts_without_step
                else []
            ),
            ("checkpoints", f"{self.checkpoints_saved:,} saved{failed}"),
            ("final loss", amount(self.loss)),
        ]
        rows += [(f"last {name}", amount(value)) for name, value in self.metrics.items()]
        return rows


def summarise(run: Run) -> Summary:
    """The numbers of a run."""
    start, steps, seconds = run.start, run.steps, run.duration
    made, samples, progress = (
        _last(column) for column in (steps.step, steps.samples, steps.progress)
    )
    # Progress before the first reported step does not belong to this run.
    learned = progress - (_first(steps.progress) - _first(steps.gain))
    used = samples - (_first(steps.samples) - _first(steps.batch_size))
    reference = run.reference or None
    actions = [checkpoint.action for checkpoint in run.checkpoints]
    metrics = {name: _finite(_last(series.value)) for name, series in run.metrics.items()}
    loss = _end(steps.loss)
    if loss is None:
        loss = metrics.pop("loss", None)
    return Summary(
        name=run.name,
        script=start.script if start else "",
        began=_finite(run.starts[0].time) if run.starts else None,
        ended=_ended(run),
        rule=start.rule if start else "",
        optimizer=start.optimizer if start else "",
        software=start.software if start else "",
        replays=start.replays if start else "",
        reference=reference,
        seconds=seconds,
        steps=int(made),
        samples=int(samples),
        progress=progress,
        steps_done=progress
        if start is None or start.clock == "progress"
        else samples / (reference or 1),
        total_steps=_finite(start.total_steps) if start else None,
        generations=len(
            {*np.unique(steps.generation).tolist(), *(s.generation for s in run.starts)}
        ),
        replicas=_bounds(steps.replicas),
        batch_size=_bounds(steps.batch_size[whole_batches(run)]),
        goodput=_finite(learned * reference / seconds) if reference and seconds else None,
        throughput=_finite(used / seconds) if seconds else None,
        paused_seconds=_paused(run),
        repeated_steps=_repeated(run),
        rescales=len(run.rescales),
        faults=sum(fault.kind not in ENDS for fault in run.faults),
        starts_without_step=sum(fault.without_step for fault in run.faults),
        checkpoints_saved=actions.count("saved"),
        checkpoints_failed=actions.count("failed"),
        loss=loss,
        metrics=metrics,
        damaged_lines=len(run.damage),
    )


def whole_batches(run: Run) -> npt.NDArray[np.bool_]:
    """Mask of the steps with the chosen batch size, without remainders of epochs.

    A remainder is recognised by its scale, which counts started reference steps. A remainder that
    is a whole number of reference batches cannot be distinguished from other batches.
    """
    steps, reference = run.steps, float(run.reference or math.nan)
    with np.errstate(all="ignore"):
        whole = ~(np.abs(steps.batch_size - steps.scale * reference) > 0.5)
    return np.asarray(whole) if whole.any() else np.ones(len(steps), dtype=np.bool_)


def _ended(run: Run) -> str:
    """The end of the launcher, if that was the last that happened."""
    last = max((each.time for each in (*run.starts, *run.faults)), default=math.nan)
    steps = run.steps.time[np.isfinite(run.steps.time)]
    for fault in reversed(run.faults):
        if fault.kind in ENDS and fault.time == last and not (steps > last).any():
            return f"{ENDS[fault.kind]} {fault.detail}"
    return ""


def _paused(run: Run) -> float:
    """Time between the last step of a generation and the first of the next one."""
    steps = run.steps
    told = {event.generation: event.seconds for event in run.rescales if event.seconds is not None}
    total = 0.0
    for last in np.flatnonzero(np.diff(steps.generation) != 0):
        known = told.get(int(steps.generation[last + 1]))
        # Not every step is reported, so the duration from the event is preferred to the gap.
        gap = float(steps.time[last + 1] - steps.time[last])
        pause = gap if known is None else known
        total += pause if math.isfinite(pause) and pause > 0 else 0.0
    return total


def _repeated(run: Run) -> int:
    steps, total = run.steps, 0
    for start in run.starts[1:]:
        before = steps.step[steps.time < start.time]
        if len(before) and math.isfinite(before[-1]):
            total += max(0, int(before[-1]) - start.step)
    return total


def _first(column: Array) -> float:
    return _or_zero(column[:1])


def _last(column: Array) -> float:
    return _or_zero(column[-1:])


def _or_zero(values: Array) -> float:
    return float(values[0]) if len(values) and math.isfinite(values[0]) else 0.0


def _end(column: Array) -> float | None:
    known = column[np.isfinite(column)]
    return float(known[-max(1, len(known) // TAIL) :].mean()) if len(known) else None


def _bounds(column: Array) -> tuple[int, int] | None:
    known = column[np.isfinite(column)]
    return (int(known.min()), int(known.max())) if len(known) else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
