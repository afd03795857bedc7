"""Every promise in prose that can run, runs: docstrings, pages, README, examples, figures."""

import doctest
import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import resilin.core
from docs.blocks import blocks

ROOT = Path(__file__).parents[1]
MODULES = [f"resilin.core.{m.name}" for m in pkgutil.iter_modules(resilin.core.__path__)]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
EXAMPLES = sorted(ROOT.glob("examples/**/*.py"))


def run(*args: object) -> str:
    # One thread: examples are small, and several may run at once.
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_docstring_examples():
    finder = doctest.DocTestFinder()
    found = [t for name in MODULES for t in finder.find(importlib.import_module(name))]
    assert sum(len(test.examples) for test in found) >= 5


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages(page, monkeypatch):
    # As a reader has it: with events where the page says.
    monkeypatch.delenv("RESILIN_RUN_DIR")
    run("docs/blocks.py", page)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples(example):
    run(example)


def torchrun(script: object) -> str:
    return run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script)


def test_the_readme_runs_on_two_replicas(tmp_path):
    (tmp_path / "digits.py").write_text(blocks(ROOT / "README.md")[0].code)
    output = torchrun(tmp_path / "digits.py")
    assert output.count("epoch 9") == 2


def test_the_surviving_example_survives():
    output = run("-m", "resilin.cli", "run", "--nproc", 2, "examples/survive.py", "--kill-at", 40)
    # Sums too go on: each epoch has counted each of its samples once.
    assert output.count("1797 samples") == 4
    assert float(output.split()[-1]) > 0.93


@pytest.mark.parametrize("name", ["step_5_metrics.py"])
def test_the_tutorial_runs_on_two_replicas(name):
    torchrun(ROOT / "examples" / "tutorial" / name)


def test_the_elastic_example_matches_the_reference_run():
    rows = [line.split() for line in run("examples/elastic_in_numpy.py").splitlines()[1:]]
    (_, steps, _, _, loss), (_, elastic_steps, _, _, elastic_loss) = rows
    assert int(elastic_steps) < 0.6 * int(steps)
    assert abs(float(elastic_loss) - float(loss)) < 0.005


@pytest.mark.parametrize("name", ["concepts", "goodput"])
def test_figures_are_what_their_scripts_draw(tmp_path, name):
    run(f"docs/figures/{name}.py", "--out", tmp_path / f"{name}.svg")
    assert (tmp_path / f"{name}.svg").stat().st_size > 10_000
