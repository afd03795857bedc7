"""Allocation of sizes on nodes: what runs stays where it is if that is possible.

Large jobs are placed first. A job that fits on one host gets the fullest node with room for it; a
larger one gets whole hosts, and shares at most the last one, with jobs that stay within it. Where
free accelerators are scattered, smaller jobs move, as few as possible. Sizes that divide a host, or
are whole hosts, can always be placed on equal hosts.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from resilin.cluster.node import Allocation, Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """The size that a job is to have."""

    job: str
    """Id of the job."""
    kind: str
    """Kind of accelerator."""
    size: int
    """Number of accelerators, at least 1."""
    now: Allocation | None = None
    """Its allocation now, if it need not leave it."""


Smaller = Callable[[Want], Sequence[int]]
"""Sizes that a job would take instead where its size cannot be placed, descending."""


def place(
    nodes: Sequence[Node],
    kept: Mapping[str, Allocation],
    wants: Iterable[Want],
    smaller: Smaller = lambda want: (),
) -> dict[str, Allocation]:
    """Find accelerators for all jobs; a job for which there is no room is not in the answer.

    Args:
        nodes: Nodes that can be used.
        kept: Allocations that stay as they are, by the id of the job.
        wants: The other jobs; the first ones choose first among those of one size.
        smaller: Sizes of a job instead of one that cannot be placed.
    """
    wanted: dict[str, list[Want]] = {}
    for want in wants:
        wanted.setdefault(want.kind, []).append(want)
    found = dict(kept)
    for kind in sorted(wanted):
        hosts = _Hosts([node for node in nodes if node.kind == kind])
        for allocation in kept.values():
            if allocation.kind == kind:
                hosts.pin(allocation)
        found.update(_place_kind(hosts, wanted[kind], smaller))
    return found


def _place_kind(hosts: _Hosts, wants: Sequence[Want], smaller: Smaller) -> dict[str, Allocation]:
    found: dict[str, Allocation] = {}
    queue: list[tuple[int, int]] = []
    by_job = {want.job: (order, want) for order, want in enumerate(wants)}
    for order, want in enumerate(wants):
        if want.now is not None and want.now.kind == want.kind and want.now.size == want.size:
            found[want.job] = want.now
            hosts.put(want.job, want.now)
        else:
            heapq.heappush(queue, (-want.size, order))
    failed = []
    while queue:
        _, order = heapq.heappop(queue)
        want = wants[order]
        moved: list[str] = []
        allocation = hosts.find(want, want.size, moved)
        for job in moved:
            # Smaller than this one, so it has its turn later.
            del found[job]
            heapq.heappush(queue, (-by_job[job][1].size, by_job[job][0]))
        if allocation is None:
            failed.append(want)
            continue
        found[want.job] = allocation
        hosts.put(want.job, allocation)
    for want in failed:
        for size in smaller(want):
            allocation = hosts.find(want, size, None)
            if allocation is not None:
                found[want.job] = allocation
                hosts.put(want.job, allocation)
                break
    return found


class _Hosts:
    """Nodes of one kind: what is free on each, and who is there."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.names = [node.name for node in nodes]
        self.index = {name: place for place, name in enumerate(self.names)}
        self.total = [node.accelerators for node in nodes]
        self.free = list(self.total)
        self.largest = max(self.total, default=0)
        self.least = min(self.total, default=0)
        self.spread: set[int] = set()
        """Nodes with a job that has other nodes, too."""
        self.pinned: set[int] = set()
        """Nodes with a job that may not move."""
        self.small: list[dict[str, int]] = [{} for _ in nodes]
        """Jobs within each node that may move, and their sizes."""
        self.where: list[dict[int, None]] = [{} for _ in range(self.largest + 1)]
        """Nodes by free accelerators."""
        self.whole: dict[int, None] = dict.fromkeys(range(len(nodes)))
        """Nodes that nobody uses."""
        for place, count in enumerate(self.total):
            self.where[count][place] = None

    def _change(self, place: int, by: int) -> None:
        del self.where[self.free[place]][place]
        self.free[place] += by
        assert 0 <= self.free[place] <= self.total[place]
        self.where[self.free[place]][place] = None
        if self.free[place] == self.total[place]:
            self.whole[place] = None
        else:
            self.whole.pop(place, None)

    def pin(self, allocation: Allocation) -> None:
        """Take what an allocation has, for good."""
        for name, count in allocation.shares:
            place = self.index[name]
            self._change(place, -count)
            self.pinned.add(place)
            if allocation.hosts > 1:
                self.spread.add(place)

    def put(self, job: str, allocation: Allocation) -> None:
        """Take what an allocation has, until a larger job needs it."""
        for name, count in allocation.shares:
            place = self.index[name]
            self._change(place, -count)
            if allocation.hosts > 1:
                self.spread.add(place)
            else:
                self.small[place][job] = count

    def find(self, want: Want, size: int, moved: list[str] | None) -> Allocation | None:
        """Accelerators for a job; None if there are none.

        Args:
            want: The job.
            size: Its size.
            moved: Jobs that were taken off their nodes are added to it; None takes off nobody.
        """
        own = (
            [self.index[name] for name, _ in want.now.shares if name in self.index]
            if (want.now is not None and want.now.kind == want.kind)
            else []
        )
        if size <= self.largest:
            place = self._one(size, own, moved)
            if place is not None:
                return self._allocation(want.kind, {place: size}, own)
            if size <= self.least:
                return None
        return self._several(want.kind, size, own, moved)

    def _one(
        self,
        size: int,
        own: Sequence[int],
        moved: list[str] | None,
        others: Mapping[int, int] | None = None,
    ) -> int | None:
        """A node with room for this many.

        With `others`, the other nodes of the job, it is none of them, and has no second job with
        several nodes.
        """

        def fine(place: int) -> bool:
            return others is None or (place not in self.spread and place not in others)

        for place in own:
            if self.free[place] >= size and fine(place):
                return place
        for count in range(size, self.largest + 1):
            for place in self.where[count]:
                if fine(place):
                    return place
        if moved is None:
            return None
        for count in range(min(size, self.largest), -1, -1):
            for place in self.where[count]:
                lighter = {job: its for job, its in self.small[place].items() if its < size}
                if fine(place) and count + sum(lighter.values()) >= size:
                    self._make_room(place, size - count, lighter, moved)
                    return place
        return None

    def _make_room(
        self, place: int, need: int, movable: Mapping[str, int], moved: list[str]
    ) -> None:
        enough = sorted((its, job) for job, its in movable.items() if its >= need)
        largest_first = sorted(
            ((its, job) for job, its in movable.items()), key=lambda x: (-x[0], x[1])
        )
        for its, job in enough[:1] or largest_first:
            if need <= 0:
                break
            del self.small[place][job]
            self._change(place, its)
            moved.append(job)
            need -= its

    def _several(
        self, kind: str, size: int, own: Sequence[int], moved: list[str] | None
    ) -> Allocation | None:
        """Whole nodes, and a part of one more for what is left."""
        taken: dict[int, int] = {}
        left = size
        for place in [*(each for each in own if each in self.whole), *self.whole]:
            if left < self.least:
                break
            if place not in taken and self.total[place] <= left:
                taken[place] = self.total[place]
                left -= self.total[place]
        to_clear = []
        if moved is not None:
            for count in range(self.largest, -1, -1):
                for place in self.where[count]:
                    if left < self.least:
                        break
                    if place in taken or place in self.spread or place in self.pinned:
                        continue
                    # Of two jobs of one size, each would take the other's node, again and again.
                    lighter = all(its < size for its in self.small[place].values())
                    if self.total[place] <= left and lighter:
                        taken[place] = self.total[place]
                        left -= self.total[place]
                        to_clear.append(place)
        rest = None
        if left:
            if left <= self.largest:
                rest = self._one(left, own, moved, taken)
            if rest is None:
                return None
            taken[rest] = left
        for place in to_clear:
            assert moved is not None
            self._make_room(place, self.total[place] - self.free[place], self.small[place], moved)
        return self._allocation(kind, taken, own)

    def _allocation(self, kind: str, taken: Mapping[int, int], own: Sequence[int]) -> Allocation:
        order = [place for place in own if place in taken]
        order += [place for place in taken if place not in order]
        return Allocation(
            kind=kind, shares=tuple((self.names[place], taken[place]) for place in order)
        )
