"""A stand-in for kube-apiserver where there is none: a server of HTTP over the published schema.

It checks each object that is created against the OpenAPI schema of Kubernetes (the package
`kubernetes-validate`, strict: a field that is unknown is an error), keeps it, and answers as the
API does to what the backend and `kube_hands.py` ask: names that are taken, selectors, pages, merge
patches, deletion with a grace period. The same tests run on the real server, which is the proof
that it answers alike; it checks no rights.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate

VERSION = "1.36"
"""Version of the schema."""
API_VERSIONS = {"nodes": "v1", "pods": "v1", "jobs": "batch/v1"}
KINDS = {"nodes": "Node", "pods": "Pod", "jobs": "Job"}


class Refused(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.body = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            "code": status,
        }


def merged(old: Any, patch: Any) -> Any:
    """A merge patch, by RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    new = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        new[key] = merged(new.get(key), value)
        if value is None:
            del new[key]
    return new


def value_at(found: Any, path: str) -> str:
    for key in path.split("."):
        found = (found or {}).get(key)
    return str(found or "")


def matches(labels: Any, text: str) -> bool:
    """Whether all parts of a selector hold, each `key=value` or `key!=value`."""
    for each in filter(None, text.split(",")):
        key, _, value = each.partition("=")
        if key.endswith("!"):
            if labels(key[:-1]) == value:
                return False
        elif labels(key) != value.lstrip("="):
            return False
    return True


class Objects:
    """All objects of the server, by kind, namespace and name."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self._version = 0

    def list(self, kind: str, namespace: str, query: dict[str, str]) -> dict[str, Any]:
        with self._lock:
            found = [
                each
                for key, each in sorted(self._objects.items())
                if key[0] == kind
                and namespace in ("", key[1])
                and matches(
                    lambda key, each=each: each["metadata"].get("labels", {}).get(key, ""),
                    query.get("labelSelector", ""),
                )
                and matches(
                    lambda path, each=each: value_at(each, path), query.get("fieldSelector", "")
                )
            ]
            first = int(query.get("continue") or 0)
            last = first + int(query.get("limit") or len(found) or 1)
            page = {"resourceVersion": str(self._version)}
            if last < len(found):
                page["continue"] = str(last)
            return {
                "kind": f"{KINDS[kind]}List",
                "apiVersion": API_VERSIONS[kind],
                "metadata": page,
                "items": found[first:last],
            }

    def get(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        with self._lock:
            if (kind, namespace, name) not in self._objects:
                raise Refused(404, "NotFound", f'{kind} "{name}" not found')
            return self._objects[kind, namespace, name]

    def create(self, kind: str, namespace: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            kubernetes_validate.validate(body, VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            raise Refused(422, "Invalid", str(error)) from None
        with self._lock:
            name = body["metadata"]["name"]
            if (kind, namespace, name) in self._objects:
                raise Refused(409, "AlreadyExists", f'{kind} "{name}" already exists')
            now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
            metadata = {**body["metadata"], "uid": str(uuid.uuid4()), "creationTimestamp": now}
            if namespace:
                metadata["namespace"] = namespace
            status = {"phase": "Pending"} if kind == "pods" else body.get("status", {})
            return self._put(kind, namespace, {**body, "metadata": metadata, "status": status})

    def patch(self, kind: str, namespace: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            return self._put(kind, namespace, merged(self.get(kind, namespace, name), body))

    def delete(self, kind: str, namespace: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            found = self.get(kind, namespace, name)
            uid = body.get("preconditions", {}).get("uid")
            if uid not in (None, found["metadata"]["uid"]):
                raise Refused(409, "Conflict", f"the uid is {found['metadata']['uid']}, not {uid}")
            grace = body.get("gracePeriodSeconds", 0 if kind != "pods" else 30)
            before = found["metadata"].get("deletionGracePeriodSeconds", grace)
            if kind != "pods" or grace == 0 or "nodeName" not in found["spec"]:
                return self._objects.pop((kind, namespace, name))
            grace = min(grace, before)
            end = datetime.fromtimestamp(time.time() + grace, timezone.utc)
            marks = {
                "deletionTimestamp": end.strftime("%Y-%m-%dT%H:%M:%SZ"),
                "deletionGracePeriodSeconds": grace,
            }
            return self._put(kind, namespace, merged(found, {"metadata": marks}))

    def _put(self, kind: str, namespace: str, made: dict[str, Any]) -> dict[str, Any]:
        self._version += 1
        made = merged(made, {"metadata": {"resourceVersion": str(self._version)}})
        self._objects[kind, namespace, made["metadata"]["name"]] = made
        return made


class Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    objects: Objects

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:
            self.close_connection = True

    def answer(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size) or b"{}")
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        try:
            status, content = 200, self.act(url.path, query, body)
            status = 201 if self.command == "POST" else 200
        except Refused as refused:
            status, content = refused.status, refused.body
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PATCH = do_DELETE = answer

    def act(self, path: str, query: dict[str, str], body: dict[str, Any]) -> Any:
        """What the API does: /api/v1 or /apis/batch/v1, then the object."""
        words = path.strip("/").split("/")
        words = words[2:] if words[0] == "api" else words[3:]
        namespace = ""
        if words[0] == "namespaces":
            namespace, words = words[1], words[2:]
        kind, *rest = words
        if kind not in KINDS:
            raise Refused(404, "NotFound", f"the server has no {path}")
        objects = type(self).objects
        match self.command, rest[:1]:
            case "GET", []:
                return objects.list(kind, namespace, query)
            case "GET", [name]:
                return objects.get(kind, namespace, name)
            case "POST", []:
                return objects.create(kind, namespace, body)
            case "POST", [name] if rest[1:] == ["binding"]:
                place = {"spec": {"nodeName": body["target"]["name"]}}
                return objects.patch(kind, namespace, name, place)
            case "PATCH", [name]:
                return objects.patch(kind, namespace, name, body)
            case "DELETE", [name]:
                return objects.delete(kind, namespace, name, body)
        raise Refused(405, "MethodNotAllowed", f"{self.command} {path}")

    def log_message(self, *_: Any) -> None:
        """Write nothing."""


class SchemaServer:
    """The server, in threads of this process."""

    def __init__(self) -> None:
        handler = type("Bound", (Handler,), {"objects": Objects()})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=60)
