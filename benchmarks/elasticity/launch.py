"""How each contender is launched: what runs on a host, and what runs outside of all hosts.

Settings that matter: time after which a host that is not heard of counts as lost is 3 s for
`resilin run --live` (its default) and 5 s for all that use torchrun (the settings of `resilin
run`; torchrun's own take half a minute longer), and each start waits 2 s for more hosts. The
rendezvous store, etcd, torchft's lighthouse and Ray's head are outside of the hosts, and are not
killed.
"""

from __future__ import annotations

import importlib.metadata
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from processes import TOKEN, kill_all

from resilin.cli.etcd_server import Etcd, Settings
from resilin.cli.options import RENDEZVOUS
from resilin.cli.run import OWN_STORE

SCRIPTS = Path(__file__).parent / "contenders"
Authority = Callable[[Path, Mapping[str, str]], AbstractContextManager[list[str]]]


@dataclass(frozen=True)
class Contender:
    """One way to train the task."""

    name: str
    scripts: tuple[str, ...]
    packages: tuple[str, ...]
    """Those whose versions are printed."""
    authority: Authority
    """Starts what is outside of the hosts, and gives the options by which hosts find it."""
    host: Callable[[int, Path, list[str]], list[str]]
    """Command of a host, from its number, a directory in memory, and these options."""
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Its scripts, one behind the other."""
        return "\n".join((SCRIPTS / script).read_text() for script in self.scripts)

    def versions(self) -> dict[str, str]:
        return {name: importlib.metadata.version(name) for name in self.packages}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _beside(name: str) -> str:
    """A command of this environment."""
    return str(Path(sys.executable).parent / name)


@contextmanager
def _running(
    command: list[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[None]:
    """A process outside of the hosts; all that comes from it is killed at the end."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, start_new_session=True, env=environment
        )
    try:
        yield
    finally:
        kill_all(process, (environment or {}).get(TOKEN))


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


def _resilin(*more: str) -> Callable[[int, Path, list[str]], list[str]]:
    def host(number: int, memory: Path, options: list[str]) -> list[str]:
        command = [sys.executable, "-m", "resilin.cli", "run", "--warm", "--nproc", "1", *more]
        return [*command, "--memory-dir", str(memory), *options, str(SCRIPTS / "resilin_loop.py")]

    return host


def _torchrun(script: str) -> Callable[[int, Path, list[str]], list[str]]:
    def host(number: int, memory: Path, options: list[str]) -> list[str]:
        settings = ",".join(f"{key}={value}" for key, value in RENDEZVOUS.items())
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
        command += ["--max-restarts", "100", "--rdzv-backend", "c10d", "--rdzv-conf", settings]
        return [*command, *options, str(SCRIPTS / script)]

    return host


@contextmanager
def _lighthouse(folder: Path, environment: Mapping[str, str]) -> Iterator[list[str]]:
    """The lighthouse of torchft: it takes members for lost after a second."""
    address = f"127.0.0.1:{_free_port()}"
    command = [_beside("torchft_lighthouse"), "--bind", address, "--min_replicas", "1"]
    command += ["--quorum_tick_ms", "100", "--join_timeout_ms", "1000"]
    with _running([*command, "--heartbeat_timeout_ms", "1000"], folder / "lighthouse.log"):
        yield ["env", f"TORCHFT_LIGHTHOUSE=http://{address}"]


def _replica_group(script: str) -> Callable[[int, Path, list[str]], list[str]]:
    def host(number: int, memory: Path, options: list[str]) -> list[str]:
        command = [*options, sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "1", "--max-restarts", "100"]
        return [*command, str(SCRIPTS / script)]

    return host


@contextmanager
def _ray(folder: Path, environment: Mapping[str, str]) -> Iterator[list[str]]:
    """The head of a Ray cluster, without a worker, and the driver of the job.

    A driver that ends with an error is started again, as Ray's guide says, and continues.
    """
    address = f"127.0.0.1:{_free_port()}"
    # Ray makes sockets below it, whose names may not be long.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as place:
        head = [_beside("ray"), "start", "--head", "--port", address.partition(":")[2]]
        head += ["--num-cpus", "0", "--include-dashboard", "false", "--temp-dir", place]
        with _running([*head, *_RAY_NODE], folder / "head.log", environment):
            driver = [sys.executable, str(SCRIPTS / "ray_loop.py"), address]
            again = ["bash", "-c", 'until "$@"; do sleep 1; done', "bash", *driver]
            with _running(_when_up(address, again), folder / "driver.log", environment):
                yield ["--address", address, "--temp-dir", place]


_RAY_NODE = ("--node-ip-address", "127.0.0.1", "--object-store-memory", "80000000", "--block")


def _when_up(address: str, command: list[str]) -> list[str]:
    """A command that waits for a port before another one."""
    host, _, port = address.partition(":")
    wait = f"until (exec 3<>/dev/tcp/{host}/{port}) 2>/dev/null; do sleep 0.2; done"
    return ["bash", "-c", f'{wait}; exec "$@"', "bash", *command]


def _ray_node(number: int, memory: Path, options: list[str]) -> list[str]:
    address = options[options.index("--address") + 1]
    start = [_beside("ray"), "start", *options[:2], "--num-cpus", "1", *_RAY_NODE]
    return _when_up(address, start)


_RAY = {
    # Whoever reaches a Ray cluster may run code on it: this one has a token of its own.
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    # A node that does not answer for 5 s is lost, as under torchrun here; Ray's default is 25 s.
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
    # By default, workers are looked at every 2 s, and a start waits a minute for nodes.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10",
}
# Without it, torch 2.13 dies when a host joins.
_OWN_STORE = {OWN_STORE: "1"}
_QUIET = {"RESILIN_RUN_DIR": "off"}
CONTENDERS: dict[str, Contender] = {
    contender.name: contender
    for contender in (
        Contender(
            name="resilin live",
            scripts=("resilin_loop.py",),
            packages=("torch",),
            authority=_etcd,
            host=_resilin("--live"),
            environment=_QUIET,
        ),
        Contender(
            name="resilin restart",
            scripts=("resilin_loop.py",),
            packages=("torch",),
            authority=_store,
            host=_resilin(),
            environment=_QUIET,
        ),
        Contender(
            name="torchft",
            scripts=("torchft_loop.py",),
            packages=("torchft", "torchdata", "torch"),
            authority=_lighthouse,
            host=_replica_group("torchft_loop.py"),
        ),
        Contender(
            name="torchft, patched",
            scripts=("torchft_loop.py", "torchft_patched.py"),
            packages=("torchft", "torchdata", "torch"),
            authority=_lighthouse,
            host=_replica_group("torchft_patched.py"),
        ),
        Contender(
            name="torchrun",
            scripts=("torchrun_loop.py",),
            packages=("torch",),
            authority=_store,
            host=_torchrun("torchrun_loop.py"),
            environment=_OWN_STORE,
        ),
        Contender(
            name="Lightning",
            scripts=("lightning_loop.py",),
            packages=("lightning", "torch"),
            authority=_store,
            host=_torchrun("lightning_loop.py"),
            environment=_OWN_STORE,
        ),
        Contender(
            name="HF Trainer",
            scripts=("transformers_loop.py",),
            packages=("transformers", "accelerate", "torch"),
            authority=_store,
            host=_torchrun("transformers_loop.py"),
            environment=_OWN_STORE,
        ),
        Contender(
            name="Ray Train",
            scripts=("ray_loop.py",),
            packages=("ray", "torch"),
            authority=_ray,
            host=_ray_node,
            environment=_RAY,
        ),
    )
}
