import json
import os
import subprocess
import sys

import pytest

from resilin.cli.sched import VERBS, access, demo, main, parser, serve, submit
from tests.cluster.controller.cheap import launch
from tests.cluster.served import Served

OPTIONS = ("--rendezvous", "127.0.0.1:1", "--option", "nodes=a=1,b=2")


@pytest.fixture
def served(tmp_path, monkeypatch):
    monkeypatch.delenv("RESILIN_SCHEDULER", raising=False)
    with Served(tmp_path / "state", *OPTIONS) as made:
        yield made


def said(capsys, *arguments):
    code = main([*arguments])
    assert code == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_a_job_on_the_command_line(served, tmp_path, capsys, monkeypatch):
    (tmp_path / "one").mkdir()
    monkeypatch.chdir(tmp_path / "one")
    made = launch(tmp_path / "one", "unused")
    monkeypatch.setattr(sys, "executable", made["launch"]["python"])
    state = ("--state", str(served.state))
    options = ("--max", "2", "--tenant", "lab", "--priority", "3", "--env", "X=1")
    checkpoints = ("--checkpoint-dir", "c")
    arguments = ("train.py", "--lr", "0.1", str(tmp_path / "one"))
    name = said(capsys, "submit", *state, *options, *checkpoints, *arguments).strip()
    assert name == "train-1"
    launched = json.loads(_submitted(served))["launch"]
    assert launched["script"] == list(arguments)
    assert launched["directory"] == str(tmp_path / "one")
    assert launched["checkpoint_dir"] == str(tmp_path / "one" / "c")
    served.wait(lambda: served.job(name)["replicas"] == 2)
    header, row = said(capsys, "ls", *state).splitlines()
    assert header.split()[:4] == ["job", "phase", "replicas", "wanted"]
    assert row.split()[:5] == ["train-1", "running", "2", "2", "1-2"]
    assert "lab" in row
    (told,) = json.loads(said(capsys, "ls", "--json", *state))
    assert told["priority"] == 3
    nodes = said(capsys, "ls", "--nodes", *state)
    assert "b            2 cpu" in nodes
    why = said(capsys, "why", name, *state)
    assert why.startswith("train-1 (running, 2 replicas): ")
    node = next(iter(told["nodes"]))
    said(capsys, "drain", node, *state)
    assert "drained" in said(capsys, "ls", "--nodes", *state)
    said(capsys, "drain", node, "--undo", *state)
    said(capsys, "drain", node, "--in", "2h", *state)
    assert "in 7" in said(capsys, "ls", "--nodes", *state)
    said(capsys, "cancel", name, *state)
    served.wait(lambda: served.phase(name) == "cancelled")
    assert main(["cancel", name, *state]) == 1
    assert "train-1 has cancelled already" in capsys.readouterr().err


def _submitted(served):
    lines = (served.state / "journal.jsonl").read_bytes().splitlines()
    return next(line.partition(b" ")[2] for line in lines if b'"Submitted"' in line)


def test_the_token_is_for_its_owner_alone_and_the_port_stays(served):
    token = served.state / access.TOKEN
    assert token.stat().st_mode & 0o777 == 0o600
    assert (served.state / "journal.jsonl").stat().st_mode & 0o077 == 0
    before, secret = served.client.url, token.read_text()
    served.kill()
    served.start()
    assert served.client.url == before
    assert token.read_text() == secret


def test_the_environment_and_options_name_the_controller(served, tmp_path, monkeypatch, capsys):
    other = tmp_path / "other"
    other.mkdir()
    assert main(["ls", "--state", str(other)]) == 1
    assert "no controller is known: give --url or RESILIN_SCHEDULER" in capsys.readouterr().err
    assert main(["ls", "--state", str(other), "--url", served.client.url]) == 1
    assert "must hold the token of the controller" in capsys.readouterr().err
    (other / access.TOKEN).write_text("wrong")
    assert main(["ls", "--state", str(other), "--url", served.client.url]) == 1
    assert "the token must be that of the cluster" in capsys.readouterr().err
    (other / access.TOKEN).write_text((served.state / access.TOKEN).read_text())
    monkeypatch.setenv("RESILIN_SCHEDULER", served.client.url)
    assert main(["ls", "--state", str(other)]) == 0
    served.kill()
    assert main(["ls", "--state", str(other)]) == 1
    assert "no controller answers at http" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--option", "nodes=a"], "nodes ('a') must be NAME=ACCELERATORS"),
        (["--option", "x=1"], "option 'x' must be one of directory, nodes, kind"),
        (["--policy-option", "x=1"], "policy ours does not take these options"),
        (["--policy-option", "x=y"], "an option of the policy ('y') must be a number"),
        (["--rendezvous", "here"], "rendezvous ('here') must be HOST:PORT"),
        (["--quota", "QUOTA"], "has 'most': known are guaranteed, limit"),
    ],
)
def test_wrong_options_of_the_controller_are_one_line(tmp_path, capsys, arguments, error):
    (tmp_path / "quota").write_text('{"lab": {"most": 3}}')
    arguments = [str(tmp_path / "quota") if each == "QUOTA" else each for each in arguments]
    assert serve.main(["--state", str(tmp_path / "state"), *arguments]) == 1
    told = capsys.readouterr().err
    assert error in told
    assert len(told.splitlines()) == 1


def test_half_a_certificate_is_wrong_usage(capsys):
    with pytest.raises(SystemExit):
        serve.main(["--tls-key", "x"])
    assert "must both be given" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        serve.main(["--tls-ca", "x"])
    assert "--tls-ca must come with --tls-certificate" in capsys.readouterr().err


def test_a_fixed_size_is_one_size(capsys):
    with pytest.raises(SystemExit):
        submit.main(["--fixed", "2", "--max", "4", "x.py"])
    assert "--fixed cannot be combined" in capsys.readouterr().err
    args = submit.parser().parse_args(["--fixed", "2", "-m", "package.train", "--lr", "1"])
    told = submit._job(args)
    assert (told["min"], told["max"]) == (2, 2)
    assert told["launch"]["script"] == ["-m", "package.train", "--lr", "1"]


def test_every_verb_has_an_example_and_a_purpose():
    whole = parser().format_help()
    for name, purpose in VERBS.items():
        assert purpose in whole
        with pytest.raises(SystemExit) as end:
            main([name, "--help"])
        assert end.value.code == 0


def test_without_a_verb_it_is_wrong_usage(capsys):
    with pytest.raises(SystemExit) as end:
        main(["nonsense"])
    assert end.value.code == 2
    assert "invalid choice: 'nonsense'" in capsys.readouterr().err


def test_no_verb_loads_torch(tmp_path):
    code = f"""
import sys
from resilin.cli import main
main(["sched", "ls", "--state", {str(tmp_path)!r}])
import resilin.cli.sched.serve, resilin.cli.sched.demo, resilin.cli.sched.submit
assert "torch" not in sys.modules
"""
    env = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    done = subprocess.run([sys.executable, "-c", code], env=env, timeout=60)
    assert done.returncode == 0


@pytest.mark.nightly(part="clusters")
@pytest.mark.timeout(900)
def test_the_demo_shows_that_each_sample_was_used_once(capfd):
    assert demo.main(["--epochs", "2"]) == 0
    shown = capfd.readouterr().out
    assert "draining node-" in shown
    assert "killing node-" in shown
    assert shown.count("2 epochs of 1800 samples, each used once") == 3
    assert "all jobs have finished, and used each sample once" in shown
