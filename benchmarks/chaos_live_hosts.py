"""A live job over several machines, an etcd between them, and their faults: see `chaos_live`.

Machines are network namespaces (`chaos_live_network`): machine 0 has the etcd, each other one a
launcher with its workers and a memory of its own. After each fault the job gets back what it had.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from chaos_live_jobs import HEARTBEAT, START, Fault, Hung, Job, launch
from chaos_live_network import Network

LEASE = 3.0
"""Seconds after which a machine that is not heard of is lost."""
EXPIRED = LEASE + 1.0
"""Seconds after which all know that: etcd looks for leases that have expired twice a second."""
LONG = 2 * LEASE + 1.0
"""Seconds for which something is away until its members are surely removed."""
SHORT = 1.0
"""Seconds of an absence that nobody is removed for."""
PORT = 2379
KINDS = (
    "kill",
    "stop",
    "kill on two machines",
    "host lost",
    "host lost and kill",
    "host leaves",
    "host stopped and continued",
    "launcher stopped and continued",
    "launcher stopped for a moment",
    "etcd killed and started",
    "etcd killed, a worker killed",
    "etcd killed, a host lost",
    "etcd cut off from all",
    "partition: one host",
    "partition: halves",
    "partition: for a moment",
    "partition: halves and kill",
    "cut off from etcd alone",
)


class Etcd:
    """The etcd of the job, on machine 0. Its data outlive its process."""

    def __init__(self, network: Network, folder: Path) -> None:
        path = shutil.which("etcd")
        if path is None:
            raise OSError("no etcd on the path: apt-get install etcd-server")
        self._network, self._log, self._path = network, folder / "etcd.log", path
        self.url = f"{network.address(0)}:{PORT}"
        # In memory: it waits for the disk at every change.
        self._data = tempfile.mkdtemp(prefix="resilin-chaos-etcd-", dir=_memory())
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        urls = f"http://{self.url}"
        options = {
            "data-dir": self._data,
            "listen-client-urls": urls,
            "advertise-client-urls": urls,
            "listen-peer-urls": "http://127.0.0.1:0",
            "logger": "zap",
            "log-level": "warn",
        }
        command = [self._path, *(f"--{name}={value}" for name, value in options.items())]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._network.command(0, command), stdout=log, stderr=log, start_new_session=True
            )

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._data, ignore_errors=True)


class HostsJob(Job):
    """A job over several machines.

    Args:
        folder: Where everything is written.
        workers: Number of workers of each machine.
    """

    def __init__(self, folder: Path, workers: Sequence[int]) -> None:
        super().__init__(folder, [])
        (folder / "diaries").mkdir(parents=True)
        self.workers = workers
        self.network = Network(1 + len(workers))
        self._memory = tempfile.mkdtemp(prefix="resilin-chaos-", dir=_memory())
        self.etcd: Etcd | None = None
        try:
            self.etcd = Etcd(self.network, folder)
            for host in range(len(workers)):
                self.launchers.append(self._launch(host))
        except BaseException:
            self.end()
            raise

    def _launch(self, host: int) -> subprocess.Popen[bytes]:
        assert self.etcd is not None
        options = ["--membership", f"etcd://{self.etcd.url}", "--rdzv-id", "chaos", "--warm"]
        options += ["--address", self.network.address(1 + host)]
        options += ["--memory-dir", f"{self._memory}/{host}"]
        prefix = self.network.command(1 + host, [])
        return launch(self.folder, f"launcher-{host}", self.workers[host], *options, prefix=prefix)

    def launch_again(self, host: int) -> None:
        """Starts the launcher of a machine that has none."""
        self.launchers[host].wait(timeout=30)
        self.launchers[host] = self._launch(host)

    def of(self, host: int) -> list[int]:
        """Members on one machine."""
        own = f"launcher-{host}"
        return [pid for pid, line in self.members().items() if line["launcher"] == own]

    def lose(self, host: int) -> None:
        """A machine and all that is on it is gone."""
        self.gone |= set(self.of(host))
        self.launchers[host].kill()  # its workers end with it
        self.launchers[host].wait()
        shutil.rmtree(f"{self._memory}/{host}", ignore_errors=True)

    def await_strength(self) -> None:
        """Waits until all machines have all their workers."""
        num = sum(self.workers)
        whole = lambda: self.complete() and len(self.members()) == num  # noqa: E731
        self.until(whole, f"{num} members", START)

    def end(self) -> None:
        super().end()
        if self.etcd is not None:
            self.etcd.close()
        self.network.close()
        shutil.rmtree(self._memory, ignore_errors=True)


class HostFaults:
    """Faults of one job over several machines."""

    def __init__(self, job: HostsJob, dice: random.Random) -> None:
        self.job, self.dice = job, dice
        self._kind, self._generation, self._members = "", -1, set[int]()

    def happen(self, kind: str) -> Fault:
        """Makes one happen, and returns when all that it takes is there again."""
        job = self.job
        job.await_strength()
        self._kind, self._members = kind, set(job.members())
        self._generation = max(line["generation"] for line in job.members().values())
        host = self.dice.randrange(len(job.workers))
        happen = {
            "kill": self._kill,
            "stop": self._stop,
            "kill on two machines": self._kill_two,
            "host lost": lambda: self._lose(host),
            "host lost and kill": lambda: self._lose(host, kill=True),
            "host leaves": lambda: self._leave(host),
            "host stopped and continued": lambda: self._stop_host(host),
            "launcher stopped and continued": lambda: self._stop_launcher(host, LONG),
            "launcher stopped for a moment": lambda: self._stop_launcher(host, SHORT),
            "etcd killed and started": lambda: self._end_etcd(self._nobody),
            "etcd killed, a worker killed": lambda: self._end_etcd(self._kill),
            "etcd killed, a host lost": lambda: self._end_etcd(lambda: self._lose(host)),
            "etcd cut off from all": self._cut_etcd,
            "partition: one host": lambda: self._cut({host}, LONG),
            "partition: halves": lambda: self._cut(self._half(), LONG),
            "partition: for a moment": lambda: self._cut({host}, SHORT),
            "partition: halves and kill": lambda: self._cut(self._half(), LONG, kill=True),
            "cut off from etcd alone": lambda: self._block(host),
        }[kind]
        fault = happen()
        job.await_recovery(fault)
        job.await_strength()
        return fault

    def _fault(
        self, when: float, notice: float, *, lossless: bool = False, cut_off: Sequence[int] = ()
    ) -> Fault:
        survivors = sorted(self._members - self.job.gone - {*cut_off})
        generation = -1 if lossless else self._generation
        return Fault(self._kind, when, notice, survivors, generation, cut_off=frozenset(cut_off))

    def _half(self) -> set[int]:
        """About half of the machines; one at least stays with the etcd."""
        num = len(self.job.workers)
        return set(self.dice.sample(range(num), self.dice.randint(1, num - 1)))

    def _choose(self, hosts: Sequence[int]) -> int:
        pids = {pid for host in hosts for pid in self.job.of(host)} - self.job.gone
        return self.dice.choice(sorted(pids))

    # Of workers ----------------------------------------------------------------------------

    def _nobody(self) -> Fault:
        return self._fault(time.time(), 0.0, lossless=True)

    def _kill(self) -> Fault:
        when = time.time()
        self.job.hit(self._choose(range(len(self.job.workers))), signal.SIGKILL)
        return self._fault(when, 0.0)

    def _stop(self) -> Fault:
        when = time.time()
        self.job.hit(self._choose(range(len(self.job.workers))), signal.SIGSTOP)
        return self._fault(when, HEARTBEAT)

    def _kill_two(self) -> Fault:
        hosts = self.dice.sample(range(len(self.job.workers)), 2)
        for host in hosts:
            when = time.time()
            self.job.hit(self._choose([host]), signal.SIGKILL)
            time.sleep(self.dice.choice([0.0, 0.05]))
        return self._fault(when, 0.0)

    # Of machines ---------------------------------------------------------------------------

    def _lose(self, host: int, *, kill: bool = False) -> Fault:
        others = [each for each in range(len(self.job.workers)) if each != host]
        when = time.time()
        self.job.lose(host)
        if kill:
            time.sleep(self.dice.uniform(0.0, EXPIRED))
            self.job.hit(self._choose(others), signal.SIGKILL)
        fault = self._fault(when, EXPIRED)
        self.job.launch_again(host)
        return fault

    def _leave(self, host: int) -> Fault:
        self.job.gone |= set(self.job.of(host))
        when = time.time()
        self.job.launchers[host].terminate()
        fault = self._fault(when, 0.0)
        self.job.launch_again(host)
        return fault

    def _stop_host(self, host: int) -> Fault:
        """A machine that hangs, with all that is on it, and continues after it was removed."""
        pids = [self.job.launchers[host].pid, *self.job.of(host)]
        cut_off, when = self.job.of(host), time.time()
        self.job.gone |= {*cut_off}
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(LONG)
        for pid in reversed(pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        return self._fault(when, EXPIRED, cut_off=cut_off)

    def _stop_launcher(self, host: int, seconds: float) -> Fault:
        when, cut_off = time.time(), self.job.of(host)
        self.job.launchers[host].send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.job.launchers[host].send_signal(signal.SIGCONT)
        if seconds == SHORT:
            return self._fault(when, 0.0, lossless=True)
        self.job.gone |= {*cut_off}
        return self._fault(when, EXPIRED, cut_off=cut_off)

    # Of the etcd ---------------------------------------------------------------------------

    def _end_etcd(self, also: Callable[[], Fault]) -> Fault:
        assert self.job.etcd is not None
        when = time.time()
        self.job.etcd.kill()
        time.sleep(self.dice.uniform(0.0, 1.0))
        fault = also()
        time.sleep(self.dice.choice([0.5, LONG]))
        self.job.etcd.start()
        if fault.generation >= 0:
            # Nobody can know of the loss before; leases begin anew then.
            fault.notice += time.time() - when
        return fault

    def _cut_etcd(self) -> Fault:
        self.job.network.cut([0])
        time.sleep(LONG)
        when = time.time()
        self.job.network.mend()
        return self._fault(when, 0.0, lossless=True)

    # Of the network ------------------------------------------------------------------------

    def _cut(self, hosts: set[int], seconds: float, *, kill: bool = False) -> Fault:
        cut_off = [pid for host in hosts for pid in self.job.of(host)]
        others = [each for each in range(len(self.job.workers)) if each not in hosts]
        when = time.time()
        self.job.network.cut([1 + host for host in hosts])
        if kill and sum(self.job.workers[host] for host in others) > 1:
            self.job.hit(self._choose(others), signal.SIGKILL)
        time.sleep(seconds)
        self.job.network.mend()
        if seconds == SHORT:
            # Packets that were lost are sent again after up to twice the time of the cut.
            return self._fault(when, 3 * SHORT, lossless=True)
        self.job.gone |= {*cut_off}
        return self._fault(when, EXPIRED, cut_off=cut_off)

    def _block(self, host: int) -> Fault:
        """A machine that reaches the others, but not the etcd."""
        cut_off, when = self.job.of(host), time.time()
        self.job.network.block(1 + host, [0])
        time.sleep(LONG)
        self.job.network.mend()
        self.job.gone |= {*cut_off}
        return self._fault(when, EXPIRED, cut_off=cut_off)


def disturb_hosts(
    job: HostsJob,
    kinds: Sequence[str],
    dice: random.Random,
    happened: list[Fault],
    tell: Callable[[Job, Fault, int], None],
) -> None:
    """Has faults happen to a job over several machines."""
    job.await_strength()
    faults = HostFaults(job, dice)
    for kind in kinds:
        if kind not in KINDS:
            raise Hung(f"no such fault: {kind}")
        time.sleep(dice.uniform(0.0, 0.5))
        happened.append(faults.happen(kind))
        tell(job, happened[-1], len(happened))


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
