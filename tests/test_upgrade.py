"""The page on upgrading: each name that it gives for a name of 0.1 exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from resilin.core.membership import Membership

PAGE = (Path(__file__).parents[1] / "docs" / "upgrade.md").read_text(encoding="utf-8")
MOVED = re.findall(r"^\| `(resilin\.[\w.]+)` \| `([\w.]+)` \|$", PAGE, re.MULTILINE)


def found(name: str) -> object:
    """The module or the attribute of this dotted name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        parent, _, attribute = name.rpartition(".")
        return getattr(found(parent), attribute)


@pytest.mark.parametrize(("old", "new"), MOVED)
def test_a_name_that_moved_is_where_the_page_says(old, new):
    found(new)
    with pytest.raises((ModuleNotFoundError, AttributeError)):
        found(old)


def test_the_page_lists_what_a_script_may_have_imported():
    assert len(MOVED) >= 12
    assert {"replica", "num_replicas"} <= set(Membership.__dataclass_fields__)


def test_the_page_is_about_the_last_release_with_other_names():
    assert PAGE.startswith("# From 0.1 to 0.2")
