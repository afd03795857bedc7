"""`JobHints`: what a cluster scheduler needs to know of a job, as one record and its JSON form.

A scheduler that divides machines among jobs asks each of them what it would make of more, or of
fewer. The answer is small and complete: a table of goodput over the sizes on offer, so that a
scheduler evaluates no model; and the fitted numbers, from which `goodput` computes it for any
placement, without torch and without the job.

Fields may be added: a reader ignores what it does not know. A change that misleads an older reader
raises `VERSION`. A record of version 1 is read as one that does not know what it lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import ArrayLike

from resilin.core import _validate, hints_json
from resilin.core.answer import Menu
from resilin.core.clock import CLOCKS, ClockName
from resilin.core.fit import Fitted
from resilin.core.goodput import Best, best_of_each
from resilin.core.hints_json import Fields, HintsError
from resilin.core.hints_tables import GoodputTable, Speedup, read_speedup, read_tables
from resilin.core.noise import Noise
from resilin.core.plan import BatchBounds
from resilin.core.throughput import Floats, ThroughputModel

__all__ = ["VERSION", "End", "GoodputTable", "HintsError", "JobHints", "Speedup"]

VERSION = 2
"""Version of the JSON form."""

End = Literal["declared", "estimated", "unknown"]
"""Source of the length of a run: the script, the epochs so far, or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHints:
    """Placement, batch size, progress and fitted models of one job.

    The JSON form has the same fields.
    """

    job: str | None = None
    """Id of the job in the cluster; None outside of one."""
    generation: int = 0
    """Number of the job's period of fixed membership; each change and each restart raises it."""
    time: float | None = None
    """Unix time at which the record was made, in seconds; None if it is not known."""
    accelerator: str | None = None
    """Kind of accelerator that the job runs on now."""
    rescale_seconds: float | None = None
    """Median time without training of the last changes; None before the first one."""
    hosts: int
    """Machines that the replicas are on."""
    replicas: int
    """Data-parallel members."""
    accelerators_per_replica: int = 1
    """Accelerators of each: more than one under tensor parallelism."""
    min_replicas: int = 1
    """Smallest number of accelerators on which the job can run."""
    max_replicas: int | None = None
    """Largest number that has samples for all of them; None if nothing limits it."""
    size_multiple: int = 1
    """Sizes of the job are multiples of this number."""
    profiled: int = 0
    """Largest number of accelerators at which steps were measured; 0 before the first one."""
    reference: int
    """The reference batch."""
    batch_size: int
    """The global batch size now."""
    fixed: bool = False
    """Whether the batch size stays what it is, whatever the number of replicas."""
    bounds: BatchBounds
    """Batch sizes that the job may run."""
    steps: int
    """Optimizer steps committed."""
    samples: int
    """Samples trained on."""
    progress: float
    """Progress in reference steps, by the clock that decides when the run ends."""
    total: float | None
    """Length of the run in reference steps, if it is known."""
    end: End = "unknown"
    """Source of `total`."""
    clock: ClockName = "progress"
    """That clock. By samples or tokens, goodput is throughput: no sample is worth less."""
    noise: Noise | None
    """Noise of the gradient, per sample; None until it was measured."""
    throughput: ThroughputModel | None
    """Model of the step times; None while no step was measured."""
    speedup: Speedup | None = None
    """Speedup at other numbers of replicas; None without a throughput."""
    tables: tuple[GoodputTable, ...] = ()
    """Goodput over the menu of the scheduler, for each kind of accelerator that was measured."""

    def __post_init__(self) -> None:
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas ({self.max_replicas}) must be at least min_replicas "
                f"({self.min_replicas})"
            )
        _validate.one_of("end", self.end, get_args(End))
        _validate.one_of("clock", self.clock, CLOCKS)
        if (self.total is None) != (self.end == "unknown"):
            raise ValueError(
                f"end ({self.end!r}) must be 'unknown' if total ({self.total}) is None, and only "
                "then"
            )

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

    def with_tables(self, menu: Menu, fits: Mapping[str, Fitted]) -> JobHints:
        """The same with a table for each kind of the menu that there is a fit for.

        Args:
            menu: Sizes on offer.
            fits: Fitted step times of this job, by kind of accelerator.
        """
        kinds = [kind for kind in menu if kind in fits and menu[kind]]
        return replace(
            self, tables=tuple(self._table(kind, menu[kind], fits[kind]) for kind in kinds)
        )

    def _table(
        self, kind: str, offers: tuple[tuple[int, int], ...], fitted: Fitted
    ) -> GoodputTable:
        sizes, hosts = np.array(offers).T
        replicas = np.maximum(1, sizes // self.accelerators_per_replica)
        best = self._best(fitted.model, hosts, replicas)
        runs = (sizes >= self.min_replicas) & (sizes % self.size_multiple == 0)
        if self.max_replicas is not None:
            runs &= sizes <= self.max_replicas
        spread = fitted.spread(hosts, replicas, best.local_bsz, best.accumulation_steps)
        return GoodputTable(
            kind=kind,
            sizes=tuple(sizes.tolist()),
            hosts=tuple(hosts.tolist()),
            goodput=tuple(np.where(runs, best.goodput, 0.0).tolist()),
            spread=tuple(spread.tolist()),
        )

    def goodput(self, hosts: ArrayLike, replicas: ArrayLike) -> Floats:
        """Best goodput on each of these placements, in reference samples per second.

        With a fixed batch size it is the throughput at that batch, times its efficiency: the
        throughput itself if it is the reference batch.

        Args:
            hosts: Machines; an array, or one number.
            replicas: Data-parallel members, for each of them.

        Raises:
            ValueError: The job has measured no step yet.
        """
        if self.throughput is None:
            raise ValueError("throughput (None) must be known: the job has measured no step yet")
        return self._best(self.throughput, hosts, replicas).goodput

    def _best(self, model: ThroughputModel, hosts: ArrayLike, replicas: ArrayLike) -> Best:
        bounds, least = self.bounds, None
        if self.fixed:
            bounds, least = replace(bounds, max_batch_size=self.batch_size), self.batch_size
        best = best_of_each(
            model, self.noise, self.reference, bounds, hosts, replicas, min_batch_size=least
        )
        if self.clock == "progress":
            return best
        seconds = model.step_seconds(hosts, replicas, best.local_bsz, best.accumulation_steps)
        return best._replace(goodput=np.where(best.goodput > 0, best.batch_size / seconds, 0.0))

    def to_json(self) -> dict[str, Any]:
        """A dict that `json.dumps` takes; see `resilin.hints` for its fields."""
        bounds, local = self.bounds, self.bounds.local_bsz_bounds
        return {
            "version": VERSION,
            "job": {
                "id": self.job,
                "generation": self.generation,
                "time": self.time,
                "accelerator": self.accelerator,
                "rescale_seconds": self.rescale_seconds,
            },
            "placement": {
                "hosts": self.hosts,
                "replicas": self.replicas,
                "accelerators_per_replica": self.accelerators_per_replica,
            },
            "sizes": {
                "min": self.min_replicas,
                "max": self.max_replicas,
                "multiple": self.size_multiple,
                "profiled": self.profiled,
            },
            "batch": {
                "reference": self.reference,
                "current": self.batch_size,
                "fixed": self.fixed,
                "max_batch_size": bounds.max_batch_size,
                "local_bsz_bounds": local and list(local),
                "gradient_accumulation": bounds.gradient_accumulation,
            },
            "progress": {
                "steps": self.steps,
                "samples": self.samples,
                "progress": self.progress,
                "total": self.total,
                "end": self.end,
                "clock": self.clock,
            },
            "noise": self.noise and asdict(self.noise),
            "throughput": self.throughput and asdict(self.throughput),
            "speedup": self.speedup and self.speedup.to_json(),
            "goodput": {table.kind: table.to_json() for table in self.tables},
        }

    @classmethod
    def from_json(cls, told: Any) -> JobHints:
        """Reads what `to_json` returned. Fields that it does not know are ignored.

        Raises:
            HintsError: A field is missing or cannot be what it should be, or the version is later
                than this reader's. The message names the field and the rule.
        """
        get = Fields(told)
        version = get.whole("version", at_least=1)
        if version > VERSION:
            raise HintsError(f"version ({version}) must be at most {VERSION}, that of this reader")
        total = get.optional("progress.total", get.real)
        values: dict[str, Any] = {
            "hosts": get.whole("placement.hosts", at_least=1),
            "replicas": get.whole("placement.replicas", at_least=1),
            "reference": get.whole("batch.reference", at_least=1),
            "batch_size": get.whole("batch.current", at_least=1),
            "bounds": _bounds(get),
            "steps": get.whole("progress.steps"),
            "samples": get.whole("progress.samples"),
            "progress": get.real("progress.progress"),
            "total": total,
            "end": "unknown" if total is None else "declared",
            "noise": _record(Noise, get, "noise"),
            "throughput": _record(ThroughputModel, get, "throughput"),
            "speedup": read_speedup(get),
        }
        if version > 1:
            values |= _later(get)
        try:
            return cls(**values)
        except ValueError as error:
            raise HintsError(str(error)) from None

    @classmethod
    def parse(cls, text: str | bytes) -> JobHints:
        """Reads a JSON text from a network.

        Raises:
            HintsError: As for `from_json`, or the text is too long or not JSON.
        """
        return cls.from_json(hints_json.parse(text, "the hints"))


# Reading -------------------------------------------------------------------------------------


def _later(get: Fields) -> dict[str, Any]:
    """The fields that version 1 does not have."""
    end, clock = get.text("progress.end"), get.text("progress.clock")
    for path, value, known in (("end", end, get_args(End)), ("clock", clock, CLOCKS)):
        if value not in known:
            raise HintsError(f"progress.{path} ({value!r}) must be one of {', '.join(known)}")
    return {
        "job": get.optional("job.id", get.text),
        "generation": get.whole("job.generation"),
        "time": get.optional("job.time", get.real),
        "accelerator": get.optional("job.accelerator", get.text),
        "rescale_seconds": get.optional("job.rescale_seconds", get.real),
        "accelerators_per_replica": get.whole("placement.accelerators_per_replica", at_least=1),
        "min_replicas": get.whole("sizes.min", at_least=1),
        "max_replicas": get.optional("sizes.max", lambda path: get.whole(path, at_least=1)),
        "size_multiple": get.whole("sizes.multiple", at_least=1),
        "profiled": get.whole("sizes.profiled"),
        "fixed": get.truth("batch.fixed"),
        "end": end,
        "clock": clock,
        "tables": read_tables(get),
    }


def _bounds(get: Fields) -> BatchBounds:
    local = get.optional("batch.local_bsz_bounds", lambda path: get.entries(path, hints_json.whole))
    most = get.optional("batch.max_batch_size", lambda path: get.whole(path, at_least=1))
    accumulates = get.truth("batch.gradient_accumulation")
    try:
        return BatchBounds(most, local, accumulates)  # type: ignore[arg-type]  # checked there
    except ValueError as error:
        raise HintsError(f"batch: {error}") from None


_R = TypeVar("_R", Noise, ThroughputModel)


def _record(kind: type[_R], get: Fields, path: str) -> _R | None:
    """A record of numbers, or None. What an older writer did not know has its default."""
    if get.get(path) is None:
        return None
    names = [
        f.name
        for f in fields(kind)
        if f.default is MISSING or get.get(f"{path}.{f.name}", None) is not None
    ]
    read = {name: get.real(f"{path}.{name}") for name in names}
    try:
        return kind(**read)
    except ValueError as error:
        raise HintsError(f"{path}: {error}") from None
