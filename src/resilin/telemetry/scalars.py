"""Contents of an event as named numbers, as counts and as text: the common base of all sinks.

A curve has the same name everywhere, so no sink has its own list. Numbers that are unknown or not
finite are left out: a gap in a curve is right, a zero would be wrong. `Counts` is for services that
add up over time; it holds the only state that is kept from event to event.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from resilin.core.events import (
    CheckpointEvent,
    DecisionEvent,
    EpochEvent,
    Event,
    FaultEvent,
    MetricsEvent,
    RescaleEvent,
    RiskEvent,
    StartEvent,
    StepEvent,
)
from resilin.telemetry.wording import describe


class Meaning(NamedTuple):
    """Unit and description of a number."""

    unit: str
    """Unit in UCUM, as in OpenTelemetry; words in braces are counted things."""
    text: str
    """Description in one sentence."""


SCALARS: Final[Mapping[str, Meaning]] = MappingProxyType(
    {
        "batch_size": Meaning("{sample}", "Samples in the step, over all replicas."),
        "replicas": Meaning("{replica}", "Data-parallel members."),
        "hosts": Meaning("{host}", "Machines that the replicas run on."),
        "local_bsz": Meaning("{sample}", "The largest micro-batch."),
        "accumulation_steps": Meaning(
            "{batch}", "The largest number of micro-batches that a replica ran."
        ),
        "scale": Meaning("1", "Global batch over reference batch."),
        "gain": Meaning("{step}", "Reference steps that the step was worth."),
        "lr": Meaning("1", "Learning rate of the first group, as the script sets it."),
        "lr_factor": Meaning("1", "Factor of the scaling rule on the learning rate."),
        "learning_rate": Meaning("1", "Learning rate used by the optimizer: lr times lr_factor."),
        "noise_scale": Meaning("{sample}", "Gradient noise scale: trace over sqr_norm."),
        "sqr_norm": Meaning("1", "Squared norm of the true gradient, averaged."),
        "trace": Meaning("1", "Trace of one sample's gradient covariance, averaged."),
        "loss": Meaning("1", "The loss, if the script records one."),
        "step_seconds": Meaning("s", "Wall time of the step."),
        "samples": Meaning("{sample}", "Samples used so far."),
        "progress": Meaning("{step}", "Reference steps done so far."),
        "reference": Meaning("{sample}", "The reference batch."),
        "total_steps": Meaning("{step}", "Length of the run in reference steps, if it is known."),
        "epoch": Meaning("{epoch}", "Epoch of the sample stream, from 0."),
        "generation": Meaning("{generation}", "The period of fixed membership."),
        "predicted_goodput": Meaning(
            "{sample}/s", "Predicted reference samples per second at the chosen batch size."
        ),
        "rescale_seconds": Meaning("s", "Time without a step during a rescale."),
        "checkpoint_seconds": Meaning("s", "Wall time of saving a checkpoint."),
        "checkpoint_bytes": Meaning("By", "Size of a saved checkpoint on storage."),
        "load_seconds": Meaning("s", "Wall time of loading a checkpoint."),
        "at_risk": Meaning(
            "{step}", "Largest number of completed steps that a lost worker can cost."
        ),
    }
)
"""Names of resilin's own numbers. Any other name in `scalars` is a metric of the user."""

COUNTS: Final[Mapping[str, Meaning]] = MappingProxyType(
    {
        "steps": Meaning("{step}", "Optimizer steps committed."),
        "rescales": Meaning("{rescale}", "Changes of the set of replicas."),
        "faults": Meaning("{fault}", "Faults, by kind."),
        "checkpoints": Meaning("{checkpoint}", "Checkpoints, by action."),
        "decisions": Meaning("{decision}", "Choices of a batch size, by whether it changed."),
    }
)
"""Names of the counts."""


def scalars(event: Event) -> dict[str, float]:
    """The numbers of an event that can be plotted.

    A metric of the user with the name of one of resilin's numbers gets the prefix `user_`, except
    `loss`, which always comes from the user.

    Args:
        event: Any event.

    Returns:
        Finite numbers by name; nothing for events of an unknown kind.
    """
    values = dict(_own(event))
    for name, number in _recorded(event).items():
        values[f"user_{name}" if name in SCALARS and name != "loss" else name] = number
    return {
        name: float(number)
        for name, number in values.items()
        if number is not None and math.isfinite(number)
    }


