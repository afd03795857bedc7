"""The shape of the package: small classes, one hidden global, engines nobody looks into."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import resilin

PACKAGE = Path(resilin.__file__).parent
MOST_LINES = 300
MOST_ATTRIBUTES = 15
MOST_LOOKUPS = 8
"""Modules that may look the current job up."""


def sources() -> Iterator[tuple[str, ast.Module]]:
    """All modules of the package, by their path in it."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text())


def attributes(cls: ast.ClassDef) -> set[str]:
    """Fields of a class, and whatever its methods set on `self`."""
    fields = {
        node.target.id
        for node in cls.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return fields | {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def too_large(tree: ast.Module) -> Iterator[str]:
    """Classes past a limit whose docstring gives no reason."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        num_lines = (node.end_lineno or 0) - node.lineno + 1
        num_attributes = len(attributes(node))
        if num_lines <= MOST_LINES and num_attributes <= MOST_ATTRIBUTES:
            continue
        doc = ast.get_docstring(node) or ""
        if "many attributes:" not in doc.lower() and "long:" not in doc.lower():
            yield f"{node.name}: {num_lines} lines, {num_attributes} attributes"


def calls(tree: ast.Module, name: str) -> bool:
    """Whether a function of this name is called."""
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
        for node in ast.walk(tree)
    )


def test_no_class_is_too_large_without_a_reason():
    assert {path: list(too_large(tree)) for path, tree in sources() if list(too_large(tree))} == {}


def test_few_modules_look_the_current_job_up():
    found = [path for path, tree in sources() if calls(tree, "current_job")]
    assert 0 < len(found) <= MOST_LOOKUPS, found


def test_nobody_asks_which_engine_it_is():
    asks = re.compile(r"isinstance\([\w.]*engine\b")
    assert [path for path, tree in sources() if asks.search(ast.unparse(tree))] == []


def test_only_the_engine_names_the_group_of_all_processes():
    names = re.compile(r"\bgroup\.WORLD\b|\bGroupMember\b")
    found = [path for path, tree in sources() if names.search(ast.unparse(tree))]
    assert found
    assert [path for path in found if not path.startswith("engine/")] == []


def test_a_class_that_is_too_large_would_be_found():
    body = "\n".join(f"        self.a{i} = {i}" for i in range(16))
    source = f'class Large:\n    """A class."""\n\n    def __init__(self):\n{body}\n'
    assert list(too_large(ast.parse(source))) == ["Large: 20 lines, 16 attributes"]
    reason = source.replace("A class.", "A class. Many attributes: a record of one run.")
    assert list(too_large(ast.parse(reason))) == []
