"""How each contender is launched: what runs on a host, and what runs outside of all hosts.

Settings that matter: time after which a host that is not heard of counts as lost is 3 s for
`resilin run --live` (its default) and 5 s for all that use torchrun (the settings of `resilin
run`; torchrun's own take half a minute longer), and each start waits 2 s for more hosts. The
rendezvous store, etcd, torchft's lighthouse and Ray's head are outside of the hosts, and are not
killed.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from resilin.cli.etcd_server import Etcd, Settings
from resilin.cli.options import RENDEZVOUS
from resilin.cli.run import OWN_STORE

SCRIPTS = Path(__file__).parent / "contenders"
Authority = Callable[[Path, Mapping[str, str]], AbstractContextManager[list[str]]]


@dataclass(frozen=True)
class Contender:
    """One way to train the task."""

    name: str
    script: str
    packages: tuple[str, ...]
    """Those whose versions are printed."""
    authority: Authority
    """Starts what is outside of the hosts, and gives the options by which hosts find it."""
    host: Callable[[int, Path, list[str]], list[str]]
    """Command of a host, from its number, a directory in memory, and these options."""
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return SCRIPTS / self.script

    def versions(self) -> dict[str, str]:
        return {name: importlib.metadata.version(name) for name in self.packages}


@contextmanager
def _etcd(folder: Path, environment: Mapping[str, str]) -> Iterator[list[str]]:
    etcd = Etcd(Settings(port=0))
    try:
        yield ["--membership", etcd.url, "--rdzv-id", folder.name]
    finally:
        etcd.close()


@contextmanager
def _store(folder: Path, environment: Mapping[str, str]) -> Iterator[list[str]]:
    """The store of a rendezvous."""
    command = [sys.executable, "-m", "resilin.cli", "store", "--host", "127.0.0.1", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as store:
        try:
            assert store.stdout is not None
            port = store.stdout.readline().split()[-1]
            options = ["--nnodes", "1:3", "--rdzv-endpoint", f"127.0.0.1:{port}"]
            yield [*options, "--rdzv-id", folder.name]
        finally:
            store.kill()


def _resilin(script: str, *more: str) -> Callable[[int, Path, list[str]], list[str]]:
    def host(number: int, memory: Path, options: list[str]) -> list[str]:
        command = [sys.executable, "-m", "resilin.cli", "run", "--warm", "--nproc", "1", *more]
        return [*command, "--memory-dir", str(memory), *options, str(SCRIPTS / script)]

    return host


def _torchrun(script: str) -> Callable[[int, Path, list[str]], list[str]]:
    def host(number: int, memory: Path, options: list[str]) -> list[str]:
        settings = ",".join(f"{key}={value}" for key, value in RENDEZVOUS.items())
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
        command += ["--max-restarts", "100", "--rdzv-backend", "c10d", "--rdzv-conf", settings]
        return [*command, *options, str(SCRIPTS / script)]

    return host


# Without it, torch 2.13 dies when a host joins.
_OWN_STORE = {OWN_STORE: "1"}
_QUIET = {"RESILIN_RUN_DIR": "off"}
CONTENDERS: dict[str, Contender] = {
    contender.name: contender
    for contender in (
        Contender(
            "resilin live",
            "resilin_loop.py",
            ("torch",),
            _etcd,
            _resilin("resilin_loop.py", "--live"),
            _QUIET,
        ),
        Contender(
            "resilin restart",
            "resilin_loop.py",
            ("torch",),
            _store,
            _resilin("resilin_loop.py"),
            _QUIET,
        ),
        Contender(
            "torchrun",
            "torchrun_loop.py",
            ("torch",),
            _store,
            _torchrun("torchrun_loop.py"),
            _OWN_STORE,
        ),
    )
}
