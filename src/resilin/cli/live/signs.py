"""The events that a launcher waits for: exits, signals, messages of other threads, and time.

One wait for all of them, so that each is seen at once. A signal wakes it through a pipe (Python's
wakeup descriptor), and so does a message; a warm worker that exits does so through its own
descriptor.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
from collections.abc import Callable, Collection, Iterator
from multiprocessing import connection
from types import FrameType, TracebackType
from typing import Any

Message = Callable[[], None]
"""Something for the main thread to do."""


class Inbox:
    """Wakes the main thread. A context: within it, these signals are only noted.

    Args:
        signals: Signals that stop the job.
    """

    def __init__(self, signals: Collection[signal.Signals]) -> None:
        self._signals = signals
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Inbox:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in (*self._signals, signal.SIGCHLD):
            self._previous[number] = signal.signal(number, _note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        # The pipe stays open: a thread of the server may still post something.

    def post(self, message: Message) -> None:
        """Have the main thread call this; from any thread."""
        self._messages.put(message)
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes it, too
            os.write(self._write, b"\0")

    def wait(self, seconds: float, descriptors: Collection[int]) -> list[signal.Signals]:
        """Wait until something has happened, at most this long.

        Args:
            seconds: The longest wait.
            descriptors: Further descriptors that end it.

        Returns:
            The signals that came, without SIGCHLD.
        """
        ready = connection.wait([self._read, *descriptors], max(0.0, seconds))
        if self._read not in ready:
            return []
        with contextlib.suppress(BlockingIOError):
            return [
                signal.Signals(number)
                for number in os.read(self._read, 4096)
                if number in self._signals
            ]
        return []

    def messages(self) -> Iterator[Message]:
        """Everything that was posted so far, in order."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._messages.get_nowait()


def _note(number: int, frame: FrameType | None) -> None:
    """A handler of Python's own, so that the wakeup descriptor gets the number."""
