"""The walks of ARCHITECTURE are those of the code: a real step and a real snapshot take them."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import resilin
from resilin.engine import environment

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "resilin"
PAGE = (ROOT / "ARCHITECTURE.md").read_text()
_WALK = re.compile(r"^\| \| room \| function \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", re.MULTILINE)
_CODE = re.compile(r"`([^`\n]+)`")
_DOTTED = re.compile(r"((?:\w+/)*\w+)\.((?:\w+\.)*\w+)")
OF_OTHERS = {"torch", "loss", "optimizer", "scheduler", "tool"}
"""First words of names that are not in the package: those of torch, and of the user's loop."""


class Stop(NamedTuple):
    """One line of a walk."""

    room: str
    function: str
    text: str


class Call(NamedTuple):
    """One call of a function that a walk names."""

    function: str
    inside: set[str]
    """The functions of the walk that had not returned then."""


def walk(number: int) -> list[Stop]:
    """The lines of one walk of the page."""
    rows = [row.split("|")[2:5] for row in _WALK.findall(PAGE)[number].splitlines()]
    return [Stop(*(cell.strip().strip("`") for cell in row)) for row in rows]


def names_of(tree: ast.AST) -> dict[str, ast.AST]:
    """Classes, functions, fields and constants of a module or of a class."""
    found: dict[str, ast.AST] = {}
    for node in getattr(tree, "body", []):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found.update({each.id: node for each in targets if isinstance(each, ast.Name)})
    return found


def is_there(module: Path, name: str) -> bool:
    """Whether a module has this name, or a class of it this attribute."""
    tree: ast.AST | None = ast.parse(module.read_text())
    for part in name.split("."):
        tree = names_of(tree).get(part) if tree is not None else None
    return tree is not None


def places(head: str, name: str) -> list[tuple[Path, str]]:
    """Modules that the head of a name may be, and the name in them.

    The head is a path in the package, the last part of one, or a class.
    """
    modules = [*PACKAGE.glob(f"{head}.py"), *PACKAGE.rglob(f"*/{head}.py")]
    if head[0].isupper():
        return [(module, f"{head}.{name}") for module in PACKAGE.rglob("*.py")]
    return [(module, name) for module in modules]


def missing(text: str) -> set[str]:
    """Dotted names of a page that the package does not have."""
    codes = {code.removesuffix("()") for code in _CODE.findall(text)}
    found = {code: match for code in codes if (match := _DOTTED.fullmatch(code))}
    files = {code for code in found if code.endswith((".py", ".md", ".txt", ".toml", ".json"))}
    return {
        code
        for code, match in found.items()
        if code not in files
        and match[1] not in OF_OTHERS
        and not any(is_there(*place) for place in places(*match.groups()))
    }


def test_every_name_on_the_page_is_there():
    assert missing(PAGE) == set()
    assert len([stop for i in range(3) for stop in walk(i)]) > 40


def test_a_name_that_is_not_there_would_be_found():
    page = (
        "`training/passes.Passes.run`, `training/passes.Passes.ran`, `clock.no_such`, `torch.save`"
    )
    assert missing(page) == {"training/passes.Passes.ran", "clock.no_such"}


def test_a_room_is_that_of_its_function():
    for i in range(3):
        for stop in walk(i):
            head = stop.function.partition(".")[0]
            package = str(Path(head).parent)
            assert stop.room == (package if package not in ("training", "core") else ""), stop


def code_of(function: str) -> CodeType:
    head, _, name = function.partition(".")
    found: Any = importlib.import_module("resilin." + head.replace("/", "."))
    for part in name.split("."):
        found = getattr(found, part)
    found = getattr(found, "__func__", found)
    return found.__code__


@contextmanager
def followed(stops: list[Stop], beside: Executor | None = None) -> Iterator[list[Call]]:
    """Records the calls of these functions, in this thread, those that it starts, and one more."""
    names = {code_of(stop.function): stop.function for stop in stops}
    calls: list[Call] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in names:
            inside, outer = set(), frame.f_back
            while outer is not None:
                inside.add(names.get(outer.f_code, ""))
                outer = outer.f_back
            calls.append(Call(names[frame.f_code], inside))

    threading.setprofile(profile)
    sys.setprofile(profile)
    if beside is not None:
        beside.submit(sys.setprofile, profile)
    try:
        yield calls
        if beside is not None:
            # Behind all that it has been given so far.
            beside.submit(sys.setprofile, None).result()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def check(stops: list[Stop], calls: list[Call]) -> None:
    """The calls go along the lines, and enter a room again only where it is still waiting."""
    rest = iter(calls)
    rooms: dict[str, list[str]] = {}
    last = ""
    for stop in stops:
        if stop.text.startswith("in a thread:"):
            # At any time while the others go on.
            assert stop.function in {call.function for call in calls}
            continue
        call = next((call for call in rest if call.function == stop.function), None)
        assert call is not None, f"{stop.function} was not called at its place: {calls}"
        if not stop.room:
            continue
        entered = rooms.setdefault(stop.room, [])
        if entered and stop.room != last:
            assert call.inside & set(entered), f"{stop.room} is entered again by {stop.function}"
        entered.append(stop.function)
        last = stop.room


def make(folder: Path | None = None) -> tuple[Any, Any, Callable[[Any], None]]:
    """A model and a loader, and the body of their loop."""
    torch.manual_seed(0)
    resilin.reset_job()
    if folder is not None:
        resilin.checkpoint_to(folder, every=1, memory_every=1)
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = resilin.AdaptiveDataParallel(net, optimizer)
    data = TensorDataset(torch.randn(64, 3), torch.randint(2, (64,)))
    loader = resilin.AdaptiveDataLoader(data, batch_size=8)

    def body(batch: Any) -> None:
        x, y = batch
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, loader, body


def test_a_step_goes_along_its_walk():
    model, loader, body = make()
    loader.set_batch_size(16)
    batches = iter(loader)
    with followed(walk(0)) as calls:
        while not model.clock.steps:
            body(next(batches))
    check(walk(0), calls)


@pytest.fixture
def memory(tmp_path, monkeypatch):
    directory = tmp_path / "memory"
    monkeypatch.setenv(environment.MEMORY_DIR, str(directory))
    return directory


def save(folder: Path, stops: list[Stop]) -> list[Call]:
    """Makes two steps, and follows what happens between them."""
    _, loader, body = make(folder)
    batches = iter(loader)
    body(next(batches))
    with followed(stops, resilin.current_job().recovery._copies._thread) as calls:
        next(batches)
    # Waits for the save in flight.
    resilin.reset_job()
    return calls


def test_a_snapshot_goes_out_along_its_walk(tmp_path, memory):
    check(walk(1), save(tmp_path / "saved", walk(1)))


@pytest.mark.parametrize("source", ["memory", "storage"])
def test_a_snapshot_comes_back_along_its_walk(tmp_path, memory, source):
    save(tmp_path / "saved", walk(1))
    if source == "storage":
        shutil.rmtree(memory)
    other = {"memory": "storage", "storage": "memory"}[source]
    stops = [stop for stop in walk(2) if f"where {other} wins" not in stop.text]
    assert len(stops) == len(walk(2)) - 2
    model, loader, _ = make(tmp_path / "saved")
    with followed(stops) as calls:
        next(iter(loader))
    check(stops, calls)
    assert model.clock.steps == 1
