"""What the benchmarks of streams can tell, and the example of streams under a kill."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

HISTORIES = """
import json, random
import streams
from resilin.core.shard_order import Turn

dice, take, plain_order = random.Random(0), Turn.take, streams.plain_order
right = sum(streams.history_differs(dice) for _ in range(100))

def noted(*args):
    global samples
    samples = set(order := plain_order(*args))
    return order

def swapped(self, num, lengths, replicas=1):
    global changed
    taken, after = take(self, num, lengths, replicas)
    # A batch with samples that do not exist is planned anew.
    if len(taken) > 1 and samples.issuperset(zip(taken.shards.tolist(), taken.indices.tolist())):
        changed = True
        for part in (taken.shards, taken.indices):
            part[-2:] = part[-2:][::-1].copy()
    return taken, after

streams.plain_order, Turn.take = noted, swapped
told = []
for _ in range(100):
    changed = False
    told.append((streams.history_differs(dice), changed))
print(json.dumps([right, sum(found for found, _ in told), sum(made for _, made in told)]))
"""

ROWS = """
import json
import streams_table as table

rows = {"2": {"repeated": 3, "missing": 1}, "3": {"refused": "no"}}
print(json.dumps([table.wrong(rows), table.NUM_SAMPLES]))
"""


def run(code: str) -> list[int]:
    path = os.pathsep.join((str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=100,
    )
    found: list[int] = json.loads(done.stdout)
    return found


def test_histories_are_told_from_those_of_another_order() -> None:
    right, found, changed = run(HISTORIES)
    assert right == 0
    # Two neighbours change places in each batch that has two.
    assert found == changed > 50


def test_a_row_that_was_refused_counts_as_wrong() -> None:
    wrong, num_samples = run(ROWS)
    assert wrong == num_samples + 4


@pytest.mark.nightly(part="benchmarks")
@pytest.mark.timeout(300)
def test_the_example_loses_no_token_when_a_worker_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "resilin.cli", "run", "--nproc", "2", "--run-dir", "off"]
    command += ["--memory-dir", str(tmp_path / "memory"), str(ROOT / "examples/stream_text.py")]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=environ, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 240
        while "step   40" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(worker_of(process.pid), signal.SIGKILL)
        assert process.wait(deadline - time.monotonic()) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    text = log.read_text()
    assert "restarting the workers (restart 1 of" in text
    epochs = re.findall(r"epoch (\d): (\d+) rows, (\d+) tokens", text)
    # Shards have other files in each epoch, so rows that are filled up differ; tokens do not.
    assert [epoch for epoch, _, _ in epochs] == ["0", "1"]
    assert {tokens for _, _, tokens in epochs} == {str(num_tokens())}


def worker_of(agent: int) -> int:
    found = subprocess.run(
        ["pgrep", "-P", str(agent), "-f", "stream_text"], capture_output=True, text=True, timeout=10
    )
    return int(found.stdout.split()[-1])


def num_tokens() -> int:
    """Bytes of all documents that the example trains on, and a separator after each."""
    import email

    files = sorted(Path(email.__file__).parent.glob("[a-m]*.py"))[2:]
    documents = [part for path in files for part in path.read_text().split("\n\n")]
    return sum(len(part.encode()) + 1 for part in documents)
