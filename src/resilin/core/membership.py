"""Membership of a job: one frozen record per generation, and pure transitions between them.

A generation is a period with a fixed set of replicas. An engine knows the members from a `Roster`
or from the environment that its launcher sets for each process; training only ever sees a
`Membership`, which is the roster as one process sees it. All members of a generation compute the
same roster from the same change, so nothing has to be sent: survivors keep their order, joiners
come last.

A replica is one data-parallel member: a process, or a sharded group of processes. So replicas and
processes are two words and two numbers, and they are equal only where nothing is sharded.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from resilin.core import _validate

_PLACES = {
    "replica": "num_replicas",
    "process": "num_processes",
    "host": "num_hosts",
    "local_process": "num_local_processes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The place of one process in a job, during one generation.

    Two of them are equal if nothing has changed for the process that has them. That the numbers are
    the same does not mean that the members are: compare generations.
    """

    generation: int = 0
    """Number of the generation; a later one has a greater number."""
    replica: int = 0
    """The replica that this process is, or is a part of, from 0."""
    num_replicas: int = 1
    """Data-parallel members: what a batch is divided by."""
    process: int = 0
    """Number of this process among all processes of the job, from 0."""
    num_processes: int = 1
    """Processes of the job: who takes part in a checkpoint."""
    host: int = 0
    """Number of the host, or of the agent on it, that this process runs on."""
    num_hosts: int = 1
    """Hosts, or agents, that have processes of the job."""
    local_process: int = 0
    """Number of this process among those of its host, from 0."""
    num_local_processes: int = 1
    """Processes on this host."""
    reformed: bool = False
    """Whether some of its members kept running when others left or joined.

    Not so where all members start together, as after a restart by torchrun: then each resumes its
    own state, and a job of the same size keeps what belonged to each replica.
    """

    def __post_init__(self) -> None:
        _validate.whole("generation", self.generation, at_least=0)
        for place, count in _PLACES.items():
            number, total = getattr(self, place), getattr(self, count)
            if not 0 <= number < total:
                raise ValueError(f"{place} ({number}) must be in [0, {count}), which is {total}")

    @property
    def is_first(self) -> bool:
        """Whether it is the process that speaks for the job: it logs, and writes what is shared."""
        return self.process == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One replica of a roster."""

    name: str
    """Name of the replica, unique among all replicas of the job, past and present."""
    hosts: tuple[str, ...] = ("",)
    """The host of each of its processes: one, unless the replica is sharded."""
    address: str = ""
    """Place (`host:port`) where it serves the forming of a generation, in jobs that are live."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """All replicas of one generation, in the order of their numbers.

    Raises:
        ValueError: It is empty, a name occurs twice, or replicas have unequally many processes.
    """

    generation: int = 0
    """Number of the generation."""
    members: tuple[Member, ...]
    """The replicas; the oldest one is replica 0."""
    reformed: bool = False
    """Whether some members kept running when it was formed; see `Membership`."""

    def __post_init__(self) -> None:
        if not self.members:
            raise ValueError("a job must have at least 1 replica, and has 0")
        if len(set(self.names)) < len(self.members):
            raise ValueError(f"names of replicas ({', '.join(self.names)}) must differ")
        sizes = {len(each.hosts) for each in self.members}
        if len(sizes) > 1 or 0 in sizes:
            raise ValueError(
                f"replicas have {', '.join(map(str, sorted(sizes)))} processes: all must have "
                "equally many, at least 1"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the replicas."""
        return tuple(each.name for each in self.members)

    def membership(self, name: str, part: int = 0) -> Membership:
        """The place of one process.

        Args:
            name: The replica that it belongs to.
            part: Its number within that replica.

        Raises:
            ValueError: The replica is not a member, or has no such part.
        """
        if name not in self.names:
            raise ValueError(f"{name!r} must be one of the members, {', '.join(self.names)}")
        replica, parts = self.names.index(name), len(self.members[0].hosts)
        if not 0 <= part < parts:
            raise ValueError(f"part ({part}) must be in [0, {parts})")
        process = replica * parts + part
        places = [host for each in self.members for host in each.hosts]
        hosts = list(dict.fromkeys(places))
        here = places[process]
        return Membership(
            generation=self.generation,
            replica=replica,
            num_replicas=len(self.members),
            process=process,
            num_processes=len(places),
            host=hosts.index(here),
            num_hosts=len(hosts),
            local_process=places[:process].count(here),
            num_local_processes=places.count(here),
            reformed=self.reformed,
        )


def change(
    roster: Roster, *, leaving: Collection[str] = (), joining: Sequence[Member] = ()
) -> Roster:
    """The roster of the next generation, when members change while others keep running.

    Those that stay keep their order, so the oldest is replica 0 and has the state of the job;
    joiners follow in the order given. With nobody leaving or joining it is the same members anew,
    as after a broken connection: also that is a new generation.

    Raises:
        ValueError: Somebody leaves who is not a member, joins who is one, or nobody stays.
    """
    if strangers := [name for name in leaving if name not in roster.names]:
        raise ValueError(
            f"{', '.join(strangers)} cannot leave: the members are {', '.join(roster.names)}"
        )
    if present := [each.name for each in joining if each.name in roster.names]:
        raise ValueError(f"{', '.join(present)} cannot join: already a member, or one that leaves")
    staying = tuple(each for each in roster.members if each.name not in leaving)
    if not staying:
        raise ValueError("nobody stays: a job that all members leave is over, or is restarted")
    return Roster(generation=roster.generation + 1, members=(*staying, *joining), reformed=True)
