"""The parts of a state that differ between replicas: sums, and what each has of its own.

Each replica has a part of a sum, such as an Accumulator, and its own state of some things, such as
random generators. In the state of the whole job sums are added up, and own states stand side by
side under the numbers of their replicas. All of this is small, and whole on its replica.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from resilin.training.state.shards import Held
from resilin.training.state.snapshot import Json, Snapshot, join, names, split

SUMS = "sums/"
"""Prefix of the names of parts that are summed over the replicas."""
OWN = "own/"
"""Prefix of the names of parts that each replica has its own of: `own/<replica>/<name>`."""
LARGEST = "\0max "
"""Prefix of keys of summed parts of which the largest value over the replicas counts."""
SMALLEST = "\0min "
"""The same for the smallest value."""

_OF_EPOCH = re.compile(rf"{SUMS}epoch (\d+)/\d+")


class OwnState(NamedTuple):
    """The state that one replica alone has: the parts of `Registry.add_own`."""

    tree: dict[str, Json]
    """By name, as in a snapshot."""
    tensors: dict[str, Held]
    """The tensors in it."""


def is_past(name: str, epoch: int) -> bool:
    """Whether a part holds sums of an epoch before this one."""
    of = _OF_EPOCH.fullmatch(name)
    return of is not None and int(of[1]) < epoch


def gathered(everyone: Mapping[int, OwnState]) -> OwnState:
    """The own states of replicas, by their numbers, in one tree."""
    tree: dict[str, Json] = {}
    tensors: dict[str, Held] = {}
    for replica, own in sorted(everyone.items()):
        for name, part in own.tree.items():
            key = f"{OWN}{replica}/{name.removeprefix(OWN)}"
            tree[key], _ = split(key, join(part, own.tensors), tensors)
    return OwnState(tree, tensors)


def of_process(snapshot: Snapshot, process: int, num_replicas: int) -> Snapshot:
    """A snapshot with the own state of one process, and without those of the others.

    Args:
        snapshot: What `gathered` made, with the parts that are the same on all replicas.
        process: The process that is to get it.
        num_replicas: How many replicas there are now. At another number than before, no process
            gets any: who has which data has changed.
    """
    tree = {name: part for name, part in snapshot.tree.items() if not name.startswith(OWN)}
    if snapshot.tree.get("job", {}).get("replicas") == num_replicas:
        prefix = f"{OWN}{process}/"
        tree |= {
            OWN + name.removeprefix(prefix): part
            for name, part in snapshot.tree.items()
            if name.startswith(prefix)
        }
    return replace(snapshot, tree=tree, tensors={n: snapshot.tensors[n] for n in names(tree)})


def add_up(parts: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
    """Sums the parts of several replicas, key by key."""
    totals: dict[str, dict[Any, float]] = {}
    for part in parts:
        for name, tree in part.items():
            total = totals.setdefault(name, {})
            for key, value in join(tree, {}).items():
                total[key] = _combined(key, total[key], value) if key in total else value
    return {name: split(name, total)[0] for name, total in totals.items()}


def _combined(key: Any, one: float, other: float) -> float:
    if isinstance(key, str) and key.startswith((LARGEST, SMALLEST)):
        return max(one, other) if key.startswith(LARGEST) else min(one, other)
    return one + other
