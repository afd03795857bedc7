"""Reads the migration guides.

A `python` block of a guide runs like that of any page. A `py` block is the script before, which
needs another library or torchrun.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from docs.blocks import blocks

ROOT = Path(__file__).parents[2]
PAGES = {page.stem: page for page in sorted((ROOT / "docs" / "migrate").glob("*.md"))}
#: What has to be installed for the block before of a page to run.
NEEDED = {
    "adaptdl": ("adaptdl", "pkg_resources", "portpicker", "requests", "semver"),
    "fairscale": ("fairscale",),
    "runai": ("runai",),
}
_BEFORE = re.compile(r"^```py\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Row(NamedTuple):
    """One line of a table of names."""

    peer: str
    ours: str
    remark: str


def text(page: str) -> str:
    return PAGES[page].read_text(encoding="utf-8")


def all_before(page: str) -> list[str]:
    return _BEFORE.findall(text(page))


def before(page: str) -> str:
    (code,) = all_before(page)
    return code


def task(page: str) -> str:
    return blocks(PAGES[page])[0].code


def after(page: str) -> str:
    return blocks(PAGES[page])[1].code


def table(page: str) -> list[Row]:
    """The rows under a header that has `resilin` in its second and nothing in its third cell."""
    rows, inside = [], False
    for line in text(page).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line[:1] == "|" else []
        if len(cells) != 3:
            inside = False
        elif cells[1:] == ["resilin", ""]:
            inside = True
        elif inside and set(line) != set("|-"):
            rows.append(Row(*cells))
    return rows


def words(page: str) -> set[str]:
    """Everything that the tables of a page say about the peer."""
    return set(re.findall(r"\w+", " ".join(row.peer for row in table(page))))


def needs(page: str) -> pytest.MarkDecorator:
    """Skips a test where the peer of a page is not installed."""
    missing = [name for name in NEEDED[page] if find_spec(name) is None]
    reason = f"{', '.join(missing)} not installed; docs/migrate/index.md says how"
    return pytest.mark.skipif(bool(missing), reason=reason)
