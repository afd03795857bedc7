"""Access to an etcd: its endpoints, certificates and password.

A URL names the endpoints: `etcd://host:2379`, or several with commas between them, and `etcds://`
for TLS. Nothing secret is in it, because everybody on a machine can read the command lines of all.
The rest comes from the environment variables of `etcdctl`, so that one set of them serves both.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

USER = "ETCDCTL_USER"
"""Name of a user of etcd, also as `name:password`."""
PASSWORD = "ETCDCTL_PASSWORD"
"""Password of that user."""
PASSWORD_FILE = "RESILIN_ETCD_PASSWORD_FILE"
"""File with the password, instead of `ETCDCTL_PASSWORD`."""
CA = "ETCDCTL_CACERT"
"""File with the certificates that sign those of etcd; the system's if not set."""
CERTIFICATE = "ETCDCTL_CERT"
"""File with the certificate of this client."""
KEY = "ETCDCTL_KEY"
"""File with the private key of that certificate."""
SECRET_FILE = "RESILIN_SECRET_FILE"
"""File with the secret of the job, the same on all machines; else etcd keeps a random one."""

PORT = 2379
"""The port of etcd."""
LEAST_SECRET = 16
"""Fewest bytes of a secret: less can be guessed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The place of an etcd, and the proof of who this client is."""

    endpoints: tuple[tuple[str, int], ...]
    """Host and port of each server; any of them will do."""
    tls: bool = False
    """Whether connections are encrypted."""
    ca: str | None = None
    """File with trusted certificates; None for those of the system."""
    certificate: str | None = None
    """File with the certificate of this client."""
    key: str | None = None
    """File with its private key."""
    user: str | None = None
    """User of etcd; None where etcd knows no users."""
    password: str = field(default="", repr=False)
    """Password of the user."""

    def context(self) -> ssl.SSLContext | None:
        """The settings of an encrypted connection; None if it is not encrypted.

        Raises:
            ValueError: A file is missing, or is not a certificate.
        """
        if not self.tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.key)
        except OSError as error:
            files = [each for each in (self.ca, self.certificate, self.key) if each is not None]
            raise ValueError(f"no certificates from {', '.join(files)}: {error}") from None
        return context

    def __str__(self) -> str:
        """The endpoints as a URL."""
        hosts = ",".join(f"{_bracketed(host)}:{port}" for host, port in self.endpoints)
        return f"etcd{'s' if self.tls else ''}://{hosts}"


def access(url: str, environment: Mapping[str, str] | None = None) -> Access:
    """The access that a URL and the environment describe.

    Args:
        url: `etcd://HOST[:PORT][,HOST[:PORT]...]`, or `etcds://` for TLS.
        environment: Environment variables; those of this process if None.

    Raises:
        ValueError: The URL has another form or a password in it, or variables contradict it.
    """
    known = os.environ if environment is None else environment
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in ("etcd", "etcds"):
        raise ValueError(f"{_hidden(url)!r} must be etcd://HOST:PORT, or etcds://HOST:PORT for TLS")
    if "@" in rest:
        raise ValueError(
            f"{_hidden(url)!r} must have no user and no password: all users of a machine can read "
            f"its command lines. Set {USER} and {PASSWORD}, or {PASSWORD_FILE}"
        )
    files = {name: known[name] for name in (CA, CERTIFICATE, KEY) if known.get(name)}
    if files and scheme == "etcd":
        raise ValueError(f"{', '.join(files)} must not be set for {url!r}: only etcds:// has TLS")
    if (CERTIFICATE in files) != (KEY in files):
        raise ValueError(f"{CERTIFICATE} and {KEY} must both be set, or none of them")
    user, password = _user(known)
    return Access(
        endpoints=tuple(_endpoint(url, part) for part in rest.rstrip("/").split(",")),
        tls=scheme == "etcds",
        ca=files.get(CA),
        certificate=files.get(CERTIFICATE),
        key=files.get(KEY),
        user=user,
        password=password,
    )


def given_secret(environment: Mapping[str, str] | None = None) -> bytes | None:
    """The secret of the job from its file; None if none is named.

    Raises:
        ValueError: It cannot be read, others may read it, or it is too short.
    """
    known = os.environ if environment is None else environment
    if not (name := known.get(SECRET_FILE)):
        return None
    secret = _private(SECRET_FILE, name).encode()
    if len(secret) < LEAST_SECRET:
        raise ValueError(
            f"{SECRET_FILE} ({name}) has {len(secret)} bytes and must have at least {LEAST_SECRET}"
        )
    return secret


def _user(known: Mapping[str, str]) -> tuple[str | None, str]:
    name, _, password = known.get(USER, "").partition(":")
    password = known.get(PASSWORD, password)
    if file := known.get(PASSWORD_FILE):
        if password:
            raise ValueError(f"{PASSWORD_FILE} and a password must not both be set")
        password = _private(PASSWORD_FILE, file)
    if bool(name) != bool(password):
        raise ValueError(
            f"{USER} and a password ({PASSWORD}, or {PASSWORD_FILE}) must both be set, or none"
        )
    return name or None, password


def _private(variable: str, name: str) -> str:
    """The text of a file that nobody else may read."""
    path = Path(name)
    try:
        mode = path.stat().st_mode & 0o077
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{variable} ({name}) cannot be read: {error}") from None
    if mode:
        raise ValueError(f"{variable} ({name}) must be readable by its owner alone: chmod 600")
    return text


def _endpoint(url: str, part: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{part}")
        host, port = parts.hostname, PORT if parts.port is None else parts.port
    except ValueError as error:
        raise ValueError(f"{part!r} in {url!r} must be HOST:PORT: {error}") from None
    if not host or parts.path or parts.query or parts.fragment:
        raise ValueError(f"{part!r} in {url!r} must be HOST:PORT")
    return host, port


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _hidden(url: str) -> str:
    """A URL without what may be a password."""
    scheme, separator, rest = url.rpartition("://")
    return f"{scheme}{separator}{'...@' if '@' in rest else ''}{rest.rpartition('@')[2]}"
