"""Random histories of a live job, in fast-forward: members, an authority, and faults at any point.

No process is started and no time passes: a history is a random order of what members, the authority
and the network do next. The decisions are those of `resilin.core.live` and `resilin.core.forming`.
The state of a simulated member is the list of all spans that it was trained on, with the group that
made each step: a state that is mixed, lost or made twice is seen in the states themselves.

Every few steps an epoch ends with a collective outside of steps. Survivors that were in it when
their group broke make it again; somebody who joined in between would wait for a step instead.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from resilin.core import forming, live
from resilin.core.forming import Healing
from resilin.core.live import Authority, Event, Form, Join, Leave, NotLive, Remove, Renew
from resilin.core.membership import Member, Roster
from resilin.core.recovery import Version

MOST = 6
"""Most members of a job."""
EPOCH = 3
"""Steps of an epoch."""

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

    apply: Callable[[Authority, Event], Authority] = live.apply
    check: Callable[[Authority, str], None] = Authority.check
    next_move: Callable[..., forming.Move] = forming.next_move
    is_broken: Callable[..., bool] = forming.is_broken
    all_have_seen: Callable[[int, int], bool] = forming.all_have_seen
    reports: Callable[[int], bool] = forming.reports
    continues: Callable[[bool], bool] = lambda reported: reported
    heal: Callable[..., Healing] = forming.heal
    committed_in: Callable[[int, Version], int] = lambda generation, before: generation
    loads: Callable[[Version], Version | None] = lambda loading: None


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
    reported: bool = False
    """Whether the authority has heard that it is formed."""
    gathered: dict[int, set[str]] = field(default_factory=dict)
    """By epoch: who waits in the collective at its end."""
    resets: set[str] = field(default_factory=set)
    """Who has seen a connection of it break."""

    @property
    def formed(self) -> bool:
        return len(self.told) == len(self.roster.names)

    def is_complete(self, step: int) -> bool:
        return len(self.arrived.get(step, ())) == len(self.roster.names)

    def breaks(self) -> None:
        """All members see it."""
        self.resets.update(self.roster.names)


@dataclass
class Process:
    """One member."""

    name: str
    doing: str = "form"
    """What it does next: form, load, train, wait, leave_steps or gather."""
    held: Version | None = None
    trained: Trained = None
    authority: str = ""
    """The authority that it began with."""
    known: Authority | None = None
    """What it knows of."""
    present: Roster | None = None
    """Newest generation that it has come to."""
    least: Version | None = None
    """The state that that one needs."""
    healing: Healing | None = None
    left: forming.Left = "forming"
    inside: frozenset[str] = frozenset()
    """Who was there when it came to the collective outside of steps that it has not completed."""
    frozen: bool = False
    cut_off: bool = False
    """Whether it cannot reach the authority."""
    asked: bool = False
    """Whether it was asked to leave."""

    @property
    def number(self) -> Number:
        return self.authority, -1 if self.present is None else self.present.generation

    def give_up(self, *, agreed: bool = False) -> None:
        self.doing, self.left = "form", "agreed" if agreed else "broke"


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
        self.groups: dict[Number, Group] = {}
        self.unheard: list[str] = []
        """Lost processes that the authority does not know of yet."""
        self.newest_ballot = -1
        self.late: Counter[int] = Counter()
        self.made = 0
        """Steps whose ballot was ever complete."""
        self.counts: Counter[str] = Counter()

    # The authority -------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        self.authority = self.rules.apply(self.authority, event)
        if self.rng.random() < 0.05:
            # What is sent is what is known.
            sent = json.loads(json.dumps(self.authority.to_json()))
            assert Authority.from_json(sent) == self.authority
            assert live.event_from_json(json.loads(json.dumps(live.event_to_json(event)))) == event

    def size(self) -> int:
        return len(self.authority.roster.names) + len(self.authority.waiting)

    def look(self, process: Process) -> bool:
        """Asks the authority for what it knows; whether it could."""
        if process.cut_off:
            return False
        process.authority = process.authority or self.authority.identity
        self.rules.check(self.authority, process.authority)
        if process.authority != self.authority.identity:
            raise Violation(f"{process.name} follows an authority that has lost its state")
        process.known = self.authority
        return True

    # What a member does --------------------------------------------------------------------

    def act(self, process: Process) -> None:
        getattr(self, process.doing)(process)

    def form(self, process: Process) -> None:
        group = self.groups.get(process.number)
        if group is not None and group.formed and process.left == "forming":
            if process.name not in group.resets or self.rng.random() < 0.5:
                self.begin(process, group)
                return
            process.left = "broke"
        if not self.look(process):
            return
        newest = process.known
        assert newest is not None
        # Whoever asks has been heard.
        name, present, left = process.name, process.present, process.left
        move = self.rules.next_move(name, newest, present, left, joined=True)
        if move == "out":
            self.left_out(process)
        elif move == "renew":
            # Nobody is gone, or nobody knows it yet.
            assert process.present is not None
            self.tell(Renew(process.present.generation))
        elif move == "come":
            if group is not None and not group.formed:
                # Nobody can have begun it; and nobody will, before this one comes back.
                del group.told[process.name]
            process.present, process.least = newest.roster, newest.least
            process.left = "forming"
            group = self.groups.setdefault(process.number, Group(newest.roster))
            group.told[process.name] = process.held
            group.brought[process.name] = process.trained

    def left_out(self, process: Process) -> None:
        del self.processes[process.name]
        if process.asked:
            self.counts["left"] += 1
        elif self.size() < MOST:
            # Taken for dead: it comes back under a new name, perhaps with the state that it has.
            back = Process(next(self.names), authority=process.authority)
            if self.rng.random() < 0.7:
                back.held, back.trained = process.held, process.trained
            self.processes[back.name] = back
            self.tell(Join(Member(name=back.name)))
            self.counts["returned"] += 1

    def begin(self, process: Process, group: Group) -> None:
        names, generation = group.roster.names, group.roster.generation
        held = {names.index(name): each for name, each in group.told.items()}
        healing = self.rules.heal(generation, held, process.least)
        if self.rules.reports(names.index(process.name)):
            if process.cut_off:
                return
            self.tell(Form(generation, names, healing.state))
            if self.authority.formed != group.roster:
                process.left = "broke"
                group.breaks()
                return
            group.reported = True
        elif not self.rules.continues(group.reported):
            if self.sees_break(process, group):
                process.give_up()
            return
        process.healing = healing
        if process.authority == "first":
            # What another authority begins is another start of the job: it resumes what was kept.
            self.judge(group, healing)
        if process.inside:
            self.counts["inside"] += 1
            if strangers := {*names} - process.inside:
                raise Violation(
                    f"{strangers} came while {process.name} was in a collective outside of steps"
                )
        if names.index(process.name) in healing.lacking:
            process.held = self.rules.loads(healing.state)
            process.trained = ("half", 0, 0) if process.held else None
            process.inside = frozenset()
            process.doing = "load"
        else:
            process.held = healing.state
            self.resume(process)
        self.counts["formed"] += 1

    def resume(self, process: Process) -> None:
        """Goes to what comes next in the script: a step, or the end of an epoch."""
        assert process.held is not None
        at_end = process.held.step // EPOCH > process.held.epoch
        process.doing = "leave_steps" if at_end else "train"

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
        if self.sees_break(process, group):
            process.give_up()
            return
        holders = [group.roster.names[replica] for replica in healing.holders]
        if all(name in self.processes and not self.processes[name].frozen for name in holders):
            process.held, process.trained = healing.state, group.brought[holders[0]]
            self.resume(process)
            self.counts["healed"] += 1

    def train(self, process: Process) -> None:
        group = self.group(process)
        if self.rng.random() < 0.3:
            self.look(process)
        assert process.held is not None
        assert process.known is not None
        newer = forming.sees_change(process.known, group.roster.generation)
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
        if group.is_complete(step) and self.gets_through(process, group):
            said = group.arrived[step].values()
            generation = group.roster.generation
            committed_in = self.rules.committed_in(generation, process.held)
            process.held = Version(committed_in, step + 1, process.held.epoch)
            process.trained = (process.trained, step + 1, generation)
            seen = sum(newer for _, _, newer in said)
            if self.rules.all_have_seen(seen, num):
                process.give_up(agreed=True)
            else:
                self.resume(process)
        elif self.sees_break(process, group):
            process.give_up()
            # Before the first step, members may leave whom the job was to begin with.
            self.counts["dropped" if self.made else "not begun"] += 1

    def leave_steps(self, process: Process) -> None:
        """Comes to the collective at the end of an epoch."""
        group = self.group(process)
        assert process.held is not None
        process.inside = process.inside or frozenset(group.roster.names)
        group.gathered.setdefault(process.held.epoch, set()).add(process.name)
        process.doing = "gather"

    def gather(self, process: Process) -> None:
        group, held = self.group(process), process.held
        assert held is not None
        complete = group.gathered[held.epoch] == {*group.roster.names}
        if complete and self.gets_through(process, group):
            process.held = Version(held.generation, held.step, held.epoch + 1)
            process.inside = frozenset()
            process.doing = "train"
            self.counts["epochs"] += 1
        elif self.sees_break(process, group):
            process.give_up()

    def gets_through(self, process: Process, group: Group) -> bool:
        """Whether it has the result of what all have come to."""
        return process.name not in group.resets or self.rng.random() < 0.5

    def sees_break(self, process: Process, group: Group) -> bool:
        """Whether it learns that its group is broken, from a connection or from the authority."""
        if process.name in group.resets:
            return True
        if not self.look(process):
            return False
        if self.rules.is_broken(group.roster, process.known):
            group.resets.add(process.name)
        return process.name in group.resets

    def group(self, process: Process) -> Group:
        return self.groups[process.number]

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
                self.groups[process.number].resets.add(process.name)
        elif kind == "join" and self.size() < MOST:
            name = next(self.names)
            self.processes[name] = Process(name)
            self.tell(Join(Member(name=name)))
        elif kind == "leave" and process.name in self.authority.roster.names:
            process.asked = True
            self.tell(Leave(process.name))
        elif kind == "notice" and self.unheard:
            name = self.unheard.pop(rng.randrange(len(self.unheard)))
            known = self.processes.get(name)
            if known is None or known.frozen or known.cut_off:
                self.tell(Remove(name))
        elif kind == "thaw":
            process.frozen = process.cut_off = False
        elif kind == "forget":
            # The authority is started anew by whoever asks first, and counts from the beginning.
            self.authority = Authority.start(
                f"after {self.counts[kind]}", [Member(name=process.name)]
            )
        self.counts[kind] += 1

    def lose(self, process: Process) -> None:
        del self.processes[process.name]
        # Children of the process may keep its connections open.
        if process.number in self.groups and self.rng.random() < 0.7:
            self.groups[process.number].breaks()
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
                self.tell(Remove(process.name))
            else:
                process.frozen = False
        for name in self.unheard:
            if name not in self.processes:
                self.tell(Remove(name))
        before = self.counts["steps"]
        for _ in range(6000):
            if not self.processes:
                raise NotLive("nobody is left")
            process = self.rng.choice(list(self.processes.values()))
            if not process.frozen:
                self.act(process)
            newest = self.authority.roster
            members = [self.processes.get(name) for name in newest.names]
            together = newest == self.authority.formed and not self.authority.waiting
            together &= all(each is not None and each.present == newest for each in members)
            if not together:
                before = self.counts["steps"]
            elif self.counts["steps"] >= before + 3:
                break
        else:
            doing = {name: (p.doing, p.number, p.frozen) for name, p in self.processes.items()}
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
