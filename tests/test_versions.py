"""The versions of torch: what is accepted, what is tested and what is written agree."""

import re
from pathlib import Path

import pytest
import tomllib

from resilin.cli.checks import MIN_VERSIONS

ROOT = Path(__file__).parents[1]
if not (ROOT / ".ci").is_dir():
    pytest.skip("the source archive has no gate", allow_module_level=True)


def pinned(end: str) -> str:
    """The version of torch at one end of the range, as the scripts install it."""
    text = (ROOT / ".ci" / "common.sh").read_text()
    (found,) = re.findall(rf"^{end}_TORCH=torch==([\d.]+\d)$", text, re.MULTILINE)
    return found


OLDEST, NEWEST = pinned("OLDEST"), pinned("NEWEST")


def minor(version: str) -> str:
    return version.rpartition(".")[0]


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_the_oldest_torch_that_is_accepted_is_the_oldest_that_is_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch>={minor(OLDEST)}" in project["dependencies"]
    assert MIN_VERSIONS["torch"] == number(minor(OLDEST))
    assert number(OLDEST) < number(NEWEST)


def test_the_pins_leave_torch_to_the_scripts():
    pins = (ROOT / ".ci" / "constraints.txt").read_text()
    assert re.search(r"^torch\b", pins, re.MULTILINE) is None


def test_pages_name_the_versions_that_are_tested():
    for page, phrases in {
        "README.md": [f"PyTorch {minor(OLDEST)} or later"],
        "CONTRIBUTING.md": [f"torch=={OLDEST}", f"torch=={NEWEST}"],
        "docs/dependencies.md": [f"`torch` >= {minor(OLDEST)} ", f"| torch | {OLDEST}", NEWEST],
        "docs/faq.md": [f"torch {minor(OLDEST)} and {minor(NEWEST)}"],
    }.items():
        text = (ROOT / page).read_text()
        for phrase in phrases:
            assert phrase in text, f"{page} does not say {phrase!r}"
