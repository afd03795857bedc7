"""`SlurmBackend`: each part of a job is a Slurm job of one node.

The site's Slurm stays what it is: this backend only submits, signals and cancels jobs of its own
user, and a part that Slurm does not start is one that waits. The name of a Slurm job is that of the
cluster, a dot and that of the part. A repeated start finds the job by its name. When two
controllers submit the same part at the same moment, `--dependency=singleton` keeps the second job
from running beside the first, and whoever submitted it cancels it.

Nothing of a stop is kept in this process: the grace period becomes the job's time limit, which
Slurm enforces. It counts in whole minutes, so a part that ignores its signal may have up to a
minute and a half more. `stop` with a grace of 0 is exact.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from resilin.cluster.backends import slurm_answers as answers
from resilin.cluster.backends.base import Backend, BackendError, Part, PartState, PartStatus
from resilin.cluster.backends.slurm_commands import call, change, script
from resilin.cluster.backends.slurm_options import SlurmOptions, comment, from_text
from resilin.cluster.job import check_name
from resilin.cluster.node import Node

T = TypeVar("T")
COMMANDS = ("sbatch", "scancel", "scontrol", "squeue")
"""Commands of Slurm that are called."""


class SlurmBackend:
    """The Slurm of a site.

    Args:
        cluster: Name of the cluster: the first part of the names of all its Slurm jobs.
        options: How parts are submitted.

    Raises:
        ValueError: The name is not one that all schedulers take.
    """

    def __init__(self, cluster: str, options: SlurmOptions | None = None) -> None:
        self._prefix = check_name("cluster", cluster) + "."
        self._options = options or SlurmOptions()

    def detect(self) -> str | None:
        """Reason why no Slurm can be used here; None if one can."""
        if absent := [name for name in COMMANDS if shutil.which(name) is None]:
            return f"no {', '.join(absent)} on the path: this machine has no commands of Slurm"
        try:
            said = call("scontrol", "ping")
        except BackendError as error:
            return str(error)
        return None if " is UP" in said else f"the controller of Slurm does not answer: {said}"

    def nodes(self) -> tuple[Node, ...]:
        """Nodes of the partition that are up, with the accelerators that others do not use."""
        partition, now = self._partition(), time.time()
        taken = self._reserved()
        ours: dict[str, int] = {}
        for job in self._jobs():
            if job.node and job.phase is PartState.RUNNING:
                ours[job.node] = ours.get(job.node, 0) + job.accelerators
        found = []
        for machine in self._machines():
            total = self._options.accelerators_of(machine)
            if not machine.up or not total or (partition and partition not in machine.partitions):
                continue
            has = ours.get(machine.name, 0)
            start, open_to_us = taken.get(machine.name, (None, self._options.reservation is None))
            count = self._options.free(machine, has) if open_to_us else has
            if machine.leaving:
                count, start = has, machine.since or now
            if count or (open_to_us and start is None):
                kind = machine.kind or ("gpu" if machine.gpus else "cpu")
                found.append(Node(name=machine.name, accelerators=count, kind=kind, leaves=start))
        return tuple(found)

    def start(self, part: Part) -> None:
        """Submit a part, unless a job of its name exists or is remembered by Slurm."""
        name = self._prefix + part.name
        if self._jobs(name):
            return
        machines = {each.name: each for each in self._machines(part.node)}
        if part.node not in machines:
            raise BackendError(f"Slurm has no node {part.node} for {part.name}")
        arguments = self._options.arguments(part, machines[part.node], self._limit(part))
        said = call("sbatch", f"--job-name={name}", *arguments, text=script(part))
        number = int(said.partition(";")[0])
        # Whoever else has submitted it at the same moment sees both too, and keeps the same one.
        if number != min((job.number for job in self._jobs(name)), default=number):
            call("scancel", str(number))

    def stop(self, name: str, grace: float) -> None:
        """Ask a part to save and leave; Slurm ends it when the grace period is over."""
        for job in self._jobs(self._prefix + name):
            number = str(job.number)
            if job.phase is PartState.PENDING:
                call("scancel", number)
            elif job.phase is PartState.RUNNING and grace > 0:
                _ask(job, grace)
            elif job.phase is PartState.RUNNING:
                # Cancelling alone would leave it the time between SIGTERM and SIGKILL.
                change("scancel", "--signal=KILL", "--batch", number)
                call("scancel", number)

    def list(self) -> tuple[PartStatus, ...]:
        """All parts that Slurm knows: those that ended, for as long as its `MinJobAge`."""
        first: dict[str, answers.Job] = {}
        for job in sorted(self._jobs(), key=lambda each: each.number):
            first.setdefault(job.name.removeprefix(self._prefix), job)
        return tuple(job.part(name) for name, job in first.items())

    def _jobs(self, name: str | None = None) -> Sequence[answers.Job]:
        """Jobs of this cluster, or those of one name."""
        only = [] if name is None else [f"--name={name}"]
        said = call(
            *("squeue", "--noheader", "--all", "--states=all", f"--user={os.getuid()}"),
            *(*only, f"--Format={answers.FORMAT}"),
        )
        return [job for job in _read(answers.jobs, said) if job.name.startswith(self._prefix)]

    def _machines(self, *names: str) -> Sequence[answers.Machine]:
        said = call("scontrol", "--oneliner", "--details", "show", "node", *names)
        return _read(answers.machines, said)

    def _partition(self) -> str | None:
        if self._options.partition:
            return self._options.partition
        return answers.default_partition(call("scontrol", "--oneliner", "show", "partition"))

    def _reserved(self) -> Mapping[str, tuple[float, bool]]:
        """When each reserved node leaves, and whether parts may run on it until then."""
        found: dict[str, tuple[float, bool]] = {}
        now = time.time()
        said = call("scontrol", "--oneliner", "show", "reservation")
        for each in sorted(_read(answers.reservations, said), key=lambda one: one.start):
            if not each.nodes or each.end <= now or each.nodes == "(null)":
                continue
            ours = each.name == self._options.reservation
            entry = (each.end, each.start <= now) if ours else (each.start, each.start > now)
            for name in call("scontrol", "show", "hostnames", each.nodes).split():
                if ours or (name not in found and self._options.reservation is None):
                    found[name] = entry
        return found

    def _limit(self, part: Part) -> int | None:
        """Time limit in minutes: a job that would outlast its node is not started at all."""
        leaves, _ = self._reserved().get(part.node, (None, True))
        if leaves is None:
            return self._options.time
        left = int((leaves - time.time()) // 60)
        if left < 1:
            raise BackendError(f"{part.node} is reserved in less than a minute")
        return min(left, self._options.time or left)


def backend(cluster: str, options: Mapping[str, str]) -> Backend:
    """The backend of a cluster on Slurm.

    Args:
        cluster: Name of the cluster.
        options: Fields of `SlurmOptions` as text, such as `{"partition": "spot"}`.

    Raises:
        ValueError: An option is unknown, or not what it has to be.
    """
    return SlurmBackend(cluster, from_text(options))


def _ask(job: answers.Job, grace: float) -> None:
    """Ask a part once to leave, and have Slurm end it when the grace period is over."""
    update = ["scontrol", "update", f"JobId={job.number}"]
    now = time.time()
    limit = math.ceil((max(0.0, now - (job.started or now)) + grace) / 60)
    sooner = [f"TimeLimit={limit}"] if job.limit is None or limit < job.limit else []
    if job.asked:
        # A further signal would disturb it while it saves.
        if sooner:
            change(*update, *sooner)
        return
    mark = f"Comment={comment(job.accelerators)} {answers.ASKED}"
    try:
        change(*update, mark, *sooner)
    except BackendError:
        change(*update, mark)  # a site may not let users change time limits
    change("scancel", "--signal=USR1", "--batch", str(job.number))


def _read(parse: Callable[[str], Iterable[T]], text: str) -> Sequence[T]:
    try:
        return list(parse(text))
    except ValueError as error:
        raise BackendError(str(error)) from None
