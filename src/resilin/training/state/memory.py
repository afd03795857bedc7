"""The memory copy: the latest state of the job in this host's shared memory.

After each step the replicas of a host copy the state into files in memory, which outlive them. A
restarted process on the host finds the last completed step there; a host without a copy gets it
from one that has it. Each replica writes only its share, and that of its neighbour, so a host loses
nothing if any one of its replicas dies at any moment. Two files per share are written alternately,
and are marked complete last of all. Of tensors that are split over the processes each writes its
part alone, and all hosts together have the whole; buddies may keep a second copy of it.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from resilin.core.placement import Piece, deal
from resilin.core.recovery import next_buffer, shares_written
from resilin.training.state.buddy_copies import BuddyCopies, Incoming, Outgoing
from resilin.training.state.memory_file import (
    DATA,
    FileWriter,
    Writer,
    file_name,
    generation_of,
)
from resilin.training.state.memory_scan import Scan
from resilin.training.state.replica_parts import OwnState
from resilin.training.state.shards import (
    Held,
    Sharded,
    kept_pieces,
    split_shapes,
    whole_pieces,
)
from resilin.training.state.snapshot import Json, Snapshot, Version
from resilin.training.state.stage import Block


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Placement of a process among those that share its host's memory."""

    host: int
    """Number of the host, or of the agent on it."""
    local_process: int
    """Number of the process on its host, from 0."""
    num_local_processes: int
    """Number of processes on the host."""
    process: int
    """Number of the process in the job."""


class StagedShare(NamedTuple):
    """One share of a state, on its way to a file."""

    number: int
    """Number of the share."""
    meta: dict[str, Any]
    """Its JSON."""
    block: Block
    """Copies of its tensors."""
    wait: Callable[[], None]
    """Waits until the device has made them."""
    sources: Mapping[Piece, Tensor]
    """Their originals, which must not be freed before that."""


class StagedCopy(NamedTuple):
    """One replica's part of a state, copied aside and not written yet."""

    version: Version
    """Version of the state."""
    place: Place
    """Placement of the replica."""
    shares: list[StagedShare]
    """The shares that the replica writes."""
    outgoing: Outgoing | None = None
    """The part of them that its buddy keeps as well."""


