"""Small wrong edits of the package, each with the test of the gate that fails on it.

A catalog per room lists them. `test_mutations.py` applies them one by one to a copy of the
repository and runs the named test there: `.ci/nightly mutations`. A test of the gate may go only
if every mutation that names it is caught by another one.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One wrong edit: `old`, which stands once in the file, becomes `new`."""

    promise: str
    """What no longer holds, in a few words; also the id of its test."""
    path: str
    """The file, below `src/resilin`."""
    old: str
    new: str
    test: str
    """Where the gate fails: one test, without its parameters or with them."""


def catalog() -> list[Mutation]:
    """All mutations, by room."""
    rooms = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return [
        mutation
        for room in rooms
        if not room.startswith("test_")
        for mutation in importlib.import_module(f"{__name__}.{room}").MUTATIONS
    ]
