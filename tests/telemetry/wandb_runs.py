"""Runs of Weights & Biases without a network, read back from what they wrote.

    python tests/telemetry/wandb_runs.py DIRECTORY

A test runs it in a process of its own.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.update(
    WANDB_MODE="offline", WANDB_SILENT="true", WANDB_CONSOLE="off", WANDB_ERROR_REPORTING="false"
)
sys.path.insert(0, str(Path(__file__).parents[2]))

import wandb
from wandb.proto import wandb_internal_pb2

from resilin.telemetry.scalars import scalars, words
from resilin.telemetry.wandb import WandB
from tests.telemetry.happenings import ALL, FAULT, RESCALE, START, step

HEADER, BLOCK, FRAME = 7, 32768, struct.Struct("<IHB")


def records(path: Path) -> Iterator[Any]:
    """The records of a run's file: frames in blocks, as in the log of LevelDB."""
    data, at, record = path.read_bytes(), HEADER, b""
    while at + FRAME.size <= len(data):
        left = BLOCK - at % BLOCK
        if left < FRAME.size:
            at += left
            continue
        _, length, part = FRAME.unpack_from(data, at)
        at += FRAME.size
        record += data[at : at + length]
        at += length
        if at > len(data):
            return  # the rest is not written yet
        if part in (1, 4):  # a whole record, or the last part of one
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def rows(run: Any, directory: Path) -> list[dict[str, Any]]:
    """Finishes a run, and reads all rows of its history."""
    run.finish()
    (path,) = directory.glob(f"wandb/offline-run-*/run-{run.id}.wandb")
    deadline = time.monotonic() + 60
    # The service writes the file, and is not waited for.
    while not (found := list(records(path))) or found[-1].WhichOneof("record_type") != "exit":
        assert time.monotonic() < deadline, f"{path} has no end"
        time.sleep(0.01)
    return [
        {item.nested_key[0] or item.key: json.loads(item.value_json) for item in r.history.item}
        for r in found
        if r.WhichOneof("record_type") == "history"
    ]


def curve(found: list[dict[str, Any]], name: str) -> list[tuple[Any, Any]]:
    """A curve as W&B draws it, over the step metric."""
    return [(row["resilin/step"], row[name]) for row in found if name in row]


def the_sink_alone(directory: Path) -> None:
    run = wandb.init(dir=directory)
    sink = WandB(run)
    for event in ALL:
        sink(event)
    found = rows(run, directory)
    names = {name for event in ALL for name in scalars(event)}
    assert {f"resilin/{name}" for name in names} <= {name for row in found for name in row}
    assert curve(found, "resilin/loss") == [(1, 2.0), (2, 1.0), (4, 0.5)]
    assert curve(found, "resilin/fault") == [(3, words(FAULT))]


def a_script_with_its_own_steps(directory: Path, first: int, told_late: bool = True) -> None:
    run = wandb.init(dir=directory)
    sink = WandB(run)
    for number in range(1, 30):
        if not told_late:
            sink(step(number))
        run.log({"mine": number}, step=first + number - 1)
        run.log({"also_mine": -number}, step=first + number - 1)
        if told_late:
            sink(step(number))
        if number == 20:
            for event in (RESCALE, START, FAULT):
                sink(replace(event, step=20))
    found = rows(run, directory)
    # Each number of the script is in the row that it named.
    assert [(r["mine"], r["also_mine"], r["_step"]) for r in found if "mine" in r] == [
        (n, -n, first + n - 1) for n in range(1, 30)
    ]
    assert [at for at, _ in curve(found, "resilin/gain")] == list(range(1, 30))


def a_script_that_lets_wandb_count(directory: Path) -> None:
    run = wandb.init(dir=directory)
    sink = WandB(run)
    for number in range(1, 30):
        sink(step(number))
        run.log({"mine": number})
        run.log({"mine": number + 0.5})
    found = rows(run, directory)
    assert [row["mine"] for row in found if "mine" in row] == [n / 2 for n in range(2, 60)]
    assert [at for at, _ in curve(found, "resilin/gain")] == list(range(1, 30))


def a_script_that_counts_epochs(directory: Path) -> None:
    run = wandb.init(dir=directory)
    sink = WandB(run, rows=False)
    for number in range(1, 31):
        sink(step(number))
        if number % 10 == 0:
            run.log({"mine": number}, step=number // 10)
    found = rows(run, directory)
    assert [(r["mine"], r["_step"]) for r in found if "mine" in r] == [(10, 1), (20, 2), (30, 3)]
    assert [at for at, _ in curve(found, "resilin/gain")] == [10, 20, 30]


def a_run_that_is_opened_by_the_first_event_and_resumed(directory: Path) -> None:
    def open_run(life: str) -> Any:
        (directory / life).mkdir()
        opened.append(wandb.init(dir=directory / life, id="one", resume="allow"))
        return opened[-1]

    opened: list[Any] = []
    sink = WandB(lambda: open_run("first"))
    sink(FAULT)
    assert not opened
    for number in range(1, 7):
        sink(step(number))
    found = rows(opened[0], directory / "first")
    assert [at for at, _ in curve(found, "resilin/gain")] == list(range(1, 7))
    # Another process, as a job that resumes is. W&B gives it the summary of the run; offline there
    # is none, so the test does.
    sink = WandB(lambda: with_summary(open_run("second"), {"resilin/step": 6}))
    for number in range(4, 9):
        sink(step(number))
    assert [run.id for run in opened] == ["one", "one"]
    found = rows(opened[1], directory / "second")
    assert [at for at, _ in curve(found, "resilin/gain")] == [7, 8]


def with_summary(run: Any, values: dict[str, Any]) -> Any:
    run.summary.update(values)
    return run


def a_run_that_is_switched_off() -> None:
    run = wandb.init(mode="disabled")
    sink = WandB(run)
    for event in ALL:
        sink(event)
    run.finish()


def main(directory: Path) -> None:
    the_sink_alone(directory)
    a_script_with_its_own_steps(directory, first=0)
    a_script_with_its_own_steps(directory, first=1)
    a_script_with_its_own_steps(directory, first=0, told_late=False)
    a_script_that_lets_wandb_count(directory)
    a_script_that_counts_epochs(directory)
    a_run_that_is_opened_by_the_first_event_and_resumed(directory)
    a_run_that_is_switched_off()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
