"""ARCHITECTURE is true to the tree: it names every module, and nothing that is not there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "resilin"
_TABLE = re.compile(r"^\| in `(\S+?)/` \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", re.MULTILINE)
_CODE = re.compile(r"`([^`]+)`")
# A place of the tree in any line: these may also be folders, or end in a slash.
_PLACE = re.compile(r"^(?:src|tests|docs|examples|benchmarks|resilin|\.ci)/[\w./-]*$")


def named(text: str) -> set[str]:
    """The modules and packages of the tables, as paths in the package without a suffix."""
    at_the_top = set(re.findall(r"^\| `resilin/(\w+)\.py` \|", text, re.MULTILINE))
    return at_the_top - {"__init__"} | {
        f"{room}/{name.strip('/')}"
        for room, rows in _TABLE.findall(text)
        for row in rows.splitlines()
        for name in _CODE.findall(row.split("|")[1])
    }


def there(package: Path) -> set[str]:
    """The modules of the package; not what a package says of itself, nor its way in."""
    modules = (path.relative_to(package).with_suffix("") for path in package.rglob("*.py"))
    return {str(module) for module in modules if not module.name.startswith("__")}


def is_named(module: str, names: set[str]) -> bool:
    """By itself, or by its package: that of a framework need not be taken apart."""
    return module in names or str(Path(module).parent) in names


def test_every_module_has_its_place_on_the_page():
    names = named((ROOT / "ARCHITECTURE.md").read_text())
    missing = {module for module in there(PACKAGE) if not is_named(module, names)}
    assert missing == set()


def test_the_page_names_nothing_that_is_not_there():
    names = named((ROOT / "ARCHITECTURE.md").read_text())
    packages = {str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("__init__.py")}
    assert names - there(PACKAGE) - packages == set()
    assert len(names) > 100


def test_every_path_on_the_page_is_there():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    # Planned rooms say so.
    lines = [line for line in text.splitlines() if "(planned)" not in line]
    places = {code for line in lines for code in _CODE.findall(line) if _PLACE.match(code)}
    assert len(places) > 20
    found = {
        place for place in places if (ROOT / place).exists() or (ROOT / "src" / place).exists()
    }
    assert places - found == set()


def test_no_module_is_too_long_to_be_read_at_once():
    lengths = {path: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {path.name: length for path, length in lengths.items() if length > 500} == {}


def test_a_name_that_is_wrong_would_be_found():
    page = "| in `core/` | what |\n|---|---|\n| `plan`, `stram` | x `y` |\n| `sub/` | z |\n"
    assert named(page) == {"core/plan", "core/stram", "core/sub"}
    assert is_named("core/sub/inner", named(page))
    assert not is_named("core/stream", named(page))


def test_the_links_to_other_pages_lead_somewhere():
    for page in ("ARCHITECTURE.md", "CONTRIBUTING.md"):
        text = (ROOT / page).read_text()
        for target, anchor in re.findall(r"\]\(([\w./-]*)(?:#([\w-]+))?\)", text):
            path = ROOT / (target or page)
            assert path.exists(), f"{page}: {target}"
            if anchor:
                heads = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
                assert anchor in {head.lower().replace(" ", "-") for head in heads}, anchor
