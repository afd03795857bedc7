"""Cursors of the loaders that train: what survives of a loader, and the name it survives under.

A loader that is created again in each epoch is the same loader to the job: its cursor advances. A
cursor is named by what its loader is in the script, and not by how many loaders this process has
made, which a restart changes:

- made outside of `remaining_epochs_until`: by its data, and its number among the loaders that were
  made there over data of the same name;
- made within an epoch: the same, counted anew in each epoch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from resilin.core._warn import warn
from resilin.core.batches import whole_epochs
from resilin.core.membership import Membership
from resilin.core.passes import PassCount
from resilin.core.stream import Ownership, SampleStream
from resilin.training.state.registry import CURSORS

_OF_FIRST_RELEASE = re.compile(rf"{CURSORS}\d+")
_ORDER = ("seed", "shuffle", "num_samples")
"""What may differ between two passes; it sets the order within a pass."""


class Order(Protocol):
    """The order of a loader's samples, by positions."""

    @property
    def fingerprint(self) -> str:
        """Identity of the data."""
        ...

    def state(self, cursor: int) -> dict[str, Any]:
        """Identity and position, for a checkpoint."""
        ...

    def resume(self, state: Mapping[str, Any]) -> int:
        """The position in a saved state; a `ValueError` if that is of another order."""
        ...


