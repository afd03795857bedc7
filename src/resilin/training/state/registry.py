"""The registry of state: everything that must survive is registered here once, under a name.

Models, optimizers, schedulers and loaders register themselves; users add their own objects. An
object may be registered after state was restored: it then gets its part at once, so the order in
which a script makes its things does not matter. Until then its part stays in every state that is
taken, as it was restored: a process that dies before it has made all its things loses none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol
from weakref import WeakValueDictionary

from resilin.core._warn import warn
from resilin.core.placement import Stored, Wanted
from resilin.training.state.replica_parts import OWN, SUMS, OwnState, is_past
from resilin.training.state.shards import Held
from resilin.training.state.snapshot import Branches, Json, Snapshot, Version, join, names, split
from resilin.training.state.targets import state_for, wanted_by

CURSORS = "loader/"
"""Prefix of the cursors of loaders."""
AGES = f"{SUMS}ages"
"""Steps at which parts were restored that nobody has registered for since; no sum.

resilin 0.1.0 passes over unknown names that begin like this one.
"""
_LATE = (SUMS, OWN, CURSORS)
"""Prefixes of parts that may be registered late: a loader is when it trains."""
_NEWER = frozenset({"frozen", "buffers"})
"""Parts that resilin 0.1 and 0.2 did not save, and that began at their first value then."""
MODEL = "model"
"""The name of the model, whose state is compared before it is loaded."""

FormerName = Callable[[Mapping[str, Json]], str | None]
"""Finds another name of an object among unclaimed restored parts."""


class Stateful(Protocol):
    """An object that can be registered."""

    def state_dict(self) -> Any:
        """Its state: numbers, strings, tensors, and containers of them."""
        ...

    def load_state_dict(self, state: Any) -> Any:
        """Restore the state returned by `state_dict`."""
        ...


class Summed(Protocol):
    """An object of which each replica has a part, such as an Accumulator.

    One whose part may be on a device has `begin_state_dict` too, which returns a function for
    another thread: that waits for the device, and returns the state as it was.
    """

    def state_dict(self) -> dict[str, Any]:
        """This replica's part, as `{"sums": ...}`."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a part."""
        ...


class Own(Protocol):
    """An object with its own state on each replica, such as a random generator."""

    def state_dict(self) -> Any:
        """This replica's state."""
        ...

    def load_state_dict(self, state: Any) -> Any:
        """Restore the state returned by `state_dict` on the replica of the same number.

        The state is None if there is none: the number of replicas has changed, the host that had it
        is gone, or it was not saved.
        """
        ...


