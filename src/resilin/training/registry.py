"""What has state: everything that must survive is registered here once, under a name.

Models, optimizers, schedulers and loaders register themselves; users add their own objects. An
object may be registered after state was restored: it then gets its part at once, so the order in
which a script makes its things does not matter.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol
from weakref import WeakValueDictionary

from torch import Tensor

from resilin.training.snapshot import Json, Snapshot, Version, join, names, split

SUMS = "sums/"
"""How the names of parts that are summed over the replicas begin."""
MODEL = "model"
"""The name of the model, whose state is compared before it is loaded."""


class Stateful(Protocol):
    """What can be registered."""

    def state_dict(self) -> Any:
        """Its state: numbers, strings, tensors, and containers of them."""
        ...

    def load_state_dict(self, state: Any) -> Any:
        """Takes over what `state_dict` returned."""
        ...


class Summed(Protocol):
    """What each replica has a part of, such as an Accumulator."""

    def state_dict(self) -> dict[str, Any]:
        """This replica's part, as `{"sums": ...}`."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a part."""
        ...


class Registry:
    """Names, what they stand for, and the restored state that nobody has claimed yet."""

    def __init__(self) -> None:
        self._shared: dict[str, Stateful] = {}
        self._summed: WeakValueDictionary[str, Summed] = WeakValueDictionary()
        self._numbers: Counter[str] = Counter()
        self._restored: Snapshot | None = None
        self._unclaimed: set[str] = set()
        self._first = True

    # Registering ---------------------------------------------------------------------------

    def add(self, name: str, thing: Stateful) -> None:
        """Registers something whose state is the same on all replicas.

        Raises:
            ValueError: The name is taken or malformed, or the thing has no state to give.
        """
        if not name or name.startswith(SUMS) or name != name.strip():
            raise ValueError(
                f"{name!r} cannot be a name: it must not be empty or begin with {SUMS}"
            )
        present = self._shared.get(name)
        if present is not None and present is not thing:
            raise ValueError(f"{name!r} is registered already, for a {type(present).__name__}")
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(thing, method, None)):
                raise ValueError(
                    f"{name!r} is a {type(thing).__name__} without {method}(); what is registered "
                    "needs both state_dict() and load_state_dict()"
                )
        if present is None and name in self._unclaimed:
            assert self._restored is not None
            if name == MODEL:
                _compare(thing, self._restored)
            self._claim(name, thing)
        self._shared[name] = thing

    def remove(self, name: str) -> None:
        """Forgets a name, if it is there."""
        self._shared.pop(name, None)

    def add_summed(self, when: str, thing: Summed, *, first_replica: bool) -> None:
        """Registers something that each replica has a part of. It is held weakly.

        Args:
            when: Where in the script it was made; with a running number it makes the name.
            thing: What to register.
            first_replica: Whether this replica is the one that takes over restored sums.
        """
        name = f"{SUMS}{when}/{self._numbers[when]}"
        self._numbers[when] += 1
        self._summed[name] = thing
        if name in self._unclaimed:
            self._claim_sums(name, thing, first_replica=first_replica)

    # Taking --------------------------------------------------------------------------------

    def take(self, version: Version) -> Snapshot:
        """The state of everything that is the same on all replicas. Tensors are not copied."""
        tree: dict[str, Json] = {}
        tensors: dict[str, Tensor] = {}
        for name, thing in self._shared.items():
            tree[name], _ = split(name, thing.state_dict(), tensors)
        return Snapshot(version, tree, tensors)

    def take_sums(self) -> dict[str, Json]:
        """This replica's part of everything that is summed."""
        parts = ((name, thing.state_dict()["sums"]) for name, thing in self._summed.items())
        return {name: split(name, dict(sums))[0] for name, sums in parts}

    # Restoring -----------------------------------------------------------------------------

    def restore(
        self, snapshot: Snapshot, *, first_replica: bool, without: Collection[str] = ()
    ) -> None:
        """Gives each registered thing its state, and keeps the rest for those to come.

        Args:
            snapshot: The state.
            first_replica: Whether this replica is the one that takes over restored sums.
            without: Names that are not in it because somebody else restores them.

        Raises:
            ValueError: The state belongs to another model; the message says what differs. Also
                whatever the things themselves raise.
        """
        if MODEL in self._shared and MODEL not in without:
            _compare(self._shared[MODEL], snapshot)
        self._restored = replace(snapshot, tensors=dict(snapshot.tensors))
        self._unclaimed = set(snapshot.tree)
        for name, thing in list(self._shared.items()):
            if name in self._unclaimed:
                self._claim(name, thing)
            elif name not in without:
                warnings.warn(
                    f"{name!r} is not in the state that the job goes on from ({snapshot.version}): "
                    "it begins anew",
                    stacklevel=2,
                )
        for name, summed in list(self._summed.items()):
            if name in self._unclaimed:
                self._claim_sums(name, summed, first_replica=first_replica)

    def _claim(self, name: str, thing: Stateful) -> None:
        assert self._restored is not None
        thing.load_state_dict(self._restored.state(name))
        self._claimed(name)

    def _claim_sums(self, name: str, thing: Summed, *, first_replica: bool) -> None:
        assert self._restored is not None
        sums = join(self._restored.tree[name], {})
        # One replica has the whole sum; over all of them it is what it was.
        thing.load_state_dict({"sums": sums if first_replica else {}})
        self._claimed(name)

    def _claimed(self, name: str) -> None:
        self._unclaimed.discard(name)
        assert self._restored is not None
        # Its tensors are not needed any more; what nobody claims must not keep them.
        for tensor in names(self._restored.tree[name]):
            self._restored.tensors.pop(tensor, None)

    def warn_of_unclaimed(self) -> None:
        """Warns once of state that was restored and that nobody has registered for."""
        left = sorted(name for name in self._unclaimed if not name.startswith(SUMS))
        if left and self._first:
            warnings.warn(
                f"the job goes on from a state with {', '.join(map(repr, left))}, which nothing in "
                "this script has registered: it will be missing from the next checkpoint",
                stacklevel=2,
            )
        self._first = False


def add_up(parts: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
    """Sums the parts of several replicas, key by key."""
    totals: dict[str, dict[Any, float]] = {}
    for part in parts:
        for name, tree in part.items():
            total = totals.setdefault(name, {})
            for key, value in join(tree, {}).items():
                total[key] = total.get(key, 0.0) + value
    return {name: split(name, total)[0] for name, total in totals.items()}


def _compare(model: Stateful, snapshot: Snapshot) -> None:
    """Compares names, shapes and types of the model's tensors with those of a snapshot."""
    _, ours = split(MODEL, model.state_dict())
    prefix = f"{MODEL}."
    theirs = {name: snapshot.tensors[name] for name in names(snapshot.tree.get(MODEL))}
    differing = [
        f"{name} is in it and not in the model" for name in sorted(set(theirs) - set(ours))
    ]
    differing += [f"{name} is missing from it" for name in sorted(set(ours) - set(theirs))]
    for name in sorted(set(ours) & set(theirs)):
        was, now = theirs[name], ours[name]
        if (was.shape, was.dtype) != (now.shape, now.dtype):
            differing.append(
                f"{name} was {tuple(was.shape)} {was.dtype} and is {tuple(now.shape)} {now.dtype}"
            )
    if differing:
        more = f"; and {len(differing) - 5} more" if len(differing) > 5 else ""
        raise ValueError(
            f"the saved state ({snapshot.version}) belongs to another model: "
            + "; ".join(text.replace(prefix, "", 1) for text in differing[:5])
            + more
        )