class _Texts:
    """JSON of one copy after another: parts of the tree that are the same object stay as text.

    The parts of a tree are never changed in place: what has changed is another object.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[Json, str]] = {}

    def encode(self, meta: Mapping[str, Any]) -> str:
        rest = {name: value for name, value in meta.items() if name != "tree"}
        text = _dumps(rest)
        if "tree" not in meta:
            return text
        parts = []
        known: dict[str, tuple[Json, str]] = {}
        for name, tree in meta["tree"].items():
            before = self._known.get(name)
            if before is None or before[0] is not tree:
                before = tree, _dumps(tree)
            known[name] = before
            parts.append(f"{_dumps(name)}:{before[1]}")
        self._known = known
        return f'{text[:-1]},"tree":{{{",".join(parts)}}}}}'


def _dumps(value: Json) -> str:
    return json.dumps(value, separators=(",", ":"))


class MemoryCopies:
    """Writes the copies of one job in one directory.

    Args:
        directory: A directory in memory, for this job alone; created if missing.
        holders: Processes that keep each part of a tensor; more than one keeps it if the host of
            one is lost.

    Raises:
        ValueError: The directory belongs to another user, who could forge its contents.
    """

    def __init__(self, directory: Path, *, holders: int = 1) -> None:
        _make(directory)
        self.directory = directory
        self.buddies: BuddyCopies | None = None
        """Copies that other hosts keep for this process, and it for them; None for none."""
        self._holders = holders
        self._writers: dict[tuple[int, int], FileWriter] = {}
        self._turn = 0
        self._writer_process = Writer.here()
        self._blocks: dict[int, Block] = {}
        self._sizes: tuple[dict[str, int], int] | None = None
        self._dealt: list[list[str]] = []
        self._texts = _Texts()

    # Writing -------------------------------------------------------------------------------

    def keep(
        self,
        snapshot: Snapshot,
        sums: Mapping[str, Json],
        place: Place,
        own: OwnState | None = None,
        *,
        previous: Version | None = None,
    ) -> None:
        """Stages and writes this replica's part of the state; complete when it returns.

        Arguments and errors are those of `stage` and `write`.
        """
        self.write(self.stage(snapshot, sums, place, own), previous=previous)

    def stage(
        self,
        snapshot: Snapshot,
        sums: Mapping[str, Json] | Callable[[], Mapping[str, Json]],
        place: Place,
        own: OwnState | None = None,
    ) -> StagedCopy:
        """Copies this replica's part of the state aside; the state may change from then on.

        Args:
            snapshot: The state, the same on all replicas.
            sums: This replica's part of what is summed over the replicas, or a function that
                `write` calls for it.
            place: Placement of this replica. All replicas of the host must keep the same steps.
            own: State that only this replica has.

        Returns:
            What `write` takes, good until the next call: what was staged before must be written.
        """
        num = place.num_local_processes
        dealt = self._deal(snapshot.tensors, num)
        staged = []
        outgoing: Outgoing | None = None
        for share in shares_written(place.local_process, num):
            meta: dict[str, Any] = {
                "share": share,
                "num_shares": num,
                "host": place.host,
                "branch": snapshot.version.branch,
                "writer": self._writer_process,
            }
            if share == 0:
                meta["tree"] = snapshot.tree
                meta["split"] = split_shapes(snapshot.tensors)
            pieces = whole_pieces(snapshot.tensors, dealt[share])
            num_before = len(pieces)
            if share == place.local_process:
                meta["sums"] = {"replica": place.process, "of": sums}
                stay, away = _divided(snapshot.tensors, self._holders, self.buddies)
                num_before += len(stay)
                # The last ones are for the buddy, too.
                pieces.update(stay | away)
                if own is not None and own.tree:
                    meta["own"] = own.tree
                    pieces.update(whole_pieces(own.tensors, own.tensors))
            block = self._blocks.get(share)
            if block is None or not block.fits(pieces):
                block = self._blocks[share] = Block(pieces, DATA)
            staged.append(StagedShare(share, meta, block, block.begin(pieces), pieces))
            if share == place.local_process and self._sends(snapshot.tensors):
                outgoing = Outgoing(meta, block.last(len(pieces) - num_before))
        return StagedCopy(snapshot.version, place, staged, outgoing)

    def _sends(self, tensors: Mapping[str, Held]) -> bool:
        buddies = self.buddies
        split = (isinstance(held, Sharded) for held in tensors.values())
        return buddies is not None and buddies.are_there and any(split)

    def _deal(self, tensors: Mapping[str, Held], num: int) -> list[list[str]]:
        """The names of the whole tensors of each share; computed again when a size changes."""
        sizes = {name: held.nbytes for name, held in tensors.items() if isinstance(held, Tensor)}
        if (sizes, num) != self._sizes:
            self._sizes, self._dealt = (sizes, num), deal(sizes, num)
        return self._dealt

    def write(
        self, copy: StagedCopy, *, previous: Version | None = None, again: bool = False
    ) -> None:
        """Writes what was staged; complete when it returns. Any thread may call it.

        Args:
            copy: What was staged last.
            previous: The previous copy, or the state that the job resumed from.
            again: Whether to overwrite the last copy, because an earlier state is available.

        Raises:
            OSError: There is no room for it. The previous copy is untouched.
            RuntimeError: A process of another job writes to the same file.
        """
        for share in copy.shares:
            share.wait()
            sums = share.meta.get("sums", {})
            if callable(sums.get("of")):
                sums["of"] = sums["of"]()
        before = self._turn
        self._turn = next_buffer(before, again=again)
        try:
            for share in copy.shares:
                share.meta["previous"] = None if previous is None else astuple(previous)
                writer = self._writer(copy.version, share.number, copy.place)
                writer.write(copy.version, share.block, self._texts.encode(share.meta))
        except BaseException:
            # Otherwise the next one would overwrite the last complete one.
            self._turn = before
            raise

    def write_for_wards(self, copy: StagedCopy, found: Sequence[Incoming]) -> None:
        """Writes what other processes have sent, as `write` does with what was staged."""
        assert self.buddies is not None
        place = copy.place
        where = place.host, place.local_process, place.num_local_processes
        self.buddies.write(self.directory, copy.version, found, where)

    def _writer(self, version: Version, share: int, place: Place) -> FileWriter:
        key = (share, self._turn)
        name = file_name(version.generation, place.host, place.local_process, share, self._turn)
        writer = self._writers.get(key)
        if writer is None or writer.path.name != name:
            if writer is not None:
                writer.close()
            writer = self._writers[key] = FileWriter(self.directory / name)
        return writer

    def scan(self) -> Scan:
        """What is in this directory now."""
        return Scan.of(self.directory)

    # Forgetting ----------------------------------------------------------------------------

    def forget(self, before: int | None = None, *, but: Version | None = None) -> None:
        """Removes files of generations before this one, or all of them.

        Only what this module wrote is touched.

        Args:
            before: The first generation to keep; None removes all.
            but: A state to keep in any case.
        """
        staying = set()
        if but is not None:
            staying = {file.path.name for file in self.scan().files if file.version == but}
        try:
            present = list(self.directory.iterdir())
        except FileNotFoundError:
            present = []  # Another replica of the host was first.
        for path in present:
            generation = generation_of(path.name)
            earlier = generation is not None and (before is None or generation < before)
            if earlier and path.name not in staying:
                path.unlink(missing_ok=True)
        if before is None:
            self.close()

    def withdraw(self) -> None:
        """Remove the files of this replica; others may still need theirs."""
        for writer in self._writers.values():
            writer.path.unlink(missing_ok=True)
        if self.buddies is not None:
            self.buddies.withdraw()
        self.close()

    def close(self) -> None:
        """Close the files, without removing them."""
        if self.buddies is not None:
            self.buddies.close()
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()


def _divided(
    tensors: Mapping[str, Held], holders: int, buddies: BuddyCopies | None
) -> tuple[dict[Piece, Tensor], dict[Piece, Tensor]]:
    """Pieces of split tensors that are written here alone, and those that a buddy keeps as well."""
    stay: dict[Piece, Tensor] = {}
    away: dict[Piece, Tensor] = {}
    for kept in kept_pieces(tensors, holders):
        lonely = buddies is not None and buddies.lacks(kept.keepers)
        (away if lonely and kept.is_first else stay)[kept.piece] = kept.data
    if away and buddies is not None:
        buddies.warn(holders)
    return stay, away


def _make(directory: Path) -> None:
    """Makes a directory that nobody else can write to.

    Raises:
        ValueError: Another user could forge its contents.
    """
    for missing in reversed([d for d in directory.parents if not d.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    parent = directory.parent.stat()
    replaceable = parent.st_mode & 0o022 and not parent.st_mode & stat.S_ISVTX
    if parent.st_uid not in (0, os.getuid()) or replaceable:
        raise ValueError(
            f"{directory.parent} must belong to user {os.getuid()} or root and be writable by "
            f"no other, who could replace {directory.name}; it belongs to {parent.st_uid} and "
            f"has mode {parent.st_mode & 0o1777:o}"
        )
    status = directory.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ValueError(
            f"{directory} must belong to user {os.getuid()} and be writable by no other; it "
            f"belongs to {status.st_uid} and has mode {status.st_mode & 0o777:o}"
        )
