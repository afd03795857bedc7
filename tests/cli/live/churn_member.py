"""A member that makes steps with others by the rules alone: what a group sends are small files.

Its state is the list of generations that made its steps.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from resilin.core.forming import (
    Left,
    all_have_seen,
    heal,
    is_broken,
    next_move,
    reports,
    sees_change,
)
from resilin.core.live import Authority, Form, Join, Leave, NotLive, Renew
from resilin.core.membership import Member
from resilin.core.recovery import Version
from resilin.engine.live.client import Client
from resilin.engine.stop import RESTART

STEP = 0.01
"""Seconds of work in a step."""
LOOK = 0.002
GRACE = 0.1
"""Seconds in which a loss is announced before a member asks for a new generation."""


class Lost(Exception):
    """The group is broken, or is never formed."""


class Job:
    """One member."""

    def __init__(self, path: str, name: str, directory: Path) -> None:
        self.client = Client(path, name)
        self.directory = directory
        self.came: Authority | None = None
        self.left: Left = "forming"
        self.trained: list[int] | None = None
        self.reset = False
        signal.signal(signal.SIGUSR1, lambda *_: self.client.tell(Leave(name)))
        signal.signal(signal.SIGUSR2, self.break_off)
        self.client.tell(Join(Member(name=name)))

    def break_off(self, *_: object) -> None:
        self.reset = True

    def run(self) -> None:
        while True:
            self.come()
            try:
                self.form()
                while not self.step():
                    pass
                self.left = "agreed"
            except Lost:
                self.left = "broke"

    def come(self) -> None:
        """Comes to the next generation, or ends."""
        present = None if self.came is None else self.came.roster

        def decided(newest: Authority) -> bool:
            name, joined = self.client.name, self.client.joined
            move = next_move(name, newest, present, self.left, joined=joined)
            return move in ("come", "out")

        newest = None
        while newest is None:
            newest = self.client.wait(decided, GRACE)
            self.check()
            if newest is None and self.left == "broke" and present is not None:
                self.client.tell(Renew(present.generation))
        if self.client.name not in newest:
            raise SystemExit(RESTART)
        self.came, self.left, self.reset = newest, "forming", False

    def form(self) -> None:
        assert self.came is not None
        roster = self.came.roster
        said = self.exchange("form", json.dumps(self.trained))
        held = {
            number: None if (trained := json.loads(said[name])) is None else version(trained)
            for number, name in enumerate(roster.names)
        }
        healing = heal(roster.generation, held, self.came.least)
        if reports(roster.names.index(self.client.name)):
            self.client.tell(Form(roster.generation, roster.names, healing.state))

        def decided(newest: Authority) -> bool:
            heard = newest.formed is not None and newest.formed.generation >= roster.generation
            return heard or newest.roster.generation > roster.generation

        newest = None
        while newest is None:
            newest = self.client.wait(decided, 1.0)
            self.check()
        if newest.formed is None or newest.formed.generation < roster.generation:
            raise Lost
        self.trained = json.loads(said[roster.names[healing.holders[0]]]) or []
        self.log(self.trained)

    def step(self) -> bool:
        """Makes a step; whether all leave the group after it."""
        assert self.came is not None
        assert self.trained is not None
        assert self.client.newest is not None
        generation = self.came.roster.generation
        time.sleep(STEP)
        vote = int(sees_change(self.client.newest, generation))
        said = self.exchange(f"step{len(self.trained)}", json.dumps([vote, self.trained]))
        votes, states = zip(*map(json.loads, said.values()), strict=True)
        assert all(each == self.trained for each in states), states
        self.trained.append(generation)
        self.log(generation)
        return all_have_seen(sum(votes), len(votes))

    def log(self, entry: object) -> None:
        """Logs the state that it continues with, or the generation of one more step."""
        with open(self.directory / f"log-{self.client.name}", "a") as log:
            log.write(json.dumps(entry) + "\n")

    def exchange(self, what: str, text: str) -> dict[str, str]:
        """The texts of all members, by name, as soon as all have written one."""
        assert self.came is not None
        roster = self.came.roster
        place = self.directory / f"g{roster.generation}"
        place.mkdir(exist_ok=True)
        mine = place / f"{what}-{self.client.name}"
        mine.with_suffix(".new").write_text(text)
        mine.with_suffix(".new").rename(mine)
        names = list(roster.names)
        said: dict[str, str] = {}
        while len(said) < len(names):
            for name in names:
                if name not in said and (place / f"{what}-{name}").exists():
                    said[name] = (place / f"{what}-{name}").read_text()
            if len(said) == len(names):
                break
            self.check()
            newest = self.client.newest
            assert newest is not None
            if self.reset or is_broken(roster, newest):
                raise Lost
            time.sleep(LOOK)
        return said

    def check(self) -> None:
        if self.client.lost:
            raise SystemExit(RESTART)


def version(trained: list[int]) -> Version:
    return Version(trained[-1] if trained else 0, len(trained))


def main() -> None:
    """Takes part until it is let go."""
    path, name, directory = sys.argv[1:]
    job = Job(path, name, Path(directory))
    try:
        job.run()
    except NotLive as error:
        job.client.restart(str(error))
        job.client.close()
        os._exit(RESTART)


if __name__ == "__main__":
    main()
