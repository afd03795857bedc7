"""`Scheduler`: one HTTP request that sends the hints of a job; `Sender`: a thread that sends them.

A scheduler may be away, slow, or not a scheduler. None of this concerns the training: a request
has a time limit and an answer a largest size, the first failure is a warning and further ones are
silent until the scheduler answers again.
"""

from __future__ import annotations

import http.client
import logging
import os
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

from resilin.core import hints_json
from resilin.core.answer import Answer
from resilin.core.hints_json import HintsError
from resilin.core.text import clean
from resilin.engine import environment

logger = logging.getLogger("resilin")

TIMEOUT = 5.0
"""Seconds for a request and its answer."""
LAST = 1.0
"""Longest time in seconds that the end of the training waits for the last hints to be sent."""


class SchedulerError(Exception):
    """The scheduler did not accept the hints; the message gives the reason."""


class Scheduler:
    """The scheduler of a cluster, as one of its jobs sees it.

    Args:
        url: Its address, http or https.
        token: The token that it has given to the job.
        job: The id of the job.
        ca: File with the certificate of the authority that has signed that of the scheduler; None
            means those of the system.

    Raises:
        ValueError: The address is not one, or the file has no certificate.
    """

    def __init__(self, url: str, token: str, job: str, *, ca: str | None = None) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{environment.SCHEDULER} ({url!r}) must be http://HOST:PORT or https")
        if not job or not token.isprintable():
            raise ValueError(
                f"{environment.JOB} ({job!r}) must be the id of the job, and "
                f"{environment.SCHEDULER_TOKEN} printable"
            )
        self.url = f"{url.rstrip('/')}/jobs/{urllib.parse.quote(job, safe='')}/hints"
        """Address of the hints of the job."""
        self._token = token
        # Never by a proxy: the scheduler is in the cluster, and the token is for it alone. For the
        # same reason nothing is redirected: urllib does not do that with a PUT.
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if parts.scheme == "https":
            try:
                context = ssl.create_default_context(cafile=ca)
            except OSError as error:  # ssl.SSLError among them
                raise ValueError(
                    f"{environment.SCHEDULER_CA} ({ca!r}) must be a file with a certificate: "
                    f"{error}"
                ) from None
            handlers.append(urllib.request.HTTPSHandler(context=context))
        self._opener = urllib.request.build_opener(*handlers)

    def send(self, body: bytes) -> Answer:
        """Sends hints as JSON.

        Raises:
            SchedulerError: They were not accepted, or the answer is not one.
        """
        request = urllib.request.Request(self.url, body, method="PUT")
        request.add_header("Content-Type", "application/json")
        request.add_header("Authorization", f"Bearer {self._token}")
        try:
            with self._opener.open(request, timeout=TIMEOUT) as response:
                return Answer.parse(_read(response))
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(500).decode("utf-8", "replace")
            raise SchedulerError(
                f"{error.code} {clean(error.reason)}: {clean(said, 300)}"
            ) from None
        except (OSError, http.client.HTTPException, HintsError, UnicodeError) as error:
            raise SchedulerError(f"{type(error).__name__}: {clean(str(error), 300)}") from None


def _read(response: http.client.HTTPResponse) -> bytes:
    """The body of an answer, within the limits of time and size."""
    deadline, parts, size = time.monotonic() + TIMEOUT, [], 0
    while part := response.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if size > hints_json.MAX_BYTES:
            raise HintsError(f"the answer must have at most {hints_json.MAX_BYTES} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError(f"the answer took more than {TIMEOUT:g} s")
    return b"".join(parts)


def from_environment() -> Scheduler | None:
    """The scheduler that the environment names; None if it names none.

    Raises:
        ValueError: A variable cannot be what it should be.
    """
    url = os.environ.get(environment.SCHEDULER)
    if not url:
        return None
    token, job = (
        os.environ.get(name, "") for name in (environment.SCHEDULER_TOKEN, environment.JOB)
    )
    return Scheduler(url, token, job, ca=os.environ.get(environment.SCHEDULER_CA) or None)


class Sender:
    """Sends the newest hints, in a thread that exists from the first of them on.

    Args:
        scheduler: Who gets them.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._changed = threading.Condition()
        self._waiting: bytes | None = None
        self._busy = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self._failing = False
        self._answer: Answer | None = None

    @property
    def answer(self) -> Answer | None:
        """The last answer; None before the first one."""
        return self._answer

    def offer(self, body: bytes) -> None:
        """Sends this as soon as possible. What still waits is dropped: it is older."""
        with self._changed:
            self._waiting = body
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="resilin-hints", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self) -> None:
        """Waits until all was sent, for a moment: not at all while the scheduler is away."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._waiting is None and not self._busy,
                timeout=0.1 if self._failing else LAST,
            )

    def close(self) -> None:
        """Ends the thread, when its request is over. Nobody waits for that."""
        with self._changed:
            self._closed = True
            self._waiting = None
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed or self._waiting is not None)
                if self._closed:
                    return
                body, self._waiting, self._busy = self._waiting, None, True
            assert body is not None
            self._send(body)

    def _send(self, body: bytes) -> None:
        try:
            self._answer = self._scheduler.send(body)
        except SchedulerError as error:
            logger.log(
                logging.DEBUG if self._failing else logging.WARNING,
                "the scheduler at %s did not take the hints of this job (%s); training continues, "
                "and further failures are not reported",
                self._scheduler.url,
                error,
            )
            self._failing = True
        else:
            if self._failing:
                logger.info("the scheduler at %s answers again", self._scheduler.url)
            self._failing = False
