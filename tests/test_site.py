"""The README and the site as a visitor finds them: entries, lists of pages, changes to a script."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import re
import textwrap
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.figures import recording
from docs.llms import HERE as DOCS
from docs.llms import Entry, configuration, pages

ROOT = Path(__file__).parents[1]
NAV: list[Entry] = configuration()["nav"]
DIFFS = {
    f"{page.name}-{number}": textwrap.dedent(found)
    for page in (ROOT / "README.md", DOCS / "index.md")
    for number, found in enumerate(
        re.findall(r"^ *```diff\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE)
    )
}
SHORT = {
    "ElasticTrainer": "resilin.integrations.transformers:ElasticTrainer",
    "ElasticStrategy": "resilin.integrations.lightning:ElasticStrategy",
    "launched": "resilin.integrations.lightning:launched",
    "storage": "resilin.integrations.ray:storage",
}
"""Names that the pages import, and their places."""


def test_every_page_is_in_the_navigation_once():
    listed = [page for _, page in pages(NAV)]
    there = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
    assert sorted(listed) == there


def test_every_page_is_in_llms_txt_once():
    text = (DOCS / "llms.txt").read_text(encoding="utf-8")
    links = re.findall(r"^- \[[^]]+\]\(([^)]+)\): \S", text, re.MULTILINE)
    assert links == [page.removesuffix(".md") + ".html" for _, page in pages(NAV)]


def test_the_table_of_the_elasticity_benchmark_is_that_of_its_figures(monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "figures")
    script = importlib.import_module("elasticity")
    found = json.loads(script.FIGURES.read_text(encoding="utf-8"))
    (shown,) = script.TABLE.findall(script.PAGE.read_text(encoding="utf-8"))
    assert shown == script.table(found)
    # The chart has all contenders, and so has the table.
    assert len(shown.splitlines()) - 2 == len(found["contenders"]) == 8


def test_resilin_repeats_and_loses_nothing_in_the_elasticity_benchmark():
    found = json.loads((DOCS / "figures" / "elasticity.json").read_text(encoding="utf-8"))
    counts = ("unfinished", "repeated", "missing", "redone")
    assert {name: found[f"resilin_{name}"] for name in counts} == dict.fromkeys(counts, 0)
    assert found["resilin_deviation"] < 1e-9


def test_the_recording_is_what_its_script_draws_from_the_run():
    svg = (DOCS / "assets" / "recording.svg").read_text()
    assert svg == recording.draw(recording.load())
    assert len(svg) < 300_000
    assert "prefers-reduced-motion" in svg
    ElementTree.fromstring(svg)


def test_the_recorded_run_lost_a_worker_and_the_others_made_the_next_steps():
    data = recording.load()
    when, lost = data["lost"]
    before, after, *_ = data["members"]
    assert lost in before
    assert after == [worker for worker in before if worker != lost]
    assert any(time > when and generation == 1 for time, generation in data["steps"])
    text = "\n".join(line for _, line in data["lines"])
    assert "was killed by SIGKILL" in text
    assert text.count("1800 samples") == 4


def sides(diff: str) -> tuple[str, str]:
    """A script before and after a change."""
    lines = diff.splitlines()
    return (
        "\n".join(line[1:] for line in lines if not line.startswith("+")),
        "\n".join(line[1:] for line in lines if not line.startswith("-")),
    )


def test_there_is_a_change_for_each_framework_on_both_pages():
    assert len(DIFFS) == 10


@pytest.mark.parametrize("name", DIFFS)
def test_both_sides_of_a_change_are_python(name):
    before, after = sides(DIFFS[name])
    ast.parse(before)
    ast.parse(after)
    assert "resilin" not in before
    assert "Elastic" not in before


@pytest.mark.parametrize("name", DIFFS)
def test_what_a_change_calls_exists_and_takes_these_arguments(name, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    calls = []
    for node in ast.walk(ast.parse(sides(DIFFS[name])[1])):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        place = SHORT.get(called, called)
        if not place.startswith("resilin."):
            continue
        if ":" not in place:
            place = ":".join(place.rsplit(".", 1))
        keywords = {each.arg: None for each in node.keywords if each.arg is not None}
        inspect.signature(pkgutil.resolve_name(place)).bind(*node.args, **keywords)
        calls.append(called)
    assert calls


def test_the_change_of_a_loop_is_that_of_the_script_that_runs():
    readme = (ROOT / "README.md").read_text()
    (script,) = re.findall(r'```python title="digits.py"\n(.*?)```', readme, re.DOTALL)
    changed = [line[1:].strip() for line in DIFFS["README.md-0"].splitlines() if line[:1] == "+"]
    assert len(changed) == 5
    assert [line for line in changed if line not in script] == []
