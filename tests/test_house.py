"""What holds for the code of the whole package, each with a bug that it prevents."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import resilin

ROOT = Path(__file__).parents[1]
PACKAGE = Path(resilin.__file__).parent
FOR_LIVE_ENGINES = {"Member", "Roster", "change"}
"""Names of the core that engines use whose members change without a restart; `tests/engine` has one
of these."""
PLACES = re.compile(r"^(num_)?(local_)?(replica|process)(e?s)?$")


@functools.cache
def sources() -> tuple[tuple[str, ast.Module], ...]:
    """All modules of the package, by their path in it."""
    return tuple(
        (str(path.relative_to(PACKAGE)), ast.parse(path.read_text()))
        for path in sorted(PACKAGE.rglob("*.py"))
    )


def test_nobody_asks_which_engine_it_is():
    asks = re.compile(r"isinstance\([\w.]*engine\b")
    assert [path for path, tree in sources() if asks.search(ast.unparse(tree))] == []


def test_only_the_engine_names_the_group_of_all_processes():
    names = re.compile(r"\bgroup\.WORLD\b|\bGroupMember\b")
    found = [path for path, tree in sources() if names.search(ast.unparse(tree))]
    assert found
    assert [path for path in found if not path.startswith("engine/")] == []


def mixed_up(tree: ast.AST) -> Iterator[str]:
    """Arguments that give a number of replicas for one of processes, or the reverse."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.keyword) or not isinstance(node.value, ast.Attribute):
            continue
        wanted, given = PLACES.match(node.arg or ""), PLACES.match(node.value.attr)
        if wanted and given and wanted[3] != given[3]:
            yield ast.unparse(node)


def test_replicas_and_processes_are_not_taken_for_each_other():
    assert {path: found for path, tree in sources() if (found := list(mixed_up(tree)))} == {}
    wrong = "Place(process=me.replica, num_replicas=me.num_processes, replica=me.replica)"
    found = ["process=me.replica", "num_replicas=me.num_processes"]
    assert list(mixed_up(ast.parse(wrong))) == found


def pickles(tree: ast.AST) -> set[str]:
    """Modules and functions that a module uses, and that make or read pickles."""
    of_objects = re.compile(r"(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?")
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names} & {"pickle", "dill", "marshal", "shelve"}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or ""} & {"pickle", "dill", "marshal", "shelve"}
            found |= {each.name for each in node.names if of_objects.fullmatch(each.name)}
        elif isinstance(node, ast.Attribute) and of_objects.fullmatch(node.attr):
            found.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "pickle.load"):
            checked = any(ast.unparse(each) == "weights_only=True" for each in node.keywords)
            found |= set() if checked else {ast.unparse(node.func)}
    return found


def test_nothing_is_pickled_on_a_wire_and_no_pickle_is_read():
    found = {path: its for path, tree in sources() if (its := pickles(tree))}
    # The metadata of torch's checkpoint format: written for other readers, and never read.
    assert found == {"training/state/checkpoint/writer.py": {"pickle"}}
    wrong = "import torch.distributed as dist\ndist.all_gather_object(x, y)\ntorch.load(f)"
    assert pickles(ast.parse(wrong)) == {"all_gather_object", "torch.load"}


def test_every_room_has_an_import_contract():
    contracts = (ROOT / "pyproject.toml").read_text().partition("[tool.importlinter]")[2]
    rooms = {path.parent.relative_to(PACKAGE) for path in PACKAGE.glob("*/__init__.py")}
    inner = {path.parent.name for path in PACKAGE.glob("training/*/__init__.py")}
    assert len(rooms) > 7
    assert len(inner) > 7
    assert {room for room in rooms if f"resilin.{room}" not in contracts} == set()
    _, _, training = contracts.partition('containers = ["resilin.training"]')
    layers = set(re.findall(r"\w+", training.partition("]\nignore_imports")[0]))
    assert inner - layers == set()


def public_names(tree: ast.Module) -> Iterator[str]:
    """Functions, classes and methods that another module may use."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            methods = node.body if isinstance(node, ast.ClassDef) else []
            functions = [each for each in methods if isinstance(each, ast.FunctionDef)]
            yield from (each.name for each in [node, *functions] if each.name[0] != "_")


def test_the_core_has_nothing_that_nobody_uses():
    core = {path: tree for path, tree in sources() if path.startswith("core/")}
    # Without comments: these use nothing.
    words = {
        path: Counter(re.findall(r"\w+", ast.unparse(tree)))
        for path, tree in sources()
        if not path.endswith("__init__.py")
    }
    # Scripts use the core, too, as the pages and the examples show.
    shown = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]
    pages = {word for path in shown for word in re.findall(r"\w+", path.read_text())}
    unused = {
        f"{path}: {name}"
        for path, tree in core.items()
        # The rules of such engines; a simulator over them is in `tests/protocol`.
        if path not in ("core/live.py", "core/forming.py")
        for name in set(public_names(tree)) - FOR_LIVE_ENGINES
        # Within its module, beyond the place where it is defined.
        if words.get(path, Counter())[name] < 2
        and name not in pages
        and not any(name in used for p, used in words.items() if p != path)
    }
    assert unused == set()
