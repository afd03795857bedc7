"""Events: typed records of a run, and their JSON form.

Logs, views and reports are made from events alone. An event is one JSON object on one line, with
its `event` name and the schema `version`. Fields may be added: an older reader skips unknown
fields, a newer one fills in defaults. A change that an older reader would misunderstand must raise
`VERSION`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from operator import attrgetter
from types import MappingProxyType, NoneType, UnionType
from typing import Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from resilin.core.noise import noise_scale

VERSION = 1
"""Version of the schema. Readers reject a higher one."""


class EventError(ValueError):
    """A line that is not an event of a known version; the message gives the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """The common fields of all events."""

    name: ClassVar[str] = ""
    """The `event` field of the JSON form."""

    time: float
    """Unix time in seconds."""
    step: int
    """Optimizer steps committed when it happened."""
    generation: int = 0
    """The period of fixed membership in which it happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEvent(Event):
    """The processes of a generation have started training."""

    name: ClassVar[str] = "start"

    reference: int
    """The reference batch."""
    replicas: int
    """Data-parallel members."""
    hosts: int
    """Machines that they run on."""
    rule: str
    """The scaling rule."""
    optimizer: str
    """Class of the optimizer."""
    clock: str = "progress"
    """The clock in which the rule measures the length of the run."""
    total_steps: float | None = None
    """Length of the run in reference steps, if it is known."""
    steps_per_epoch: float | None = None
    """Reference steps in one epoch, if that is known."""
    resumed: bool = False
    """Whether it resumes from a state of an earlier process."""
    script: str = ""
    """The script that was started; not its arguments, which may be secrets."""
    replays: str = ""
    """Source of the batch-size trace that is being replayed, if any."""
    software: str = ""
    """Versions of resilin, torch and Python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent(Event):
    """One committed optimizer step. Not every step has to be reported."""

    name: ClassVar[str] = "step"

    epoch: int
    """Epoch of the sample stream."""
    replicas: int
    """Data-parallel members."""
    batch_size: int
    """Samples in the step, over all replicas."""
    local_bsz: int
    """The largest micro-batch."""
    accumulation_steps: int
    """The largest number of micro-batches that a replica ran."""
    samples: int
    """Samples used so far."""
    progress: float
    """Reference steps done so far."""
    scale: float
    """Global batch over reference batch."""
    gain: float
    """Worth of this step in reference steps."""
    lr_factor: float
    """Factor of the rule on the first group's learning rate."""
    lr: float | None = None
    """The first group's learning rate without the factor."""
    sqr_norm: float | None = None
    """Squared norm of the true gradient, averaged."""
    trace: float | None = None
    """Trace of one sample's gradient covariance, averaged."""
    seconds: float | None = None
    """Wall time of the step."""
    loss: float | None = None
    """Loss, if the user recorded one: the mean over replica 0's micro-batches."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Other metrics that the user recorded in the step, by name."""

    @property
    def learning_rate(self) -> float | None:
        """Learning rate that the optimizer used for the first group; None if it has none."""
        return None if self.lr is None else self.lr * self.lr_factor

    @property
    def noise_scale(self) -> float | None:
        """The batch size at which noise and signal of the gradient are equal, if it is known."""
        if self.trace is None or self.sqr_norm is None:
            return None
        scale = float(noise_scale(self.sqr_norm, self.trace))
        return None if math.isnan(scale) else scale


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsEvent(Event):
    """Metrics that the user recorded between steps, such as the result of an evaluation."""

    name: ClassVar[str] = "metrics"

    values: Mapping[str, float]
    """The numbers, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to run the next steps that was considered in a decision."""

    batch_size: int
    """Global batch size."""
    local_bsz: int
    """The largest micro-batch."""
    accumulation_steps: int
    """Micro-batches per replica."""
    goodput: float
    """Predicted reference samples per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionEvent(Event):
    """The batch size was changed, or deliberately kept."""

    name: ClassVar[str] = "decision"

    batch_size_before: int
    """The global batch size so far."""
    batch_size: int
    """The chosen global batch size."""
    reason: str
    """The reason, as text."""
    candidates: tuple[Candidate, ...] = ()
    """The batch sizes that were compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RescaleEvent(Event):
    """The set of replicas changed; `generation` is the new one."""

    name: ClassVar[str] = "rescale"

    replicas_before: int
    """Data-parallel members before."""
    replicas: int
    """Data-parallel members from now on."""
    reason: str
    """The reason, as text."""
    seconds: float | None = None
    """Duration without a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEvent(Event):
    """State was saved, loaded or removed, or that failed."""

    name: ClassVar[str] = "checkpoint"

    action: Literal["saved", "loaded", "failed", "removed"]
    """The action."""
    path: str
    """Path of the checkpoint."""
    num_bytes: int | None = None
    """Size on storage."""
    seconds: float | None = None
    """Wall time."""
    detail: str = ""
    """The reason, if it failed."""


ENDS = {"gave_up": "gave up", "stopped": "stopped", "left": "ended"}
"""Kinds of `FaultEvent` with which a launcher ended though the job is not finished, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultEvent(Event):
    """A fault occurred and was handled."""

    name: ClassVar[str] = "fault"

    kind: str
    """Kind of the fault: `worker_lost`, `out_of_memory`, ..., or one of `ENDS`."""
    detail: str
    """Details, and how it was handled."""
    replica: int | None = None
    """The replica, if the fault concerns one."""
    without_step: bool = False
    """Whether it ended workers that had made no step since they were started; one fault tells it
    for all that were started together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RiskEvent(Event):
    """The possible cost of a lost worker is known, or has changed."""

    name: ClassVar[str] = "risk"

    steps: int
    """Largest number of completed steps that it can cost, while a host with a copy is alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEvent(Event):
    """An epoch of the sample stream was completed."""

    name: ClassVar[str] = "epoch"

    epoch: int
    """The completed epoch, from 0."""
    samples: int
    """Samples used so far."""
    progress: float
    """Reference steps done so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownEvent(Event):
    """An event of a kind that this version does not know, with all its fields."""

    name: ClassVar[str] = "unknown"

    kind: str
    """Its `event` name."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """All other fields, as JSON values."""


EVENTS: Mapping[str, type[Event]] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            StartEvent,
            StepEvent,
            MetricsEvent,
            DecisionEvent,
            RescaleEvent,
            CheckpointEvent,
            FaultEvent,
            EpochEvent,
            RiskEvent,
        )
    }
)
"""The known kinds, by name."""


def begins_anew(event: Event) -> bool:
    """Whether a new run starts here: earlier events in the same log belong to another run."""
    return isinstance(event, StartEvent) and not event.resumed and event.generation == 0


def to_json(event: Event) -> str:
    """One line of strict JSON, without a line break.

    Numbers that JSON lacks are written as the strings `nan`, `inf` and `-inf`.
    """
    if isinstance(event, UnknownEvent):
        own = {"time": event.time, "step": event.step, "generation": event.generation}
        body = {"version": VERSION, "event": event.kind, **own, **event.fields}
        return _ENCODER.encode(_plain(body))
    head = {"version": VERSION, "event": event.name}
    names, values_of = _columns(type(event))  # type: ignore[arg-type]  # a class is hashable
    try:
        # Most events hold plain finite numbers, and there may be millions of them.
        return _ENCODER.encode({**head, **dict(zip(names, values_of(event), strict=True))})
    except (TypeError, ValueError):
        return _ENCODER.encode({**head, **_plain(event)})


_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


@cache
def _columns(cls: type[Any]) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    names = tuple(item.name for item in fields(cls))
    return names, attrgetter(*names)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def from_json(line: str | bytes) -> Event:
    """Reads one line.

    Returns:
        The event; an `UnknownEvent` if its kind is not known here.

    Raises:
        EventError: Not JSON, not an event, of a newer version, or with a missing or mistyped
            field. The message names the field.
    """
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise EventError(f"not a JSON line: {error}") from None
    if not isinstance(body, dict):
        raise EventError(f"an event is a JSON object, not {type(body).__name__}")
    version, name = body.pop("version", None), body.pop("event", None)
    if type(version) is not int or type(name) is not str:
        raise EventError(f"not an event: version is {version!r} and event is {name!r}")
    if version > VERSION:
        raise EventError(f"the event has version {version}; this reader knows up to {VERSION}")
    if name in EVENTS:
        event: Event = _build(EVENTS[name], body, name)
        return event
    common = {item.name: body.pop(item.name) for item in fields(Event) if item.name in body}
    head = _build(Event, common, name)
    return UnknownEvent(
        time=head.time, step=head.step, generation=head.generation, kind=name, fields=body
    )


_PLAIN = {int, float, str, bool, NoneType}
_ABSENT = object()


@cache
def _plan(cls: type[Any]) -> tuple[tuple[str, Any, frozenset[type[Any]], bool], ...]:
    """For each field: name, annotation, types that need no check, and whether it is required.

    Resolving annotations is slow, and a log has millions of lines of a few kinds.
    """
    hints = get_type_hints(cls)
    plan = []
    for item in fields(cls):
        hint = hints[item.name]
        origin, args = _shape(hint)
        fitting = frozenset(args if origin in (Union, UnionType) else (hint,))
        is_required = item.default is MISSING and item.default_factory is MISSING
        plan.append((item.name, hint, fitting & _PLAIN, is_required))
    return tuple(plan)


@cache
def _shape(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(hint), get_args(hint)


class _Recipe(NamedTuple):
    """A fast constructor for fields whose names and types were valid before.

    A log has millions of lines of a few kinds, and checking each field takes most of the time.
    """

    looks: tuple[tuple[str, Any], ...]
    """Fields whose values must still be checked, with their annotations."""
    setters: tuple[Callable[[Any, Any], None], ...]
    """Setters of the fields, in order."""


_recipes: dict[tuple[Any, ...], _Recipe] = {}
_MOST_RECIPES = 1000


def _build(cls: type[Any], body: dict[str, Any], where: str) -> Any:
    key = (cls, *body, *map(type, body.values()))
    known = _recipes.get(key)
    if known is not None:
        for name, hint in known.looks:
            body[name] = _typed(hint, body[name], f"{where}.{name}")
        # As `cls(**body)`, which takes three times as long because the class is frozen.
        event = object.__new__(cls)
        for set_field, value in zip(known.setters, body.values(), strict=True):
            set_field(event, value)
        return event
    values, looks = {}, []
    for name, hint, fitting, is_required in _plan(cls):  # type: ignore[arg-type]
        value = body.get(name, _ABSENT)
        if type(value) in fitting:
            values[name] = value
        elif value is not _ABSENT:
            values[name] = _typed(hint, value, f"{where}.{name}")
            looks.append((name, hint))
        elif is_required:
            raise EventError(f"{where}.{name} is missing")
    is_whole = len(values) == len(body) == len(_plan(cls))  # type: ignore[arg-type]
    if is_whole and len(_recipes) < _MOST_RECIPES:
        _recipes[key] = _Recipe(tuple(looks), tuple(getattr(cls, name).__set__ for name in body))
    return cls(**values)


def _typed(hint: Any, value: Any, where: str) -> Any:
    """`value` as the annotated type, converting only types that JSON does not have."""
    origin, args = _shape(hint)
    if origin in (Union, UnionType):
        if value is None and NoneType in args:
            return None
        (inner,) = [arg for arg in args if arg is not NoneType]
        return _typed(inner, value, where)
    if origin is Literal:
        if value in args:
            return value
    elif origin is tuple:
        if isinstance(value, list):
            return tuple(_typed(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    elif origin is Mapping:
        # The names are strings: JSON has no others.
        if isinstance(value, dict):
            return {key: _typed(args[1], item, f"{where}.{key}") for key, item in value.items()}
    elif isinstance(hint, type) and is_dataclass(hint):
        if isinstance(value, dict):
            return _build(hint, value, where)
    elif hint is float:
        if type(value) is float or value in ("nan", "inf", "-inf"):
            return float(value)
        if type(value) is int and abs(value) < 2**1023:
            return float(value)
    elif type(value) is hint:
        return value
    expected = getattr(hint, "__name__", str(hint))
    raise EventError(f"{where} ({value!r}) must be {expected}")
