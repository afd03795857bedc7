"""Signs of life, with a clock that is set."""

import os
from dataclasses import dataclass

from resilin.cli.live.guard import MOST_SEEN, TICK, Heartbeats
from resilin.cli.live.workers import Worker


@dataclass
class Process:
    pid: int

    def poll(self):
        return None


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def silence(heartbeats, clock, worker, beats, seconds):
    """Lets time pass in ticks, with one look each; returns all who froze."""
    found = []
    for _ in range(round(seconds / TICK)):
        clock.now += TICK
        found += heartbeats.frozen([worker], beats)
    return found


def test_a_worker_freezes_after_its_first_sign_of_life_and_not_before():
    clock = Clock()
    heartbeats = Heartbeats(5.0, clock)
    worker = Worker(0, "job-0", 0, Process(os.getpid()))
    assert silence(heartbeats, clock, worker, {}, 60) == []
    assert silence(heartbeats, clock, worker, {"job-0": 1}, 4.5) == []
    assert silence(heartbeats, clock, worker, {"job-0": 2}, 4.5) == []
    assert silence(heartbeats, clock, worker, {"job-0": 2}, 1.0)[0] is worker


def test_time_in_which_the_launcher_was_stopped_does_not_count():
    clock = Clock()
    heartbeats = Heartbeats(5.0, clock)
    worker = Worker(0, "job-0", 0, Process(os.getpid()))
    assert list(heartbeats.frozen([worker], {"job-0": 1})) == []
    clock.now += 3600
    assert list(heartbeats.frozen([worker], {"job-0": 1})) == []
    assert worker.silent == MOST_SEEN
