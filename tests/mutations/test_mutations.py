"""Every mutation is caught by the test that it names, and that test belongs to the gate."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
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


def run_gate(
    copy: Path, tests: list[str], seconds: float = SECONDS
) -> subprocess.CompletedProcess[str]:
    """Run these tests of the copy as the gate does, and stop at the first that fails."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(copy / "src"), str(copy)])}
    # Bytecode is valid by time and size, and a mutation can change neither.
    env |= {"PYTHONDONTWRITEBYTECODE": "1", "HYPOTHESIS_PROFILE": "ci"}
    env = {name: value for name, value in env.items() if not name.startswith("PYTEST_")}
    env.pop("PYTHONPYCACHEPREFIX", None)
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not nightly", f"--rootdir={copy}"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=copy,
        env=env,
        capture_output=True,
        text=True,
        timeout=seconds,
    )


@pytest.mark.nightly(part="mutations")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("room", sorted(set(map(room_of, MUTATIONS))))
def test_named_tests_pass_without_a_mutation(copy, room):
    tests = {mutation.test for mutation in MUTATIONS if room_of(mutation) == room}
    done = run_gate(copy, sorted(tests), seconds=1700)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


@pytest.mark.nightly(part="mutations")
@pytest.mark.parametrize("mutation", MUTATIONS, ids=promises)
def test_the_named_test_fails(copy, mutation):
    path = copy / "src" / "resilin" / mutation.path
    text = path.read_text()
    try:
        path.write_text(text.replace(mutation.old, mutation.new))
        done = run_gate(copy, [mutation.test])
    finally:
        path.write_text(text)
    # 1: a test has failed. Others are an edit that cannot be imported, or no test of this name in
    # the gate.
    assert done.returncode == 1, done.stdout[-5000:] + done.stderr[-2000:]
    assert " failed" in done.stdout or " error" in done.stdout, done.stdout[-5000:]
