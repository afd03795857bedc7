"""Random histories of a live job, in fast-forward: members, an authority, and faults at any point.

No process is started and no time passes: a history is a random order of what members, the authority
and the network do next. The decisions are those of `resilin.core.live`. The state of a simulated
member is the list of all spans that it was trained on, with the group that made each step: a state
that is mixed, lost or made twice is seen in the states themselves.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from resilin.core import live
from resilin.core.live import Authority, Healing, NotLive
from resilin.core.membership import Member, Roster
from resilin.core.recovery import Version

MOST = 6
"""Most members of a job."""


FAULTS = (
    *["join", "notice", "notice", "thaw"] * 3,
    "kill",
    "kill",
    "freeze",
    "cut",
    "break",
    "leave",
)
PLANNED = ("join", "leave")


class Violation(AssertionError):
    """A history in which something was lost, repeated or mixed."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The decisions under test. A mutation replaces one of them."""

    moves_on: Callable[[int, int], bool] = live.moves_on
    is_broken: Callable[..., bool] = live.is_broken
    all_have_seen: Callable[[int, int], bool] = live.all_have_seen
    reports: Callable[[int], bool] = live.reports
    heal: Callable[..., Healing] = live.heal
    committed_in: Callable[[int, Version], int] = lambda generation, before: generation
    loads: Callable[[Version | None], Version | None] = lambda before: None
    remove: Callable[[Authority, str], Authority] = Authority.remove
    renew: Callable[[Authority, int], Authority] = Authority.renew
    form: Callable[[Authority, Roster, Version], Authority] = Authority.form
    check: Callable[[Authority, str], None] = Authority.check


Number = tuple[str, int]
"""A generation: its number, and the authority that gave it."""
Trained = tuple[Any, int, int] | None
"""Steps so far, as a linked list: (earlier, number, generation that made it)."""


@dataclass
class Group:
    """The connections among the members of one generation, and what has gone through them."""

    roster: Roster
    told: dict[str, Version | None] = field(default_factory=dict)
    """What each one holds that has come to it."""
    brought: dict[str, Trained] = field(default_factory=dict)
    arrived: dict[int, dict[str, tuple[Version, Trained, bool]]] = field(default_factory=dict)
    """By step: who waits in its ballot, with what, and whether it has seen a newer generation."""
    broken: bool = False

    @property
    def formed(self) -> bool:
        return len(self.told) == len(self.roster.names)

    def is_complete(self, step: int) -> bool:
        return len(self.arrived.get(step, ())) == len(self.roster.names)


@dataclass
class Process:
    """One member."""

    name: str
    doing: str = "form"
    """What it does next: form, load, train or wait."""
    held: Version | None = None
    trained: Trained = None
    authority: str = ""
    """The authority that it began with."""
    seen: int = -1
    """Newest generation that it knows of."""
    present: int = -1
    """Newest generation that it has come to."""
    healing: Healing | None = None
    frozen: bool = False
    cut_off: bool = False
    """Whether it cannot reach the authority."""
    asked: bool = False
    """Whether it was asked to leave."""

    @property
    def number(self) -> Number:
        return self.authority, self.present

    over: bool = False
    """Whether it has left its group: all do after this step, or it broke."""


