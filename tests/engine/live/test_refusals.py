"""What a live job cannot do is refused, before anything is connected."""

import os
import subprocess
import sys

import pytest

import resilin
from resilin.engine import environment, pulse
from resilin.engine.group import live_engine
from resilin.engine.live.refusal import NOT_LIVE
from resilin.training.bridge.home import Home

pytestmark = pytest.mark.processes


@pytest.fixture
def live(monkeypatch, tmp_path):
    monkeypatch.setenv(environment.LIVE, str(tmp_path / "socket"))


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_a_backend_whose_collectives_cannot_be_given_up_is_refused(live, backend):
    with pytest.raises(ValueError, match=f"asks for '{backend}'.*without --live"):
        resilin.init_process_group(backend)


def test_a_framework_is_refused(live):
    with pytest.raises(ValueError, match=r"needs a loop of your own.*without --live"):
        Home()


IMPORTS = """
import importlib
for name in ("accelerate", "keras", "lightning", "transformers"):
    try:
        importlib.import_module(f"resilin.integrations.{name}")
    except ValueError as error:
        print(name, error)
"""


def test_frameworks_are_refused_before_they_start_groups_of_their_own():
    env = {**os.environ, environment.LIVE: "socket"}
    command = [sys.executable, "-c", IMPORTS]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [
        "accelerate",
        "keras",
        "lightning",
        "transformers",
    ]
    assert all("needs a loop of your own" in line for line in lines)


def test_where_the_job_can_run_without_it_the_launcher_is_told_why(live, monkeypatch, tmp_path):
    monkeypatch.setenv(environment.LIVE_OR_RESTART, "1")
    monkeypatch.setenv(environment.PULSE_DIR, str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(SystemExit) as ended:
        Home()
    assert ended.value.code == NOT_LIVE
    assert "needs a loop of your own" in pulse.error_path(tmp_path, 3).read_text()


def test_a_worker_without_a_name_is_refused(live, monkeypatch):
    monkeypatch.delenv(environment.MEMBER, raising=False)
    with pytest.raises(ValueError, match="RESILIN_LIVE is set and RESILIN_MEMBER is missing"):
        live_engine()
