"""The controller as programs reach it: one method for each request."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

TIMEOUT = 30.0
"""Seconds that an answer may take."""


class Refused(ValueError):
    """The controller refused a request; the message is its sentence."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        """HTTP status."""


class Client:
    """A connection to a controller.

    Args:
        url: Its URL.
        token: Token of the cluster, or of one job.
        ca: File with the certificates that sign its own; None for those of the system.
    """

    def __init__(self, url: str, token: str, *, ca: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url ({url!r}) must begin with http:// or https://")
        self.url = url.rstrip("/")
        """Its URL."""
        self._token = token
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if url.startswith("https://"):
            context = ssl.create_default_context(cafile=ca)
            handlers.append(urllib.request.HTTPSHandler(context=context))
        self._opener = urllib.request.build_opener(*handlers)

    def submit(self, told: Mapping[str, Any]) -> str:
        """Submit a job; see `Api.submit`. Returns its id."""
        return str(self._ask("POST", "jobs", told)["id"])

    def jobs(self) -> list[dict[str, Any]]:
        """All jobs."""
        found: list[dict[str, Any]] = self._ask("GET", "jobs")
        return found

    def job(self, name: str) -> dict[str, Any]:
        """One job."""
        found: dict[str, Any] = self._ask("GET", f"jobs/{quote(name, safe='')}")
        return found

    def why(self, name: str) -> dict[str, Any]:
        """The reason for the size of a job."""
        found: dict[str, Any] = self._ask("GET", f"jobs/{quote(name, safe='')}/why")
        return found

    def cancel(self, name: str) -> None:
        """End a job."""
        self._ask("DELETE", f"jobs/{quote(name, safe='')}")

    def hint(self, name: str, told: Mapping[str, Any]) -> dict[str, Any]:
        """Report hints of a job; see `Api.hint` for the answer."""
        found: dict[str, Any] = self._ask("PUT", f"jobs/{quote(name, safe='')}/hints", told)
        return found

    def nodes(self) -> list[dict[str, Any]]:
        """All nodes."""
        found: list[dict[str, Any]] = self._ask("GET", "nodes")
        return found

    def drain(self, node: str, at: float | None = None) -> None:
        """Have a node empty by a time; None means now."""
        self._ask("POST", f"nodes/{quote(node, safe='')}/drain", {"at": at})

    def undrain(self, node: str) -> None:
        """Use a node again."""
        self._ask("DELETE", f"nodes/{quote(node, safe='')}/drain")

    def _ask(self, method: str, path: str, told: Mapping[str, Any] | None = None) -> Any:
        body = None if told is None else json.dumps(told).encode()
        request = urllib.request.Request(f"{self.url}/{path}", body, method=method)
        request.add_header("Authorization", f"Bearer {self._token}")
        request.add_header("Content-Type", "application/json")
        try:
            with self._opener.open(request, timeout=TIMEOUT) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                content = error.read()
            raise Refused(error.code, _sentence(content) or f"HTTP {error.code}") from None
        except (OSError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise OSError(f"no controller answers at {self.url}: {reason}") from None


def _sentence(content: bytes) -> str:
    """The error in an answer; empty if there is none."""
    try:
        return str(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        return ""