class History:
    """One history."""

    def __init__(self, seed: int, rules: Rules, faults: Sequence[str] = FAULTS) -> None:
        self.rng = random.Random(seed)
        self.faults = faults
        self.rules = rules
        self.names = (f"m{number}" for number in range(10**6))
        first = [next(self.names) for _ in range(self.rng.randint(1, 4))]
        self.processes = {name: Process(name) for name in first}
        self.authority = Authority.start("first", [Member(name=name) for name in first])
        self.rosters: dict[Number, Roster] = {}
        self.least: dict[Number, Version | None] = {}
        self.announce()
        self.groups: dict[Number, Group] = {}
        self.unheard: list[str] = []
        """Lost processes that the authority does not know of yet."""
        self.newest_ballot = -1
        self.late: Counter[int] = Counter()
        self.made = 0
        """Steps whose ballot was ever complete."""
        self.counts: Counter[str] = Counter()

    # The authority -------------------------------------------------------------------------

    def tell(self, event: Callable[[Authority], Authority]) -> None:
        self.authority = event(self.authority)
        self.announce()

    def announce(self) -> None:
        number = (self.authority.identity, self.authority.roster.generation)
        self.rosters[number] = self.authority.roster
        self.least.setdefault(number, self.authority.state)

    def look(self, process: Process) -> bool:
        """Asks the authority for the newest generation; whether it could."""
        if process.cut_off:
            return False
        process.authority = process.authority or self.authority.identity
        self.rules.check(self.authority, process.authority)
        process.seen = max(process.seen, self.authority.roster.generation)
        return True

    # What a member does --------------------------------------------------------------------

    def act(self, process: Process) -> None:
        getattr(self, process.doing)(process)

    def form(self, process: Process) -> None:
        group = self.groups.get(process.number)
        if group is not None and group.formed and not process.over:
            if not group.broken or self.rng.random() < 0.5:
                self.begin(process, group)
                return
            process.over = True
        if not self.look(process):
            return
        if group is not None and process.present == process.seen:
            if group.broken:
                # Nobody is gone, or nobody knows it yet.
                self.tell(lambda authority: self.rules.renew(authority, process.present))
            return
        roster = self.newest(process)
        if process.name not in roster.names:
            self.left_out(process)
        elif self.rules.moves_on(process.seen, process.present):
            if group is not None and not group.formed:
                # Nobody can have begun it; and nobody will, before this one comes back.
                del group.told[process.name]
            process.present, process.over = process.seen, False
            group = self.groups.setdefault(process.number, Group(roster))
            group.told[process.name] = process.held
            group.brought[process.name] = process.trained

    def left_out(self, process: Process) -> None:
        if process.asked:
            # Its connections stay open until the others have the last step, too.
            del self.processes[process.name]
            self.counts["left"] += 1
        elif len(self.authority.roster.names) < MOST:
            # Taken for dead: it comes back under a new name, with the state that it has.
            del self.processes[process.name]
            process.name = next(self.names)
            self.processes[process.name] = process
            process.present = -1
            self.tell(lambda authority: authority.join(Member(name=process.name)))
            self.counts["returned"] += 1

    def begin(self, process: Process, group: Group) -> None:
        names, generation = group.roster.names, group.roster.generation
        held = {names.index(name): each for name, each in group.told.items()}
        healing = self.rules.heal(generation, held, self.least[process.number])
        if self.rules.reports(names.index(process.name)):
            if process.cut_off:
                return
            self.tell(lambda authority: self.rules.form(authority, group.roster, healing.state))
            if self.authority.formed != group.roster:
                process.over = group.broken = True
                return
        process.healing = healing
        if process.authority == "first":
            # What another authority begins is another start of the job: it resumes what was kept.
            self.judge(group, healing)
        if names.index(process.name) in healing.lacking:
            process.held = self.rules.loads(process.held)
            process.trained = ("half", 0, 0) if process.held else None
            process.doing = "load"
        else:
            process.held = healing.state
            process.doing = "train"
        self.counts["formed"] += 1

    def judge(self, group: Group, healing: Healing) -> None:
        """Those who have the state have the same, and nobody's completed steps are lost by it."""
        found = [group.brought[group.roster.names[replica]] for replica in healing.holders]
        if any(each != found[0] for each in found):
            raise Violation(f"holders of generation {group.roster.generation} differ: {found}")
        if group.roster.generation < self.newest_ballot:
            return  # Somebody comes late, and finds nobody there.
        # Only the last step may have been committed by somebody who is not here.
        if healing.state.step < self.made - 1:
            raise Violation(f"step {self.made} was made, and all continue with {healing.state}")

    def load(self, process: Process) -> None:
        group, healing = self.group(process), process.healing
        assert healing is not None
        if group.broken or self.sees_break(process, group):
            process.doing, process.over = "form", True
            return
        holders = [group.roster.names[replica] for replica in healing.holders]
        if all(name in self.processes and not self.processes[name].frozen for name in holders):
            process.held, process.trained = healing.state, group.brought[holders[0]]
            process.doing = "train"
            self.counts["healed"] += 1

    def train(self, process: Process) -> None:
        group = self.group(process)
        if self.rng.random() < 0.3:
            self.look(process)
        assert process.held is not None
        newer = self.rules.moves_on(process.seen, process.present)
        waiting = group.arrived.setdefault(process.held.step, {})
        waiting[process.name] = (process.held, process.trained, newer)
        process.doing = "wait"
        if group.is_complete(process.held.step):
            self.ballot(group, process.held.step)

    def ballot(self, group: Group, step: int) -> None:
        """All members have added theirs: the same state, and no later group makes steps.

        One step is excepted. Members may have added theirs before they gave the group up, and
        somebody who hears of it late commits what the others have dropped, and make again.
        """
        said = list(group.arrived[step].values())
        if any(each[:2] != said[0][:2] for each in said):
            raise Violation(f"a step from different states: {[each[0] for each in said]}")
        generation = group.roster.generation
        if generation < self.newest_ballot:
            self.counts["late"] += 1
            self.late[generation] += 1
            if self.late[generation] > 1:
                raise Violation(f"steps in generation {generation} after {self.newest_ballot}")
        self.newest_ballot = max(generation, self.newest_ballot)
        self.made = max(self.made, step + 1)
        self.counts["steps"] += 1

    def wait(self, process: Process) -> None:
        group = self.group(process)
        assert process.held is not None
        step, num = process.held.step, len(group.roster.names)
        if group.is_complete(step) and (not group.broken or self.rng.random() < 0.5):
            said = group.arrived[step].values()
            generation = group.roster.generation
            committed_in = self.rules.committed_in(generation, process.held)
            process.held = Version(committed_in, step + 1)
            process.trained = (process.trained, step + 1, generation)
            seen = sum(newer for _, _, newer in said)
            process.over = self.rules.all_have_seen(seen, num)
            process.doing = "form" if process.over else "train"
        elif group.broken or self.sees_break(process, group):
            process.doing, process.over = "form", True
            # Before the first step, members may leave whom the job was to begin with.
            self.counts["dropped" if self.made else "not begun"] += 1

    def sees_break(self, process: Process, group: Group) -> bool:
        """Whether it learns that a member is gone, and breaks its connections off."""
        if not self.look(process):
            return False
        newest = self.newest(process)
        if self.rules.is_broken(group.roster, newest, self.authority.leaving):
            group.broken = True
        return group.broken

    def group(self, process: Process) -> Group:
        return self.groups[process.number]

    def newest(self, process: Process) -> Roster:
        roster = self.rosters.get((process.authority, process.seen))
        if roster is None:
            raise Violation(f"{process.name} follows an authority that has lost its state")
        return roster

    # Faults --------------------------------------------------------------------------------

    def fault(self) -> None:
        rng = self.rng
        process = rng.choice(list(self.processes.values()))
        kind = rng.choice(self.faults)
        if kind == "kill":
            self.lose(process)
        elif kind == "freeze":
            process.frozen = True
            self.unheard.append(process.name)
        elif kind == "cut":
            process.cut_off = True
            self.unheard.append(process.name)
        elif kind == "break":
            # One connection is reset, and nobody is gone.
            if process.number in self.groups:
                self.groups[process.number].broken = True
        elif kind == "join" and len(self.authority.roster.names) < MOST:
            name = next(self.names)
            self.processes[name] = Process(name)
            self.tell(lambda authority: authority.join(Member(name=name)))
        elif kind == "leave" and process.name in self.authority.roster.names:
            process.asked = True
            self.tell(lambda authority: authority.ask_to_leave(process.name))
        elif kind == "notice" and self.unheard:
            name = self.unheard.pop(rng.randrange(len(self.unheard)))
            known = self.processes.get(name)
            if known is None or known.frozen or known.cut_off:
                self.tell(lambda authority: self.rules.remove(authority, name))
        elif kind == "thaw":
            process.frozen = process.cut_off = False
        elif kind == "forget":
            # The authority is started anew by whoever asks first, and counts from the beginning.
            self.authority = Authority.start(
                f"after {self.counts[kind]}", [Member(name=process.name)]
            )
            self.announce()
        self.counts[kind] += 1

    def lose(self, process: Process) -> None:
        del self.processes[process.name]
        if process.number in self.groups:
            self.groups[process.number].broken = True
        self.unheard.append(process.name)

    # All of it -----------------------------------------------------------------------------

    def run(self) -> None:
        faults = self.rng.choice((0.02, 0.05, 0.15))
        try:
            for _ in range(400):
                if not self.processes:
                    raise NotLive("nobody is left")
                if self.rng.random() < faults:
                    self.fault()
                    continue
                process = self.rng.choice(list(self.processes.values()))
                if not process.frozen:
                    self.act(process)
            self.settle()
        except NotLive:
            self.counts["restarts"] += 1

    def settle(self) -> None:
        """Without more faults, all members come to one generation and make steps."""
        for process in list(self.processes.values()):
            process.cut_off = False
            if process.frozen and self.rng.random() < 0.5:
                self.tell(lambda authority, name=process.name: self.rules.remove(authority, name))
            else:
                process.frozen = False
        for name in self.unheard:
            if name not in self.processes:
                self.tell(lambda authority, name=name: self.rules.remove(authority, name))
        before = self.counts["steps"]
        for _ in range(6000):
            if not self.processes:
                raise NotLive("nobody is left")
            process = self.rng.choice(list(self.processes.values()))
            if not process.frozen:
                self.act(process)
            members = [self.processes.get(name) for name in self.authority.roster.names]
            newest = self.authority.roster.generation
            together = all(each is not None and each.present == newest for each in members)
            if not together:
                before = self.counts["steps"]
            elif self.counts["steps"] >= before + 3:
                break
        else:
            doing = {name: (p.doing, p.present, p.seen) for name, p in self.processes.items()}
            raise Violation(f"no step is made any more: {doing}, {self.authority}")
        self.counts["settled"] += 1


def run(
    seeds: Iterable[int], rules: Rules | None = None, faults: Sequence[str] = FAULTS
) -> Counter[str]:
    """Runs the histories of these seeds, and counts what happened in them."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        history = History(seed, rules or Rules(), faults)
        try:
            history.run()
        except Violation as error:
            raise Violation(f"history {seed}: {error}") from None
        counts += history.counts
    return counts