def _own(event: Event) -> Mapping[str, float | None]:
    match event:
        case StepEvent():
            return _of_step(event)
        case StartEvent():
            return {
                # 0 stands for a reference that the job did not know.
                "reference": event.reference or None,
                "replicas": event.replicas,
                "hosts": event.hosts,
                "total_steps": event.total_steps,
                "generation": event.generation,
            }
        case RescaleEvent():
            return {
                "replicas": event.replicas,
                "generation": event.generation,
                "rescale_seconds": event.seconds,
            }
        case EpochEvent():
            return {"epoch": event.epoch, "samples": event.samples, "progress": event.progress}
        case CheckpointEvent(action="saved"):
            return {"checkpoint_seconds": event.seconds, "checkpoint_bytes": event.num_bytes}
        case CheckpointEvent(action="loaded"):
            return {"load_seconds": event.seconds}
        case RiskEvent():
            return {"at_risk": event.steps}
        case DecisionEvent():
            chosen = [c.goodput for c in event.candidates if c.batch_size == event.batch_size]
            return {"predicted_goodput": max(chosen, default=None)}
    return {}


def _of_step(event: StepEvent) -> Mapping[str, float | None]:
    return {
        "batch_size": event.batch_size,
        "replicas": event.replicas,
        "local_bsz": event.local_bsz,
        "accumulation_steps": event.accumulation_steps,
        "scale": event.scale,
        "gain": event.gain,
        "lr": event.lr,
        "lr_factor": event.lr_factor,
        "learning_rate": event.learning_rate,
        "noise_scale": event.noise_scale,
        "sqr_norm": event.sqr_norm,
        "trace": event.trace,
        "loss": event.loss,
        "step_seconds": event.seconds,
        "samples": event.samples,
        "progress": event.progress,
        "epoch": event.epoch,
        "generation": event.generation,
    }


def _recorded(event: Event) -> Mapping[str, float]:
    match event:
        case StepEvent():
            return event.metrics
        case MetricsEvent():
            return event.values
    return {}


def words(event: Event) -> str | None:
    """One-line description of an event that is of interest to a person; None for all others.

    Those are the start of a generation, rescales, faults, changes of the batch size and failed
    checkpoints.
    """
    match event:
        case StartEvent():
            verb = "resumes" if event.resumed else "starts"
            return (
                f"{verb}: {event.optimizer} with rule {event.rule}, reference batch "
                f"{event.reference}, {event.replicas} replicas on {event.hosts} hosts"
            )
        case RescaleEvent() | FaultEvent() | CheckpointEvent(action="failed"):
            return describe(event)
        case DecisionEvent() if event.batch_size != event.batch_size_before:
            return describe(event)
    return None


class Count(NamedTuple):
    """An increment of a counter."""

    name: str
    """One of `COUNTS`."""
    num: int
    """The increment."""
    labels: Mapping[str, str]
    """Labels of the counter, such as the kind of a fault."""


LABELS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"faults": ("kind",), "checkpoints": ("action",), "decisions": ("outcome",)}
)
"""The labels of each count; a name that is not listed has none."""


class Counts:
    """Turns the events of one process into counts.

    Steps are counted by their numbers, because not every step is reported. If the job returns to an
    older state, the repeated steps count again: they were executed.
    """

    def __init__(self) -> None:
        self._step: int | None = None

    def __call__(self, event: Event) -> Count | None:
        """The increment of this event, if any."""
        match event:
            case StepEvent():
                before = event.step - 1 if self._step is None else self._step
                self._step = event.step
                # Not after the last one, and no start in between: at least this step was executed.
                return Count("steps", event.step - before if event.step > before else 1, {})
            case StartEvent():
                self._step = event.step
            case RescaleEvent():
                self._step = event.step
                return Count("rescales", 1, {})
            case FaultEvent():
                return Count("faults", 1, {"kind": event.kind})
            case CheckpointEvent():
                return Count("checkpoints", 1, {"action": event.action})
            case DecisionEvent():
                changed = event.batch_size != event.batch_size_before
                return Count("decisions", 1, {"outcome": "changed" if changed else "kept"})
        return None
