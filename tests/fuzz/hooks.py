"""What a generated script calls: places to be killed at, and the report of its final state.

Outside of a fuzzed run both do nothing but print, so that a script can be run by hand.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from tests.fuzz import parts
from tests.fuzz.program import Kill


class Plan:
    """The kill that is planned for this process in this life, and where things are written."""

    def __init__(self, folder: Path, life: int, replica: int, kill: Kill | None) -> None:
        self.folder, self.life, self.replica, self.kill = folder, life, replica, kill
        self._left = kill.count if kill else 0
        self._pid = os.getpid()
        self._place = kill.at[5:] if kill and kill.at.startswith("line:") else None
        self._lock = threading.Lock()

    def reached(self, name: str) -> None:
        if self.kill is not None and self.kill.at == name:
            self._count()

    def _count(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left != 0 or os.getpid() != self._pid:
                return
            assert self.kill is not None
            text = "term" if self.kill.term else "kill"
            text += "-wipe" if self.kill.wipe else ""
            (self.folder / f"killed-{self.life}").write_text(text)
            os.kill(os.getpid(), signal.SIGTERM if self.kill.term else signal.SIGKILL)

    def start(self) -> None:
        """Counts lines of resilin's own files, if the kill is to come there."""
        if self._place is not None:
            threading.settrace(self._trace)
            sys.settrace(self._trace)

    def end(self) -> None:
        threading.settrace(None)  # type: ignore[arg-type]
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        return self._line if "resilin/" + str(self._place) in name else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self._count()
        return self._line


plan: Plan | None = None
"""Set by the worker before it runs a script."""


def folder() -> Path:
    """Where this case keeps its files."""
    return Path("fuzz-run") if plan is None else plan.folder


def kill_point(name: str) -> None:
    """A place where the process may be killed."""
    if plan is not None:
        plan.reached(name)


def may_leave() -> bool:
    """Whether no life of this case was left by its loop yet."""
    return plan is not None and not any(plan.folder.glob("left-*"))


def leave() -> None:
    """Says that the loop is left on purpose, and that the script is to be run again."""
    assert plan is not None
    (plan.folder / f"left-{plan.life}").touch()


def report(
    net: parts.Net,
    optimizer: Any,
    scheduler: Any,
    scaler: Any,
    ema: Any,
    history: Any,
    clock: Any,
    diary: Any = None,
) -> None:
    """Writes the final state of this replica down."""
    state = parts.final_state(
        net, optimizer, scheduler, scaler, ema, history, clock.steps, clock.samples
    )
    if diary is not None:
        state["diary"] = diary.steps
    save(state)


def save(state: dict[str, Any], name: str = "result") -> None:
    """Writes any final state down: what a family of programs compares."""
    if plan is None:
        print(state)
        return
    plan.end()
    path = plan.folder / f"{name}-{plan.life}-{plan.replica}.pt"
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)
