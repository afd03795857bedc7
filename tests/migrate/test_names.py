"""The tables of the migration guides name what is there, on both sides."""

import ast
import contextlib
import importlib
import inspect
import io
import re
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import resilin
from resilin import cli
from resilin.core.rules import get_rule
from tests.migrate.pages import NEEDED, PAGES, ROOT, all_before, before, table, words

SPAN = re.compile(r"`([^`]+)`")
#: What a cell says where it names nothing of resilin.
NOTHING = ("not needed", "not there", "the same")


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a chain of attributes; empty for anything else."""
    if isinstance(node, ast.Attribute) and (root := dotted(node.value)):
        return f"{root}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def names_of_peer(code: str, peer: str) -> set[str]:
    """What a script uses of a library: its names, their arguments, attributes of its objects."""
    tree = ast.parse(code)
    roots = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots |= {peer for alias in node.names if alias.name.split(".")[0] == peer}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == peer:
            roots |= {alias.asname or alias.name for alias in node.names}
    assert roots, f"the block before does not import {peer}"
    names, objects = roots - {peer}, set()

    def is_peers(node: ast.AST) -> bool:
        return dotted(node).split(".")[0] in roots

    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and is_peers(node.func):
            names |= {keyword.arg for keyword in node.keywords if keyword.arg}
        elif isinstance(node, ast.Attribute) and is_peers(node):
            names.add(node.attr)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            objects |= {dotted(t) for t in node.targets if is_peers(node.value.func)}
    modules = set(dir(torch.nn.Module)) - {"zero_grad"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and dotted(node.value) in objects:
            names |= {node.attr} - modules
    return names


@pytest.mark.parametrize("page", PAGES)
def test_what_stands_before_is_python(page):
    for code in all_before(page):
        compile(code, str(PAGES[page]), "exec")


@pytest.mark.parametrize("page", NEEDED)
def test_each_name_that_is_used_before_stands_in_the_table(page):
    used = names_of_peer(before(page), page)
    assert len(used) >= 3
    assert used <= words(page)


def test_a_name_that_is_not_in_the_table_would_be_found():
    code = "import runai.ga\nfrom runai import x\no = runai.ga.Optimizer(p, every=2)\no.flush()\n"
    assert names_of_peer(code, "runai") == {"ga", "x", "Optimizer", "every", "flush"}


class Resolver:
    """Looks up what a table says, in real objects. Nothing is called but `current_job`."""

    def __init__(self) -> None:
        self.job = resilin.reset_job()
        module = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        data = TensorDataset(torch.zeros(4, 2))
        self.objects: dict[str, Any] = {
            "resilin": resilin,
            "optimizer": optimizer,
            "model": resilin.AdaptiveDataParallel(module, optimizer, batch_size=2),
            "loader": resilin.AdaptiveDataLoader(data, batch_size=2),
            "stats": resilin.Accumulator(),
            "plan": resilin.plan(2),
            "len": len,
            "i": 0,
        }

    def check(self, span: str) -> None:
        if span.startswith("RESILIN_"):
            sources = (ROOT / "src").rglob("*.py")
            assert any(f'"{span}"' in path.read_text(encoding="utf-8") for path in sources), span
        elif span.startswith("resilin "):
            self.check_command(*span.split()[1:])
        else:
            self.value(ast.parse(span, mode="eval").body, whole=True)

    def check_command(self, command: str, *options: str) -> None:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), pytest.raises(SystemExit) as end:
            cli.main([command, "--help"])
        assert end.value.code == 0
        assert set(options) <= set(re.findall(r"--[\w-]+", said.getvalue()))

    def value(self, node: ast.AST, *, whole: bool = False) -> Any:
        if isinstance(node, ast.Name):
            return self.objects[node.id]
        if isinstance(node, ast.Attribute):
            home = self.value(node.value)
            if hasattr(home, "__path__") and not hasattr(home, node.attr):
                # A module is an attribute of its package only once it was imported. One that is
                # all a cell says is not imported here: it may need an extra.
                path = dotted(node)
                assert find_spec(path), f"{path} is neither a name nor a module"
                return None if whole else importlib.import_module(path)
            return getattr(home, node.attr)
        if isinstance(node, ast.Subscript):
            return self.value(node.value)[self.value(node.slice)]
        assert isinstance(node, ast.Call), ast.dump(node)
        function = self.value(node.func)
        if function is resilin.current_job:
            return self.job
        if function is not len:
            check_arguments(function, node)
        return None


def check_arguments(function: Any, call: ast.Call) -> None:
    parameters = inspect.signature(function).parameters
    places = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    given = [dotted(argument) for argument in call.args]
    assert given == places[: len(given)], f"{ast.unparse(call)}: {places}"
    for keyword in call.keywords:
        assert keyword.arg in parameters, f"{ast.unparse(call)}: {list(parameters)}"
        value = getattr(keyword.value, "value", ...)
        if keyword.arg == "rule" and value is not ...:
            get_rule(value)


@pytest.fixture(scope="module")
def resolver() -> Iterator[Resolver]:
    yield Resolver()
    resilin.reset_job()


@pytest.mark.parametrize("page", PAGES)
def test_what_a_table_names_is_there_with_the_arguments_it_names(page, resolver):
    rows = table(page)
    assert len(rows) >= 5
    for row in rows:
        spans = SPAN.findall(row.ours)
        assert spans or row.ours in NOTHING, f"{row.ours!r} says nothing that can be checked"
        for span in spans:
            resolver.check(span)


@pytest.mark.parametrize(
    "span",
    [
        "resilin.missing",
        "resilin.core.rules.Cubic",
        "resilin.AdaptiveDataParallel(mp_scaler=...)",
        "resilin.AdaptiveDataParallel(optimizer)",
        'resilin.AdaptiveDataParallel(rule="cubic")',
        "model.factors[i].learning_rate",
        "resilin run --checkpoint-folder",
        "RESILIN_CHECKPOINT_FOLDER",
    ],
)
def test_what_is_not_there_would_be_found(span, resolver):
    with pytest.raises((AssertionError, AttributeError, ValueError)):
        resolver.check(span)
