"""Complete passes over a loader, which a restarted script does not repeat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCount:
    """Number of complete passes over one loader in the current epoch.

    After a restart the script runs the epoch from its beginning. Passes that were complete are not
    repeated: iterating over the loader then yields nothing.

    Examples:
        >>> first = PassCount().begin(0, {})
        >>> done = first.end({}, {})
        >>> again = PassCount.from_state(done.state(), cursor=100)
        >>> again.begin(0, {}).left_out, again.begin(1, {}).left_out
        (True, False)
    """

    epoch: int | None = None
    """The epoch of the loop that the passes belong to."""
    complete: int = 0
    """Passes that are complete in it."""
    within: Mapping[str, int] = field(default_factory=dict)
    """Positions of the enclosing training iterations, by loader; others start a new count."""
    under_way: bool = False
    """Whether a pass has begun and is not complete; stays True if it was left early."""
    until: int | None = None
    """End of that pass in the stream, if the data determine it."""
    seen: int = 0
    """Number of complete passes that this process has made or skipped."""
    left_out: bool = False
    """Whether the current pass was complete before a restart, and is skipped."""

    def begin(self, epoch: int, enclosing: Mapping[str, int]) -> PassCount:
        """Begins a pass.

        Args:
            epoch: The epoch of the loop.
            enclosing: Positions of the training iterations that are open, by loader.
        """
        moved = any(enclosing.get(name, place) != place for name, place in self.within.items())
        now = PassCount(epoch=epoch) if epoch != self.epoch or moved else self
        if now.seen < now.complete:
            return replace(now, seen=now.seen + 1, left_out=True)
        return replace(now, under_way=True, left_out=False)

    def end(self, began: Mapping[str, int], now: Mapping[str, int]) -> PassCount:
        """Complete the current pass.

        Args:
            began: Positions of the enclosing iterations when it began.
            now: Their current positions. An iteration that has moved since does not enclose the
                pass: both are zipped.
        """
        complete = self.complete + 1
        within = {name: at for name, at in began.items() if now.get(name) == at}
        return PassCount(epoch=self.epoch, complete=complete, within=within, seen=complete)

    def state(self) -> dict[str, Any]:
        """The state, for checkpoints; JSON-compatible."""
        return {
            "epoch": self.epoch,
            "passes": self.complete,
            "within": dict(self.within),
            "under_way": self.under_way,
            "until": self.until,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], cursor: int) -> PassCount:
        """The inverse of `state`; also reads the state of resilin 0.1.0.

        Args:
            state: The state of a loader.
            cursor: Its cursor.
        """
        if "passes" not in state:
            ended = state.get("ended")
            return cls(epoch=ended, complete=int(ended is not None))
        count = cls(
            epoch=state["epoch"],
            complete=int(state["passes"]),
            within=dict(state["within"]),
            under_way=bool(state["under_way"]),
            until=state["until"],
        )
        if count.until is not None and cursor >= count.until:
            # All its data are used; the process was lost before the iteration ended.
            return replace(count, complete=count.complete + 1, under_way=False, until=None)
        return count
