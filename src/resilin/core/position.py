"""The position of a loader: how far its data are used up, and which passes are done.

A process that is started again runs its loop from the beginning of an epoch. Which passes over the
data to skip, and where the next one resumes, follows from three integers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPosition:
    """How far a loader's data are used up by committed steps."""

    cursor: int = 0
    """Position in the sample stream: every earlier one is used up."""
    epoch: int = 0
    """Epoch of the user's loop in which the loader trained last."""
    passes: int = 0
    """Passes over the data that are complete within that epoch."""

    def enter(self, epoch: int) -> DataPosition:
        """The position when a pass begins in an epoch of the user's loop."""
        return self if epoch == self.epoch else replace(self, epoch=epoch, passes=0)

    def is_done(self, num_begun: int) -> bool:
        """Whether a pass was complete before the process was started again.

        Such a pass yields nothing. A loop that iterates over the loader twice in an epoch skips as
        many passes as are done, and resumes in the next one.

        Args:
            num_begun: Passes that this process has begun in the epoch so far.
        """
        return num_begun < self.passes

    def commit(self, stop: int) -> DataPosition:
        """The position after a step whose samples end before `stop`."""
        assert stop >= self.cursor, "the cursor never moves back"
        return replace(self, cursor=stop)

    def end_pass(self, data_end: int) -> DataPosition:
        """The position after a pass; a remainder that was dropped is used up as well."""
        return replace(self, cursor=max(self.cursor, data_end), passes=self.passes + 1)
