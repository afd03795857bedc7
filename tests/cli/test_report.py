import json
import os
import subprocess
import sys

import pytest

from resilin.cli import report
from resilin.telemetry.log import EventLog
from tests.telemetry.told import told_run


@pytest.fixture
def runs(tmp_path):
    for number, name in enumerate(("a", "b")):
        log = EventLog(tmp_path / name, "replica-0")
        for event in told_run(seed=number):
            log.write(event)
        log.close()
    return tmp_path


@pytest.fixture
def one_panel(monkeypatch):
    """Drawing takes time; what is drawn is tested with the lab."""
    from resilin.lab import report as page

    whole = page.time_panels
    monkeypatch.setattr(page, "time_panels", lambda runs: whole(runs)[:1])
    monkeypatch.setattr(page, "progress_panels", lambda runs: [])


@pytest.mark.usefixtures("one_panel")
def test_a_report_is_one_file(runs, monkeypatch, capsys):
    monkeypatch.chdir(runs)
    assert report.main(["a"]) == 0
    assert "wrote report.html" in capsys.readouterr().err
    title = "<title>resilin report: train.py --epochs 4, 1970-01-01 00:16 UTC</title>"
    assert title in (runs / "report.html").read_text()
    assert sorted(path.name for path in runs.iterdir()) == ["a", "b", "report.html"]


def test_without_a_name_it_is_the_newest_run_here(runs, monkeypatch, capsys):
    (runs / "resilin-runs").mkdir()
    monkeypatch.chdir(runs)
    assert report.main(["--json"]) == 1
    assert "there is no run in" in capsys.readouterr().err
    for age, name in enumerate(("a", "b")):
        (runs / name).rename(runs / "resilin-runs" / name)
        os.utime(runs / "resilin-runs" / name, (1000 - age, 1000 - age))
    assert report.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == "a"


@pytest.mark.usefixtures("one_panel")
def test_the_summary_as_json_writes_files_only_where_asked_for(runs, monkeypatch, capsys):
    monkeypatch.chdir(runs)
    assert report.main(["a", "b", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["progress"]) for row in rows] == [("a", 160.5), ("b", 160.5)]
    assert not (runs / "report.html").exists()
    assert report.main(["a", "--json", "--out", "own.html"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["faults"] == 1
    assert (runs / "own.html").exists()


@pytest.mark.usefixtures("one_panel")
def test_what_cannot_be_read_or_written_is_one_line(runs, capsys):
    assert report.main([str(runs / "missing")]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"resilin: {runs / 'missing'} has no event log")
    assert error.count("\n") == 1
    assert report.main([str(runs / "a"), "--out", str(runs / "no" / "r.html")]) == 1
    assert "there is no directory" in capsys.readouterr().err
    assert report.main([str(runs / "a"), "--out", str(runs), "--json"]) == 1
    assert capsys.readouterr().err.startswith("resilin: ")


def test_damaged_lines_are_told_of_and_left_out(runs, capsys):
    with (runs / "a" / "events-replica-0.jsonl").open("a") as file:
        file.write("{}\n")
    assert report.main([str(runs / "a"), "--json"]) == 0
    captured = capsys.readouterr()
    assert "1 lines could not be read" in captured.err
    assert json.loads(captured.out)[0]["damaged_lines"] == 1


def test_reporting_never_loads_torch_or_draws_on_a_screen(runs):
    code = (
        "import sys; from resilin.cli import main\n"
        f"assert main(['report', {str(runs / 'a')!r}, '--out', {str(runs / 'r.html')!r}]) == 0\n"
        "assert 'torch' not in sys.modules and 'matplotlib.pyplot' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("one_panel")
def test_a_log_cannot_speak_to_the_terminal(runs, capsys):
    escape = "\\u001b]0;title\\u0007\\u001b[2J"  # as JSON writes it
    name = "name\x1b]0;title\x07"
    (runs / "a").rename(runs / name)
    log = next((runs / name).glob("*.jsonl"))
    long = '{"version": 1, "event": "' + "A" * 10**6 + '"}\n'
    log.write_text(f'{{"version": 1, "event": "{escape}", "time": 1}}\n{long}' + log.read_text())
    for arguments in ([str(runs / name), "--out", str(runs / "r.html")], [str(runs / f"no{name}")]):
        report.main(arguments)
        said = "".join(capsys.readouterr())
        assert "\x1b" not in said
        assert "\x07" not in said
        assert len(said) < 10_000
        assert "name?]0;title?" in said
