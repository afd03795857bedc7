"""The newest state of a job, found at its start in the memory of hosts or on storage.

All replicas end up with the same state. Those on a host that has it read it there; the others get
it from them, each holder sending a share. Tensors that are split over the processes are there if
the pieces of all hosts together are the whole, and each process gets what it needs of them. Storage
is read only if no host has a later state.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from resilin.core.placement import Asked
from resilin.core.recovery import Held, candidates, next_generation
from resilin.engine.base import Engine
from resilin.engine.collectives import State
from resilin.training.state.checkpoint import Checkpoints
from resilin.training.state.memory import MemoryCopies
from resilin.training.state.memory_scan import Scan
from resilin.training.state.offers import Offer, Table
from resilin.training.state.replica_parts import OwnState, add_up, gathered
from resilin.training.state.shards import all_whole
from resilin.training.state.snapshot import Json, Snapshot, Version
from resilin.training.state.transfer import transfer

logger = logging.getLogger("resilin")


class Content(NamedTuple):
    """Contents of one host's memory for a state, besides the parts that all replicas share."""

    num_replicas: int
    """Number of replicas of the job when it was written."""
    previous: Version | None
    """The previous copy."""
    sums: Mapping[int, Mapping[str, Json]]
    """Sums of the replicas, by replica."""
    owners: set[int]
    """Replicas whose own state is there."""
    empty: Collection[int] = ()
    """Those of `owners` whose own state is empty."""
    split: bool = False
    """Whether it has tensors that are split over the processes."""

    @classmethod
    def of(cls, version: Version, scan: Scan) -> Content:
        """The content of one state that a host has."""
        shares = scan.states[version]
        parts = [f.meta for f in scan.of_version(version) if "sums" in f.meta]
        own = {meta["sums"]["replica"]: meta["own"] for meta in parts if "own" in meta}
        before = shares[0].meta["previous"]
        return cls(
            next(f.meta["tree"]["job"]["replicas"] for f in shares if "tree" in f.meta),
            None if before is None else Version(*before),
            {meta["sums"]["replica"]: meta["sums"]["of"] for meta in parts},
            set(own),
            {replica for replica, tree in own.items() if not any(tree.values())},
            any(file.meta.get("split") for file in shares),
        )

    def held(self, version: Version, num_replicas: int) -> Held:
        """The same as the record that decides which state wins.

        Args:
            version: Version of the state.
            num_replicas: Current number of replicas. Own states count only if there are as many
                replicas as before.
        """
        own = self.owners - set(self.empty) if num_replicas == self.num_replicas else set()
        parts = {each: bool(sums) or each in own for each, sums in self.sums.items()}
        return Held(
            version=version,
            num_replicas=self.num_replicas,
            previous=self.previous,
            parts=parts,
        )

    def to_json(self) -> Json:
        """The content as JSON."""
        return {
            "num_replicas": self.num_replicas,
            "previous": None if self.previous is None else self.previous.to_json(),
            "sums": [[replica, dict(sums)] for replica, sums in self.sums.items()],
            "owners": sorted(self.owners),
            "empty": sorted(self.empty),
            "split": self.split,
        }

    @classmethod
    def from_json(cls, state: Json) -> Content:
        """The reverse of `to_json`."""
        previous = state["previous"]
        return cls(
            num_replicas=state["num_replicas"],
            previous=None if previous is None else Version.from_json(previous),
            sums=dict(state["sums"]),
            owners=set(state["owners"]),
            empty=set(state["empty"]),
            split=state["split"],
        )


class Newest(NamedTuple):
    """Result of a search."""

    snapshot: Snapshot | None
    """The latest state; None if there is none."""
    source: str
    """Its storage: `memory`, `checkpoint`, or empty."""
    generation: int
    """Number of the generation that starts now: no earlier state has it."""
    in_memory: bool = False
    """Whether this host has it in its memory, or keeps no copies."""


def newest_state(
    engine: Engine,
    memory: MemoryCopies | None,
    checkpoints: Checkpoints | None,
    *,
    wanted: Asked | None = None,
) -> Newest:
    """Find the latest state that any replica can find. Collective.

    Args:
        engine: Who is in the job.
        memory: The copies of this host.
        checkpoints: Those of the job.
        wanted: The pieces that this process needs of split tensors; it gets the others whole.

    Raises:
        CheckpointError: There are checkpoints, and none can be read.
        ValueError: One was written by a newer resilin.
    """
    scan = None if memory is None else memory.scan()
    here = {} if scan is None else {v: Content.of(v, scan) for v in scan.states}
    saved: list[Version] = []
    if checkpoints is not None and engine.membership.is_first:
        saved = [commit.version for commit in checkpoints.commits()]
    everyone = engine.gather(
        {
            "here": [[v.to_json(), content.to_json()] for v, content in here.items()],
            "seen": [] if scan is None else sorted(scan.generations),
            "saved": [v.to_json() for v in saved],
        }
    )
    saved = [Version.from_json(v) for v in everyone[0]["saved"]]
    visible = {generation for said in everyone for generation in said["seen"]}
    generation = next_generation([*saved, *(Version(each, 0) for each in visible)])
    contents = [
        {Version.from_json(v): Content.from_json(content) for v, content in said["here"]}
        for said in everyone
    ]
    held = [
        content.held(v, engine.membership.num_replicas)
        for each in contents
        for v, content in each.items()
    ]
    split = {v for each in contents for v, content in each.items() if content.split}
    pieces = _Pieces(engine, scan, split)
    order = candidates(held, saved)
    while order and order[0].source == "memory" and not pieces.are_whole(order[0].version):
        # A copy whose pieces are not the whole, on all hosts together, is none.
        lacking = order[0].version
        held = [each for each in held if each.version != lacking]
        order = candidates(held, saved)
    for index, candidate in enumerate(order):
        if candidate.source == "checkpoint":
            assert checkpoints is not None
            if index and order[index - 1].source == "checkpoint":
                continue
            # All of them down to the next copy in memory, which wins over older checkpoints.
            copies = (each.version for each in order[index:] if each.source == "memory")
            snapshot = checkpoints.newest(
                engine.group("control"), at_least=next(copies, None), wanted=wanted
            )
            if snapshot is not None:
                return Newest(snapshot, "checkpoint", generation)
            continue
        if not pieces.are_whole(candidate.version):
            continue
        mine = _mine(scan, candidate.version) if candidate.version in here else None
        snapshot = _from_memory(engine, mine, candidate.version, wanted, pieces)
        if snapshot is None:
            continue
        found = [each.get(candidate.version) for each in contents]
        _add_sums(
            snapshot,
            [content for content in found if content is not None],
            engine.membership.process,
        )
        owners = [() if content is None else content.owners for content in found]
        _add_own(engine, scan, snapshot, owners, whole=candidate.whole)
        return Newest(snapshot, "memory", generation, scan is None or mine is not None)
    if checkpoints is None:
        return Newest(None, "", generation)
    snapshot = checkpoints.newest(engine.group("control"), wanted=wanted)
    return Newest(snapshot, "checkpoint", generation)


