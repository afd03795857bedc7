"""Random histories of a job, in fast-forward: replicas, hosts, copies, checkpoints and crashes.

No process is started. A history is drawn from a seed: how many hosts and replicas there are, when a
fault comes, who dies at which point of which write, who comes back. What to keep, which copy is
complete and which state wins is decided by the functions of `resilin.core` that the live job runs;
everything else here is a stand-in for memory, storage and processes.

The state of the simulated model is the list of all stream positions that it was trained on. So a
sample that is lost or repeated is seen in the state itself, whatever the bookkeeping says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from resilin.core import recovery
from resilin.core.passes import PassCount
from resilin.core.recovery import CopyFile, Held, Version


class Violation(AssertionError):
    """A history in which something was lost, repeated or mixed."""


class Refused(Exception):
    """The job ends with an error that says why; nothing wrong has happened."""


class Fault(Exception):
    """The generation ends here."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The decisions under test. A mutation replaces one of them."""

    next_generation: Callable[..., int] = recovery.next_generation
    is_kept: Callable[..., bool] = recovery.is_kept
    shares_written: Callable[..., tuple[int, ...]] = recovery.shares_written
    next_buffer: Callable[..., int] = recovery.next_buffer
    may_vote: Callable[..., bool] = recovery.may_vote
    may_forget: Callable[[int], bool] = recovery.may_forget
    complete_copies: Callable[..., Any] = recovery.complete_copies
    candidates: Callable[..., Any] = recovery.candidates
    kept_parts: Callable[[set[str], set[str]], set[str]] = set.union
    begin_pass: Callable[[PassCount, int], PassCount] = lambda passes, epoch: passes.begin(
        epoch, {}
    )
    end_pass: Callable[[PassCount], PassCount] = lambda passes: passes.end({}, {})
    resume_passes: Callable[..., PassCount] = PassCount.from_state
    commit: Callable[[int, int], int] = lambda cursor, stop: stop
    draw_branch: Callable[[random.Random], int] = lambda rng: rng.getrandbits(63)


class State(NamedTuple):
    """The shared state of the job between two steps."""

    step: int
    epoch: int
    cursor: int
    passes: PassCount
    trained: Any
    """All spans of positions that were trained on, as a linked list: (earlier, start, stop)."""


class Own(NamedTuple):
    """What one replica has for itself."""

    total: int
    """Its part of a sum over the replicas: samples that it was given."""
    draws: int
    """Random numbers drawn: one a step."""


class Copy(NamedTuple):
    """What one file of a memory copy holds."""

    version: Version
    host: int
    share: int
    num_shares: int
    num_replicas: int
    previous: Version | None
    state: State
    parts: frozenset[str]
    replica: int | None
    """Whose own part it holds, if any."""
    own: Own | None


class Staged(NamedTuple):
    """What the replicas have copied aside, and their threads have yet to write."""

    version: Version
    state: State
    own: tuple[Own, ...]
    parts: frozenset[str]
    previous: Version | None


class Saved(NamedTuple):
    """A committed checkpoint."""

    version: Version
    state: State
    own: tuple[Own, ...]


@dataclass
class Host:
    """A machine and what is in its memory."""

    files: dict[tuple[int, int, int, int, int], Copy | Version] = field(default_factory=dict)
    """By (generation, number of the host, replica, share, buffer): a copy, or the version of one
    that is not complete."""
    safe: Version | None = None
    """The newest state that every replica of the host has completed: the oracle's own record."""


@dataclass(frozen=True)
class Setting:
    """What stays the same during a history."""

    num_samples: int
    batch_size: int
    num_epochs: int
    passes: int
    """Passes over the data in one epoch of the loop."""
    interval: int
    """Steps between two memory copies; 0 for none."""
    save_every: int
    """Steps between two checkpoints; 0 for none."""
    save_takes: int
    """Steps until a checkpoint is committed."""
    own_state: bool
    """Whether replicas have state of their own: sums and random numbers."""


def draw_setting(rng: random.Random) -> Setting:
    interval = rng.choice((0, 1, 1, 1, 2, 3))
    return Setting(
        num_samples=rng.randint(3, 11),
        batch_size=rng.randint(2, 5),
        num_epochs=rng.randint(1, 3),
        passes=rng.choice((1, 1, 1, 2)),
        interval=interval,
        save_every=rng.choice((1, 2, 3, 5) if not interval else (0, 0, 2, 4)),
        save_takes=rng.randint(0, 3),
        own_state=rng.random() < 0.5,
    )


