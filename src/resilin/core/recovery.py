"""Decisions of recovery: when to copy, which copies are complete, and which state to resume from.

Every replica of a job makes these decisions on its own, from numbers that all replicas have, so all
of them decide the same. The functions here are the whole protocol: `training/state` only executes
it, and the simulator in `tests/protocol` runs the same functions over random histories of crashes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

Source = Literal["memory", "checkpoint"]
"""Storage of a state."""


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """Version of the state of a job; of two, the greater one is the one to resume from."""

    generation: int
    """The generation that reached it. A later one resumes from the state of earlier ones."""
    step: int
    """Optimizer steps committed."""
    epoch: int = 0
    """Completed epochs of the user's loop: work between two epochs makes no step."""
    branch: int = 0
    """Random number of the start that reached it; copies of two branches are never mixed."""

    def __str__(self) -> str:
        return f"step {self.step} of generation {self.generation}"

    def to_json(self) -> list[int]:
        """The version as JSON."""
        return [self.generation, self.step, self.epoch, self.branch]

    @classmethod
    def from_json(cls, state: Sequence[int]) -> Version:
        """The reverse of `to_json`."""
        return cls(*state)


def next_generation(visible: Iterable[Version]) -> int:
    """Number of the generation that starts now.

    Args:
        visible: Versions of all states that any replica can see, complete or not. A state that
            could not be read must not win over the work of this generation.
    """
    return max((version.generation for version in visible), default=-1) + 1


# When -----------------------------------------------------------------------------------------


LOSS_EVERY = 3600.0
"""Longest time from one lost worker to the next that memory copies are made for, in seconds."""
COPY_SHARE = 0.05
"""Largest share of the training time that automatic memory copies take, whatever is at risk."""


def seconds_between_copies(copy_seconds: float, trained_seconds: float) -> float:
    """Training time from one automatic memory copy to the next.

    With `t` seconds between copies, copies take `c / t` of the time. A lost worker takes `t / 2` on
    average, which is `t / (2 m)` of the time if one is lost every `m` seconds. The sum is smallest
    at `t = sqrt(2 c m)` (Young, 1974). Nobody knows `m`: losses come in groups, and what has run
    for long runs on. It is taken to be ten times as long as this start of the job has trained, and
    at most `LOSS_EVERY`, so copies are frequent after a start and become rare. The formula holds
    for copies that are short against `m`; beyond that, `COPY_SHARE` limits what they take.

    Args:
        copy_seconds: Time for which training stands still for one copy; 0 if not known yet.
        trained_seconds: Time for which the job has trained since it was started.

    Examples:
        >>> seconds_between_copies(0.02, trained_seconds=3600)
        12.0
    """
    loss_every = min(10 * trained_seconds, LOSS_EVERY)
    return max(math.sqrt(2 * copy_seconds * loss_every), copy_seconds / COPY_SHARE)


def is_kept(step: int, interval: int, *, stopping: bool) -> bool:
    """Whether a state is copied to memory, if copies have a set interval.

    Args:
        step: Optimizer steps committed.
        interval: Steps between two copies; 0 if there are none.
        stopping: Whether the job stops here, so that there is no later copy.
    """
    return interval > 0 and (stopping or step % interval == 0)


# Copies in the memory of a host -----------------------------------------------------------------


def shares_written(local_process: int, num_local_processes: int) -> tuple[int, ...]:
    """Shares of the state that a replica writes: its own, and that of its neighbour.

    Each share is thereby written by two replicas, and any one of them may die at any moment.
    """
    neighbour = (local_process + 1) % num_local_processes
    return (local_process,) if neighbour == local_process else (local_process, neighbour)


def next_buffer(last: int, *, again: bool) -> int:
    """Buffer, of a replica's two, that the next copy is written to.

    The previous copy stays intact while this one is written: all replicas of the host have
    completed it, because the ballot of a step lies between two copies, and no replica votes before
    its copy is complete (`may_vote`).

    Args:
        last: The buffer of the last copy, 0 or 1.
        again: Whether that buffer is overwritten. Only if the state that the generation resumed
            from is still there, and there is no room for a third one.
    """
    return last if again else 1 - last


