"""Whether it is worth while to start a job again that keeps failing.

A life is the time from a start of the workers to their failure. A life that makes a new step is
worth another one, however many there were. A script with a fault makes none: it fails where it
failed before, be it after a second or after an hour.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MOST_FRUITLESS = 5
"""Lives in a row without a new step after which a job is given up."""
EARLY = 30.0
"""Seconds within which a life of workers that show no steps is a short one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One life of the workers, which has failed."""

    seconds: float
    """How long it was."""
    shows: bool = False
    """Whether its workers have shown that they would show their steps."""
    began: int | None = None
    """The step from which it started; None if it came to no training."""
    ended: int | None = None
    """The last step it was at; None likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lives:
    """What is remembered of the lives of a job."""

    best: int | None = None
    """The last step that any of them was at; None if none has shown its steps."""
    began: int | None = None
    """Where the last one that showed its steps started."""
    fruitless: int = 0
    """Lives in a row that made no new step."""
    shows: bool = False
    """Whether any of them has shown that it would show its steps."""

    def after(self, life: Life) -> Lives:
        """What is remembered after one more life.

        A life that starts from an earlier step than the one before has lost state, as with a
        machine. What it makes again counts as new. Where no life has ever shown its steps, the
        script may not be one that does: then only short ones count as fruitless.
        """
        if life.ended is None or life.began is None:
            shows = self.shows or life.shows
            if not shows and life.seconds >= EARLY:
                return Lives()
            return replace(self, shows=shows, fruitless=self.fruitless + 1)
        best = self.best
        if best is None or (self.began is not None and life.began < self.began):
            best = life.began
        new = life.ended > best
        return Lives(
            best=max(best, life.ended),
            began=life.began,
            fruitless=0 if new else self.fruitless + 1,
            shows=True,
        )

    @property
    def hopeless(self) -> bool:
        """Whether another life would be of no use."""
        return self.fruitless >= MOST_FRUITLESS
