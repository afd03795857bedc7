"""A real Slurm on this machine: munged, slurmctld and a slurmd for each node, in one directory.

    with slurm_cluster(directory) as slurm:
        subprocess.run(["sinfo"], env={**os.environ, **slurm.environment}, check=True)

All nodes are this machine, on ports of their own. Nothing is read from or written to `/etc`, and
neither systemd nor control groups are needed. Slurm has to run as root here, since a daemon of
another user may only start jobs of that user.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

NODES = 4
ACCELERATORS = 2
"""Accelerators of each node. Slurm wants a file for each, and any file will do."""
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel")
TIMEOUT = 200.0
"""Seconds in which the cluster has to be up."""
CONFIGURATION = """\
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A job that is requeued waits until its first credential has expired: 121 s without this.
AuthInfo=socket={directory}/munge.socket,cred_expire=5
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
# A node that somebody has set DOWN stays so.
ReturnToService=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=0,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# Or the batch script of a job hears of it only when its time of grace is over.
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
KillWait=10
KillOnBadExit=0
MinJobAge=300
SlurmdTimeout=30
InactiveLimit=0
UnkillableStepTimeout=60
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=spot Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE \
GraceTime={grace}
"""


def missing() -> str | None:
    """Why there can be no Slurm on this machine; None if there can be one."""
    absent = [name for name in PROGRAMS if _program(name) is None]
    if absent:
        return f"no {', '.join(absent)} on this machine: apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "the daemons of Slurm must run as root here"
    return None


@dataclass
class SlurmCluster:
    """A cluster that runs, and what a test does to it."""

    directory: Path
    """Where its configuration, state and logs are."""
    nodes: tuple[str, ...]
    """Names of its nodes."""
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    """Its processes by name."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables with which the commands of Slurm find this cluster."""
        return {"SLURM_CONF": str(self.directory / "slurm.conf")}

    def call(self, *command: str, timeout: float = 60) -> str:
        """Run a command of Slurm, and return what it prints."""
        done = subprocess.run(
            command,
            env={**os.environ, **self.environment},
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=timeout,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def set_state(self, node: str, state: str) -> None:
        """Set a node DOWN, DRAIN or RESUME, as an operator does."""
        self.call("scontrol", "update", f"NodeName={node}", f"State={state}", "Reason=test")

    def start_node(self, node: str) -> None:
        """Start the daemon of a node."""
        self._start(f"slurmd-{node}", "slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """End the daemon of a node at once, as if the machine were gone; its jobs stay."""
        daemon = self.daemons.pop(f"slurmd-{node}")
        daemon.kill()
        daemon.wait(timeout=30)

    def _start(self, name: str, program: str, *arguments: str) -> None:
        found = _program(program)
        assert found is not None
        with (self.directory / f"{name}.out").open("ab") as out:
            self.daemons[name] = subprocess.Popen(
                [found, *arguments],
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def up(self) -> None:
        """Wait until all nodes can take jobs."""
        deadline = time.monotonic() + TIMEOUT
        said = ""
        while time.monotonic() < deadline:
            for name, daemon in self.daemons.items():
                if daemon.poll() is not None:
                    raise RuntimeError(f"{name} ended with {daemon.returncode}: {self.log(name)}")
            try:
                said = self.call("sinfo", "--noheader", "--partition=main", "--Node", "-o", "%N %T")
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                said = str(error)  # the controller does not listen yet
            if said.split() == [word for node in self.nodes for word in (node, "idle")]:
                return
            time.sleep(0.2)
        raise RuntimeError(f"no cluster after {TIMEOUT:.0f} s: {said}\n{self.log('slurmctld')}")

    def log(self, name: str) -> str:
        """The end of the log of a daemon."""
        files = [self.directory / f"{name}{end}" for end in (".out", ".log")]
        return "\n".join(file.read_text()[-3000:] for file in files if file.exists())

    def clean(self) -> None:
        """End all jobs and bring all nodes back, so that the next test finds an idle cluster."""
        self.call("scancel", "--user=root", "--signal=KILL", "--full")
        self.call("scancel", "--user=root")
        deadline = time.monotonic() + TIMEOUT
        while jobs := self.call("squeue", "--noheader"):
            if time.monotonic() > deadline:
                raise RuntimeError(f"jobs that do not end: {jobs}")
            time.sleep(0.2)
        for node in self.nodes:
            if f"slurmd-{node}" not in self.daemons:
                self.start_node(node)
            state = self.call("sinfo", "--noheader", f"--nodes={node}", "-o", "%T").split()[0]
            if any(word in state for word in ("down", "drain", "inval")):
                self.set_state(node, "RESUME")
        self.up()

    def stop(self) -> None:
        """End the daemons, and whatever jobs they have."""
        if "slurmctld" in self.daemons and self.daemons["slurmctld"].poll() is None:
            with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
                self.call("scancel", "--user=root", "--signal=KILL", "--full", timeout=20)
                self.call("scancel", "--user=root", timeout=20)
                deadline = time.monotonic() + 20
                while self.call("squeue", "--noheader") and time.monotonic() < deadline:
                    time.sleep(0.2)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for daemon in reversed(self.daemons.values()):
                if daemon.poll() is None:
                    daemon.send_signal(number)
            for daemon in self.daemons.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    daemon.wait(timeout=15)
        self.daemons.clear()


@contextlib.contextmanager
def slurm_cluster(
    directory: Path, *, num_nodes: int = NODES, accelerators: int = ACCELERATORS, grace: int = 30
) -> Iterator[SlurmCluster]:
    """Run a cluster until the block ends.

    Args:
        directory: An empty directory that only this user may write.
        num_nodes: Number of nodes, named n1, n2 and so on.
        accelerators: Accelerators (`gpu`) of each.
        grace: Seconds between the notice and the end of a job in `spot` that another displaces.

    Raises:
        RuntimeError: It cannot be started, see `missing`.
    """
    if why := missing():
        raise RuntimeError(why)
    directory = directory.resolve()
    names = tuple(f"n{number + 1}" for number in range(num_nodes))
    controller, *ports = _free_ports(num_nodes + 1)
    cpus = 4 * max(accelerators, 1)
    gres = f" Gres=gpu:{accelerators}" if accelerators else ""
    nodes = [
        f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs={cpus} "
        f"RealMemory=2000{gres} State=UNKNOWN"
        for name, port in zip(names, ports, strict=True)
    ]
    (directory / "state").mkdir()
    for name in names:
        (directory / f"spool-{name}").mkdir()
    (directory / "slurm.conf").write_text(
        CONFIGURATION.format(
            directory=directory, controller=controller, nodes="\n".join(nodes), grace=grace
        )
    )
    if accelerators:
        for number in range(accelerators):
            (directory / f"gpu{number}").touch()
        (directory / "gres.conf").write_text(
            f"NodeName={','.join(names)} Name=gpu File={directory}/gpu[0-{accelerators - 1}]\n"
        )
    key = directory / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    cluster = SlurmCluster(directory=directory, nodes=names)
    try:
        files = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        cluster._start(
            "munged",
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            *(f"--{option}={directory}/munge.{end}" for option, end in files.items()),
        )
        _wait_for(directory / "munge.socket", cluster)
        cluster._start("slurmctld", "slurmctld", "-D")
        for name in names:
            cluster.start_node(name)
        cluster.up()
        yield cluster
    finally:
        cluster.stop()


def _wait_for(path: Path, cluster: SlurmCluster) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not path.exists():
        if cluster.daemons["munged"].poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"no munged: {cluster.log('munged')}")
        time.sleep(0.05)


def _program(name: str) -> str | None:
    # Daemons are not on the path of every user.
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
