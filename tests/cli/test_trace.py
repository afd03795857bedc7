import json
import struct
import sys

import pytest

from resilin.cli import trace
from resilin.core.trace import BatchTrace, CapacityTrace
from resilin.lab.trace_plots import draw


def run(capsys, *arguments):
    code = trace.main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "made"),
    [
        ("constant --size 8 --steps 3", BatchTrace.constant(8, 3)),
        ("constant --replicas 0 --duration 1h", CapacityTrace.constant(0, 3600)),
        ("ramp --from 64 --to 8 --steps 5", BatchTrace.ramp(64, 8, 5)),
        (
            "walk --min 8 --max 64 --steps 20 --seed 3 --ratio 1.5",
            BatchTrace.random_walk((8, 64), 20, seed=3, step_ratio=1.5),
        ),
        (
            "spot --max-replicas 8 --min-replicas 2 --duration 2h --mean-hold 90s",
            CapacityTrace.spot(8, 7200, seed=0, min_replicas=2, mean_hold=90),
        ),
        ("spot --max-replicas 8 --duration 2h", CapacityTrace.spot(8, 7200, seed=0)),
    ],
)
def test_traces_are_made(arguments, made, capsys, tmp_path):
    assert run(capsys, "make", *arguments.split()) == (0, made.format(), "")
    file = tmp_path / "made.csv"
    assert run(capsys, "make", *arguments.split(), "-o", file) == (0, "", "")
    assert file.read_text() == made.format()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("constant --size 8 --duration 9", 2, "takes --size with --steps, or --replicas with"),
        ("constant --size 8 --replicas 8 --steps 9", 2, "not allowed with"),
        ("walk --min 9 --max 8 --steps 9", 1, "resilin: upper bound (8) must be at least 9"),
        ("walk --min 8 --max 9 --steps 9 --ratio 1", 1, "step_ratio (1.0) must be above 1"),
        ("spot --max-replicas 8 --duration soon", 2, "'soon' is not a time above 0"),
        ("ramp --from 1 --to 2 --steps 3 -o /no/such/place", 1, "/no/such/place: No such file"),
    ],
)
def test_what_cannot_be_made_says_why(arguments, code, message, capsys):
    try:
        returned = trace.main(["make", *arguments.split()])
    except SystemExit as end:
        returned = end.code
    assert returned == code
    assert message in capsys.readouterr().err


