"""Makes a failing case smaller: takes away one thing after the other while it still fails."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.fuzz.driver import source
from tests.fuzz.program import Case, Program, possible

Fails = Callable[[Case], bool]


def shrink(case: Case, fails: Fails, *, seconds: float = 600.0) -> Case:
    """The smallest case found within this time that still fails.

    Args:
        case: One that fails.
        fails: Runs a case and says whether it fails in the same way.
        seconds: Time after which no further case is tried.
    """
    deadline = time.monotonic() + seconds
    progress = True
    while progress:
        progress = False
        for smaller in simpler(case):
            if time.monotonic() > deadline:
                return case
            if smaller != case and fails(smaller):
                case, progress = smaller, True
                break
    return case


def simpler(case: Case) -> Iterator[Case]:
    """Cases with one thing less, those that save most first."""

    def with_program(**fields: Any) -> Case:
        program = dataclasses.replace(case.program, **fields)
        return possible(dataclasses.replace(case, program=program))

    for index in range(len(case.kills)):
        kills = case.kills[:index] + case.kills[index + 1 :]
        worlds = case.worlds
        if index < len(worlds) - 1:
            worlds = worlds[:index] + worlds[index + 1 :]
        yield dataclasses.replace(case, kills=kills, worlds=worlds)
    if len(case.worlds) > len(case.kills) + 1:
        yield dataclasses.replace(case, worlds=case.worlds[: len(case.kills) + 1])
    for index, world in enumerate(case.worlds):
        for less in range(1, world):
            worlds = (*case.worlds[:index], less, *case.worlds[index + 1 :])
            yield dataclasses.replace(case, worlds=worlds)
    for name in case.options:
        rest = {key: value for key, value in case.options.items() if key != name}
        yield dataclasses.replace(case, options=rest)
    plain = Program()
    p = case.program
    for field in dataclasses.fields(Program):
        now, default = getattr(p, field.name), getattr(plain, field.name)
        # A length only ever shrinks, or this would go round in circles.
        if now != default and not (field.name in ("num_samples", "epochs") and now < default):
            yield with_program(**{field.name: default})
    for epochs in range(1, p.epochs):
        yield with_program(epochs=epochs)
    for num_samples in (4, 6, 8, max(4, p.num_samples // 2)):
        if num_samples < p.num_samples:
            yield with_program(num_samples=num_samples)
    if len(p.trace) > 1:
        yield with_program(trace=p.trace[:-1])
    for index, kill in enumerate(case.kills):
        for count in sorted({1, kill.count // 2, kill.count - 1} - {0, kill.count}):
            less_often = dataclasses.replace(kill, count=count)
            kills = (*case.kills[:index], less_often, *case.kills[index + 1 :])
            yield dataclasses.replace(case, kills=kills)


def keep(case: Case, detail: str, folder: Path) -> Path:
    """Writes a case down with its script, what was wrong, and the command that runs it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "case.json").write_text(case.to_json() + "\n")
    (folder / "script.py").write_text(source(case))
    (folder / "README").write_text(
        f"python benchmarks/torture.py --replay {folder / 'case.json'}\n\n{detail}\n"
    )
    return folder
