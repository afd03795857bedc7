"""Records of an application, and jobs that train by them, on records small enough to check."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from resilin.cluster.simulation.applications import Application
from resilin.cluster.simulation.training import GivenTraining, Offer, RecordedTraining, Speeds
from resilin.cluster.simulation.workload import read

HEADER = "name,time,application,num_replicas,batch_size\n"


def records(folder: Path) -> Path:
    """Records of a model whose steps take 0.1 s and 1 ms a sample, and 0.1 s of waiting."""
    folder.mkdir(parents=True)
    lines = ["placement,local_bsz,step_time,sync_time"]
    for placement in ("1", "2", "4", "11", "12", "44"):
        wait = 0.0 if placement == "1" else 0.1
        lines += [f"{placement},{b},{0.1 + b / 1000 + wait},{wait}" for b in (20, 40, 100)]
    (folder / "placements.csv").write_text("\n".join(lines) + "\n")
    lines = ["num_nodes,num_replicas,local_bsz,step_time,sync_time"]
    lines += [
        f"{hosts},{hosts * each},{b},{0.3 + b / 1000},0.2"
        for hosts in (4, 16)
        for each in (1, 4)
        for b in (20, 100)
    ]
    (folder / "scalability.csv").write_text("\n".join(lines) + "\n")
    header = "progress,iteration,metric,grad_sqr,grad_var\n"
    (folder / "validation-100.csv").write_text(header + "100,100,0,1,1\n200,200,0,1,3\n")
    (folder / "validation-200.csv").write_text(header + "99,66,0,2,1\n199,122,0,2,5\n")
    return folder


@pytest.fixture
def app(tmp_path: Path) -> Application:
    return Application(records(tmp_path / "traces" / "tiny"))


def test_bounds_are_those_of_the_records(app):
    assert (app.reference, app.max_batch_size, app.max_epochs) == (100, 200, 2)
    assert app.local_bsz_bounds == (20, 100)
    assert app.most_per_host == 4


def test_measured_placements_are_interpolated_between_micro_batches(app):
    assert app.step_seconds((1,), 30) == pytest.approx((0.13, 0.0))
    assert app.step_seconds((4,), 70) == pytest.approx((0.27, 0.1))


def test_a_ring_may_be_entered_anywhere(app):
    assert app.step_seconds((2, 1), 20) == app.step_seconds((1, 2), 20)


def test_other_placements_are_interpolated_between_hosts_and_replicas(app):
    step, sync = app.step_seconds((2, 2), 20)
    # Between two hosts (0.22) and four (0.32).
    assert 0.22 < step < 0.32
    assert 0.1 < sync < 0.2


def test_what_was_never_measured_is_an_error_with_the_limits(app):
    with pytest.raises(ValueError, match="at most 4 were on a host, and 64 in all"):
        app.step_seconds((8,), 20)


def test_records_between_two_batches_are_interpolated(app):
    assert app.statistics(150, 0) == (1.5, 1.0)
    assert app.statistics(100, 1) == (1.0, 3.0)
    assert app.iteration(150, 1) == 161.0
    assert [app.progress(epoch) for epoch in range(3)] == [0.0, 99.0, 199.0]
    with pytest.raises(ValueError, match="global batch 201 must be from 100 to 200"):
        app.statistics(201, 0)


def test_a_fixed_batch_trains_as_its_records_say(app):
    # One replica splits 200 in two micro-batches of 100: 0.4 s a step. Its gain is
    # (1 + 2) / (1/2 + 2) = 1.2 in the first epoch, (5 + 2) / (5/2 + 2) in the second.
    training = RecordedTraining(app, batch_size=200)
    training.place("gpu", (1,))
    assert training.run(20.0) == (20.0, False)
    assert training.done == pytest.approx(100 * 20 * 1.2 / 0.4)
    # 99 - 60 left at 3 a second: 13 s. Then 100 at 3.889 a second: 25.71 s, rounded to 26.
    assert training.run(100.0) == (39.0, True)
    assert training.done == training.total == 100 * 199
    assert training.profiled == 1


def test_an_oracle_tells_true_steps_per_second_and_steps_to_go(app):
    training = RecordedTraining(app, batch_size=200, oracle=True)
    (speeds,) = training.speeds([Offer.of("gpu", range(1, 5), 4)])
    assert speeds.goodput[0] == pytest.approx(1 / 0.4)
    assert speeds.goodput[1] == pytest.approx(1 / 0.3)
    assert (training.done, training.total) == (66, 122)


def test_an_adaptive_job_reports_what_it_fitted_once_it_has_run(app):
    training = RecordedTraining(app, batch_size=None)
    offer = Offer.of("gpu", (1, 2, 4, 8), 4)
    assert training.speeds([offer]) == ()
    training.place("gpu", (1,))
    training.run(5.0)
    (speeds,) = training.speeds([offer])
    # A gain of 1 for each step of 0.2 s is 500 reference samples a second.
    assert 400 < speeds.goodput[0] < 700
    assert speeds.sizes == (1, 2, 4, 8)
    assert training.profiled == 1


def test_given_speeds_are_interpolated_and_work_ends_where_it_should():
    speeds = Speeds(kind="gpu", sizes=(1, 4), goodput=(1.0, 2.5))
    training = GivenTraining(10.0, (speeds,))
    training.place("gpu", (2,))
    assert training.run(2.0) == (2.0, False)
    assert training.done == 3.0
    training.place("gpu", (4, 4))
    assert training.run(60.0) == (pytest.approx(2.8), True)
    with pytest.raises(ValueError, match=r"kind \(tpu\) must be one that the job has speeds for"):
        training.place("tpu", (1,))


def test_a_workload_is_read_with_its_optional_columns(tmp_path):
    records(tmp_path / "traces" / "tiny")
    path = tmp_path / "w.csv"
    header = HEADER.strip() + ",tenant,priority,preemptible,max_replicas\n"
    path.write_text(header + "b,9,tiny,2,200,lab,1,false,4\na,5,tiny,1,100,,,,\n")
    first, second = read(path, tmp_path / "traces")
    assert (first.wishes.id, second.wishes.id) == ("a", "b")
    assert first.spec("nothing").max_replicas == 1
    # A batch of 200 has at most 10 micro-batches of 20.
    assert first.spec("all").max_replicas == 10
    spec = second.spec("all")
    assert (spec.tenant, spec.priority, spec.preemptible, spec.max_replicas) == ("lab", 1, False, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,time\na,1\n", "must have the columns"),
        (HEADER, "at least one job"),
        (HEADER + "a,0,huge,1,100\n", r"w.csv:2: application \(huge\) must be one .*: tiny"),
        (HEADER + "a,0,tiny,1,5\n", r"batch_size \(5\) must be from 100 to 200"),
        (HEADER + "a,0,tiny,0,100\n", r"num_replicas \(0\) must be from 1 to 64"),
        (HEADER + "a,soon,tiny,1,100\n", "w.csv:2: .*soon"),
        (HEADER + "A!,0,tiny,1,100\n", "lower-case"),
        (HEADER + "a,0,tiny,1,100\na,1,tiny,1,100\n", "two jobs have the name a"),
    ],
)
def test_a_wrong_workload_is_an_error_that_names_the_line(tmp_path, text, message):
    records(tmp_path / "traces" / "tiny")
    path = tmp_path / "w.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read(path, tmp_path / "traces")


def test_records_that_are_missing_or_wrong_are_errors_that_name_the_file(tmp_path):
    with pytest.raises(ValueError, match=r"at least one validation-B\.csv"):
        Application(tmp_path)
    folder = records(tmp_path / "a")
    (folder / "scalability.csv").unlink()
    with pytest.raises(ValueError, match=r"scalability.csv: must be a file"):
        Application(folder)
    folder = records(tmp_path / "b")
    (folder / "placements.csv").write_text("placement,local_bsz\n1,2\n")
    with pytest.raises(ValueError, match=r"placements.csv: must have the column step_time"):
        Application(folder)
    folder = records(tmp_path / "c")
    (folder / "validation-100.csv").write_text("progress,iteration,grad_sqr,grad_var\n1,2,x,4\n")
    with pytest.raises(ValueError, match=r"validation-100.csv:2: .*x"):
        Application(folder)


def test_without_scipy_the_error_names_the_command_that_installs_it(tmp_path):
    folder = records(tmp_path / "tiny")
    script = (
        "import sys\nfrom pathlib import Path\nsys.modules['scipy.interpolate'] = None\n"
        "from resilin.cluster.simulation.applications import Application\n"
        f"app = Application(Path({str(folder)!r}))\nprint(app.step_seconds((1,), 20))\n"
        "app.step_seconds((2, 2), 20)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.startswith("(0.12")
    assert "pip install 'resilin[cluster]'" in done.stderr
