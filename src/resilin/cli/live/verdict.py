"""The meaning of a worker's end for a live job, and the number of its replacements."""

from __future__ import annotations

from enum import Enum

from resilin.cli.faults import count
from resilin.core.lives import Life, Lives
from resilin.engine.stop import RESTART, SIGNALS

STOPPED = tuple(128 + number for number in SIGNALS)
"""Exit codes of a worker that was asked to leave, and did."""
JOB = -1
"""In place of a local rank: the whole job."""


class Verdict(Enum):
    """The consequence of the end of a worker."""

    FINISHED = "its training is over, and its script has ended"
    LEFT = "it was asked to leave, and is not replaced"
    EARLY = "its script ended before its training: reported, and not replaced"
    ABSENT = "it has gone without taking part: the job cannot begin"
    WRONG = "its script failed before the job ever began: it would do so again"
    ANEW = "it asks for a restart before anything was formed: the job is started again"
    LOST = "it is replaced"


def judge(code: int, *, finished: bool, begun: bool, formed: bool, ever_formed: bool) -> Verdict:
    """The meaning of an exit.

    Args:
        code: The exit code; -N if signal N killed the process.
        finished: Whether the worker had said that its training is over.
        begun: Whether there is a first generation. Until then, all wait for this worker.
        formed: Whether a generation was formed since the job was started, or started again.
        ever_formed: Whether a generation was formed since the command was started.
    """
    if code == 0 and finished:
        return Verdict.FINISHED
    if code == 0 or code in STOPPED:
        if not begun:
            return Verdict.ABSENT
        return Verdict.LEFT if code else Verdict.EARLY
    if code == RESTART:
        return Verdict.LOST if formed else Verdict.ANEW
    if code > 0 and not ever_formed:
        return Verdict.WRONG
    return Verdict.LOST


class Budget:
    """Replacements and restarts that are left.

    Workers are counted by local rank: one device may be broken while the job continues with
    the others.

    Args:
        most: The limit of replacements and restarts together.
        bounds_fruitless: Whether to give up earlier on a script that keeps failing without a new
            step.
    """

    def __init__(self, most: int, *, bounds_fruitless: bool) -> None:
        self.most = most
        self.replaced = 0
        """Workers that were replaced."""
        self.restarted = 0
        """Times that the job was started again."""
        self._bounds_fruitless = bounds_fruitless
        self._lives: dict[int, Lives] = {}

    @property
    def used(self) -> int:
        """Replacements and restarts so far."""
        return self.replaced + self.restarted

    @property
    def used_up(self) -> str:
        """The end of a sentence: after how many replacements and restarts; may be empty."""
        parts = [count(self.replaced, "replacement")] * bool(self.replaced)
        parts += [count(self.restarted, "restart")] * bool(self.restarted)
        return f" after {' and '.join(parts)}" if parts else ""

    def refusal(self, slot: int, life: Life | None) -> str | None:
        """Spend one replacement, or one restart of the job.

        Args:
            slot: Local rank of the worker, or `JOB`.
            life: The life that has ended; None if it asked for another one.

        Returns:
            None, or the reason why there is no other one.
        """
        if life is not None:
            self._lives[slot] = self._lives.get(slot, Lives()).after(life)
        lives = self._lives.get(slot, Lives())
        if self._bounds_fruitless and lives.hopeless:
            made = "a step" if lives.best is None else f"a new step after step {lives.best}"
            return (
                f"failed {lives.fruitless} times in a row without making {made} (--max-restarts N "
                "would start it N times)"
            )
        if self.used >= self.most:
            return f"failed, and {count(self.most, 'restart')} are used up (--max-restarts)"
        if slot == JOB:
            self.restarted += 1
            # Its workers have made no life of their own since.
            self._lives = {key: value for key, value in self._lives.items() if key == JOB}
        else:
            self.replaced += 1
        return None