class History:
    """One job from its first start to its end, with faults."""

    def __init__(self, seed: int, rules: Rules) -> None:
        self.rng = random.Random(seed)
        self.rules = rules
        self.setting = draw_setting(self.rng)
        self.hosts = [Host() for _ in range(self.rng.randint(1, 3))]
        self.saved: list[Saved] = []
        self.damaged: set[int] = set()
        self.whole: tuple[Version, tuple[Host, ...]] | None = None
        """The newest state that every replica of the job has completed, and the hosts with it."""
        self.resumed: dict[int, int | None] = {}
        """By branch: the branch that it resumed from."""
        self.faults_left = self.rng.randint(1, 5)
        self.num_starts = 0
        # The size that a host has in most generations.
        self.usual = self.rng.randint(1, 3)

    def run(self) -> int:
        """Runs the job to its end; returns the number of generations."""
        while True:
            self.num_starts += 1
            generation = Generation(self)
            try:
                generation.start()
                generation.train()
            except Fault:
                continue
            self.check_end(generation.state)
            return self.num_starts

    def check_end(self, state: State) -> None:
        """Every position once, in order, and as many steps as an undisturbed run."""
        setting = self.setting
        num_passes = setting.num_epochs * setting.passes
        spans = list(_spans(state.trained))[::-1]
        expected = 0
        for start, stop in spans:
            if start != expected:
                word = "twice" if start < expected else "never"
                raise Violation(f"positions from {min(start, expected)} on are trained {word}")
            expected = stop
        if expected != num_passes * setting.num_samples:
            raise Violation(f"trained {expected} positions of {num_passes * setting.num_samples}")
        steps = num_passes * -(-setting.num_samples // setting.batch_size)
        if (state.step, state.epoch) != (steps, setting.num_epochs):
            raise Violation(f"{state.step} steps in {state.epoch} epochs, not {steps}")

    def members(self) -> list[tuple[int, int]]:
        """Hosts of the next generation, by their index, with their numbers of replicas."""
        rng = self.rng
        if rng.random() < 0.1:
            self.hosts.append(Host())
        present = [i for i in range(len(self.hosts)) if rng.random() < 0.8]
        present = present or [rng.randrange(len(self.hosts))]
        if rng.random() < 0.3:
            rng.shuffle(present)
        same = rng.random() < 0.7
        return [(i, self.usual if same else rng.randint(1, 3)) for i in present]


class Generation:
    """One life of the job: a fixed set of replicas, from its start to its end or a fault."""

    def __init__(self, history: History) -> None:
        self.history, self.rules, self.rng = history, history.rules, history.rng
        self.setting = history.setting
        self.members = history.members()
        # (host index, number of the host in this generation, local replica, local replicas)
        self.replicas = [
            (index, number, local, num)
            for number, (index, num) in enumerate(self.members)
            for local in range(num)
        ]
        self.state = State(0, 0, 0, PassCount(), None)
        self.own = [Own(0, 0)] * len(self.replicas)
        self.number = 0
        self.branch = self.rules.draw_branch(self.rng)
        self.num_kept = 0
        self.buffer = 0
        self.kept: Version | None = None
        self.staged: Staged | None = None
        self.full: set[int] = set()
        self.registered: set[str] = {"model"}
        self.unclaimed: set[str] = set()
        self.pending: list[tuple[int, Saved]] = []
        # How many more places a fault passes by before it strikes; never, in the last generation.
        left = history.faults_left
        history.faults_left -= 1
        steps = -(-self.setting.num_samples // self.setting.batch_size)
        self.countdown = self.rng.randint(0, 2 * steps + 4) if left > 0 else -1

    # The start -----------------------------------------------------------------------------

    def start(self) -> None:
        history, rules = self.history, self.rules
        hosts = [history.hosts[index] for index, _ in self.members]
        visible: list[Version] = [saved.version for saved in history.saved]
        held: list[Held] = []
        copies: dict[Version, list[Copy]] = {}
        parts: dict[Version, dict[int, Own]] = {}
        for host in hosts:
            whole: list[CopyFile] = []
            by_file: dict[int, Copy] = {}
            own: dict[Version, dict[int, Own]] = {}
            for content in host.files.values():
                if isinstance(content, Version):
                    visible.append(content)
                    continue
                visible.append(content.version)
                file = CopyFile(
                    version=content.version,
                    host=content.host,
                    share=content.share,
                    num_shares=content.num_shares,
                )
                whole.append(file)
                by_file[id(file)] = content
                if content.replica is not None and content.own is not None:
                    own.setdefault(content.version, {})[content.replica] = content.own
            for version, files in rules.complete_copies(whole).items():
                found = [by_file[id(file)] for file in files]
                copies.setdefault(version, []).extend(found)
                parts.setdefault(version, {}).update(own.get(version, {}))
                held.append(
                    Held(
                        version=version,
                        num_replicas=found[0].num_replicas,
                        previous=found[0].previous,
                        parts={r: part != (0, 0) for r, part in own.get(version, {}).items()},
                    )
                )
        tried = rules.candidates(held, [saved.version for saved in history.saved])
        self.number = rules.next_generation(visible)
        chosen = None
        for candidate in tried:
            if candidate.source == "memory":
                self.take_memory(copies[candidate.version], parts[candidate.version])
                chosen = candidate
                break
            index = next(i for i, s in enumerate(history.saved) if s.version == candidate.version)
            if index in history.damaged:
                continue
            self.take_saved(history.saved[index])
            chosen = candidate
            break
        if chosen is None and tried:
            raise Refused("no checkpoint is whole")
        self.check_promise(hosts, None if chosen is None else chosen.version, held)
        if chosen is not None:
            # The number of a generation that was chosen is seen by all, and must be passed.
            if self.number <= chosen.version.generation:
                raise Violation("a generation resumes from a state of its own number")
            self.check_whole(hosts, chosen)
            self.restore_own(chosen, parts)
            self.kept = chosen.version
        whole = history.whole
        if whole is not None and (chosen is None or whole[0] != chosen.version):
            # Another state has won, with parts that may be missing in all that follows from it.
            history.whole = None
        history.resumed[self.branch] = None if chosen is None else chosen.version.branch
        self.place()
        holders = 0 if chosen is None else sum(s.version == chosen.version for s in held)
        if chosen is None or chosen.source == "checkpoint" or holders < len(hosts):
            # What every host has already is not written again.
            self.keep()
            self.write()

    def take_memory(self, copies: list[Copy], own: dict[int, Own]) -> None:
        states = {id(copy.state) for copy in copies}
        if len(states) > 1 or len({copy.share for copy in copies}) < copies[0].num_shares:
            raise Violation("the shares of a state come from different states, or are missing")
        self.state = copies[0].state
        self.unclaimed = set(copies[0].parts)

    def take_saved(self, saved: Saved) -> None:
        self.state = saved.state
        self.unclaimed = {"model", "loader"} if saved.state.step else {"model"}

    def restore_own(self, chosen: Any, parts: dict[Version, dict[int, Own]]) -> None:
        if chosen.source == "checkpoint":
            saved = next(s for s in self.history.saved if s.version == chosen.version)
            own = dict(enumerate(saved.own))
            num = len(saved.own)
        else:
            own = parts[chosen.version]
            num = len(own)
        total = sum(part.total for part in own.values())
        if self.setting.own_state and chosen.whole and total != self.state.cursor:
            raise Violation(f"sums over the replicas are {total}, {self.state.cursor} due")
        same = chosen.whole and num == len(self.replicas)
        if same and self.setting.own_state:
            draws = {part.draws for part in own.values()}
            if draws != {self.state.step}:
                raise Violation(f"random states of steps {draws} at step {self.state.step}")
        if not self.setting.own_state:
            return
        # The first replica takes over the whole sum; random numbers go by step at another size.
        missing = self.state.cursor - total
        self.own = [
            Own(total + missing if replica == 0 else 0, self.state.step)
            for replica in range(len(self.replicas))
        ]

    def check_promise(self, hosts: list[Host], chosen: Version | None, held: list[Held]) -> None:
        """The oracle: nothing older wins than what was safe before the fault."""
        safe = [host.safe for host in hosts if host.safe is not None]
        good = [
            saved.version
            for index, saved in enumerate(self.history.saved)
            if index not in self.history.damaged
        ]
        newest = max(safe + good, default=None)
        if newest is None or (chosen is not None and chosen >= newest):
            return
        # Replicas' own parts are complete one copy earlier, if one of them died in between. The
        # copy that they died in may be newer than any that was safe: it was completed by luck.
        for state in held if chosen is not None and self.setting.own_state else ():
            there = {r for same in held if same.version == state.version for r in same.parts}
            lacks_parts = len(there) < state.num_replicas
            if state.version >= newest and state.previous == chosen and lacks_parts:
                return
        raise Violation(f"resumed from {chosen}, though {newest} was safe")

    def check_whole(self, hosts: list[Host], chosen: Any) -> None:
        """The oracle: own parts are not given up while a state that has all of them is near."""
        if self.history.whole is None or chosen.whole or not self.setting.own_state:
            return
        version, holders = self.history.whole
        # A branch that was away meanwhile may win: it is another run of the same job.
        line = (chosen.version.branch, self.history.resumed[chosen.version.branch])
        near = chosen.version.step - version.step <= self.setting.interval and (
            version.branch in line
        )
        if near and all(any(host is holder for host in hosts) for holder in holders):
            raise Violation(f"{chosen.version} has not all parts, and {version} has")

    # Training ------------------------------------------------------------------------------

    def train(self) -> None:
        setting, state = self.setting, self.state
        # The loader registers when it is iterated for the first time, and claims its state.
        cursor, passes = 0, PassCount()
        if "loader" in self.unclaimed:
            cursor = state.cursor
            passes = self.rules.resume_passes(state.passes.state(), cursor)
        self.state = state._replace(cursor=cursor, passes=passes)
        for epoch in range(self.state.epoch, setting.num_epochs):
            for _ in range(setting.passes):
                self.place()
                self.registered.add("loader")
                self.unclaimed.discard("loader")
                passes = self.rules.begin_pass(self.state.passes, epoch)
                self.state = self.state._replace(passes=passes)
                if passes.left_out:
                    continue
                self.one_pass()
            # Evaluation.
            self.place()
            self.vote()
            self.promise()
            self.state = self.state._replace(epoch=epoch + 1)
            self.boundary()
        if self.pending:
            self.history.saved.extend(saved for _, saved in self.pending)

    def one_pass(self) -> None:
        setting = self.setting
        while True:
            cursor = self.state.cursor
            left = setting.num_samples - cursor % setting.num_samples
            stop = cursor + min(setting.batch_size, left)
            self.place()
            self.vote()
            self.promise()
            self.state = self.state._replace(
                step=self.state.step + 1,
                cursor=self.rules.commit(cursor, stop),
                trained=(self.state.trained, cursor, stop),
            )
            if setting.own_state:
                num = len(self.replicas)
                self.own = [
                    Own(own.total + len(range(cursor + r, stop, num)), own.draws + 1)
                    for r, own in enumerate(self.own)
                ]
            last = stop % setting.num_samples == 0
            if last:
                self.state = self.state._replace(passes=self.rules.end_pass(self.state.passes))
            self.boundary()
            if last:
                return

    def version(self) -> Version:
        return Version(self.number, self.state.step, self.state.epoch, self.branch)

    def boundary(self) -> None:
        """Between two steps: keep, save, stop."""
        rng, setting = self.rng, self.setting
        self.settle_saves()
        stopping = self.countdown == 0 and rng.random() < 0.3
        if self.rules.is_kept(self.state.step, setting.interval, stopping=stopping):
            self.keep()
        if stopping:
            self.write()
            # In order: all replicas stop here, and the state is saved where there is storage.
            if setting.save_every:
                self.settle_saves(at_once=True)
                self.save()
                self.settle_saves(at_once=True)
            elif setting.interval and self.history.hosts[self.members[0][0]].safe is not None:
                newest = self.history.hosts[self.members[0][0]].safe
                if self.members[0][0] not in self.full and newest != self.version():
                    raise Violation(f"stopped at {self.version()} with {newest} kept")
            raise Fault
        if setting.save_every and self.state.step % setting.save_every == 0 and not self.pending:
            self.save()

    def save(self) -> None:
        version = self.version()
        if all(saved.version != version for saved in self.history.saved):
            saved = Saved(version, self.state, tuple(self.own))
            self.pending.append((self.state.step + self.setting.save_takes, saved))

    def settle_saves(self, at_once: bool = False) -> None:
        history = self.history
        while self.pending and (at_once or self.state.step >= self.pending[0][0]):
            history.saved.append(self.pending.pop(0)[1])
            if self.rng.random() < 0.05:
                history.damaged.add(len(history.saved) - 1)

    def keep(self, cuts: dict[int, int] | None = None) -> None:
        """All replicas stage the state; their threads write it into the memory of their hosts.

        Args:
            cuts: Files that a replica completes before it dies in the middle of the next.
        """
        setting, rules = self.setting, self.rules
        version = self.version()
        if not setting.interval or version == self.kept:
            return
        self.write()
        if cuts is None and self.countdown == 0 and self.rng.random() < 0.7:
            self.countdown = -1
            cuts = self.draw_cuts()
        parts = frozenset(rules.kept_parts(self.registered, self.unclaimed))
        self.staged = Staged(version, self.state, tuple(self.own), parts, self.kept)
        self.kept = version
        if cuts is not None:
            self.write(cuts)
            raise Fault

    def vote(self) -> None:
        """What a replica does before its ballot: it waits for its copy, or does not."""
        if self.staged is not None and not self.rules.may_vote(writing=True):
            self.write()

    def write(self, cuts: dict[int, int] | None = None) -> None:
        """The threads of all replicas write what was staged.

        Args:
            cuts: Files that a replica completes before it dies in the middle of the next.
        """
        rules, staged = self.rules, self.staged
        if staged is None:
            return
        self.staged = None
        version = staged.version
        buffer = self.buffer = rules.next_buffer(self.buffer, again=False)
        if rules.may_forget(self.num_kept + 1) and not self.full:
            # Before the copy: there may be room for one generation alone.
            for index, _ in self.members:
                files = self.history.hosts[index].files
                for old in [key for key in files if key[0] < self.number]:
                    del files[old]
        for replica, (index, number, local, num) in enumerate(self.replicas):
            if index in self.full:
                continue
            files = self.history.hosts[index].files
            left = None if cuts is None else cuts.get(replica)
            for share in sorted(rules.shares_written(local, num)):
                key = (self.number, number, local, share, buffer)
                if left == 0:
                    # Dies before this file, or in the middle of it.
                    if self.rng.random() < 0.5:
                        files[key] = version
                    break
                own = staged.own[replica] if share == local else None
                files[key] = Copy(
                    version,
                    number,
                    share,
                    num,
                    len(self.replicas),
                    staged.previous,
                    staged.state,
                    staged.parts,
                    replica if own is not None else None,
                    own,
                )
                if left is not None:
                    left -= 1
        self.num_kept += 1
        dead = set() if cuts is None else set(cuts)
        for number, (index, num) in enumerate(self.members):
            mine = [r for r, each in enumerate(self.replicas) if each[1] == number]
            # A share has two writers: a host is safe if at most one of its replicas died, and it
            # has another one.
            lost = len(dead & set(mine))
            if index not in self.full and (lost == 0 or (lost == 1 and num > 1)):
                self.history.hosts[index].safe = version
        if cuts is None:
            hosts = tuple(self.history.hosts[index] for index, _ in self.members)
            # A host without room has its last copies for good, while the others move on.
            self.history.whole = None if self.full else (version, hosts)

    def promise(self) -> None:
        """The oracle: a step is committed, so the copy of the one before is safe."""
        if self.staged is not None:
            for index, _ in self.members:
                if index not in self.full:
                    self.history.hosts[index].safe = self.staged.version

    def draw_cuts(self) -> dict[int, int]:
        """Who dies in the middle of the copy; the others complete theirs before they end."""
        rng = self.rng
        victims = rng.sample(
            range(len(self.replicas)),
            1 if rng.random() < 0.6 else rng.randint(1, len(self.replicas)),
        )
        return {victim: rng.randint(0, 1) for victim in victims}

    # Faults --------------------------------------------------------------------------------

    def place(self) -> None:
        """A place where a fault may strike, outside the copies."""
        if self.countdown < 0:
            return
        self.countdown -= 1
        if self.countdown >= 0:
            if self.countdown == 3 and self.rng.random() < 0.15:
                # A memory file system without room: this host keeps no more copies.
                self.full.add(self.members[0][0])
            return
        rng, history = self.rng, self.history
        if self.staged is not None:
            # Some replicas die while they write, the others complete their copies.
            self.write(self.draw_cuts())
        kind = rng.random()
        if kind < 0.25:
            # A host is lost, with its memory.
            index = rng.choice(self.members)[0]
            history.hosts[index] = Host()
        elif kind < 0.32:
            for index, _ in self.members:
                history.hosts[index] = Host()
        raise Fault


def _spans(trained: Any) -> Iterator[tuple[int, int]]:
    while trained is not None:
        trained, start, stop = trained
        yield start, stop


def run(seeds: range, rules: Rules | None = None) -> dict[str, int]:
    """Runs a history per seed.

    Raises:
        Violation: One of them lost, repeated or mixed something; the message has its seed.
    """
    rules = rules or Rules()
    counts = {"histories": 0, "generations": 0, "refused": 0}
    for seed in seeds:
        try:
            counts["generations"] += History(seed, rules).run()
        except Refused:
            counts["refused"] += 1
        except Violation as error:
            raise Violation(f"history {seed}: {error}") from error
        counts["histories"] += 1
    return counts