@pytest.fixture
def files(tmp_path):
    """A trace of each kind, one that two were joined in, and one that is none."""
    texts = {
        "batches.csv": "step,batchsize\n0,64\n2,96\n5,32\n",
        "capacity.csv": ",Time,GPUs\n0,100,4\n1,110,0\n2,120,8\n3,140,2\n",
        "joined.csv": "step,batchsize\n0,64\n1,96\n0,32\n",
        "broken.csv": "step,batchsize\n0,none\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "picture.csv").write_bytes(b"\x89PNG\xff")
    return tmp_path


def test_a_check_says_what_is_in_a_trace(capsys, files, monkeypatch):
    monkeypatch.chdir(files)
    code, out, error = run(capsys, "check", "batches.csv", "capacity.csv")
    assert (code, error) == (0, "")
    assert out.splitlines() == [
        "file          kind      lines   length  min   mean  max  changes  at zero",
        "batches.csv   batches       3  6 steps   32  74.67   96        2        -",
        "capacity.csv  capacity      4     40 s    0   5.00    8        3    25.0%",
    ]
    rows = json.loads(run(capsys, "check", "--json", "batches.csv", "capacity.csv")[1])
    assert rows[1] == {
        "file": "capacity.csv",
        "kind": "capacity",
        "lines": 4,
        "length": 40.0,
        "unit": "s",
        "min": 0,
        "mean": 5.0,
        "max": 8,
        "changes": 3,
        "zero": 0.25,
    }
    assert rows[0]["zero"] is None


def test_a_check_names_every_bad_file_and_shows_the_good_ones(capsys, files, monkeypatch):
    monkeypatch.chdir(files)
    bad = ["broken.csv", "joined.csv", "no-such.csv", "picture.csv"]
    code, out, error = run(capsys, "check", "batches.csv", *bad)
    assert code == 1
    assert [line.split()[0] for line in out.splitlines()] == ["file", "batches.csv"]
    lines = error.splitlines()
    assert len(lines) == len(bad)
    assert lines[0].startswith("resilin: broken.csv, line 2: batchsize ('none')")
    assert "restarts='append'" in lines[1]
    assert lines[2] == "resilin: no-such.csv: No such file or directory"
    assert lines[3].startswith("resilin: picture.csv")
    code, out, error = run(capsys, "check", "--json", "batches.csv", "broken.csv")
    assert code == 1
    assert ["error" in row for row in json.loads(out)] == [False, True]
    assert run(capsys, "check", "--restarts", "append", "joined.csv")[0] == 0


def test_capacity_is_converted_to_batch_sizes(capsys, files):
    file = files / "capacity.csv"
    sizes = ["--local-bsz", 8, "--step-seconds", 5]
    expected = CapacityTrace.parse(file.read_text())
    assert run(capsys, "convert", file, *sizes) == (
        0,
        expected.batches(8, step_seconds=5).format(),
        "",
    )
    out = files / "out.csv"
    options = ["--max-replicas", 2, "--end", "repeat", "-o", out]
    assert run(capsys, "convert", file, *sizes, *options) == (0, "", "")
    fewer = expected.batches(8, step_seconds=5, max_replicas=2, end="repeat")
    assert BatchTrace.parse(out.read_text(), end="repeat") == fewer
    code, _, error = run(capsys, "convert", files / "batches.csv", *sizes)
    assert code == 1
    assert "already has batch sizes" in error


def test_traces_are_drawn(files, capsysbinary):
    out = files / "traces.png"
    names = [files / "batches.csv", files / "capacity.csv", files / "joined.csv"]
    options = ["--restarts", "append", "-o"]
    assert run(capsysbinary, "plot", *names, *options, out) == (0, b"", b"")
    picture = out.read_bytes()
    assert run(capsysbinary, "plot", *names, *options, "-") == (0, picture, b"")
    assert picture.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", picture[16:24])
    assert width > 1000
    assert height > 3 * 300


def test_panels_have_units_and_show_the_whole_trace():
    market = CapacityTrace((0.0, 1800.0, 3600.0, 7200.0, 10800.0), (4, 0, 0, 8, 8))
    figure = draw({"a/market.csv": market, "sizes": BatchTrace((0, 2, 9), (64, 96, 32))})
    capacity, batches = figure.axes
    assert (capacity.get_title(loc="left"), batches.get_title(loc="left")) == (
        "market.csv",
        "sizes",
    )
    assert (capacity.get_xlabel(), capacity.get_ylabel()) == ("time (hours)", "replicas (count)")
    assert (batches.get_xlabel(), batches.get_ylabel()) == (
        "optimizer step",
        "global batch (samples)",
    )
    assert capacity.get_xlim() == (0, 3)
    assert batches.get_xlim() == (0, 10)
    assert capacity.get_ylim()[1] > 8
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["value", "mean", "no replicas"]


@pytest.mark.parametrize(
    ("duration", "unit"), [(0, "seconds"), (90, "seconds"), (7000, "minutes"), (2e5, "days")]
)
def test_time_is_in_a_unit_that_suits_the_trace(duration, unit):
    times = (0.0, float(duration)) if duration else (0.0,)
    figure = draw({"t": CapacityTrace(times, (2,) * len(times))})
    assert figure.axes[0].get_xlabel() == f"time ({unit})"


def test_without_matplotlib_the_command_that_installs_it_is_named(files, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, error = run(capsys, "plot", files / "batches.csv", "-o", files / "t.png")
    assert code == 1
    assert error.endswith("needs matplotlib: pip install 'resilin[lab]'\n")
