"""What the elasticity benchmark concludes from ledgers, and which faults it makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.elasticity import faults, figures, table

HERE = Path(__file__).parent.parent / "benchmarks" / "elasticity"
KINDS = ("kill", "lose", "leave", "kill")
Lines = list[dict[str, Any]]


def one_step(
    time: float, life: str, step: int, samples: list[list[int]], epoch: int = 0, dead: int = -1
) -> Lines:
    """The lines of a step whose workers had these samples; one may die before its second line."""
    lines: Lines = []
    for rank, own in enumerate(samples):
        who = {"host": rank, "pid": 10 + rank, "life": life, "step": step}
        facts = {"rank": rank, "replicas": len(samples), "epoch": epoch, "samples": own}
        lines.append({"time": time, "event": "begin", **who, **facts})
        if rank != dead:
            lines.append({"time": time + 0.01, "event": "done", **who})
    return lines


def account(lines: Lines, num_samples: int = 4, epochs: int = 1) -> tuple[int, int, int]:
    steps = figures.lineage(lines)
    return (*figures.samples(steps, num_samples, epochs), figures.redone(lines))


def test_each_sample_once_is_neither_repeated_nor_missing() -> None:
    lines = one_step(1, "a", 1, [[0], [3]]) + one_step(2, "a", 2, [[2], [1]])
    assert account(lines) == (0, 0, 0)


def test_planted_repeat_and_planted_gap_are_found() -> None:
    lines = one_step(1, "a", 1, [[0], [3]]) + one_step(2, "a", 2, [[0], [1]])
    assert account(lines) == (1, 1, 0)


def test_samples_of_another_epoch_do_not_make_up_for_missing_ones() -> None:
    lines = one_step(1, "a", 1, [[0, 1], [2, 2]]) + one_step(2, "a", 2, [[0, 1], [3, 2]], epoch=1)
    assert account(lines, epochs=2) == (1, 1, 0)


def test_samples_after_the_last_epoch_are_repeated() -> None:
    lines = one_step(1, "a", 1, [[0, 1], [2, 3]]) + one_step(2, "a", 2, [[0], [1]], epoch=1)
    assert account(lines) == (2, 0, 0)


def test_step_made_again_by_another_group_counts_once_and_is_redone() -> None:
    lines = one_step(1, "a", 1, [[0, 1], [2, 3]]) + one_step(5, "b", 1, [[0, 2], [1, 3]])
    assert account(lines) == (0, 0, 1)
    assert [part["life"] for part in figures.lineage(lines)[1].parts] == ["b", "b"]


def test_step_that_was_begun_and_given_up_does_not_count() -> None:
    given_up = [line for line in one_step(1, "a", 1, [[0, 1], [2, 3]]) if line["event"] == "begin"]
    assert account(given_up + one_step(2, "b", 1, [[0, 1, 2, 3]])) == (0, 0, 0)


def test_worker_killed_behind_its_step_has_trained_on_its_samples() -> None:
    lines = one_step(1, "a", 1, [[0, 1], [2, 3]], dead=1)
    assert account(lines) == (0, 0, 0)
    # Not all of the group had completed it: whoever makes it again loses nothing.
    assert account(lines + one_step(2, "b", 1, [[0, 1, 2, 3]])) == (0, 0, 0)


def test_job_is_full_when_all_hosts_have_made_one_step_together() -> None:
    lines = one_step(1, "a", 1, [[0], [1]]) + one_step(2, "b", 1, [[0], [1], [2]])
    assert figures.first_full(lines, 3) == 2.01
    assert figures.first_full(lines[:4], 3) is None


def test_seconds_to_the_next_step_leave_out_steps_that_are_redone() -> None:
    lines = [
        line
        for time, life, step in [(1, "a", 1), (2, "a", 2), (6, "b", 2), (7, "b", 3), (8, "b", 4)]
        for line in one_step(time, life, step, [[0]])
    ]
    assert figures.waits(lines, [2.5, 7.5], 8.01) == pytest.approx([5.0, 1.0])
    # A job that stands still has waited until its end.
    assert figures.waits(lines, [8.5], 20.01) == pytest.approx([12.0])


def test_useful_samples_are_distinct_in_their_epoch() -> None:
    lines = one_step(1, "a", 1, [[0, 1]]) + one_step(2, "a", 2, [[1, 2]])
    lines += one_step(3, "a", 3, [[1]], epoch=1)
    steps = figures.lineage(lines)
    assert figures.useful(steps, since=0) == 4
    assert figures.useful(steps, since=1.5) == 3


def test_lines_changed_are_those_of_code() -> None:
    plain = '"""A loop."""\n\nimport torch\n\nfor x in y:\n    train(x)\n'
    assert figures.lines_changed(plain, plain) == 0
    other = plain.replace("A loop", "Another").replace("    train(x)", "    # again\n    train(x)")
    assert figures.lines_changed(plain, other) == 0
    assert figures.lines_changed(plain, other.replace("train(x)", "train(x, y)\n    save()")) == 2


def test_schedule_is_the_same_for_a_seed_and_leaves_two_hosts_at_least() -> None:
    assert faults.schedule(3, KINDS) == faults.schedule(3, KINDS)
    assert len({tuple(faults.schedule(seed, KINDS)) for seed in range(8)}) == 8
    for seed in range(50):
        hosts, last = {0, 1, 2}, 0.0
        for fault in faults.schedule(seed, KINDS):
            assert fault.time > last
            last = fault.time
            if fault.what == "join":
                assert fault.host not in hosts
                hosts.add(fault.host)
            else:
                assert fault.host in hosts
            if fault.what in ("lose", "leave"):
                hosts.remove(fault.host)
            assert len(hosts) >= 2
        assert hosts == {0, 1, 2}


def test_spot_trace_becomes_hosts_that_are_lost_and_join() -> None:
    found = faults.spot([0, 10, 20, 40], [30, 10, 30, 0], seconds=4, seed=0)
    assert [(fault.time, fault.what) for fault in found] == [
        (1, "lose"),
        (1, "lose"),
        (2, "join"),
        (2, "join"),
        (4, "lose"),
        (4, "lose"),
    ]
    with pytest.raises(ValueError, match=r"times \(3\) as counts \(1\)"):
        faults.spot([0, 1, 2], [1], 1, 0)


def test_scripts_of_contenders_hold_what_the_plain_loop_does() -> None:
    """A script that lost the plain loop would be counted as all new, and measure something else."""
    plain = (HERE / "contenders" / "plain.py").read_text()
    for path in sorted((HERE / "contenders").glob("*_loop.py")):
        text = path.read_text()
        code = [line for line in text.splitlines() if line.strip()]
        assert figures.lines_changed(plain, text) < len(code), path.name
        for word in ("task.make()", "task.finish(", "task.BATCH", "task.EPOCHS", "Ledger("):
            assert word in text, (path.name, word)


def test_table_tells_who_did_not_finish_and_what_is_unknown() -> None:
    run = {"finished": False, "redone": 3, "repeated": 0, "missing": None, "waits": [1.0, 9.0]}
    entry = {"lines_changed": 7, "spot": {"goodput": [0.5, 0.4, 0.6]}}
    cells = table.row("x", entry, {"spot": [run, {**run, "redone": 5}]})
    assert cells[0] == "x (did not finish: 2 of 2)"
    assert cells[1:] == [
        "-",
        "0.50 (0.40 to 0.60)",
        "5.0 (1.0 to 9.0)",
        "4 (3 to 5)",
        "0",
        "-",
        "-",
        "7",
    ]
