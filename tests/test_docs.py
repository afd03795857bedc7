"""Every promise in prose that can run, runs: docstrings, pages, README, examples, figures."""

import ast
import doctest
import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import resilin.core
from docs.blocks import blocks, pages
from tests import forked

ROOT = Path(__file__).parents[1]
MODULES = [f"resilin.core.{m.name}" for m in pkgutil.iter_modules(resilin.core.__path__)]
EXAMPLES = sorted(ROOT.glob("examples/**/*.py"))


def run(*args: object) -> str:
    # One thread: examples are small, and several may run at once. Ray would make its workers wait
    # for all others, and join a cluster of another test.
    ray = {"RAY_worker_niceness": "0", "RAY_ADDRESS": "local"}
    env = {**os.environ, **ray, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, args)]
    # Not those of Ray, which has threads and processes of its own.
    start = subprocess.run if "ray" in str(args[0]) else forked.run
    done = start(command, capture_output=True, text=True, timeout=300, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_docstring_examples():
    finder = doctest.DocTestFinder()
    found = [t for name in MODULES for t in finder.find(importlib.import_module(name))]
    assert sum(len(test.examples) for test in found) >= 5


def test_every_block_of_every_page_is_understood():
    # They are run by `.ci/stranger`, from the wheel, and by `python docs/blocks.py`.
    found = [block for page in pages() for block in blocks(page, ("python", "bash"))]
    assert any(block.needs is None for block in found)


@pytest.mark.nightly(part="docs")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples(example):
    run(example)


@pytest.mark.nightly(part="docs")
def test_the_demo_survives_what_it_does(tmp_path):
    done = forked.run(
        [sys.executable, "-m", "resilin.cli", "demo"],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    # The worker that is left has no fault of its own to show.
    assert "Traceback" not in done.stderr
    assert "Terminating process" not in done.stderr
    # Which of its workers the agent names depends on whose end it sees first.
    assert "restarting the workers (restart 1 of" in done.stderr
    assert "at step 39 from memory" in done.stderr
    # Sums too go on: each epoch has counted each of its samples once.
    assert done.stdout.count("1800 samples") == 4
    assert float(done.stdout.split()[-1]) > 0.9


@pytest.mark.nightly(part="docs")
@pytest.mark.parametrize("name", ["step_5_metrics.py"])
def test_the_tutorial_runs_on_two_replicas(name):
    script = ROOT / "examples" / "tutorial" / name
    run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script)


@pytest.mark.processes
def test_the_elastic_example_matches_the_reference_run():
    rows = [line.split() for line in run("examples/elastic_in_numpy.py").splitlines()[1:]]
    (_, steps, _, _, loss), (_, elastic_steps, _, _, elastic_loss) = rows
    assert int(elastic_steps) < 0.6 * int(steps)
    assert abs(float(elastic_loss) - float(loss)) < 0.005


@pytest.mark.nightly(part="docs")
@pytest.mark.parametrize("name", ["cluster", "concepts", "goodput", "growth", "large_batch"])
def test_figures_are_what_their_scripts_draw(tmp_path, name):
    run(f"docs/figures/{name}.py", "--out", tmp_path / f"{name}.svg")
    assert (tmp_path / f"{name}.svg").stat().st_size > 10_000


def _read_after_a_loop_that_may_run_zero_times(source: str) -> list[str]:
    """Names that only the body of a loop over a loader sets, and that an epoch reads after it."""
    found = []
    for epoch in ast.walk(ast.parse(source)):
        if not isinstance(epoch, ast.For) or "remaining_epochs_until" not in ast.dump(epoch.iter):
            continue
        set_so_far: set[str] = set()
        for statement in epoch.body:
            names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
            stored = {name.id for name in names if isinstance(name.ctx, ast.Store)}
            if isinstance(statement, ast.For):
                maybe = stored - set_so_far
                later = epoch.body[epoch.body.index(statement) + 1 :]
                for node in (node for each in later for node in ast.walk(each)):
                    if isinstance(node, ast.Name) and node.id in maybe:
                        if isinstance(node.ctx, ast.Load):
                            found.append(node.id)
                        maybe = maybe - {node.id}
            else:
                set_so_far |= stored
    return found


def test_no_loop_is_trusted_to_run():
    # A job that is resumed at the end of an epoch has no data left in it.
    wrong = "for e in remaining_epochs_until(2):\n for x in loader:\n  loss = f(x)\n print(loss)"
    assert _read_after_a_loop_that_may_run_zero_times(wrong) == ["loss"]
    sources = {str(path): path.read_text() for path in EXAMPLES}
    for page in pages():
        for index, block in enumerate(blocks(page, ("python",))):
            sources[f"{page} {index}"] = block.code
    found = {
        name: _read_after_a_loop_that_may_run_zero_times(text) for name, text in sources.items()
    }
    assert {name: names for name, names in found.items() if names} == {}
