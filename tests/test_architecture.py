"""The pages for contributors are true to the tree: paths and links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("ARCHITECTURE.md", "CONTRIBUTING.md")
_CODE = re.compile(r"`([^`\n]+)`")
# A place of the tree in any line: these may also be folders, or end in a slash.
_PLACE = re.compile(r"^(?:src|tests|docs|examples|benchmarks|resilin|\.ci)/[\w./-]*$")


def places(text: str) -> set[str]:
    """The paths of the tree that a page names, those of commands without their arguments."""
    codes = {code.partition(" ")[0] for code in _CODE.findall(text)}
    return {code for code in codes if _PLACE.match(code)}


def is_there(place: str) -> bool:
    return (ROOT / place).exists() or (ROOT / "src" / place).exists()


@pytest.mark.parametrize("page", PAGES)
def test_every_path_on_the_page_is_there(page):
    found = places((ROOT / page).read_text())
    assert found
    assert {place for place in found if not is_there(place)} == set()


def test_a_path_that_is_wrong_would_be_found():
    found = places("`resilin/core/plan.py` and `tests/core/`, `.ci/rum --all`; `torch.save`")
    assert found == {"resilin/core/plan.py", "tests/core/", ".ci/rum"}
    assert {place for place in found if not is_there(place)} == {".ci/rum"}


@pytest.mark.parametrize("page", PAGES)
def test_the_links_to_other_pages_lead_somewhere(page):
    text = (ROOT / page).read_text()
    for target, anchor in re.findall(r"\]\(([\w./-]*)(?:#([\w-]+))?\)", text):
        path = ROOT / (target or page)
        assert path.exists(), target
        if anchor:
            heads = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
            assert anchor in {head.lower().replace(" ", "-") for head in heads}, anchor


def test_warnings_name_the_line_of_the_script():
    """A depth that is counted by hand ends within resilin as soon as a function moves."""
    sources = (ROOT / "src").rglob("*.py")
    assert [path for path in sources if "warnings.warn(" in path.read_text()] == []
