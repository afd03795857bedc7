"""`JobHints`: what a cluster scheduler needs to know of a job, as one record and its JSON form.

A scheduler that divides machines among jobs asks each of them what it would make of more, or of
fewer. The answer is small and complete: with the fitted numbers, `goodput` computes it for any
placement, without torch and without the job.

Fields may be added: a reader ignores what it does not know. A change that misleads an older reader
raises `VERSION`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from resilin.core import _validate
from resilin.core.goodput import best_goodput
from resilin.core.noise import Noise
from resilin.core.plan import BatchBounds
from resilin.core.throughput import Floats, ThroughputModel

VERSION = 1
"""Version of the JSON form."""


class HintsError(ValueError):
    """Not the hints of a job, or of a later version; names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """Goodput of the job at other numbers of replicas, on hosts as full as they are now."""

    replicas: tuple[int, ...]
    """Numbers of replicas: powers of two."""
    speedup: tuple[float, ...]
    """Best goodput of each, over that of one replica on one host; 0 where no plan is allowed."""

    def __post_init__(self) -> None:
        if len(self.replicas) != len(self.speedup):
            raise ValueError(
                f"replicas has {len(self.replicas)} entries and speedup has {len(self.speedup)}: "
                "they must have the same number"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHints:
    """Placement, batch size, progress and fitted models of one job."""

    hosts: int
    """Machines that the replicas are on."""
    replicas: int
    """Data-parallel members."""
    reference: int
    """The reference batch."""
    batch_size: int
    """The global batch size now."""
    bounds: BatchBounds
    """Batch sizes that the job may run."""
    steps: int
    """Optimizer steps committed."""
    samples: int
    """Samples trained on."""
    progress: float
    """Progress in reference steps."""
    total: float | None
    """Length of the run in reference steps, if it is known."""
    noise: Noise | None
    """Noise of the gradient, per sample; None until it was measured."""
    throughput: ThroughputModel | None
    """Model of the step times; None while no step was measured."""
    speedup: Speedup | None = None
    """Speedup at other numbers of replicas; None without a throughput."""

    def with_speedup(self, max_replicas: int) -> JobHints:
        """The same with the speedup of up to so many replicas, if there is a throughput."""
        _validate.whole("max_replicas", max_replicas, at_least=1)
        if self.throughput is None:
            return replace(self, speedup=None)
        replicas = 2 ** np.arange(max_replicas.bit_length())
        # Hosts as full as they are now.
        hosts = -(-replicas // -(-self.replicas // self.hosts))
        values = self.goodput(hosts, replicas)
        base = values[0] if values[0] > 0 else 1.0
        table = Speedup(replicas=tuple(replicas.tolist()), speedup=tuple((values / base).tolist()))
        return replace(self, speedup=table)

    def goodput(self, hosts: ArrayLike, replicas: ArrayLike) -> Floats:
        """Best goodput on each of these placements, in reference samples per second.

        Args:
            hosts: Machines; an array, or one number.
            replicas: Data-parallel members, for each of them.

        Raises:
            ValueError: The job has measured no step yet.
        """
        if self.throughput is None:
            raise ValueError("throughput (None) must be known: the job has measured no step yet")
        return best_goodput(
            self.throughput, self.noise, self.reference, self.bounds, hosts, replicas
        )

    def to_json(self) -> dict[str, Any]:
        """A dict that `json.dumps` takes; see `resilin.hints` for its fields."""
        bounds, local = self.bounds, self.bounds.local_bsz_bounds
        return {
            "version": VERSION,
            "placement": {"hosts": self.hosts, "replicas": self.replicas},
            "batch": {
                "reference": self.reference,
                "current": self.batch_size,
                "max_batch_size": bounds.max_batch_size,
                "local_bsz_bounds": local and list(local),
                "gradient_accumulation": bounds.gradient_accumulation,
            },
            "progress": {
                "steps": self.steps,
                "samples": self.samples,
                "progress": self.progress,
                "total": self.total,
            },
            "noise": self.noise and asdict(self.noise),
            "throughput": self.throughput and asdict(self.throughput),
            "speedup": self.speedup
            and {"replicas": list(self.speedup.replicas), "speedup": list(self.speedup.speedup)},
        }

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> JobHints:
        """Reads what `to_json` returned. Fields that it does not know are ignored.

        Raises:
            HintsError: A field is missing or cannot be what it should be, or the version is later
                than this reader's.
        """
        version = _whole(told, "version")
        if version > VERSION:
            raise HintsError(f"version ({version}) must be at most {VERSION}, that of this reader")
        total = _get(told, "progress.total")
        return cls(
            hosts=_whole(told, "placement.hosts", at_least=1),
            replicas=_whole(told, "placement.replicas", at_least=1),
            reference=_whole(told, "batch.reference", at_least=1),
            batch_size=_whole(told, "batch.current", at_least=1),
            bounds=_bounds(told),
            steps=_whole(told, "progress.steps"),
            samples=_whole(told, "progress.samples"),
            progress=_real(told, "progress.progress"),
            total=None if total is None else _real(told, "progress.total"),
            noise=_record(Noise, told, "noise"),
            throughput=_record(ThroughputModel, told, "throughput"),
            speedup=_speedup(told),
        )


# Reading -------------------------------------------------------------------------------------


def _get(told: Any, path: str) -> Any:
    """The value of a field, such as `batch.current`."""
    value, seen = told, ""
    for name in path.split("."):
        if not isinstance(value, Mapping):
            raise HintsError(f"{seen or 'the hints'} ({value!r}) must be an object")
        seen = f"{seen}.{name}" if seen else name
        if name not in value:
            raise HintsError(f"{seen} is missing")
        value = value[name]
    return value


def _whole(told: Any, path: str, *, at_least: int = 0) -> int:
    try:
        return _validate.whole(path, _get(told, path), at_least=at_least)
    except ValueError as error:
        raise HintsError(str(error)) from None


def _real(told: Any, path: str) -> float:
    try:
        return _validate.real(path, _get(told, path), at_least=0)
    except ValueError as error:
        raise HintsError(str(error)) from None


def _bounds(told: Any) -> BatchBounds:
    local = _get(told, "batch.local_bsz_bounds")
    accumulates = _get(told, "batch.gradient_accumulation")
    if not isinstance(accumulates, bool):
        raise HintsError(f"batch.gradient_accumulation ({accumulates!r}) must be true or false")
    try:
        return BatchBounds(
            max_batch_size=_get(told, "batch.max_batch_size"),
            local_bsz_bounds=None if local is None else tuple(local),
            gradient_accumulation=accumulates,
        )
    except (TypeError, ValueError) as error:
        raise HintsError(f"batch: {error}") from None


_R = TypeVar("_R", Noise, ThroughputModel)


def _record(kind: type[_R], told: Any, path: str) -> _R | None:
    """A record of numbers, or None. What an older writer did not know has its default."""
    given = _get(told, path)
    if given is None:
        return None
    names = [f.name for f in fields(kind) if f.default is MISSING or f.name in given]
    try:
        return kind(**{name: _real(told, f"{path}.{name}") for name in names})
    except HintsError:
        raise
    except ValueError as error:
        raise HintsError(f"{path}: {error}") from None


def _speedup(told: Any) -> Speedup | None:
    if _get(told, "speedup") is None:
        return None
    replicas, values = _get(told, "speedup.replicas"), _get(told, "speedup.speedup")
    try:
        return Speedup(
            replicas=tuple(_validate.whole("replicas", each, at_least=1) for each in replicas),
            speedup=tuple(_validate.real("speedup", each, at_least=0) for each in values),
        )
    except (TypeError, ValueError) as error:
        raise HintsError(f"speedup: {error}") from None
