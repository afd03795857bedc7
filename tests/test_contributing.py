"""The pages for contributors are true: what CONTRIBUTING shows is built and tested, from its text.

A block of that page whose first line is a comment with a path is that file, or, in a `diff` block,
a change of it. They are put into a copy of the repository, in which their tests are run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
OTHERS = "site-packages"
TIMEOUT = 240
"""Seconds for one build and its tests: some of them start processes of their own."""
pytestmark = pytest.mark.timeout(TIMEOUT)
_BLOCK = re.compile(r"^```(py|diff)\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECTIONS = {
    "A new scaling rule": ["tests/core/test_rules.py"],
    "A new telemetry sink": ["tests/telemetry/test_statsd.py"],
    "A new reducer": ["tests/training/gradient/test_flat.py"],
    "A new framework": ["tests/integrations/test_tinyfit.py"],
    "A new engine": ["tests/engine/test_fleet.py"],
}
"""The worked examples, and the tests that each of them brings or changes."""


class Piece(NamedTuple):
    """A file of the page, or a change of one."""

    kind: str
    path: str
    text: str


def pieces(text: str, section: str) -> list[Piece]:
    """What a section of the page has a contributor write."""
    (body,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    found = [Piece(*match) for match in _BLOCK.findall(body)]
    fences = re.findall(r"^```(?:py|diff)$", body, re.MULTILINE)
    assert len(found) == len(fences), f"{section}: a block does not say which file it is"
    return found


def changed(before: str, diff: str) -> str:
    """The text after a change, whose context must be there exactly once."""
    lines = diff.splitlines(keepends=True)
    assert all(line[0] in " +-" for line in lines), f"not a diff:\n{diff}"
    old = "".join(line[1:] for line in lines if line[0] != "+")
    new = "".join(line[1:] for line in lines if line[0] != "-")
    assert before.count(old) == 1, f"{before.count(old)} places look like\n{old}"
    return before.replace(old, new)


def build(text: str, section: str, copy: Path) -> list[Path]:
    """Does in a copy of the repository what a section of the page says."""
    copy.mkdir()
    shutil.copy(ROOT / "pyproject.toml", copy)
    for name in ("src", "tests"):
        leave = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, copy / name, ignore=leave)
    written = []
    for piece in pieces(text, section):
        path = copy / piece.path
        if piece.kind == "diff":
            path.write_text(changed(path.read_text(), piece.text))
        else:
            assert not path.exists(), f"{piece.path} is there already"
            path.parent.mkdir(exist_ok=True)
            path.write_text(piece.text)
        written.append(path)
    return written


def run(copy: Path, *args: object, succeeds: bool = True) -> str:
    paths = os.pathsep.join(str(copy / name) for name in ("src", "", OTHERS))
    env = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT - 20,
        env=env,
        cwd=copy,
    )
    output = done.stdout + done.stderr
    assert (done.returncode == 0) is succeeds, output
    return output


def pytest_in(copy: Path, *args: str, succeeds: bool = True) -> str:
    return run(copy, "pytest", "-q", "-p", "no:cacheprovider", *args, succeeds=succeeds)


@pytest.mark.parametrize("section", SECTIONS)
def test_what_the_page_shows_works_as_it_stands(section, tmp_path):
    copy = tmp_path / "copy"
    written = build(CONTRIBUTING.read_text(), section, copy)
    assert set(SECTIONS[section]) <= {str(path.relative_to(copy)) for path in written}
    # The copy is what is tested, and not the package that is installed.
    where = "import resilin; print(resilin.__file__)"
    (copy / "where.py").write_text(where)
    assert run(copy, "where").strip() == str(copy / "src" / "resilin" / "__init__.py")
    output = pytest_in(copy, *SECTIONS[section])
    assert re.search(r"\b[1-9]\d* passed", output), output
    assert "skipped" not in output, output
    ours = [path for path in written if path.parent.name != OTHERS]
    run(copy, "ruff", "check", "--no-cache", *ours)
    run(copy, "ruff", "format", "--no-cache", "--check", *ours)


@pytest.mark.parametrize(
    ("section", "right", "wrong", "complaint"),
    [
        ("A new scaling rule", "scale ** (1 / 3)", "scale ** (1 / 4)", "cbrt"),
        ("A new telemetry sink", '"\\n".join(lines)', '" ".join(lines)', "test_statsd.py"),
        ("A new reducer", "self._sum.unit / divisor", "1 / divisor", "of_the_global_batch"),
        ("A new framework", "self._carried.load_state_dict(state)", "pass", "at_its_cursor"),
        ("A new engine", "process % per_host", "process", "local_process"),
    ],
)
def test_a_mistake_in_the_page_is_found(section, right, wrong, complaint, tmp_path):
    text = CONTRIBUTING.read_text()
    assert text.count(right) == 1
    build(text.replace(right, wrong), section, tmp_path / "copy")
    # Without the test in several processes, which takes longest and is not the one that fails.
    arguments = ["-x", "-k", "not stock", *SECTIONS[section]]
    output = pytest_in(tmp_path / "copy", *arguments, succeeds=False)
    assert complaint in output
    assert "1 failed" in output, output


def test_a_change_that_fits_nowhere_is_an_error():
    assert changed("a\nb\nc\n", " a\n-b\n+d\n") == "a\nd\nc\n"
    with pytest.raises(AssertionError, match="0 places"):
        changed("a\nc\n", " a\n+d\n b\n")
    with pytest.raises(AssertionError, match="2 places"):
        changed("a\na\n", " a\n+d\n")
