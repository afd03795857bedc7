import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilin.cli import plan
from resilin.core.plan import BatchBounds


def run(capsys, *arguments):
    code = plan.main([str(argument) for argument in arguments])
    return code, capsys.readouterr().out


def test_the_table_of_256_over_64(capsys):
    code, out = run(capsys, 256, "--max-local", 64, "--replicas", "1-4,8,300")
    assert code == 0
    assert out.splitlines() == [
        "replicas  micro-batch  accumulation  per replica  idle    work  balance",
        "       1           64             4          256     0  100.0%   100.0%",
        "       2           64             2          128     0   50.0%   100.0%",
        "       3        42-43             2        85-86     0   33.6%    99.2%",
        "       4           64             1           64     0   25.0%   100.0%",
        "       8           32             1           32     0   12.5%   100.0%",
        "     300            1             1          0-1    44    0.4%    85.3%",
        "",
        "Every row is the same step: 256 samples and their mean gradient.",
    ]


def test_the_table_in_the_guide_is_what_the_command_prints(capsys):
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "planning.md").read_text()
    command, table = re.search(
        r"^resilin plan ([^\n]*)\n```\n\n```text\n(.*?)```", guide, re.MULTILINE | re.DOTALL
    ).groups()
    assert run(capsys, *command.split()) == (0, table)


def test_what_cannot_be_planned_says_why_in_its_row(capsys):
    code, out = run(capsys, 256, "--max-local", 64, "--min-local", 60, "--replicas", "3,4")
    assert code == 0
    reason = out.splitlines()[1]
    assert reason.split()[:3] == ["3", "not", "possible:"]
    assert "smaller (42) than the smallest (60)" in reason
    code, out = run(capsys, 256, "--max-local", 64, "--no-accumulation", "--replicas", 2, "--json")
    assert code == 1
    (row,) = json.loads(out)
    assert (row["replicas"], row["possible"]) == (2, False)
    assert "accumulation is off" in row["reason"]


def test_the_largest_global_batch_limits_the_replicas(capsys):
    limits = ["--min-local", 100, "--max-local", 200, "--max-batch", 1000]
    code, out = run(capsys, 1000, *limits, "--replicas", "10,11", "--json")
    assert code == 0
    assert [row["possible"] for row in json.loads(out)] == [True, False]
    code, out = run(capsys, 1001, *limits, "--replicas", 8)
    assert code == 1
    assert "(1001) exceeds max_batch_size (1000)" in out


def test_bounds_that_contradict_each_other_are_wrong_usage(capsys):
    with pytest.raises(SystemExit) as end:
        plan.main(["256", "--min-local", "65", "--max-local", "64"])
    assert end.value.code == 2
    assert "--min-local (65) must be at most --max-local (64)" in capsys.readouterr().err


@given(st.integers(1, 500), st.integers(1, 64), st.integers(1, 40))
def test_the_numbers_are_those_of_the_plan_itself(batch, max_local, replicas):
    bounds = BatchBounds(local_bsz_bounds=(0, max_local))
    row = plan._row(bounds, batch, replicas)
    parts = [bounds.plan(batch, replicas).micro_batches(replica) for replica in range(replicas)]
    sizes = [size for part in parts for size in part if size]
    shares = [sum(part) for part in parts]
    assert sum(sizes) == batch == row["global_batch"]
    assert (row["smallest_micro_batch"], row["micro_batch"]) == (min(sizes), max(sizes))
    assert row["micro_batch"] - row["smallest_micro_batch"] <= 1
    assert (row["smallest_share"], row["largest_share"]) == (min(shares), max(shares))
    assert row["accumulation"] == max(map(len, parts))
    assert row["idle_replicas"] == shares.count(0)
    assert row["work"] == max(shares) / batch
    assert row["balance"] == pytest.approx(sum(shares) / replicas / max(shares))
