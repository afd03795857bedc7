"""Pages of the gallery fail if a fault costs a sample, and every file that they name exists."""

import re
from pathlib import Path

import pytest

from docs.blocks import blocks

ROOT = Path(__file__).parents[1]
GALLERY = ROOT / "docs/gallery"
PAGES = sorted(set(GALLERY.glob("*.md")) - {GALLERY / "index.md"})
ELSEWHERE = {"slurm-preemptible.md", "kubernetes.md"}
"""Pages whose faults need a cluster."""

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


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
