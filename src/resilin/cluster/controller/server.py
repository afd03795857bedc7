"""HTTP of the controller: JSON, a bearer token, and TLS from files.

The token of the cluster opens everything; that of a job, which its processes have, its hints alone.
A browser gives the token as a password, and gets to read only.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import socket
import ssl
import sys
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from resilin.cluster.controller.api import Api, Conflict, Unknown, parse
from resilin.cluster.controller.launch import job_token
from resilin.cluster.controller.page import page
from resilin.cluster.controller.views import metrics
from resilin.core.text import clean

LARGEST = 1 << 20
"""Bytes of a request, at most."""
TIMEOUT = 30.0
"""Seconds for which a connection may be silent."""


class Server(ThreadingHTTPServer):
    """The server of one controller.

    Args:
        address: Host and port; port 0 takes any.
        certificate: Certificate and key files, for TLS; None serves plain HTTP.
    """

    daemon_threads = True
    request_queue_size = 128

    api: Api
    """The requests that it serves; to be set before it does."""

    def __init__(
        self, address: tuple[str, int], certificate: tuple[str, str] | None = None
    ) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, Handler)
        self.context: ssl.SSLContext | None = None
        """Of TLS."""
        if certificate is not None:
            self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.context.load_cert_chain(*certificate)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Serve one connection, in its own thread."""
        request.settimeout(TIMEOUT)
        if self.context is not None:
            # Here and not where connections are accepted: a client that says nothing holds up its
            # own thread alone.
            request = self.context.wrap_socket(request, server_side=True)
            try:
                super().finish_request(request, client_address)
            finally:
                request.close()
            return
        super().finish_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that break off; show everything else."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server
    server_version = "resilin"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer a GET."""
        self._answer("GET")

    def do_POST(self) -> None:
        """Answer a POST."""
        self._answer("POST")

    def do_PUT(self) -> None:
        """Answer a PUT."""
        self._answer("PUT")

    def do_DELETE(self) -> None:
        """Answer a DELETE."""
        self._answer("DELETE")

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: requests of jobs come all the time."""

    def _answer(self, method: str) -> None:
        try:
            path = [unquote(each) for each in urlsplit(self.path).path.split("/") if each]
            body = self._body()
            if path != ["health"] and not self._is_allowed(method, path):
                self._refuse(path)
                return
            self._route(method, path, body)
        except Unknown as error:
            self._json(HTTPStatus.NOT_FOUND, {"error": clean(str(error))})
        except Conflict as error:
            self._json(HTTPStatus.CONFLICT, {"error": clean(str(error))})
        except ValueError as error:
            self._json(HTTPStatus.BAD_REQUEST, {"error": clean(str(error))})
        except TooLarge as error:
            self.close_connection = True
            self._json(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"error": str(error)})

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "0")
        if not (length.isascii() and length.isdigit()):
            raise ValueError(f"Content-Length ({length!r}) must be a whole number")
        if "Transfer-Encoding" in self.headers:
            raise ValueError("a body must come with its Content-Length")
        if int(length) > LARGEST:
            raise TooLarge(f"a body ({int(length)} bytes) must have at most {LARGEST}")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise ValueError(f"the body has {len(body)} bytes, and not {length}")
        return body

    def _is_allowed(self, method: str, path: list[str]) -> bool:
        kind, _, given = self.headers.get("Authorization", "").partition(" ")
        if kind == "Basic" and method == "GET":
            try:
                given = base64.b64decode(given, validate=True).decode().partition(":")[2]
            except (binascii.Error, UnicodeDecodeError):
                return False
        elif kind != "Bearer":
            return False
        token = self.server.api.controller.token
        if _same(given.strip(), token):
            return True
        is_hint = method == "PUT" and len(path) == 3 and path[0::2] == ["jobs", "hints"]
        return is_hint and _same(given.strip(), job_token(token, path[1]))

    def _refuse(self, path: list[str]) -> None:
        told = json.dumps({"error": "the token must be that of the cluster"}).encode()
        self.send_response(HTTPStatus.UNAUTHORIZED)
        self.send_header("WWW-Authenticate", "Bearer" if path else 'Basic realm="resilin"')
        self._send("application/json", told)

    def _route(self, method: str, path: list[str], body: bytes) -> None:
        api = self.server.api
        routes: dict[tuple[str, ...], Callable[..., None]] = {
            ("GET",): self._page,
            ("GET", "health"): lambda: self._json(HTTPStatus.OK, {"ok": True}),
            ("GET", "metrics"): self._metrics,
            ("GET", "jobs"): lambda: self._json(HTTPStatus.OK, api.jobs()),
            ("POST", "jobs"): lambda: self._submit(body),
            ("GET", "jobs", "*"): lambda job: self._json(HTTPStatus.OK, api.job(job)),
            ("DELETE", "jobs", "*"): lambda job: self._done(api.cancel, job),
            ("GET", "jobs", "*", "why"): lambda job: self._json(HTTPStatus.OK, api.why(job)),
            ("PUT", "jobs", "*", "hints"): lambda job: self._json(
                HTTPStatus.OK, api.hint(job, parse(body))
            ),
            ("GET", "nodes"): lambda: self._json(HTTPStatus.OK, api.nodes()),
            ("POST", "nodes", "*", "drain"): lambda node: self._drain(node, body),
            ("DELETE", "nodes", "*", "drain"): lambda node: self._done(api.undrain, node),
        }
        named = len(path) > 1
        found = routes.get((method, *(("*" if i == 1 else each) for i, each in enumerate(path))))
        if found is None:
            raise Unknown(f"there is no {method} {clean(self.path, 200)}")
        found(path[1]) if named else found()

    def _submit(self, body: bytes) -> None:
        told = parse(body)
        if not isinstance(told, dict):
            raise ValueError("the body must be an object")
        self._json(HTTPStatus.CREATED, {"id": self.server.api.submit(told)})

    def _drain(self, node: str, body: bytes) -> None:
        told = parse(body) if body else {}
        if not isinstance(told, dict) or set(told) - {"at"}:
            raise ValueError('the body must be an object with "at", or empty')
        self._done(self.server.api.drain, node, told.get("at"))

    def _page(self) -> None:
        controller = self.server.api.controller
        text = page(controller.state, controller.policy.name, time.time(), controller.troubles)
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
        self._send("text/html; charset=utf-8", text.encode())

    def _metrics(self) -> None:
        controller = self.server.api.controller
        self.send_response(HTTPStatus.OK)
        text = metrics(controller.state, time.time(), len(controller.troubles))
        self._send("text/plain; version=0.0.4; charset=utf-8", text.encode())

    def _done(self, do: Callable[..., None], *given: Any) -> None:
        do(*given)
        self._json(HTTPStatus.OK, {})

    def _json(self, status: HTTPStatus, value: Any) -> None:
        self.send_response(status)
        self._send("application/json", json.dumps(_finite(value), allow_nan=False).encode())

    def _send(self, kind: str, content: bytes) -> None:
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)


class TooLarge(Exception):
    """A request is larger than it may be."""


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())


def _finite(value: Any) -> Any:
    """JSON has no infinite numbers: they become null."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and value - value != 0:
        return None
    return value
