"""The interface between training and changes of members that nobody is restarted for."""

from __future__ import annotations

from typing import NoReturn, Protocol

from resilin.core.recovery import Version


class Training(Protocol):
    """The training of this process, as far as it follows changes of members."""

    def let_go(self) -> None:
        """Gives up all references to the groups of the present generation."""
        ...

    def heal(self) -> Version:
        """Gives all members of a generation that was just formed the newest state. Collective.

        Returns:
            That state.

        Raises:
            PeerLost: A member was lost meanwhile: it is called again in the next generation.
            NotLive: Nobody has it.
        """
        ...

    def hand_over(self, leaving: frozenset[int]) -> None:
        """Gives replicas that stay what those that leave have of their own. Collective."""
        ...

    def say_farewell(self) -> None:
        """Completes the reports of this process, which leaves."""
        ...


class Changes(Protocol):
    """Changes of the members of a job, as training follows them."""

    place: int
    """Questions outside of steps that were answered since the last step was committed."""
    answer: object
    """The last answer."""
    outside: bool
    """Whether one is being asked after the script has left its last step behind."""

    @property
    def name(self) -> str:
        """Name of this member."""
        ...

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the members of the present generation, in the order of their numbers."""
        ...

    @property
    def least(self) -> Version | None:
        """The state that the present generation needs; None if none was formed before it."""
        ...

    @property
    def is_joining(self) -> bool:
        """Whether the job runs without this process, which has to be given its state."""
        ...

    @property
    def sees_change(self) -> bool:
        """Whether a newer generation than the present one is announced."""
        ...

    def begin(self, training: Training) -> None:
        """Take part in the job: what was built is complete. Members are healed from here on."""
        ...

    def agree(self, votes: int) -> None:
        """Takes how many members have seen a newer generation, by the ballot of a step."""
        ...

    def formed(self, state: Version) -> None:
        """Waits until the authority has heard that the generation is formed, with which state."""
        ...

    def be_replaced(self, reason: str) -> NoReturn:
        """Ends this process; the launcher starts another one, which joins."""
        ...

    def restart(self, reason: str) -> NoReturn:
        """Ends this process, and has all others ended: the job is restarted from what was kept."""
        ...
