"""Requests to stop: by a signal, by a poller such as a cloud's notice, or by the user's code.

A request is only recorded; the ballot of the next step sends it to all replicas, and they stop
together. The signal is also received by a thread, because the main thread of a replica whose peer
has died may wait in a collective, where no Python handler runs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that ask to stop: that of clusters before they take a machine, and Slurm's notice."""
RESTART = 75
"""Exit code of a process that asks for a restart (`EX_TEMPFAIL` of sysexits.h)."""

BY_LAUNCHER = "the launcher stops the job"
"""Reason of a request that the launcher of a live job makes."""

logger = logging.getLogger("resilin")


class StopRequest:
    """A request to stop this process, with its reason."""

    def __init__(self) -> None:
        self.signal: int | None = None
        """The signal, if the request was one."""
        self.reason: str | None = None
        """The reason; None without a request."""
        self._previous: dict[int, Any] = {}
        self._wakeup: tuple[int, int] | None = None
        self._closed = threading.Event()
        self._event = threading.Event()
        self.insisted = False
        """Whether Ctrl-C was pressed again while a request to stop was waiting for its step."""

    @property
    def asked(self) -> bool:
        """Whether this process was asked to stop."""
        return self.reason is not None

    @property
    def exit_code(self) -> int:
        """Exit code of the process: 128 + signal as in a shell, else `RESTART`."""
        return RESTART if self.signal is None else 128 + self.signal

    @property
    def reported(self) -> bool:
        """Whether a launcher reports the request: it has made it, or it sees the exit code."""
        return self.signal is not None or self.reason == BY_LAUNCHER

    def request(self, reason: str) -> None:
        """Request a stop at the end of the current step."""
        if self.reason is None:
            self.reason = reason
            self._event.set()
            if self._wakeup is not None:
                # No signal has the number 0: it only ends the wait. A full pipe does so, too.
                with contextlib.suppress(BlockingIOError):
                    os.write(self._wakeup[1], b"\0")

    # Signals -------------------------------------------------------------------------------

    def listen(self, *, interrupts: bool = False) -> None:
        """Treat `SIGNALS` as requests from now on; only a warning outside the main thread.

        Args:
            interrupts: Whether Ctrl-C is a request, too, where it has no handler of the script's. A
                second one interrupts at once.
        """
        if threading.current_thread() is not threading.main_thread():
            logger.warning("not the main thread: signals cannot be handled as requests to stop")
            return
        for number in SIGNALS:
            present = signal.getsignal(number)
            if present not in (signal.SIG_DFL, signal.SIG_IGN):
                logger.warning(
                    "%s has a handler already, which is left alone: it does not ask the job to "
                    "stop; use resilin.stop_when for that",
                    number.name,
                )
                continue
            self._previous[number] = signal.signal(number, self._handle)
        if interrupts and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._previous[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
        _listening.add(self)
        present = signal.set_wakeup_fd(-1)
        if present != -1:
            # An existing one, such as that of asyncio, stays; then only handlers see signals.
            signal.set_wakeup_fd(present)
        elif self._previous:
            read, write = os.pipe()
            os.set_blocking(read, False)
            os.set_blocking(write, False)
            signal.set_wakeup_fd(write, warn_on_full_buffer=False)
            self._wakeup = (read, write)

    def _handle(self, number: int, _: FrameType | None) -> None:
        self._take(number)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            self.insisted = True
            self._forget()
            signal.default_int_handler(number, frame)
        logger.warning("interrupted: the job stops after this step (Ctrl-C again: at once)")
        self._take(number)

    def _forget(self) -> None:
        self.signal = self.reason = None
        self._event.clear()

    def leave(self) -> NoReturn:
        """End the main thread as the request says: Ctrl-C as it would have ended it itself."""
        if self.signal == signal.SIGINT:
            # A script may catch it and train again, as a cell of a notebook does.
            self._forget()
            raise KeyboardInterrupt
        raise SystemExit(self.exit_code)

    def _take(self, number: int) -> None:
        if self.reason is None:
            self.signal = number
        self.request(signal.Signals(number).name)

    def wait(self, seconds: float) -> bool:
        """Wait for a request; also receives a signal while the main thread is blocked.

        Returns:
            Whether this process was asked to stop.
        """
        if self._wakeup is None:
            self._event.wait(seconds)
            return self.asked
        ready, _, _ = select.select([self._wakeup[0]], [], [], 0 if self.asked else seconds)
        if ready:
            for number in os.read(self._wakeup[0], 256):
                if number in self._previous:
                    self._take(number)
        return self.asked

    # Pollers -------------------------------------------------------------------------------

    def poll(self, condition: Callable[[], bool], every: float) -> None:
        """Call a function periodically, in a thread, to ask whether to stop.

        Args:
            condition: True requests a stop. If it raises, the error is logged, and it is called
                again later.
            every: Seconds between two calls.
        """

        def ask() -> None:
            while not self._closed.wait(every) and not self.asked:
                try:
                    answer = condition()
                except Exception:
                    logger.warning(
                        "the poller %r failed; it will be called again", condition, exc_info=True
                    )
                    continue
                if answer:
                    self.request(f"{getattr(condition, '__name__', condition)} returned True")

        threading.Thread(target=ask, name="resilin-poller", daemon=True).start()

    def close(self) -> None:
        """Restore the former signal handlers, and end the pollers."""
        self._closed.set()
        self.release()

    def release(self) -> None:
        """Restore the former signal handlers."""
        _listening.discard(self)
        if self._wakeup is not None:
            signal.set_wakeup_fd(-1)
            for end in self._wakeup:
                os.close(end)
            self._wakeup = None
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()


_listening: weakref.WeakSet[StopRequest] = weakref.WeakSet()


def _release_in_child() -> None:
    """Drop the handlers and the pipe that a forked child inherits from its parent."""
    for request in list(_listening):
        request.release()


os.register_at_fork(after_in_child=_release_in_child)
