"""Every mutation is caught by the test that it names, and that test belongs to the gate."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutations import Mutation, catalog

ROOT = Path(__file__).parents[2]
MUTATIONS = catalog()
SECONDS = 200
"""For one test; pytest's own limit (`timeout` in pyproject) is above, a hang is caught here."""
COPIED = ("src", "tests", "docs", "examples", "benchmarks", "deploy", ".ci", ".github")


def promises(mutation: Mutation) -> str:
    return re.sub(r"\W+", "-", mutation.promise.lower()).strip("-")


def room_of(mutation: Mutation) -> str:
    return Path(mutation.test.partition("::")[0]).parent.name


def named_tests(path: Path) -> set[str]:
    """Tests of a file, as in the part of a node id after the path, without parameters."""
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.parametrize("mutation", MUTATIONS, ids=promises)
def test_the_edit_and_its_test_are_there(mutation):
    text = (ROOT / "src" / "resilin" / mutation.path).read_text()
    assert text.count(mutation.old) == 1, f"{mutation.path}: {text.count(mutation.old)} places"
    assert mutation.old != mutation.new
    file, _, name = mutation.test.partition("::")
    assert re.sub(r"\[.*", "", name).rpartition("::")[2] in named_tests(ROOT / file)


def test_each_promise_is_broken_once():
    counts = Counter(promises(mutation) for mutation in MUTATIONS)
    assert {name for name, count in counts.items() if count > 1} == set()


@pytest.fixture(scope="session")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, whose package comes before the one that is installed."""
    copy = tmp_path_factory.mktemp("mutations")
    for name in COPIED:
        if (ROOT / name).exists():
            leave = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, ignore=leave, symlinks=True)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, copy)
    return copy


class Gate:
    """Runs tests of a copy of the repository as the gate does, up to the first that fails."""

    def __init__(self, copy: Path) -> None:
        self._copy = copy
        # What a new interpreter would import each time, which is most of what a test takes.
        stem = ROOT / "tests/mutation_stem.py"
        self._stem = subprocess.Popen(
            [sys.executable, str(stem)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, tests: list[str], seconds: float = SECONDS) -> tuple[int, str]:
        """The exit code of pytest, and what it has printed."""
        copy, output = self._copy, self._copy / "output"
        paths = [str(copy / "src"), str(copy)]
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        # Bytecode is valid by time and size, and a mutation can change neither.
        env |= {"PYTHONDONTWRITEBYTECODE": "1", "HYPOTHESIS_PROFILE": "ci"}
        env["PYTHONPATH"] = os.pathsep.join(paths)
        env.pop("PYTHONPYCACHEPREFIX", None)
        args = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not nightly", f"--rootdir={copy}"]
        said = {"args": [*args, *tests], "env": env, "cwd": str(copy), "paths": paths}
        assert self._stem.stdin is not None
        assert self._stem.stdout is not None
        print(json.dumps(said | {"output": str(output)}), file=self._stem.stdin, flush=True)
        group = int(self._stem.stdout.readline())
        late = threading.Timer(seconds, os.killpg, (group, signal.SIGKILL))
        late.start()
        code = int(self._stem.stdout.readline())
        late.cancel()
        return code, output.read_text(errors="replace")

    def close(self) -> None:
        self._stem.communicate(timeout=30)


@pytest.fixture(scope="session")
def gate(copy: Path) -> Iterator[Gate]:
    gate = Gate(copy)
    yield gate
    gate.close()


@pytest.mark.nightly(part="mutations")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("room", sorted(set(map(room_of, MUTATIONS))))
def test_named_tests_pass_without_a_mutation(gate, room):
    tests = {mutation.test for mutation in MUTATIONS if room_of(mutation) == room}
    code, output = gate.run(sorted(tests), seconds=1700)
    assert code == 0, output[-5000:]


@pytest.mark.nightly(part="mutations")
@pytest.mark.parametrize("mutation", MUTATIONS, ids=promises)
def test_the_named_test_fails(copy, gate, mutation):
    path = copy / "src" / "resilin" / mutation.path
    text = path.read_text()
    try:
        path.write_text(text.replace(mutation.old, mutation.new))
        code, output = gate.run([mutation.test])
    finally:
        path.write_text(text)
    # 1: a test has failed. Others are an edit that cannot be imported, or no test of this name in
    # the gate.
    assert code == 1, output[-5000:]
    assert " failed" in output or " error" in output, output[-5000:]
