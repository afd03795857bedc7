"""What `benchmarks/gpu_check.py` makes of its sections; the gate runs the sections themselves."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def gpu_check():
    path = ROOT / "benchmarks" / "gpu_check.py"
    spec = importlib.util.spec_from_file_location("gpu_check", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def raises(error):
    def section():
        raise error

    return section


def test_each_section_has_a_status_whatever_becomes_of_it(gpu_check, capsys):
    sections = {
        "good": lambda: {"figure": 1.0},
        "bad": raises(ZeroDivisionError("by nothing")),
        "absent": raises(gpu_check.NotRunError("needs CUDA")),
    }
    results = gpu_check.check(sections)
    assert list(results) == list(sections)
    assert all(result.pop("seconds") >= 0 for result in results.values())
    assert results == {
        "good": {"status": "passed", "figure": 1.0},
        "bad": {"status": "failed", "error": "ZeroDivisionError: by nothing"},
        "absent": {"status": "not run: needs CUDA"},
    }
    assert gpu_check.failures(results) == ["bad: ZeroDivisionError: by nothing"]
    assert gpu_check.failures({"odd": {"status": "perhaps"}}) == ["odd: perhaps"]


def test_a_section_that_fails_makes_the_exit_code_1(gpu_check, monkeypatch, tmp_path, capsys):
    out = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(out)])
    monkeypatch.setattr(gpu_check, "sections", lambda quick: {"one": lambda: {}})
    gpu_check.main()
    assert '"failed": []' in out.read_text()
    monkeypatch.setattr(gpu_check, "sections", lambda quick: {"one": raises(ValueError("no"))})
    with pytest.raises(SystemExit, match="one: ValueError: no"):
        gpu_check.main()
    assert '"failed": ["one: ValueError: no"]' in out.read_text()


@pytest.mark.processes
def test_a_job_that_fails_is_reported_with_its_error(gpu_check, tmp_path, monkeypatch):
    script = tmp_path / "job.py"
    lines = ["import pathlib, sys", "pathlib.Path(sys.argv[2], '1.error').write_text('E: why')"]
    script.write_text("\n".join([*lines, "sys.exit(3)"]))
    monkeypatch.setattr(gpu_check, "JOBS", script)
    with pytest.raises(gpu_check.FailedError, match=r"^exit code 1: E: why$"):
        gpu_check.launched("exactness", quick=True)
    # One that ends well without figures has failed, too.
    script.write_text("")
    with pytest.raises(gpu_check.FailedError, match=r"^exit code 0: "):
        gpu_check.launched("exactness", quick=True)


def test_the_page_says_what_each_section_is(gpu_check):
    page = (ROOT / "docs" / "gpu.md").read_text()
    said = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert said == list(gpu_check.sections(quick=True))
