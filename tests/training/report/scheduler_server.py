"""A real HTTP server in the place of a scheduler: keeps what it was sent, answers as it is told."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from resilin.core.hints import JobHints

MENU = {"gpu": [[1, 1], [2, 1], [4, 1], [8, 2]]}
GOOD = (200, json.dumps({"replicas": 2, "menu": MENU, "leaves": None}).encode())
Reply = tuple[int, bytes]


class Server:
    """A scheduler on a port that the system has chosen.

    Args:
        answer: Returns status and body for each request; it may take its time.
        certificate: Files of its certificate and key, for https.
    """

    def __init__(
        self,
        answer: Callable[[], Reply] = lambda: GOOD,
        certificate: tuple[str, str] | None = None,
    ) -> None:
        self.answer = answer
        self.sent: list[dict[str, Any]] = []
        self.requests: list[tuple[str, str, str | None]] = []
        self.location: str | None = None
        self.released = threading.Event()
        told = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                length = int(self.headers["Content-Length"])
                told.sent.append(json.loads(self.rfile.read(length)))
                told.requests.append(("PUT", self.path, self.headers.get("Authorization")))
                status, body = told.answer()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                if status in (301, 302, 307, 308):
                    self.send_header("Location", told.location or f"{told.url}/elsewhere")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._http.handle_error = lambda *_: None  # a client that has given up
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        self.url = f"http{'s' * bool(certificate)}://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def hints(self) -> list[JobHints]:
        """What it was sent; an error if that is no hint."""
        return [JobHints.from_json(each) for each in self.sent]

    def hang(self) -> Reply:
        """An answer that does not come while the test runs."""
        self.released.wait(60)
        return GOOD

    def wait_for(self, condition: Callable[[], Any], seconds: float = 30.0) -> Any:
        """The first true value of the condition."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if value := condition():
                return value
            time.sleep(0.01)
        raise AssertionError(f"not within {seconds} s; {len(self.sent)} hints were sent")

    def close(self) -> None:
        self.released.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
