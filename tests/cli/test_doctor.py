import json
import os
import sys
from pathlib import Path

import pytest

from resilin.cli import checks, doctor, storage
from resilin.cli.finding import Finding, Options
from resilin.compat.torch_names import TORCH
from tests import forked


def options(tmp_path, url=None):
    return Options(checkpoint_dir=url and str(url), memory_parent=tmp_path)


@pytest.mark.processes
def test_this_machine_can_run_jobs(tmp_path):
    command = [sys.executable, "-m", "resilin.cli", "doctor", "--json"]
    env = {**os.environ, "RESILIN_CHECKPOINT_DIR": str(tmp_path)}
    done = forked.run(command, capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    findings = json.loads(done.stdout)
    assert [finding["check"] for finding in findings] == list(doctor.CHECKS)
    assert {"fail"}.isdisjoint(finding["verdict"] for finding in findings)
    assert all(finding["advice"] for finding in findings if finding["verdict"] == "warn")
    assert list(tmp_path.iterdir()) == []


def test_findings_are_lines_and_a_failed_one_is_an_exit_code(monkeypatch, capsys):
    def broken(options):
        raise OSError("no such thing")

    fine = Finding(verdict="warn", found="little", advice="get more")
    monkeypatch.setattr(doctor, "CHECKS", {"room": lambda options: fine})
    assert doctor.main([]) == 0
    monkeypatch.setattr(doctor, "CHECKS", {"room": lambda options: fine, "thing": broken})
    assert doctor.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-4] == "warn  room   little"
    assert lines[-3].split() == ["->", "get", "more"]
    assert lines[-2] == "fail  thing  OSError: no such thing"


@pytest.mark.parametrize("place", ["nowhere", "file", "/proc"])
def test_a_checkpoint_directory_that_cannot_be_written_fails_with_advice(tmp_path, place):
    # The superuser may write to anything but what is no place for files.
    if place == "/proc" and not Path(place).exists():
        pytest.skip("there is no /proc")
    (tmp_path / "file").touch()
    finding = storage.checkpoint(options(tmp_path, tmp_path / place))
    assert finding.verdict == "fail"
    assert str(tmp_path / place) in finding.found
    assert f"mkdir -p {tmp_path / place}" in finding.advice


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_checkpoint_directory_on_disk_is_tried_and_left_as_it_was(tmp_path, scheme):
    finding = storage.checkpoint(options(tmp_path, f"{scheme}{tmp_path}"))
    assert finding.verdict in {"ok", "warn"}  # the disk may be full
    assert "fsync and rename work" in finding.found
    assert list(tmp_path.iterdir()) == []


def test_an_object_store_is_tried_and_left_as_it_was(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    finding = storage.checkpoint(options(tmp_path, "memory://bucket/job"))
    assert finding == Finding(verdict="ok", found="put, get and delete work in memory://bucket/job")
    assert fsspec.filesystem("memory").find("bucket") == []
    unknown = storage.checkpoint(options(tmp_path, "nosuch://bucket"))
    assert unknown.verdict == "fail"
    assert "nosuch" in unknown.found


def test_state_of_dead_jobs_is_named_with_the_command_that_removes_it(tmp_path):
    assert storage.leftovers(options(tmp_path)).verdict == "ok"
    (tmp_path / "job 7").mkdir()
    (tmp_path / "job 7" / "state").write_bytes(b"x")
    finding = storage.leftovers(options(tmp_path))
    assert finding.verdict == "warn"
    assert finding.advice.endswith("resilin clean")


def test_little_memory_is_a_warning(tmp_path, monkeypatch):
    assert str(tmp_path) in storage.memory(options(tmp_path / "not" / "yet")).found
    monkeypatch.setattr(storage, "MIN_FREE", 2**80)
    assert storage.memory(options(tmp_path)).verdict == "warn"
    assert storage.checkpoint(options(tmp_path, tmp_path)).verdict == "warn"


@pytest.mark.parametrize(("value", "verdict"), [(None, "ok"), ("1", "ok"), ("0", "fail")])
def test_the_switch_that_keeps_jobs_from_growing(tmp_path, monkeypatch, value, verdict):
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    monkeypatch.delenv(name, raising=False)
    if value is not None:
        monkeypatch.setenv(name, value)
    assert checks.store(options(tmp_path)).verdict == verdict


def test_a_package_that_is_too_old_fails_with_the_command_that_updates_it(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "MIN_VERSIONS", {"numpy": (99, 1), "no-such-package": (1, 0)})
    finding = checks.packages(options(tmp_path))
    assert finding.verdict == "fail"
    assert "no-such-package missing" in finding.found
    assert finding.advice == "pip install 'numpy>=99.1' 'no-such-package>=1.0'"


def test_a_number_below_the_tested_ones_is_a_warning_beside_their_range(tmp_path, monkeypatch):
    assert (
        f"(tested: {TORCH.tested[0]} to {TORCH.tested[-1]})"
        in checks.packages(options(tmp_path)).found
    )
    monkeypatch.setattr(checks, "MIN_VERSIONS", {"torch": (99, 0)})
    finding = checks.packages(options(tmp_path))
    assert (finding.verdict, finding.advice) == ("warn", "pip install 'torch>=99.0'")


def test_processes_that_cannot_meet_are_a_failure_with_a_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "PAIR", "raise SystemExit('no network')")
    finding = checks.group(options(tmp_path))
    assert finding.verdict == "fail"
    assert "no network" in finding.found
    monkeypatch.setattr(checks, "PAIR", "import time; time.sleep(60)")
    monkeypatch.setattr(checks, "PAIR_TIMEOUT", 0.5)
    assert "no answer within 0.5 s" in checks.group(options(tmp_path)).found


def test_a_name_that_is_not_this_machine_is_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(checks.socket, "gethostname", lambda: "no-such-host.invalid")
    finding = checks.hostname(options(tmp_path))
    assert finding.verdict == "fail"
    assert "--local-addr" in finding.advice
