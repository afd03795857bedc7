"""Comparisons: one for real, interrupted in the middle; the rest with scripts that only pretend."""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from matplotlib.image import imread

from resilin.cli import compare as command
from resilin.core.trace import BatchTrace
from resilin.lab import launch
from resilin.lab.compare import Comparison, Row, in_words
from resilin.lab.compare_plots import draw, mean_curve
from resilin.lab.grid import Cell, Grid, log_end
from resilin.lab.intervals import Interval, mean_interval
from resilin.lab.results import Result, UnclearMetric, choose_metric
from resilin.lab.style import save_png

TIMEOUT = 110
ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("RESILIN_DATA", ROOT.parent / "shared" / "data")) / "capacity"
REAL = """
import os, pathlib, sys
import torch
import resilin

pathlib.Path(os.environ["RESILIN_RUN_DIR"], "pid").write_text(str(os.getpid()))
torch.set_num_threads(1)
x = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
y = (x.sum(dim=1) > 0).long()
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
model = resilin.AdaptiveDataParallel(net, optimizer)
dataset = torch.utils.data.TensorDataset(x, y)
loader = resilin.AdaptiveDataLoader(dataset, batch_size=8, shuffle=True)
for epoch in resilin.remaining_epochs_until(int(sys.argv[1])):
    for inputs, targets in loader:
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        resilin.record(loss=loss)
    with torch.no_grad():
        resilin.record(error=torch.nn.functional.cross_entropy(net(x), y))
"""
PRETENDED = """
import os, random, sys
from pathlib import Path
from resilin.core.events import EpochEvent, MetricsEvent, StartEvent, StepEvent
from resilin.telemetry.log import EventLog

env = os.environ
seed, rule, trace = (env.get("RESILIN_" + name, "") for name in ("SEED", "RULE", "BATCH_TRACE"))
print("seed", seed, "rule", rule, "arguments", *sys.argv[1:])
if "fail" in sys.argv[1:] and rule == "linear" and seed == "1":
    raise SystemExit("this run is to fail")
log = EventLog(env["RESILIN_RUN_DIR"], "replica-0")
if "silent" not in sys.argv[1:]:
    log.write(StartEvent(time=0, step=0, reference=8, replicas=1, hosts=1, rule=rule or "own",
                         optimizer="SGD", replays=trace))
score = random.Random(0 if "fixed" in sys.argv[1:] else seed).random() + 10 * (rule == "linear")
for step in range(1, 21):
    loss = 1 / step
    log.write(StepEvent(time=step, step=step, epoch=0, replicas=1, batch_size=8, local_bsz=8,
                        accumulation_steps=1, samples=8 * step, progress=step, scale=1, gain=1,
                        lr_factor=1, loss=loss))
    if step % 10 == 0:
        log.write(EpochEvent(time=step, step=step, epoch=step // 10 - 1, samples=8 * step,
                             progress=step))
        if "loss-only" not in sys.argv[1:]:
            log.write(MetricsEvent(time=step, step=step, values={"score": score + step}))
        if "two" in sys.argv[1:]:
            log.write(MetricsEvent(time=step, step=step, values={"other": 1.0}))
log.close()
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text("step,batchsize\n0,16\n3,24\n")
    (tmp_path / "u.csv").write_text("time,replicas\n0,2\n60,3\n")
    return tmp_path


@pytest.fixture
def pretend(place, monkeypatch):
    """Runs the command on a script that trains nothing, and counts the runs."""
    (place / "script.py").write_text(PRETENDED)
    num = itertools.count()
    # Seeding loads torch, which such a script has no use for.
    plain = launch.command

    def unseeded(script, arguments, *, seeded):
        assert seeded
        next(num)
        return plain(script, arguments)

    monkeypatch.setattr(launch, "command", unseeded)
    monkeypatch.setattr(command, "_draw", lambda *_: None)

    def run(*arguments, options=("--rules=linear,constant", "--trace=t.csv", "--seeds=2")):
        before = next(num)
        code = command.main([*options, "--out=out", "script.py", *arguments])
        return code, next(num) - before - 1

    return run


@pytest.mark.nightly(part="jobs")
def test_a_comparison_goes_on_after_it_was_stopped(place):
    (place / "script.py").write_text(REAL)
    (place / "my_rules.py").write_text(
        "from resilin import PowerRule\n\n\ndef slow():\n    return PowerRule(0.25)\n"
    )
    line = [sys.executable, "-m", "resilin.cli", "compare", "--rules", "linear,my_rules:slow"]
    line += ["--trace", "t.csv", "--seeds", "1", "--jobs", "2", "--out", "out"]
    line += ["--json", "script.py", "2"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + TIMEOUT
        # One run is done, and others are under way.
        while not (results := list(place.glob("out/**/result.json"))):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.terminate()
        _, errors = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "Traceback" not in errors
    for file in place.glob("out/**/pid"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)
    results = {path: path.stat().st_mtime_ns for path in place.glob("out/**/result.json")}
    assert 1 <= len(results) < 3

    done = subprocess.run(line, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    assert f"{len(results)} of 3 runs already have a result" in done.stderr
    assert {path: path.stat().st_mtime_ns for path in results} == results
    told = json.loads(done.stdout)
    assert told == json.loads((place / "out" / "table.json").read_text())
    assert told["metric"] == "error"
    assert (told["failures"], told["warnings"]) == ([], [])
    reference, linear, slow = told["rows"]
    assert (reference["trace"], reference["rule"]) == (None, "reference")
    assert (reference["steps"], reference["samples"]) == (24, 192)
    assert (linear["trace"], linear["rule"]) == ("t", "linear")
    assert (linear["samples"], slow["rule"]) == (192, "my_rules:slow")
    # Three steps of 16 samples, and 24 from there on: 48 + 2 * 24, and 4 * 24.
    assert linear["steps"] == slow["steps"] == 9
    assert len({*linear["values"], *slow["values"], *reference["values"]}) == 3
    difference = linear["values"][0] - reference["values"][0]
    assert linear["difference"] == {"mean": pytest.approx(difference), "half": None, "num": 1}
    height, width, _ = imread(place / "out" / "compare.png").shape
    assert height > 500
    assert width > 500


def test_the_table_has_each_rule_on_each_trace(place, pretend, capsys):
    options = ["--rules=linear,constant", "--trace=t.csv", "--trace=u.csv", "--local-bsz=8"]
    options += ["--step-seconds=1min", "--seeds=2"]
    assert pretend("--seed={seed}", options=options) == (0, 10)
    out, err = capsys.readouterr()
    lines = out.splitlines()
    header = ["trace", "rule", "seeds", "score", "minus", "reference"]
    assert lines[0].split() == [*header, "steps", "samples", "progress"]
    names = [("-", "reference"), ("t", "linear"), ("t", "constant"), ("u", "linear")]
    assert [tuple(line.split()[:2]) for line in lines[1:5]] == names
    assert "+10.0000 +- 0.0000" in lines[2]
    assert "10 of 10 runs" in err
    assert (
        "seed 1 rule linear arguments --seed=1"
        in (place / "out/t/linear/seed-1/log.txt").read_text()
    )
    markdown = (place / "out" / "table.md").read_text().splitlines()
    assert len(markdown) == 2 + len(lines) - 1
    assert markdown[3].startswith("| t | linear | 2 | 3")
    trace = BatchTrace.parse((place / "out/u/linear/seed-0/trace.csv").read_text())
    assert (trace.at(0), trace.at(1)) == (16, 24)


def test_what_is_done_is_not_run_again_and_more_can_be_added(place, pretend):
    options = ["--rules=linear", "--trace=t.csv", "--seeds=1"]
    assert pretend(options=options) == (0, 2)
    assert pretend(options=options) == (0, 0)
    assert pretend(options=["--rules=linear,sqrt", *options[1:]]) == (0, 1)
    assert pretend(options=[*options[:2], "--seeds=2"]) == (0, 2)
    assert pretend(options=[*options, "--again"]) == (0, 2)
    assert not (place / "out/t/sqrt").exists()


def test_what_has_changed_is_refused_by_name(place, pretend, capsys):
    options = ["--rules=linear", "--trace=t.csv", "--seeds=1"]
    assert pretend(options=options) == (0, 2)
    assert pretend("more", options=options) == (1, 0)
    assert "arguments was [] and is ['more']" in capsys.readouterr().err
    (place / "t.csv").write_text("step,batchsize\n0,16\n3,25\n")
    assert pretend(options=options) == (1, 0)
    assert "trace t has changed. --again starts over" in capsys.readouterr().err
    (place / "t.csv").write_text("step,batchsize\n0,16\n3,24\n")
    (place / "script.py").write_text(PRETENDED + "\n")
    assert pretend(options=options) == (1, 0)
    assert "the content of script.py has changed" in capsys.readouterr().err
    (place / "script.py").write_text(PRETENDED)
    assert pretend(options=options) == (0, 0)
    (place / "out" / "compare.json").unlink()
    assert pretend(options=options) == (1, 0)
    assert "is not empty and holds no comparison" in capsys.readouterr().err


def test_a_changed_module_of_a_rule_is_noticed(place):
    (place / "script.py").write_text("")
    (place / "my_rules.py").write_text("")
    trace = {"t": BatchTrace.constant(8, 3)}
    common = {"script": place / "script.py", "traces": trace, "num_seeds": 1, "out": place / "out"}
    grid = Grid(rules=("my_rules:slow", "elsewhere:slow"), **common)
    with (
        grid.held(),
        pytest.raises(ValueError, match="another comparison is using"),
        grid.held(),
    ):
        pass
    (place / "my_rules.py").write_text("\n")
    with (
        pytest.raises(ValueError, match="the module of rule my_rules:slow has changed"),
        grid.held(),
    ):
        pass


def test_a_failed_run_is_told_of_and_the_others_are_run(place, pretend, capsys):
    assert pretend("fail") == (1, 6)
    out, err = capsys.readouterr()
    assert "t/linear/seed-1 failed with exit code 1; the end of its log:" in err
    assert "resilin:   this run is to fail" in err
    rows = {tuple(line.split()[:2]): line.split()[2] for line in out.splitlines()[1:]}
    assert rows == {("-", "reference"): "2", ("t", "linear"): "1", ("t", "constant"): "2"}
    assert json.loads((place / "out/table.json").read_text())["failures"] == ["t/linear/seed-1"]
    # Only that one is tried again.
    assert pretend("fail") == (1, 1)


def test_a_script_that_does_not_train_fails(pretend, capsys):
    assert pretend("silent")[0] == 1
    err = capsys.readouterr().err
    assert "no run has a result: failed: the script did not follow the trace" in err


def test_seeds_that_change_nothing_are_warned_of(pretend, capsys):
    assert pretend("fixed")[0] == 0
    err = capsys.readouterr().err
    assert "warning: linear on t: all 2 seeds gave identical runs" in err
    assert err.count("warning") == 3


def test_the_metric_has_to_be_clear_after_the_first_run(place, pretend, capsys):
    options = ["--rules=linear", "--trace=t.csv", "--seeds=1", "--jobs=1"]
    assert pretend("two", options=options) == (1, 1)
    assert "the script records other, score: choose one with --metric" in capsys.readouterr().err
    assert pretend("two", options=[*options, "--metric=size"]) == (1, 0)
    assert "'size' was not recorded between steps; recorded were: other, score" in (
        capsys.readouterr().err
    )
    assert pretend("two", options=[*options, "--metric=score"]) == (0, 1)


def test_a_loss_of_steps_is_the_mean_of_the_last_tenth(place, pretend, capsys):
    options = ["--rules=linear", "--trace=t.csv", "--seeds=1"]
    assert pretend("loss-only", options=options)[0] == 0
    result = json.loads((place / "out/t/linear/seed-0/result.json").read_text())
    assert result["metrics"] == {}
    assert result["step_loss"] == pytest.approx((1 / 19 + 1 / 20) / 2)
    assert capsys.readouterr().out.split()[3] == "loss"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rules=fast", "--trace=t.csv"], "rule ('fast') must be one of"),
        (["--rules=legw", "--trace=t.csv"], "rule 'legw' with parameters {}"),
        (["--rules=linear,linear", "--trace=t.csv"], "rule 'linear' is given twice"),
        (["--rules=linear", "--trace=t.csv", "--trace=./t.csv"], "two traces are named 't'"),
        (["--rules=linear", "--trace=u.csv"], "local_bsz (None)"),
        (["--rules=linear", "--trace=reference.csv"], "must not be 'reference'"),
        (["--rules=linear", "--trace=none.csv"], "none.csv: No such file"),
    ],
)
def test_what_cannot_be_compared_is_one_line(place, pretend, capsys, options, message):
    (place / "reference.csv").write_text("step,batchsize\n0,16\n")
    assert pretend(options=options) == (1, 0)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("resilin: ")
    assert message in line
    assert not (place / "out").exists()


def test_a_comparison_needs_rules_and_traces(place, capsys):
    (place / "script.py").write_text("")
    with pytest.raises(SystemExit, match="2"):
        command.main(["script.py"])
    assert "--rules, --trace" in capsys.readouterr().err
    with pytest.raises(ValueError, match="at least one rule and one trace"):
        Grid(
            script=place / "script.py",
            rules=("linear",),
            traces={},
            num_seeds=1,
            out=place / "out",
        )


def test_numbers_have_the_digits_that_their_interval_allows():
    assert in_words(Interval(0.951234, 0.00321, 5)) == "0.9512 +- 0.0032"
    assert in_words(Interval(951.234, 32.1, 5)) == "951 +- 32"
    assert in_words(Interval(0.5, 0.0, 5), sign="+") == "+0.5000 +- 0.0000"
    assert in_words(Interval(0.5, math.nan, 1)) == "0.5"
    assert in_words(Interval(math.nan, math.nan, 3)) == "not finite"
    assert in_words(Interval(math.nan, math.nan, 0)) == "-"


def result(**kwargs):
    plain = {"metrics": {}, "step_loss": None, "curves": {}, "steps": 1, "samples": 1}
    return Result(**{**plain, "progress": 1.0, "seconds": 1.0, **kwargs})


def test_a_result_survives_its_file_even_where_it_is_not_a_number():
    whole = result(metrics={"a": 0.5}, curves={"a": ((1.0, 2.0), (0.1, 0.2))})
    assert Result.from_dict(json.loads(json.dumps(whole.to_dict()))) == whole
    astray = result(metrics={"a": math.inf}, curves={"a": ((1.0,), (math.nan,))})
    plain = json.dumps(astray.to_dict(), allow_nan=False)
    back = Result.from_dict(json.loads(plain))
    assert math.isnan(back.value("a"))
    assert math.isnan(back.curves["a"][1][0])


def test_a_metric_is_chosen_or_the_only_one():
    one, two = result(metrics={"a": 1.0}), result(metrics={"a": 1.0, "b": 2.0})
    assert choose_metric([one], None) == "a"
    assert choose_metric([one, two], "a") == "a"
    assert choose_metric([result(step_loss=1.0)], None) == "loss"
    for results, wanted in (([one, two], None), ([one, two], "b"), ([result()], None)):
        with pytest.raises(UnclearMetric):
            choose_metric(results, wanted)


def test_a_mean_curve_is_where_all_curves_are():
    samples, mean, half = mean_curve([((0.0, 10.0), (0.0, 10.0)), ((5.0, 20.0), (7.0, 7.0))])
    assert (samples[0], samples[-1]) == (5, 10)
    assert (mean[0], mean[-1]) == (6, 8.5)
    assert half[0] == pytest.approx(mean_interval([5.0, 7.0]).half)
    assert all(len(part) == 0 for part in mean_curve([((), ())]))
    assert all(len(part) == 0 for part in mean_curve([((0.0,), (1.0,)), ((5.0,), (1.0,))]))


def row(trace, rule, values, curves):
    interval = mean_interval(values)
    difference = None if rule == "reference" else interval
    facts = {"steps": 1, "samples": 1, "progress": 1, "values": tuple(values)}
    return Row(
        trace=trace, rule=rule, value=interval, difference=difference, curves=curves, **facts
    )


def test_the_picture_bears_runs_that_went_astray(tmp_path):
    curve = ((1.0, 2.0, 3.0), (0.5, 0.6, 0.7))
    astray = ((1.0, 2.0, 3.0), (0.5, math.nan, 1e30))
    rows = [
        row("", "reference", [0.7, 0.71], (curve, curve)),
        row("a", "linear", [0.6, math.nan], (curve, astray)),
        row("a", "my_rules:with_a_rather_long_name", [0.6], (curve,)),
        row("b", "sqrt", [], ()),
    ]
    figure = draw(Comparison(metric="accuracy", rows=tuple(rows)), "%")
    save_png(figure, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    labels = {ax.get_xlabel() for ax in figure.axes} | {ax.get_ylabel() for ax in figure.axes}
    assert {"samples used (thousands)", "accuracy (%)"} <= labels


def test_a_cell_knows_its_place(tmp_path):
    assert Cell(None, None, 3).place == "reference/seed-3"
    assert Cell("t", "a.b:c", 0).place == "t/a.b-c/seed-0"
    (tmp_path / "log").write_bytes(b"\n".join(b"%d \xff" % n for n in range(99)))
    assert log_end(tmp_path / "log").splitlines()[0].startswith("87 ")


@pytest.mark.nightly(part="jobs")
@pytest.mark.skipif(not DATA.is_dir(), reason=f"public traces are not in {DATA} (RESILIN_DATA)")
def test_the_example_is_compared_on_the_public_traces(tmp_path, capsys):
    names = ("batchsize_mnist", "gcp_spot_a100", "gcp_spot_tpuv2")
    traces = [part for name in names for part in ("--trace", str(DATA / f"{name}.csv"))]
    options = ["--restarts", "append", "--end", "repeat", "--max-replicas", "16"]
    options += ["--local-bsz", "8", "--step-seconds", "2min", "--seeds", "1", "--json"]
    out = tmp_path / "out"
    script = [str(ROOT / "examples" / "lab_digits.py"), "--epochs", "2"]
    assert command.main(["--rules", "sqrt", *traces, *options, "--out", str(out), *script]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["trace"] for row in rows] == [None, *names]
    # Two passes over the data in all of them, in fewer and larger steps under a trace.
    assert {row["samples"] for row in rows} == {2 * 1280}
    assert all(row["steps"] < rows[0]["steps"] for row in rows[1:])
    assert (out / "compare.png").stat().st_size > 10_000