def _add_sums(snapshot: Snapshot, found: Sequence[Content], replica: int) -> None:
    parts = {each: sums for content in found for each, sums in content.sums.items()}
    if len(parts) < found[0].num_replicas and any(parts.values()) and replica == 0:
        logger.warning(
            "Accumulators resume without the values that were added on lost hosts since the last "
            "checkpoint"
        )
    snapshot.tree.update(add_up([parts[each] for each in sorted(parts)]))


def _add_own(
    engine: Engine,
    scan: Scan | None,
    snapshot: Snapshot,
    owners: Sequence[Collection[int]],
    *,
    whole: bool,
) -> None:
    """Add the own states of the replicas, from all hosts that have them. Collective.

    Args:
        engine: Who is in the job.
        scan: The memory of this host.
        snapshot: The rest of the state.
        owners: Per replica, those whose own state it can read. The first that can sends it.
        whole: Whether nothing is missing: a replica that is not among them had an empty part.
    """
    known = set().union(*owners[: engine.membership.process])
    here: dict[int, OwnState] = {}
    if scan is not None and not known.issuperset(owners[engine.membership.process]):
        try:
            found = scan.own(snapshot.version)
            here = {each: own for each, own in found.items() if each not in known}
        except LookupError as error:
            logger.warning("%s", error)
    parts = {i: each for part in _gather_own(engine, here) for i, each in part.items()}
    if whole and parts and not any(any(own.tree.values()) for own in parts.values()):
        # A replica that is missing died before it had written its part. Those of the others are
        # empty, and so was this one: without it, its random generators would be seeded anew.
        present = next(iter(parts.values()))
        for each in range(snapshot.tree["job"]["replicas"]):
            parts.setdefault(each, present)
    own = gathered(parts)
    snapshot.tree.update(own.tree)
    snapshot.tensors.update(own.tensors)


def _gather_own(engine: Engine, here: Mapping[int, OwnState]) -> list[dict[int, OwnState]]:
    """The own states that each process has read, by replica, known to all of them. Collective."""
    said = [[i, own.tree, list(own.tensors)] for i, own in here.items()]
    tensors = {
        f"{i}/{name}": t for i, own in here.items() for name, t in all_whole(own.tensors).items()
    }
    return [
        {
            i: OwnState(tree, {name: state.tensors[f"{i}/{name}"] for name in names})
            for i, tree, names in state.tree
        }
        for state in engine.collectives().gather_states(State(said, tensors))
    ]


class _Pieces:
    """The pieces of split tensors that all hosts have of a state, looked up when it is its turn.

    Args:
        engine: Who is in the job.
        scan: The memory of this host.
        split: Versions of the states that have split tensors.
    """

    def __init__(self, engine: Engine, scan: Scan | None, split: set[Version]) -> None:
        self._engine = engine
        self._scan = scan
        self._split = split
        self._known: dict[Version, tuple[Offer, Table]] = {}

    def of(self, version: Version) -> tuple[Offer, Table] | None:
        """The pieces of this host and of all; None if nothing is split. Collective."""
        if version not in self._split:
            return None
        if version not in self._known:
            offer = Offer.of(None) if self._scan is None else self._scan.offer(version)
            self._known[version] = offer, Table.gather(self._engine, offer)
        return self._known[version]

    def are_whole(self, version: Version) -> bool:
        """Whether the pieces of all hosts are the whole of every tensor. Collective."""
        found = self.of(version)
        if found is None:
            return True
        reason = found[1].missing()
        if reason and self._engine.membership.is_first:
            logger.warning("the memory copies of %s are incomplete: %s", version, reason)
        return not reason


def _mine(scan: Scan | None, version: Version) -> Snapshot | None:
    """A state that was found in the memory of this host; None if it has changed since."""
    assert scan is not None
    try:
        return scan.read(version, pieces=False)
    except LookupError as error:
        logger.warning("%s", error)
        return None


def _from_memory(
    engine: Engine,
    mine: Snapshot | None,
    version: Version,
    wanted: Asked | None,
    pieces: _Pieces,
) -> Snapshot | None:
    """A state that some host has in memory, on all replicas; None if it has gone."""
    found = pieces.of(version)
    if found is None:
        return transfer(engine, mine, version)
    try:
        return transfer(engine, mine, version, wanted, offer=found[0], table=found[1])
    except LookupError as error:
        logger.warning("%s", error)
        return None
