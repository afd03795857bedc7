"""Whether a job that keeps failing should be restarted again.

A life is the time from a start of the workers to their failure. A life that completes a new step
justifies another one, however many there were. A script with a bug completes none: it fails where
it failed before, be it after a second or after an hour.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MOST_FRUITLESS = 5
"""Consecutive lives without a new step after which the agent gives up."""
EARLY = 30.0
"""Seconds below which a life counts as short, if its workers report no steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One failed life of the workers."""

    seconds: float
    """Its duration."""
    shows: bool = False
    """Whether its workers report their steps."""
    began: int | None = None
    """The step at which it started; None if it did not start training."""
    ended: int | None = None
    """Its last step; None if it did not start training."""

    @property
    def without_step(self) -> bool:
        """Whether it made no step. Workers that report none may make some, unless they end soon."""
        if self.began is None or self.ended is None:
            return self.shows or self.seconds < EARLY
        return self.ended <= self.began


@dataclass(frozen=True, slots=True, kw_only=True)
class Lives:
    """Summary of the lives of a job so far."""

    best: int | None = None
    """The highest step that any of them reached; None if none has reported steps."""
    began: int | None = None
    """First step of the latest life that reported steps."""
    fruitless: int = 0
    """Consecutive lives without a new step."""
    shows: bool = False
    """Whether any of them reports its steps."""

    def after(self, life: Life) -> Lives:
        """The summary after one more life.

        A life that starts at an earlier step than the previous one has lost state, for example with
        a machine. Its repeated steps count as new. If no life has ever reported steps, the script
        may not use resilin: then only short lives count as fruitless.
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
        """Whether another restart would be useless."""
        return self.fruitless >= MOST_FRUITLESS
