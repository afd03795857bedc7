"""Buddy copies: pieces of split tensors that only one host has, kept by a process of another one.

Each process sends what only its own host has to its buddy (`core.buddies`), and keeps what others
send to it, in files beside its own. The thread that writes memory copies does it, after it has
written its own: whoever is lost in between leaves its last copy complete, and the buddies have the
copy before that. Random generators and sums of a replica are sent along.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from resilin.core.buddies import buddies
from resilin.core.placement import Sizes
from resilin.core.recovery import Version, next_buffer
from resilin.engine.base import Engine
from resilin.engine.collectives import Group
from resilin.training.state.exchange import Swaps
from resilin.training.state.memory_file import FileWriter, Writer, file_name
from resilin.training.state.stage import Bytes, Layout

logger = logging.getLogger("resilin")

_COPIES = 2
"""Copies of what is sent to a buddy, the original included."""
_TEXTS = 2
"""JSON texts of a message: of the copy, and of its layout."""


class Outgoing(NamedTuple):
    """The part of a copy that a buddy keeps."""

    meta: Mapping[str, Any]
    """JSON of the share that it is a part of."""
    block: Bytes
    """The pieces."""


class Incoming(NamedTuple):
    """The part of a copy of another process, which this one keeps."""

    ward: int
    """Number of that process."""
    meta: dict[str, Any]
    """Its JSON."""
    block: Bytes
    """The pieces; good until the next ones come."""


class BuddyCopies:
    """The copies that the processes of one generation keep for each other.

    Args:
        hosts: The host of each process that keeps copies.
        process: Number of this process.
        group: A group for the thread that writes copies; None if nobody has a buddy.
        lacking: The reason why nobody has one; empty if they do.
    """

    def __init__(
        self, hosts: Mapping[int, int], process: int, group: Group | None, lacking: str = ""
    ) -> None:
        self.last: Version | None = None
        """Version of the copies that were exchanged last."""
        self._hosts, self._process, self._group, self._lacking = hosts, process, group, lacking
        chosen = {} if group is None else buddies(hosts)
        self._buddy = chosen.get(process)
        self._wards = [each for each, buddy in chosen.items() if buddy == process]
        self._room: dict[int, Tensor] = {}
        self._layouts: dict[int, Layout] = {}
        self._written: dict[int, tuple[Version, int]] = {}
        self._writers: dict[tuple[int, int], FileWriter] = {}
        self._warned = self._failed = False

    @classmethod
    def form(cls, engine: Engine, *, keeps: bool) -> BuddyCopies:
        """Finds the buddies of a generation. Collective.

        Args:
            engine: Who is in the job.
            keeps: Whether this process keeps copies.
        """
        me = engine.membership
        said = engine.gather([me.host] if keeps else [])
        hosts = {process: host[0] for process, host in enumerate(said) if host}
        lacking = ""
        if not buddies(hosts):
            lacking = "all processes that keep copies are on one host"
        elif engine.live:
            lacking = "the processes of a live job do not send each other copies"
        return cls(hosts, me.process, None if lacking else engine.group("memory"), lacking)

    @property
    def are_there(self) -> bool:
        """Whether this process takes part in exchanges."""
        return self._buddy is not None

    def lacks(self, keepers: Sizes) -> bool:
        """Whether a part that these processes write, besides this one, is on its host alone."""
        mine = self._hosts.get(self._process)
        return all(self._hosts.get(each, mine) == mine for each in keepers)

    def warn(self, holders: int) -> None:
        """Says once that a setting cannot be honoured here. Called if it matters.

        Args:
            holders: The setting `memory_holders`.
        """
        if self._warned or self._process != 0 or (self.are_there and holders <= _COPIES):
            return
        self._warned = True
        if self.are_there:
            logger.warning(
                "memory_holders is %d, and pieces that only one host has are kept %d times: there "
                "and by one process of another host",
                holders,
                _COPIES,
            )
            return
        logger.warning(
            "memory_holders is %d, and no other host keeps a copy of the pieces that only one host "
            "has: %s. While that is so, a lost host costs the steps since the last checkpoint",
            holders,
            self._lacking,
        )

    # In the thread that writes copies ------------------------------------------------------

    def exchange(self, version: Version, outgoing: Outgoing | None) -> list[Incoming]:
        """Sends a part of a copy to the buddy, and gets those of the wards of this process.

        All processes that take part call it for the same versions.

        Args:
            version: Version of the copy.
            outgoing: The part; None if this process makes no copy of this version.
        """
        assert self._buddy is not None
        texts, data = (b"", b""), torch.empty(0, dtype=torch.uint8)
        if outgoing is not None:
            meta = {"version": version.to_json()}
            meta |= {name: outgoing.meta[name] for name in ("sums", "own") if name in outgoing.meta}
            texts = json.dumps(meta).encode(), outgoing.block.layout.text.encode()
            data = outgoing.block.data
        message = [torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in texts if each]
        message = message or [torch.empty(0, dtype=torch.uint8)] * _TEXTS
        swaps = Swaps(self._group)
        found = swaps.pass_on(
            {self._buddy: [*message, data]}, self._wards, _TEXTS + 1, self._make_room
        )
        self.last = version
        return [
            self._incoming(version, ward, *each) for ward, each in found.items() if len(each[0])
        ]

    def _make_room(self, ward: int, size: int) -> Tensor:
        present = self._room.get(ward)
        if present is None or present.numel() < size:
            present = self._room[ward] = torch.empty(size, dtype=torch.uint8)
        return present[:size]

    def _incoming(
        self, version: Version, ward: int, head: Tensor, rows: Tensor, data: Tensor
    ) -> Incoming:
        meta: dict[str, Any] = json.loads(head.numpy().tobytes())
        sent = Version.from_json(meta.pop("version"))
        assert sent == version, f"process {ward} has sent {sent}, and this is {version}"
        text, before = rows.numpy().tobytes().decode(), self._layouts.get(ward)
        # A file is written in place as long as it has the same layout object.
        if before is None or before.text != text or before.num_bytes != data.numel():
            before = self._layouts[ward] = Layout(data.numel(), text)
        return Incoming(ward, meta, Bytes(before, data))

    def write(
        self, directory: Path, version: Version, found: Sequence[Incoming], place: Sizes
    ) -> None:
        """Writes what wards have sent; complete when it returns.

        Args:
            directory: Directory of this host's copies.
            version: Version of the copy.
            found: What they have sent; what was written before is not written again.
            place: Host of this process, its number on the host, and the number of processes there.

        Raises:
            OSError: There is no room for it. The copy before is untouched.
        """
        host, local, num_local = place
        for ward, its, block in found:
            before, turn = self._written.get(ward, (None, 1))
            if before == version:
                continue  # There was room for this one at the last attempt.
            turn = next_buffer(turn, again=False)
            share = num_local + ward
            meta = {
                **its,
                "share": share,
                "num_shares": num_local,
                "host": host,
                "branch": version.branch,
                "writer": Writer.here(),
                "ward": ward,
            }
            path = directory / file_name(version.generation, host, local, share, turn)
            writer = self._writers.get((ward, turn))
            if writer is None or writer.path != path:
                writer = self._writers[ward, turn] = FileWriter(path)
            writer.write(version, block, json.dumps(meta, separators=(",", ":")))
            self._written[ward] = version, turn

    def failed(self, directory: Path, version: Version, error: OSError) -> None:
        """Says once that there was no room for what wards have sent. The next one is tried again.

        Args:
            directory: Directory of this host's copies.
            version: Version of the copy.
            error: The error of `write`.
        """
        if self._failed:
            return
        self._failed = True
        logger.warning(
            "no room for the pieces of process %s of step %d in %s: %s. Until there is, the loss "
            "of their host costs all steps since the last checkpoint",
            " and ".join(map(str, self._wards)),
            version.step,
            directory,
            error,
        )

    def withdraw(self) -> None:
        """Removes the files that this process keeps for others, who are done."""
        for writer in self._writers.values():
            writer.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Closes the files, without removing them."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
