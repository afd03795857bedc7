"""Tables in the hints of a job: goodput over sizes, with its uncertainty, and its JSON form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from resilin.core import hints_json
from resilin.core.hints_json import MAX_ENTRIES, Fields, HintsError

COLUMNS = ("sizes", "hosts", "goodput", "spread")
"""Columns of a table, by their names in JSON."""


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

    def to_json(self) -> dict[str, Any]:
        """A dict that `json.dumps` takes."""
        return {"replicas": list(self.replicas), "speedup": list(self.speedup)}


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputTable:
    """Goodput of the job on one kind of accelerator, at the sizes of a menu."""

    kind: str
    """Kind of accelerator."""
    sizes: tuple[int, ...]
    """Numbers of accelerators, ascending."""
    hosts: tuple[int, ...]
    """Hosts of each size."""
    goodput: tuple[float, ...]
    """Best goodput of each, in reference samples per second; 0 where the job cannot run."""
    spread: tuple[float, ...]
    """Uncertainty of each: standard deviation of the logarithm of the step time."""

    def __post_init__(self) -> None:
        lengths = [len(each) for each in (self.sizes, self.hosts, self.goodput, self.spread)]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"sizes, hosts, goodput and spread have {', '.join(map(str, lengths))} entries: "
                "they must have the same number"
            )
        if list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError("sizes must be ascending, none of them twice")

    def to_json(self) -> dict[str, Any]:
        """A dict that `json.dumps` takes; the kind is the name of the table."""
        columns = (self.sizes, self.hosts, self.goodput, self.spread)
        return {name: list(each) for name, each in zip(COLUMNS, columns, strict=True)}


def read_tables(get: Fields) -> tuple[GoodputTable, ...]:
    """The tables of hints in JSON.

    Raises:
        HintsError: One of them is no table, or they are too long.
    """
    tables = []
    for kind, told in get.kinds("goodput").items():
        column = Fields(told, f"goodput.{kind}")
        try:
            tables.append(
                GoodputTable(
                    kind=kind,
                    sizes=column.entries("sizes", _counted),
                    hosts=column.entries("hosts", _counted),
                    goodput=column.entries("goodput", hints_json.real),
                    spread=column.entries("spread", hints_json.real),
                )
            )
        except ValueError as error:
            raise HintsError(f"goodput.{kind}: {error}") from None
    if sum(len(table.sizes) for table in tables) > MAX_ENTRIES:
        raise HintsError(f"goodput must have at most {MAX_ENTRIES} sizes, over all kinds")
    return tuple(tables)


def _counted(path: str, value: Any) -> int:
    return hints_json.whole(path, value, at_least=1)


def read_speedup(get: Fields) -> Speedup | None:
    """The speedup of hints in JSON; None if they have none.

    Raises:
        HintsError: It is no speedup.
    """
    if get.get("speedup") is None:
        return None
    replicas = get.entries("speedup.replicas", _counted)
    values = get.entries("speedup.speedup", hints_json.real)
    try:
        return Speedup(replicas=replicas, speedup=values)
    except ValueError as error:
        raise HintsError(f"speedup: {error}") from None
