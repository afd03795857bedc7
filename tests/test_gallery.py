"""Pages of the gallery have one shape, and every file that they name exists."""

import re
from pathlib import Path

import pytest

from docs.blocks import blocks

ROOT = Path(__file__).parents[1]
GALLERY = ROOT / "docs/gallery"
PAGES = sorted(set(GALLERY.glob("*.md")) - {GALLERY / "index.md"})
HEADINGS = ["Run it", "Expected output", "Inject a fault", "What it costs", "Limits"]
ELSEWHERE = {"slurm-preemptible.md", "kubernetes.md"}
"""Pages whose faults need a cluster."""

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@each_page
def test_a_page_has_the_five_headings_in_order(page: Path) -> None:
    assert re.findall(r"^## (.*)$", page.read_text(), re.MULTILINE) == HEADINGS


@each_page
def test_a_page_opens_with_its_situation_and_ends_with_the_guide(page: Path) -> None:
    paragraphs = page.read_text().split("\n\n")
    situation = paragraphs[1].replace("\n", " ")
    assert len(re.findall(r"[.?](?: |$)", situation)) == 2, situation
    last = paragraphs[-1]
    assert last.startswith("More: ")
    assert "](../guides/" in last or "](../recipes/" in last


@each_page
def test_a_page_says_what_it_was_not_tested_on(page: Path) -> None:
    limits = page.read_text().partition("## Limits")[2]
    assert "Not tested" in limits


@each_page
def test_a_fault_is_injected_and_a_lost_sample_fails_the_page(page: Path) -> None:
    text = page.read_text()
    line = text[: text.index("## Inject a fault")].count("\n")
    end = text[: text.index("## What it costs")].count("\n")
    faults = [block for block in blocks(page, ("bash",)) if line < block.line < end]
    assert faults
    for block in faults:
        if page.name in ELSEWHERE:
            assert block.needs is not None
        else:
            # The run with the fault must end as the one without it: `diff` fails otherwise.
            assert block.needs is None
            assert re.search(r"^kill -(KILL|TERM) ", block.code, re.MULTILINE)
            assert re.search(r"^wait \$job", block.code, re.MULTILINE)
            assert block.code.splitlines()[-1].startswith("diff ")


@each_page
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"\b(?:benchmarks|tests|examples|deploy)/[\w./-]*\w", page.read_text())
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_index_has_every_page_once() -> None:
    links = re.findall(r"\]\(([\w-]+\.md)\)", (GALLERY / "index.md").read_text())
    assert sorted(links) == [page.name for page in PAGES]