def may_vote(*, writing: bool) -> bool:
    """Whether a replica may send its ballot of a step.

    Copies are written while the next step computes its gradient. The ballot comes before anything
    of that step is committed, and is summed over all replicas: who has the sum knows that all of
    them have completed the copy before. So a commit costs no copy, and at most the last committed
    step is lost with the process that writes it.

    Args:
        writing: Whether the last copy of this replica is still being written.
    """
    return not writing


def may_forget(num_kept: int) -> bool:
    """Whether the copies of earlier generations may be removed from the host.

    The replicas have voted since the first copy of this generation was staged, so that copy is
    complete on all replicas of the host.

    Args:
        num_kept: Number of the next copy, from 1.
    """
    return num_kept >= 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyFile:
    """One complete file of a memory copy."""

    version: Version
    """Version of the state it belongs to."""
    host: int
    """Number of the host in the generation that wrote it."""
    share: int
    """Number of the share of the state that it holds."""
    num_shares: int
    """Number of shares of the state."""


File = TypeVar("File", bound=CopyFile)


def complete_copies(files: Iterable[File]) -> dict[Version, list[File]]:
    """States of which a host has all shares.

    Args:
        files: The complete files in the host's memory, of any version.

    Returns:
        One file of each share, by version. Files of two hosts or branches never complete each
        other: they may be states of different runs with the same number of steps.
    """
    found: dict[tuple[Version, int, int], dict[int, File]] = {}
    for file in files:
        shares = found.setdefault((file.version, file.host, file.num_shares), {})
        shares.setdefault(file.share, file)
    return {
        version: list(shares.values())
        for (version, _, num), shares in sorted(found.items(), key=lambda item: item[0])
        if len(shares) == num
    }


# Which state wins -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A complete state in the memory of one host."""

    version: Version
    """Version of the state."""
    num_replicas: int
    """Replicas of the generation that wrote it."""
    previous: Version | None = None
    """The previous copy, or the state that its generation resumed from."""
    parts: Mapping[int, bool] = field(default_factory=dict)
    """Replicas whose own part of the state (sums, random generators) is here, and whether that
    part is not empty."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A state to resume from."""

    version: Version
    """Version of the state."""
    source: Source
    """Its storage."""
    whole: bool
    """Whether the parts of all replicas are there, or are empty."""


def candidates(held: Iterable[Held], saved: Sequence[Version] = ()) -> list[Candidate]:
    """All states that the job can resume from, the best one first.

    The latest wins, with one exception. A replica that dies in a step leaves the others one copy
    ahead: the shared state is complete without it, but its own part (sums, random generators) is
    that of the previous copy. So a state with missing parts is passed over for the previous copy,
    if that one is whole. No other state is passed over: if a host is lost, its parts are lost in
    every copy, and an older state that happens to be whole would cost steps.

    Args:
        held: States in the memory of all hosts.
        saved: Versions of the checkpoints.
    """
    parts: dict[Version, dict[int, bool]] = {}
    sizes: dict[Version, int] = {}
    previous: dict[Version, Version | None] = {}
    for state in held:
        parts.setdefault(state.version, {}).update(state.parts)
        sizes[state.version] = state.num_replicas
        previous[state.version] = state.previous

    def whole(version: Version) -> bool:
        there, before = parts[version], previous[version]
        # A missing replica had something in the previous copy, if it had anything.
        earlier = {} if before is None else parts.get(before, {})
        missing = [holds for replica, holds in earlier.items() if replica not in there]
        return len(there) == sizes[version] or not any([*there.values(), *missing])

    found = [Candidate(version, "memory", whole(version)) for version in parts]
    found += [Candidate(version, "checkpoint", True) for version in saved]
    # Memory before storage if both have the same state, because it is faster.
    found.sort(key=lambda each: (each.version, each.source == "memory"), reverse=True)
    if found and not found[0].whole:
        before = previous[found[0].version]
        for each in found:
            if each.version == before and each.whole:
                found.remove(each)
                found.insert(0, each)
                break
    return found
