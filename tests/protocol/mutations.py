"""Broken variants of the rules, each of which the simulator must catch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from resilin.core import recovery
from resilin.core.passes import PassCount
from resilin.core.recovery import Candidate
from tests.protocol.simulator import Rules


def _keeps_passes(passes: PassCount, epoch: int) -> PassCount:
    """Passes of the last epoch count in the next."""
    return replace(passes, epoch=epoch).begin(epoch, {})


def _skips_all(passes: PassCount, epoch: int) -> PassCount:
    begun = passes.begin(epoch, {})
    return replace(begun, left_out=begun.left_out or begun.complete > 0)


def _without_neighbour(local_process: int, num_local_processes: int) -> tuple[int, ...]:
    return (local_process,)


def _any_share(files: Any) -> Any:
    found: dict[Any, Any] = {}
    for file in files:
        found.setdefault(file.version, {})[file.share] = file
    return {version: list(shares.values()) for version, shares in found.items()}


def _oldest_first(held: Any, saved: Any) -> list[Candidate]:
    return recovery.candidates(held, saved)[::-1]


def _newest_always(held: Any, saved: Any) -> list[Candidate]:
    return sorted(recovery.candidates(held, saved), key=lambda each: each.version, reverse=True)


def _whole_first(held: Any, saved: Any) -> list[Candidate]:
    return sorted(recovery.candidates(held, saved), key=lambda each: each.whole, reverse=True)


def _storage_first(held: Any, saved: Any) -> list[Candidate]:
    found = recovery.candidates(held, saved)
    return sorted(found, key=lambda each: each.source == "checkpoint", reverse=True)


def _memory_first(held: Any, saved: Any) -> list[Candidate]:
    found = recovery.candidates(held, saved)
    return sorted(found, key=lambda each: each.source == "memory", reverse=True)


def _by_step(held: Any, saved: Any) -> list[Candidate]:
    found = recovery.candidates(held, saved)
    return sorted(found, key=lambda each: each.version.step, reverse=True)


def _whole_only(held: Any, saved: Any) -> list[Candidate]:
    return [each for each in recovery.candidates(held, saved) if each.whole]


def _next_of_chosen(visible: Any) -> int:
    """As if only checkpoints and the first file were looked at."""
    return next((version.generation for version in visible), -1) + 1


MUTATIONS: dict[str, Rules] = {
    "a generation takes the number of the one before": Rules(
        next_generation=lambda visible: max((v.generation for v in visible), default=0)
    ),
    "a generation looks at one version only": Rules(next_generation=_next_of_chosen),
    "branches have no number": Rules(draw_branch=lambda rng: 0),
    "a share has one writer": Rules(shares_written=_without_neighbour),
    "any share makes a copy complete": Rules(complete_copies=_any_share),
    "copies have one buffer": Rules(next_buffer=lambda last, *, again: last),
    "a step is committed while the copy of the last one is written": Rules(
        may_vote=lambda *, writing: True
    ),
    "old copies go before the first new one is complete": Rules(may_forget=lambda num: True),
    "the oldest state wins": Rules(candidates=_oldest_first),
    "the newest state wins, whole or not": Rules(candidates=_newest_always),
    "a whole state wins, however old": Rules(candidates=_whole_first),
    "a state with missing parts is never resumed": Rules(candidates=_whole_only),
    "storage wins over memory": Rules(candidates=_storage_first),
    "memory wins over storage": Rules(candidates=_memory_first),
    "more steps win over a later generation": Rules(candidates=_by_step),
    "no copy when the job stops": Rules(
        is_kept=lambda step, interval, *, stopping: interval > 0 and step % interval == 0
    ),
    "every other copy is left out": Rules(
        is_kept=lambda step, interval, *, stopping: interval > 0 and step % (2 * interval) == 0
    ),
    "a state holds what is registered so far": Rules(kept_parts=lambda names, _: set(names)),
    "complete passes are made again": Rules(resume_passes=lambda state, cursor: PassCount()),
    "all passes of an epoch are left out if one is complete": Rules(begin_pass=_skips_all),
    "passes of the last epoch count for the next": Rules(begin_pass=_keeps_passes),
    "a pass that ends is not counted": Rules(end_pass=lambda passes: passes),
    "the cursor lags": Rules(commit=lambda cursor, stop: max(cursor, stop - 1)),
}
