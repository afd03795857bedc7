"""The etcd of this machine, started with safe settings: `resilin store --etcd`.

It serves the membership of live jobs. It listens on the loopback interface unless an address is
given, keeps its data in a directory that only its owner can read, and forgets old revisions, which
otherwise fill its quota. One etcd is enough to try things, and is lost with its machine: three, as
its own documentation sets them up, are not.
"""

from __future__ import annotations

import http.client
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from resilin.core.text import clean
from resilin.engine.stop import StopRequest

LOOPBACK = "127.0.0.1"
PORT = 2379
"""The usual port of etcd."""
OLDEST = (3, 4, 0)
"""The first version with the JSON gateway under the name that resilin uses."""
FAULTY = (((3, 4, 0), (3, 4, 20)), ((3, 5, 0), (3, 5, 4)))
"""First and last versions of which one server alone may lose what it has confirmed, when it is
killed (etcd's issue 14370); 3.5.0 to 3.5.2 may become inconsistent besides."""
HOW = (
    "install Debian's or Ubuntu's package (apt install etcd-server), or unpack a release of "
    "https://github.com/etcd-io/etcd/releases on the path"
)
_START = 30.0
"""Seconds in which it must serve."""
_STOP = 10.0
"""Seconds that it has to end after a signal."""
_LAST_LINES = 5