class Cursor:
    """Position of the job in the data of a loader.

    Args:
        name: Its name in the state of the job.
        stream: The order of the loader that has it now.
    """

    def __init__(self, name: str, stream: Order) -> None:
        self.name = name
        self.stream = stream
        self.position = 0
        """The first position that no committed step has used."""
        self.passes = PassCount()
        """Complete passes."""
        self.others = 0.0
        """Progress that the job has made with other loaders while this one was iterated."""
        self.owner: object = None
        """Identifies the loader that used it last."""
        self.num_loads = 0
        """Number of times it was restored."""
        self.sizes: Any = None
        """The `BatchSizes` of that loader, once it has trained."""
        self.epoch: int | None = None
        """The epoch in which its loader trained last."""
        self.steps_per_epoch: float | None = None
        """Reference steps in an epoch of that loader, if that is known."""
        self.sampled: dict[str, str] = {}
        """What its dataset held when the pass began; see `sampled`."""
        self.chosen: int | str | None = None
        """The batch size that the loop has set for its loader, or in words what else it has set."""

    def use(self, owner: object, stream: Order, epoch: int, *, made_within: bool) -> None:
        """Makes it that of a loader that begins a pass.

        Args:
            owner: Identifies the loader.
            stream: Its order.
            epoch: The epoch of the current loop.
            made_within: Whether the loader was made within an epoch.

        Raises:
            ValueError: Another loader has used it in this epoch.
        """
        anew = made_within and owner is not self.owner
        if anew and self.owner is not None and self.passes.epoch == epoch:
            raise ValueError(
                f"two loaders over {stream.fingerprint!r} train in epoch {epoch} under the name "
                f"{self.name!r}: one that was made in an earlier epoch, and one that was made in "
                "this one. Which position belongs to which cannot be told after a restart: give "
                "each its own fingerprint=, or make both outside of the loop over epochs"
            )
        self.owner = owner
        if anew and self.passes.under_way and self.passes.epoch != epoch:
            # A new loader begins a new pass, as in plain PyTorch; the one before it was left.
            self.end_pass()
            self.passes = PassCount()
        self.follow(stream)

    def follow(self, stream: Order) -> None:
        """Takes up the order of its loader, as it is from the next pass on."""
        self.stream = stream

    def measure(self, steps_per_epoch: float, progress: float) -> float:
        """Takes up the length of an epoch: those that are over stay over.

        Args:
            steps_per_epoch: Reference steps in an epoch from now on.
            progress: Progress of the job.

        Returns:
            By how much an epoch was longer before.
        """
        before, self.steps_per_epoch = self.steps_per_epoch, steps_per_epoch
        if before is None or before == steps_per_epoch:
            return 0.0
        epochs = whole_epochs(progress - self.others, before)
        self.others += epochs * (before - steps_per_epoch)
        return before - steps_per_epoch

    def end_pass(self) -> None:
        """Moves to the beginning of the next pass."""
        raise NotImplementedError

    def place(self) -> dict[str, Any]:
        """The order and the place in it, for a checkpoint; JSON-compatible."""
        return self.stream.state(self.position)

    def resume(self, state: Mapping[str, Any]) -> None:
        """Takes over what `place` returned."""
        self.position = self.stream.resume(state)

    def state_dict(self) -> dict[str, Any]:
        """The data state: which stream, where in it, and which passes of the epoch are complete."""
        state = {**self.place(), **self.passes.state()}
        if self.others:
            state["others"] = self.others
        if self.steps_per_epoch is not None:
            state["steps_per_epoch"] = self.steps_per_epoch
        if self.sampled:
            state["sampled"] = dict(self.sampled)
        return state if self.chosen is None else {**state, "batch_size": self.chosen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` returned.

        Raises:
            ValueError: The state belongs to another dataset or order; the message says which.
        """
        self.resume(state)
        self.chosen = state.get("batch_size")
        self.others = float(state.get("others", 0.0))
        self.num_loads += 1
        self.steps_per_epoch = state.get("steps_per_epoch")
        self.sampled = dict(state.get("sampled", {}))
        self.passes = PassCount.from_state(state, self.position)


class SampleCursor(Cursor):
    """Position of the job in a sample stream.

    Args:
        name: Its name in the state of the job.
        stream: The stream of the loader that has it now.
    """

    stream: SampleStream

    def __init__(self, name: str, stream: SampleStream) -> None:
        super().__init__(name, stream)
        self._dealt: Ownership | None = None
        self._dealt_in: int | None = None

    def follow(self, stream: Order) -> None:
        """Takes up the order of its loader, which may have another number of samples now.

        Raises:
            ValueError: It has, in the middle of a pass.
        """
        assert isinstance(stream, SampleStream)
        before, now = self.stream.num_samples, stream.num_samples
        if before != now:
            epochs, used = divmod(self.position, before)
            if used:
                raise ValueError(
                    f"the dataset of {stream.fingerprint!r} had {before} samples and has {now}, "
                    f"and {used} of the {before} were used in this pass: its length may change "
                    "between two passes over the data, and not within one. An epoch of progress "
                    "may end within a pass: take rule='linear' or another one whose epochs are "
                    "passes. After a pass that was left, make a new loader within the next epoch "
                    "of remaining_epochs_until()"
                )
            self.position, self._dealt = epochs * now, None
        self.stream = stream

    def end_pass(self) -> None:
        """Moves to the beginning of the next pass."""
        num = self.stream.num_samples
        self.position = -(-self.position // num) * num

    def deal(self, membership: Membership) -> Ownership:
        """Assignment of positions to replicas.

        They are assigned again, from the cursor on, if the number of replicas has changed, and
        where a generation was formed by replicas of which some kept running: a joiner has none of
        what a survivor had. Where all replicas start together at the same number, each keeps its
        positions, because its random numbers go with them. All replicas decide alike: what they
        look at is either part of the state, or the same for all members of a generation.
        """
        kept = self._dealt is not None and self._dealt.replicas == membership.num_replicas
        if self._dealt_in != membership.generation and membership.reformed:
            kept = False
        if not kept:
            self._dealt = Ownership(self.position, membership.num_replicas)
        self._dealt_in = membership.generation
        assert self._dealt is not None
        return self._dealt

    def place(self) -> dict[str, Any]:
        """The order, the place in it, and who owns which positions."""
        if self._dealt is None:
            return super().place()
        dealt = [self._dealt.base, self._dealt.replicas, self._dealt_in]
        return {**super().place(), "dealt": dealt}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Takes over what `place` returned."""
        between = (
            not state.get("under_way", True)
            and state.get("epoch") != self.epoch
            and "num_samples" in state
            and state["cursor"] % state["num_samples"] == 0
        )
        if between:
            # No pass is under way, so the next one may have another order and length.
            own = self.stream.state(0)
            epochs = state["cursor"] // state["num_samples"]
            if own["num_samples"] != state["num_samples"]:
                state = {name: value for name, value in state.items() if name != "dealt"}
            state = {**state, **{name: own[name] for name in _ORDER}}
            state["cursor"] = epochs * own["num_samples"]
        super().resume(state)
        self._dealt, self._dealt_in = None, None
        if "dealt" in state:
            base, replicas, *generation = state["dealt"]
            self._dealt = Ownership(base, replicas)
            self._dealt_in = generation[0] if generation else None


@dataclass(frozen=True, slots=True, eq=False)
class LoaderName:
    """The name of one loader; two of them are the same only if they are one object."""

    text: str
    """Its name in the state of the job."""
    made_within: bool
    """Whether the loader was made within an epoch."""


class Cursors:
    """The cursors of one job, and the names of its loaders."""

    def __init__(self) -> None:
        self._cursors: dict[str, Cursor] = {}
        self._outside: Counter[str] = Counter()
        self._within: Counter[str] = Counter()
        self.made: set[str] = set()
        """Names of all loaders that were made."""
        self.in_epoch = False
        """Whether an epoch of `remaining_epochs_until` is under way."""

    @property
    def none_used(self) -> bool:
        """Whether no loader has trained in this process yet."""
        return not self._cursors

    def begin_epoch(self) -> None:
        """An epoch begins: loaders that are made from now on are counted from 0."""
        self.in_epoch = True
        self._within.clear()

    def end_epochs(self) -> None:
        """The loop over epochs is over, or left."""
        self.in_epoch = False

    def name(self, fingerprint: str) -> LoaderName:
        """Names a loader that is being made."""
        if self.in_epoch:
            number, kind = self._within[fingerprint], "epoch/"
            self._within[fingerprint] += 1
        else:
            number, kind = self._outside[fingerprint], ""
            self._outside[fingerprint] += 1
        name = f"{CURSORS}{fingerprint}/{kind}{number}"
        self.made.add(name)
        return LoaderName(name, made_within=self.in_epoch)

    def get(self, name: str, stream: Order, epoch: int, make: Callable[[str], Cursor]) -> Cursor:
        """The cursor of this name; it begins at 0 if there is none.

        Args:
            name: What it is called.
            stream: The order of the loader that asks.
            epoch: The epoch that is under way.
            make: Makes a cursor of this name.
        """
        if name not in self._cursors:
            others = (c.stream.fingerprint for c in self._cursors.values() if c.epoch == epoch)
            if stream.fingerprint in others:
                warn(
                    f"a second loader trains in epoch {epoch} over data called "
                    f"{stream.fingerprint!r}. After a restart the two are told apart only by the "
                    "order in which they are made, and with the same seed they have the same "
                    "order: give each its own fingerprint=. "
                    "If this is meant to be one loader, make it once, or within an epoch of "
                    "resilin.remaining_epochs_until()"
                )
            self._cursors[name] = make(name)
        return self._cursors[name]


class FormerNames:
    """Finds the state of a loader that was kept under another name.

    Args:
        name: The name now.
        stream: The stream of the loader.
        epoch: The epoch that is under way.
        cursors: The cursors of the job.
    """

    def __init__(self, name: str, stream: Order, epoch: int, cursors: Cursors) -> None:
        self._name = name
        self._stream = stream
        self._epoch = epoch
        self._made = cursors.made
        self._first = cursors.none_used
        self._found: str | None = None

    def cursor(self, parts: Mapping[str, Any]) -> str | None:
        """The other name of its cursor among restored parts that nobody has claimed.

        Raises:
            ValueError: It is the first loader that trains, and the state is that of other data.
        """
        self._found = former_name(self._name, self._stream, parts, self._made)
        if self._found is None and self._first:
            refuse_other_data(self._name, self._stream, parts, self._epoch, self._made)
        return self._found

    def part(self, part: str) -> Callable[[Mapping[str, Any]], str | None]:
        """Finds the other name of a part of its batch sizes; `cursor` was called before."""

        def find(parts: Mapping[str, Any]) -> str | None:
            name = f"{self._found}/{part}"
            return name if self._found and name in parts else None

        return find


def former_name(
    name: str, stream: Order, parts: Mapping[str, Any], made: Collection[str]
) -> str | None:
    """Another name that the state of this loader has, if it is among these parts.

    resilin 0.1.0 numbered all loaders of a process. And a script may have been changed, and makes
    its loader elsewhere now.

    Args:
        name: The name now.
        stream: The stream of the loader.
        parts: Restored parts that nobody has claimed, by name.
        made: Names of all loaders that were made: their states are their own.
    """
    own = stream.state(0)
    own.pop("cursor")
    cursors = {n: part for n, part in parts.items() if _is_cursor(n, part) and n not in made}
    same = [n for n, part in cursors.items() if all(part.get(k) == v for k, v in own.items())]
    old = sorted((n for n in cursors if _OF_FIRST_RELEASE.fullmatch(n)), key=_number)
    if not old:
        return same[0] if len(same) == 1 else None
    same = [n for n in old if n in same]
    if not same:
        # Refused when it is loaded, by what differs.
        return old[0]
    kind, _, number = name.removeprefix(f"{CURSORS}{stream.fingerprint}/").rpartition("/")
    if kind:
        return same[-1]
    return same[int(number)] if int(number) < len(same) else None


def refuse_other_data(
    name: str,
    stream: Order,
    parts: Mapping[str, Any],
    epoch: int,
    made: Collection[str],
) -> None:
    """Refuses to begin at 0 if the job was trained over other data, and these are gone.

    A script may train over other data from some epoch on. Then the epoch is another one, and either
    it still makes the loader of before, or it makes its loaders within the epochs.

    Args:
        name: The name of the first loader that trains.
        stream: Its stream.
        parts: Restored parts that nobody has claimed, by name.
        epoch: The epoch that the job resumes.
        made: Names of all loaders that were made.

    Raises:
        ValueError: The state has a pass over other data.
    """
    within = "/epoch/"
    for other, state in parts.items():
        if not _is_cursor(other, state):
            continue
        may_be_over = other in made or within in other or within in name
        if may_be_over and state.get("epoch") != epoch:
            continue
        try:
            stream.resume(state)
        except ValueError as error:
            raise ValueError(
                f"the job was trained with {other!r} until epoch {epoch}, and the first loader "
                f"that trains now is {name!r}: {error}"
            ) from None


def _is_cursor(name: str, part: Any) -> bool:
    return name.startswith(CURSORS) and isinstance(part, Mapping) and "cursor" in part


def _number(name: str) -> int:
    return int(name.removeprefix(CURSORS))
