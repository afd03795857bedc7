"""`resilin sched simulate`."""

from __future__ import annotations

import json
import re

import pytest

from resilin.cli.sched import simulate

POLICIES = "fifo,ours"


@pytest.fixture
def workload(tmp_path):
    """Four jobs that train a model whose steps take 0.1 s and 1 ms a sample."""
    folder = tmp_path / "traces" / "tiny"
    folder.mkdir(parents=True)
    lines = ["placement,local_bsz,step_time,sync_time"]
    for placement in ("1", "2", "3", "4", "44"):
        wait = 0.0 if placement == "1" else 0.05
        lines += [f"{placement},{b},{0.1 + b / 1000 + wait},{wait}" for b in (20, 100)]
    (folder / "placements.csv").write_text("\n".join(lines))
    header = "num_nodes,num_replicas,local_bsz,step_time,sync_time\n"
    (folder / "scalability.csv").write_text(header + "4,16,20,0.2,0.1\n4,16,100,0.3,0.1\n")
    header = "progress,iteration,metric,grad_sqr,grad_var\n"
    (folder / "validation-100.csv").write_text(header + "1000,1000,0,1,5\n2000,2000,0,1,9\n")
    (folder / "validation-400.csv").write_text(header + "1000,400,0,1,5\n2000,700,0,1,9\n")
    path = tmp_path / "workloads" / "some.csv"
    path.parent.mkdir()
    lines = ["name,time,application,num_replicas,batch_size"]
    lines += [f"job-{i},{i * 40},tiny,{1 + i},200" for i in range(4)]
    path.write_text("\n".join(lines))
    return path


def run(capsys, *arguments):
    code = simulate.main([str(each) for each in arguments])
    return code, capsys.readouterr()


def test_both_assumptions_about_the_end_are_shown_unless_one_is_asked_for(capsys, workload):
    options = ("--nodes", 2, "--policy", POLICIES, "--processes", 1)
    code, told = run(capsys, workload, *options, "--json")
    assert code == 0
    rows = json.loads(told.out)
    assert [(row["policy"], row["end"]) for row in rows] == [
        ("fifo", "known"),
        ("fifo", "unknown"),
        ("ours", "known"),
        ("ours", "unknown"),
    ]
    assert rows[0]["typical"] == rows[0]["worst"] == rows[0]["no_slower"] == 1.0
    assert rows[0]["mean"] == rows[1]["mean"] > rows[2]["mean"]
    code, told = run(capsys, workload, *options, "--end", "unknown")
    assert code == 0
    lines = told.out.splitlines()
    assert lines[0].split()[:4] == ["policy", "end", "rescale", "mean"]
    assert [line.split()[0] for line in lines[1:3]] == ["fifo", "ours"]
    assert lines[3] == ""
    assert "1 workload on 2 nodes of 4" in lines[4]


def test_each_cost_of_a_rescale_is_a_row_and_processes_change_nothing(capsys, workload):
    options = (workload, "--nodes", 2, "--policy", "ours", "--end", "known", "--rescale", "30,1")
    _, one = run(capsys, *options, "--json", "--processes", 1)
    _, two = run(capsys, *options, "--json", "--processes", 2)
    assert one.out == two.out
    assert [row["rescale"] for row in json.loads(one.out)] == [30, 1]


def test_the_page_has_the_table_and_a_chart_for_each_row(capsys, workload, tmp_path):
    page = tmp_path / "page.html"
    options = ("--nodes", 2, "--policy", POLICIES, "--end", "known", "--processes", 1)
    code, told = run(capsys, workload, *options, "--html", page)
    assert code == 0
    text = page.read_text()
    for line in told.out.splitlines()[1:3]:
        for cell in line.split():
            assert f"<td>{cell}</td>" in text
    assert len(re.findall("<details", text)) == 2
    assert text.count("job-3</text>") == 2


def test_jobs_are_compared_with_published_times(capsys, workload, tmp_path):
    summary = tmp_path / "summary.json"
    times = {f"job-{i}": 1e6 for i in range(4)}
    summary.write_text(json.dumps({"jcts": {"some": times}}))
    options = (workload, "--nodes", 2, "--policy", "fifo", "--end", "known", "--processes", 1)
    _, told = run(capsys, *options, "--against", summary, "--json")
    (row,) = json.loads(told.out)
    assert row["no_slower"] == 1.0
    assert row["worst"] < 0.01
    summary.write_text(json.dumps({"jcts": {"other": times}}))
    code, told = run(capsys, *options, "--against", summary)
    assert code == 1
    assert "must have the workload some" in told.err


def test_nodes_come_and_go_with_a_trace(capsys, workload, tmp_path):
    trace = tmp_path / "capacity.csv"
    trace.write_text("time,replicas\n0,8\n300,4\n600,8\n900,8\n")
    options = (workload, "--nodes", 2, "--policy", "ours", "--end", "unknown", "--processes", 1)
    code, told = run(capsys, *options, "--capacity", trace)
    assert code == 0
    assert "at most 2 nodes of 4, as in capacity.csv" in told.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--policy", "best"), "policy ('best') must be one of fifo"),
        (("--rescale", "30,fast"), "--rescale ('fast') must be seconds"),
        (("--end", "soon"), "end ('soon') must be one of known, unknown, wrong"),
        (("--traces", "nowhere"), "must be one that has records in nowhere: there are none"),
        (("--capacity", "missing.csv"), "missing.csv: No such file or directory"),
    ],
)
def test_mistakes_are_one_line(capsys, workload, options, message):
    code, told = run(capsys, workload, "--processes", 1, *options)
    assert code == 1
    assert message in told.err
    assert told.err.count("\n") == 1
