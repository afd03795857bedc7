"""The versions of torch: what is accepted, what is tested and what is written agree."""

import json
import re
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement

from docs import support
from resilin.cli.checks import MIN_VERSIONS
from resilin.compat.torch_names import TORCH

ROOT = Path(__file__).parents[1]
if not (ROOT / ".ci").is_dir():
    pytest.skip("the source archive has no gate", allow_module_level=True)


def pinned(end: str) -> str:
    """The version of torch at one end of the range, as the scripts install it."""
    text = (ROOT / ".ci" / "common.sh").read_text()
    (found,) = re.findall(rf"^{end}_TORCH=torch==([\d.]+\d)$", text, re.MULTILINE)
    return found


SAME_AGE = {"torch": ["2.8.0"], "numpy": ["1.26.4", "2.0.0"], "fsspec": ["2024.6.0"]}
"""Versions that were there with the oldest torch."""
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


def test_compat_is_tested_with_the_versions_of_the_scripts():
    text = (ROOT / ".ci" / "common.sh").read_text()
    (listed,) = re.findall(r"^ALL_TORCH=\((.+)\)$", text, re.MULTILINE)
    assert tuple(listed.split()) == TORCH.tested
    assert (TORCH.tested[0], TORCH.tested[-1]) == (OLDEST, NEWEST)
    assert pinned("GATE") in TORCH.tested
    nightly = (ROOT / ".github" / "workflows" / "nightly.yml").read_text()
    parts = re.findall(r"- torch ([\d.]+)$", nightly, re.MULTILINE)
    assert parts == [minor(version) for version in TORCH.tested]


def test_the_table_of_versions_is_made_of_what_the_nightly_runs_said():
    page = support.PAGE.read_text()
    assert page == support.fill(page)
    assert set(json.loads(support.RESULTS.read_text())) == set(TORCH.tested)


def test_installing_resilin_leaves_a_pinned_torch_alone():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(each) for each in project["dependencies"]]
    (torch,) = (each for each in wanted if each.name == "torch")
    assert all(torch.specifier.contains(version) for version in TORCH.tested)
    assert {each.name for each in wanted} == {"torch", "numpy", "fsspec"}
    # Else pip would take a newer numpy than one that is pinned beside that torch.
    assert all(each.specifier.contains(v) for each in wanted for v in SAME_AGE[each.name])


def test_the_pins_leave_torch_to_the_scripts():
    pins = (ROOT / ".ci" / "constraints.txt").read_text()
    assert re.search(r"^torch\b", pins, re.MULTILINE) is None


def test_pages_name_the_versions_that_are_tested():
    for page, phrases in {
        "README.md": [f"PyTorch {minor(OLDEST)} or later"],
        "CONTRIBUTING.md": [f"torch=={OLDEST}", f"torch=={NEWEST}"],
        "docs/dependencies.md": [
            f"`torch` >= {minor(OLDEST)} ",
            f"| torch | {pinned('GATE')}",
            NEWEST,
        ],
        "docs/faq.md": [f"torch {minor(OLDEST)} and {minor(NEWEST)}"],
    }.items():
        text = (ROOT / page).read_text()
        for phrase in phrases:
            assert phrase in text, f"{page} does not say {phrase!r}"