class NoEtcd(RuntimeError):
    """There is no etcd that can be used, or it does not start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of an etcd."""

    host: str = LOOPBACK
    """Address that it listens on."""
    port: int = PORT
    """Port; 0 for any free one."""
    data: Path | None = None
    """Directory of its data; None for a private one that ends with it."""
    certificate: str | None = None
    """File with its certificate; None for no encryption."""
    key: str | None = None
    """File with the private key of the certificate."""
    ca: str | None = None
    """File with the certificates that sign those of clients; others are then not let in."""
    unsafe_version: bool = False
    """Whether versions that are known to lose consistency are accepted."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("a certificate and its key must both be given, or none of them")
        if self.ca is not None and self.certificate is None:
            raise ValueError("certificates of clients need a certificate and a key of the server")

    @property
    def is_open(self) -> bool:
        """Whether whoever reaches it may read and change everything."""
        return self.ca is None and self.host not in (LOOPBACK, "localhost", "::1")


def find(*, unsafe_version: bool = False) -> tuple[str, str]:
    """The path of the etcd of this machine, and its version.

    Raises:
        NoEtcd: There is none, or its version must not be used.
    """
    path = shutil.which("etcd")
    if path is None:
        raise NoEtcd(f"no etcd on the path: {HOW}")
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoEtcd(f"{path} does not run: {error}") from None
    match = re.search(r"etcd Version:\s*(\d+)\.(\d+)\.(\d+)", said.stdout)
    if match is None:
        raise NoEtcd(f"{path} does not say its version: {clean(said.stdout + said.stderr, 200)}")
    major, minor, patch = map(int, match.groups())
    check_version((major, minor, patch), path, unsafe_version=unsafe_version)
    return path, f"{major}.{minor}.{patch}"


def check_version(version: tuple[int, int, int], path: str, *, unsafe_version: bool) -> None:
    """Refuse a version of etcd that resilin must not rely on.

    Raises:
        NoEtcd: It must not be used.
    """
    name = ".".join(map(str, version))
    if version < OLDEST:
        raise NoEtcd(f"{path} is etcd {name} and must be at least 3.4: {HOW}")
    if not unsafe_version and any(first <= version <= last for first, last in FAULTY):
        raise NoEtcd(
            f"{path} is etcd {name}, which may lose data if killed; 3.4.21 and 3.5.5 do not: "
            f"{HOW}; or accept it with --unsafe-version"
        )


class Etcd:
    """A running etcd.

    Args:
        settings: How to start it.

    Raises:
        NoEtcd: It did not start.
    """

    def __init__(self, settings: Settings) -> None:
        path, self.version = find(unsafe_version=settings.unsafe_version)
        self._settings = settings
        self._private: tempfile.TemporaryDirectory[str] | None = None
        self.data = self._directory()
        self.port = settings.port or _free_port(settings.host)
        self.log = self.data / "etcd.log"
        # Its settings are these, not what the environment has for another etcd. Ctrl-C is for us.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ETCD_")}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [path, *self._arguments()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """The URL for jobs: `etcd://HOST:PORT`."""
        host = self._settings.host
        if host in ("0.0.0.0", "::"):
            host = socket.getfqdn()
        scheme = "etcd" if self._settings.certificate is None else "etcds"
        return f"{scheme}://{_bracketed(host)}:{self.port}"

    def close(self) -> None:
        """End it and wait for that."""
        self.process.terminate()
        try:
            self.process.wait(_STOP)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self._private is not None:
            self._private.cleanup()

    def last_lines(self) -> str:
        """The end of what it has said."""
        lines = self.log.read_text(errors="replace").splitlines()
        return clean(" | ".join(lines[-_LAST_LINES:]))

    def _directory(self) -> Path:
        if self._settings.data is None:
            self._private = tempfile.TemporaryDirectory(prefix="resilin-etcd-")
            return Path(self._private.name)
        self._settings.data.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._settings.data

    def _arguments(self) -> list[str]:
        given = self._settings
        scheme = "http" if given.certificate is None else "https"
        client = f"{scheme}://{_bracketed(given.host)}:{self.port}"
        arguments = {
            "name": "resilin",
            "data-dir": str(self.data / "etcd"),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            # One server has no peers: nothing outside reaches this port, whatever its number.
            "listen-peer-urls": f"http://{LOOPBACK}:0",
            "auto-compaction-mode": "periodic",
            "auto-compaction-retention": "1h",
            "log-level": "warn",
            "logger": "zap",
        }
        if given.certificate is not None and given.key is not None:
            arguments |= {"cert-file": given.certificate, "key-file": given.key}
        if given.ca is not None:
            arguments |= {"trusted-ca-file": given.ca, "client-cert-auth": "true"}
        return [f"--{name}={value}" for name, value in arguments.items()]

    def _wait(self) -> None:
        """Wait until it answers."""
        deadline = time.monotonic() + _START
        while time.monotonic() < deadline:
            if (code := self.process.poll()) is not None:
                raise NoEtcd(f"etcd ended with code {code}: {self.last_lines()}")
            if self._answers():
                return
            time.sleep(0.05)
        raise NoEtcd(f"etcd did not serve within {_START:g} s: {self.last_lines()}")

    def _answers(self) -> bool:
        given = self._settings
        host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(given.host, given.host)
        try:
            with socket.create_connection((host, self.port), timeout=1.0) as sock:
                if given.certificate is not None:
                    # It would want a certificate of ours to say more.
                    return True
                connection = http.client.HTTPConnection(host, self.port, timeout=1.0)
                connection.sock = sock
                connection.request("GET", "/health")
                return b"true" in connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            return False


def serve(settings: Settings, stop: StopRequest) -> int:
    """Run an etcd until this process is asked to stop.

    Returns:
        0 after a request to stop; 1 if it did not start, or ended on its own.
    """
    try:
        etcd = Etcd(settings)
    except NoEtcd as error:
        print(f"resilin: {clean(str(error))}")
        return 1
    try:
        if settings.is_open:
            print(
                f"resilin: whoever reaches {settings.host}:{etcd.port} can change every job: use "
                "--certificate, --key and --client-ca, or users (etcdctl auth enable)",
                flush=True,
            )
        kept = "until it ends" if settings.data is None else "kept"
        print(
            f"resilin: serving etcd {etcd.version} at {etcd.url} (data in {etcd.data}, {kept})",
            flush=True,
        )
        while not stop.wait(0.5):
            if (code := etcd.process.poll()) is not None:
                print(f"resilin: etcd ended with code {code}: {etcd.last_lines()}")
                return 1
        return 0
    finally:
        etcd.close()


def _free_port(host: str) -> int:
    with socket.create_server((host, 0), family=_family(host)) as listening:
        return int(listening.getsockname()[1])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
