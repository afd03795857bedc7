"""Learning-rate schedulers that a clock steps instead of the user's loop.

A scheduler written per step runs at the wrong pace once steps change their worth. Handed to a
clock, it is stepped once per reference step that was completed: not at all after a small step,
several times after a large one.
"""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from resilin.core import _validate
from resilin.core.clock import CLOCKS, ClockName

_OURS = ("step", "state_dict")
"""Methods of a scheduler that a clock puts its own in place of."""


class ClockedScheduler:
    """A scheduler whose `step` belongs to a clock until `release` is called."""

    def __init__(self, scheduler: LRScheduler, clock: ClockName) -> None:
        self.scheduler = scheduler
        self.clock: ClockName = clock
        """The clock that steps it."""
        self._step, self._state_dict = scheduler.step, scheduler.state_dict
        # Its state is all of its attributes, and others may save it, too.
        vars(scheduler).update(step=self._refuse, state_dict=self.state_dict)

    @classmethod
    def make(
        cls, scheduler: LRScheduler | None, schedule_by: str, rule_clock: ClockName
    ) -> ClockedScheduler | None:
        """Hands a scheduler to a clock, unless the user keeps it.

        Args:
            scheduler: The user's scheduler, if there is one.
            schedule_by: `user`, a clock, or `rule` for the clock of the rule.
            rule_clock: That clock.

        Raises:
            ValueError: There is nothing to hand over, or it steps by something else than time.
        """
        _validate.one_of("schedule_by", schedule_by, ("user", "rule", *CLOCKS))
        if schedule_by == "user":
            return None
        if scheduler is None:
            raise ValueError(f"schedule_by ({schedule_by!r}) needs an lr_scheduler")
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ValueError(
                f"ReduceLROnPlateau follows a metric and not a clock: schedule_by "
                f"({schedule_by!r}) must be 'user'"
            )
        clock = rule_clock if schedule_by == "rule" else schedule_by
        return cls(scheduler, clock)  # type: ignore[arg-type]

    def _refuse(self, *_: Any, **__: Any) -> None:
        raise RuntimeError(
            f"this scheduler is stepped by the {self.clock} clock, once per reference step; "
            "remove scheduler.step() from the loop, or pass schedule_by='user'"
        )

    def advance(self, num_steps: int) -> None:
        """Steps the scheduler this many times."""
        for _ in range(num_steps):
            self._step()

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own state, without what was put in place of its `step`."""
        state: dict[str, Any] = self._state_dict()
        return {name: value for name, value in state.items() if name not in _OURS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned."""
        self.scheduler.load_state_dict(state)

    def release(self) -> None:
        """Gives the scheduler its own methods back."""
        for name in _OURS:
            vars(self.scheduler).pop(name, None)