class Registry:
    """Registered objects by name, and restored state that is still unclaimed.

    Args:
        steps: Returns the number of committed steps of the job.
    """

    def __init__(self, steps: Callable[[], int] = lambda: 0) -> None:
        self._steps = steps
        self._shared: dict[str, Stateful] = {}
        self._released: set[str] = set()
        self._ageless: set[str] = set()
        self._own: dict[str, Own] = {}
        self._summed: WeakValueDictionary[str, Summed] = WeakValueDictionary()
        self._numbers: Counter[str] = Counter()
        self._restored: Snapshot | None = None
        self._first_replica = True
        self._unclaimed: set[str] = set()
        self._ages: dict[str, int] = {}
        self._former: dict[str, FormerName] = {}
        self._first = True
        self._branches: Branches = {}

    # Registering ---------------------------------------------------------------------------

    def add(
        self, name: str, thing: Stateful, *, ages: bool = True, former: FormerName | None = None
    ) -> None:
        """Registers something whose state is the same on all replicas.

        Args:
            name: What it is called. The name of something that was released may be used again.
            thing: What to register. Restored state of this name is loaded at once.
            ages: Whether steps change its state also while it is not registered. False for what
                nothing changes while it is not in use, as a loader: it may be registered at any
                time, where the others get a warning if they come late.
            former: Finds the name under which the state was kept before, if that is another one.

        Raises:
            ValueError: The name is taken or malformed, or the thing has no state to give.
        """
        _check(name, thing)
        if name == MODEL:
            # Another model, which may have fewer parts, takes the place of what was released.
            for each in self._released:
                del self._shared[each]
            self._released.clear()
        present = self._shared.get(name)
        if present is not None and present is not thing and name not in self._released:
            raise ValueError(f"{name!r} is registered already, for a {type(present).__name__}")
        if present is None and former is not None:
            self._former[name] = former
            self._rename(name)
        if name in self._unclaimed:
            assert self._restored is not None
            if name == MODEL:
                _compare(thing, self._restored)
            self._claim(name, thing, now=self._steps() if ages else None)
        self._ageless = self._ageless - {name} if ages else self._ageless | {name}
        self._shared[name] = thing
        self._released.discard(name)

    def has(self, thing: object) -> bool:
        """Whether this object is registered."""
        return any(present is thing for present in self._shared.values())

    def exchange(self, name: str, thing: Stateful) -> Stateful:
        """Replaces a registered object for a time, and loads no state. Returns the one before."""
        present, self._shared[name] = self._shared[name], thing
        return present

    def remove(self, name: str) -> None:
        """Forget a name, and the state that was restored for it."""
        self._shared.pop(name, None)
        self._released.discard(name)
        self._own.pop(name, None)
        for each in (name, OWN + name):
            if each in self._unclaimed:
                self._claimed(each)

    def release(self, name: str) -> None:
        """Free a name for another object, or all for another model; until then, keep the state."""
        if name in self._shared:
            self._released.add(name)

    def add_own(self, name: str, thing: Own) -> None:
        """Register an object with its own state on each replica.

        When a job resumes with the same number of replicas, each gets the state of the replica that
        had its number. Otherwise `load_state_dict` is called with None.

        Args:
            name: Its name; separate from the names of `add`.
            thing: The object. If the job was resumed, `load_state_dict` is called immediately, with
                None if there is no state for this replica.

        Raises:
            ValueError: The name is taken or malformed, or the object has no state to give.
        """
        _check(name, thing)
        present = self._own.get(name)
        if present is not None and present is not thing:
            raise ValueError(f"{name!r} is registered already, for a {type(present).__name__}")
        self._own[name] = thing
        if present is None and self._restored is not None:
            self._claim_own(name, thing)

    def add_summed(self, when: str, thing: Summed, *, first_replica: bool) -> None:
        """Register an object of which each replica has a part. It is held weakly.

        Args:
            when: Where in the script it was created; with a running number this gives the name.
            thing: The object.
            first_replica: Whether this replica is the one that receives restored sums.
        """
        name = f"{SUMS}{when}/{self._numbers[when]}"
        self._numbers[when] += 1
        self._summed[name] = thing
        if name in self._unclaimed:
            self._claim_sums(name, thing, first_replica=first_replica)

    # Taking --------------------------------------------------------------------------------

    def take(self, version: Version, without: Collection[str] = ()) -> Snapshot:
        """The state of everything that is the same on all replicas. Tensors are not copied.

        Args:
            version: Which state it is.
            without: Names that are left out.
        """
        # What was restored and has not been claimed is in it as it was restored.
        left = {n for n in self._unclaimed if not n.startswith((SUMS, OWN)) and n not in without}
        # First, so that they keep their names: those of the others avoid names that are taken.
        tree, tensors = self._left(left)
        stale = {name: age for name in left if (age := self._ages[name]) < version.step}
        for name, thing in self._shared.items():
            if name not in left and name not in without:
                tree[name], _ = split(name, thing.state_dict(), tensors, self._branches)
        if stale:
            tree[AGES] = stale
        return Snapshot(version, tree, tensors)

    def take_sums(self, epoch: int = 0) -> dict[str, Json]:
        """This replica's part of everything that is summed.

        Args:
            epoch: Completed epochs: unclaimed sums of these are left out.
        """
        return self.begin_sums(epoch)()

    def begin_sums(self, epoch: int = 0) -> Callable[[], dict[str, Json]]:
        """Begin to take the sums, without waiting for devices that have some of them.

        Args:
            epoch: As in `take_sums`.

        Returns:
            A function that waits, and returns what `take_sums` would have returned now; any thread
            may call it.
        """
        left: dict[str, Json] = {}
        if self._first_replica:
            left, _ = self._left(
                n for n in self._unclaimed if n.startswith(SUMS) and not is_past(n, epoch)
            )
        begun = {name: _begin(thing) for name, thing in self._summed.items()}

        def read() -> dict[str, Json]:
            parts = ((name, state()["sums"]) for name, state in begun.items())
            return left | {name: split(name, dict(sums))[0] for name, sums in parts}

        return read

    @property
    def summed(self) -> Mapping[str, Summed]:
        """Objects of which each replica has a part, by name."""
        return self._summed

    def take_own(self) -> OwnState:
        """State that only this replica has. Tensors are not copied."""
        tree, tensors = self._left(name for name in self._unclaimed if name.startswith(OWN))
        for name, thing in self._own.items():
            tree[OWN + name], _ = split(OWN + name, thing.state_dict(), tensors)
        return OwnState(tree, tensors)

    def _left(self, unclaimed: Iterable[str]) -> tuple[dict[str, Json], dict[str, Held]]:
        """Unclaimed restored parts, as a tree and its tensors."""
        if self._restored is None:
            return {}, {}
        tree = {name: self._restored.tree[name] for name in sorted(unclaimed)}
        return tree, {each: self._restored.tensors[each] for each in names(tree)}

    # Restoring -----------------------------------------------------------------------------

    def wanted(self, stored: Mapping[str, Stored]) -> Wanted:
        """The pieces that registered objects need of a stored state; see `targets.wanted_by`."""
        return wanted_by(self._shared, stored)

    def restore(
        self, snapshot: Snapshot, *, first_replica: bool, without: Collection[str] = ()
    ) -> None:
        """Restore each registered object, and keep the rest for later ones.

        Args:
            snapshot: The state; of own states, only that of this replica.
            first_replica: Whether this replica is the one that receives restored sums.
            without: Names that are missing from it because they are restored elsewhere.

        Raises:
            ValueError: The state belongs to another model; the message names the differences. Also
                any error of the objects themselves.
        """
        present = {n: thing for n, thing in self._shared.items() if n not in self._released}
        if MODEL in present and MODEL not in without:
            _compare(present[MODEL], snapshot)
        tree = dict(snapshot.tree)
        ages = tree.pop(AGES, {})
        self._restored = replace(snapshot, tree=tree, tensors=dict(snapshot.tensors))
        self._first_replica = first_replica
        self._unclaimed = set(tree)
        self._ages = {name: int(ages.get(name, snapshot.version.step)) for name in tree}
        for name, thing in present.items():
            self._rename(name)
            if name in self._unclaimed:
                aged = name not in self._ageless
                self._claim(name, thing, now=snapshot.version.step if aged else None)
            elif name not in {*without, *_NEWER} and name in self._shared:
                warn(
                    f"{name!r} is not in the state that the job resumes ({snapshot.version}): "
                    "it starts from scratch"
                )
        for name, own in list(self._own.items()):
            self._claim_own(name, own)
        for name, summed in list(self._summed.items()):
            if name in self._unclaimed:
                self._claim_sums(name, summed, first_replica=first_replica)

    def _rename(self, name: str) -> None:
        """Rename restored state to its current name."""
        if self._restored is None or name in self._unclaimed or name not in self._former:
            return
        tree = self._restored.tree
        old = self._former[name]({each: tree[each] for each in sorted(self._unclaimed)})
        if old is not None:
            tree[name] = tree.pop(old)
            self._ages[name] = self._ages.pop(old)
            self._unclaimed = self._unclaimed - {old} | {name}

    def restored(self, name: str) -> Any:
        """Unclaimed restored state of this name, or None."""
        if self._restored is None or name not in self._unclaimed:
            return None
        return self._restored.state(name)

    def _claim(self, name: str, thing: Stateful, *, now: int | None) -> None:
        assert self._restored is not None
        thing.load_state_dict(state_for(name, thing, self._restored))
        if now is not None and now > self._ages[name]:
            warn(
                f"{name!r} was registered at step {now} and resumes from its state at step "
                f"{self._ages[name]}: what the steps between them changed is missing from it. "
                "Register it before the first step, in every run of the script"
            )
        self._claimed(name)

    def _claim_own(self, name: str, thing: Own) -> None:
        assert self._restored is not None
        if OWN + name not in self._unclaimed:
            thing.load_state_dict(None)
            return
        thing.load_state_dict(self._restored.state(OWN + name))
        self._claimed(OWN + name)

    def _claim_sums(self, name: str, thing: Summed, *, first_replica: bool) -> None:
        assert self._restored is not None
        sums = join(self._restored.tree[name], {})
        # One replica has the whole sum; over all of them it is what it was.
        thing.load_state_dict({"sums": sums if first_replica else {}})
        self._claimed(name)

    def _claimed(self, name: str) -> None:
        self._unclaimed.discard(name)
        assert self._restored is not None
        # Its tensors are no longer needed; unclaimed parts must not keep them alive.
        for tensor in names(self._restored.tree[name]):
            self._restored.tensors.pop(tensor, None)

    def warn_of_unclaimed(self) -> None:
        """Warn once about restored state that no object has claimed."""
        left = sorted(name for name in self._unclaimed if not name.startswith(_LATE))
        if left and self._first:
            warn(
                f"the job resumes a state with {', '.join(map(repr, left))}, which nothing in "
                "this script has registered so far: it is kept unchanged until something does"
            )
        self._first = False


def _begin(thing: Summed) -> Callable[[], dict[str, Any]]:
    """Begins to take the state of a sum, if it can begin; else takes it."""
    begin = getattr(thing, "begin_state_dict", None)
    if begin is None:
        state = thing.state_dict()
        return lambda: state
    begun: Callable[[], dict[str, Any]] = begin()
    return begun


def _check(name: str, thing: object) -> None:
    if not name or name.startswith((SUMS, OWN)) or name != name.strip():
        raise ValueError(
            f"{name!r} cannot be a name: it must not be empty or begin with {SUMS} or {OWN}"
        )
    for method in ("state_dict", "load_state_dict"):
        if not callable(getattr(thing, method, None)):
            raise ValueError(
                f"{name!r} is a {type(thing).__name__} without {method}(); what is registered "
                "needs both state_dict() and load_state_dict(), or is a dict"
            )


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
