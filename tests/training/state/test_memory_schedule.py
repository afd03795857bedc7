"""When states are copied to memory, and what happens where there is little of it."""

import itertools
import logging
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

import resilin
from resilin.core import recovery
from resilin.core.events import RiskEvent
from resilin.core.recovery import LOSS_EVERY, seconds_between_copies
from resilin.engine.base import Engine
from resilin.training.state import memory_file, memory_schedule, risk, startup
from resilin.training.state.memory import MemoryCopies, Place
from resilin.training.state.memory_schedule import LONGEST_PAUSE, CopyInterval, MemorySchedule
from resilin.training.state.registry import Registry
from resilin.training.state.snapshot import Snapshot, Version
from tests import forked
from tests.training.recovery_job import Job

SIZE = 100_000


class Large:
    """A state that says which step it is of."""

    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"data": torch.full((SIZE,), self.step, dtype=torch.int32), "replicas": 1}

    def load_state_dict(self, state):
        raise NotImplementedError


class Host:
    """One replica of a host whose memory has room for so many bytes of copies."""

    def __init__(self, directory, room, monkeypatch):
        self.directory = directory
        self.room = room
        monkeypatch.setattr(memory_file, "capacity", lambda _: self.room / memory_file.SHARE)
        self.begin(0)

    def begin(self, generation, resumed=None):
        engine, registry = Engine(), Registry()
        engine.raise_generation(generation)
        self.large = Large()
        registry.add("job", self.large)
        self.schedule = MemorySchedule(MemoryCopies(self.directory), 1, engine, registry)
        self.schedule.resumed = resumed
        self.generation = generation

    def keep(self, *steps, failed=0.0):
        for step in steps:
            self.schedule.counted(0.0, failed + self.schedule.votes()[1])
            self.large.step = step
            self.schedule.keep(Version(self.generation, step))
        self.schedule.wait()

    @property
    def versions(self):
        copies = MemoryCopies(self.directory)
        found = copies.scan().versions
        for version in found:
            # Whole, and that of its step.
            assert set(copies.scan().read(version).state("job")["data"].tolist()) == {version.step}
        return [(version.generation, version.step) for version in found]


@pytest.fixture
def host(tmp_path, monkeypatch):
    host = Host(tmp_path / "memory", 2**40, monkeypatch)
    host.keep(1, 2, 3)
    # Room for what there is, and for nothing beside it.
    host.room = sum(path.stat().st_size for path in host.directory.iterdir()) + 1000
    return host


def test_copies_go_on_where_one_generation_fits(host, caplog):
    caplog.set_level(logging.WARNING, "resilin")
    for generation in (1, 2, 3):
        (before, step) = host.versions[0]
        host.begin(generation, resumed=Version(before, step))
        host.keep(step + 1)
        # The first copy took the place of the older of the two. The newer stays until all replicas
        # are known to have completed theirs.
        assert host.versions == [(generation, step + 1), (before, step)]
        host.keep(step + 2)
        assert host.versions == [(generation, step + 2), (generation, step + 1)]
        host.keep(step + 3, step + 4)
        assert host.versions == [(generation, step + 4), (generation, step + 3)]
        assert host.schedule.at_risk == 0
    assert caplog.text == ""


def test_the_state_that_was_resumed_stays_while_another_replica_has_no_copy(host):
    host.begin(1, resumed=Version(0, 3))
    host.keep(4, 5, 6, failed=1.0)
    # Of these the other replica has none: the host has nothing complete but what it began with.
    assert host.versions == [(1, 6), (0, 3)]
    assert host.schedule.at_risk is None
    host.keep(7)
    assert host.versions == [(1, 7), (1, 6)]


def test_what_does_not_fit_is_tried_again_and_warned_of_once(host, caplog):
    caplog.set_level(logging.INFO, "resilin")
    host.begin(1, resumed=Version(0, 3))
    host.room //= 4
    host.keep(*range(4, 40))
    assert caplog.text.count("no room for a memory copy of step 4 in") == 1
    assert host.schedule.at_risk is None
    assert host.schedule.votes()[1] == 1
    # The last complete one is left alone, whatever fails.
    assert host.versions == [(0, 3)]
    host.room *= 4
    host.keep(*range(40, 80))
    assert caplog.text.count("no room") == 1
    assert "memory copies fit again, from step" in caplog.text
    assert host.versions == [(1, 79), (1, 78)]
    assert host.schedule.at_risk == 0


def test_room_for_one_buffer_alone_keeps_the_one_that_is_whole(host):
    host.begin(1)
    host.room = 0.7 * host.room
    host.keep(*range(4, 30))
    # Overwriting it would leave nothing while it is written.
    assert host.versions == [(1, 4)]


def test_attempts_become_rare_and_never_stop(host, monkeypatch):
    host.begin(1)
    host.room = 0
    tried = []

    def write(_, staged, *, again):
        tried.append(staged.version.step)
        raise OSError("no room")

    monkeypatch.setattr(host.schedule, "_write", write)
    host.keep(*range(5000))
    steps = sorted(set(tried))
    assert steps[:5] == [0, 2, 6, 14, 30]
    assert steps[-1] - steps[-2] == LONGEST_PAUSE


# The thread ------------------------------------------------------------------------------------


class Gate:
    """Stands in for `memmove`: half of the bytes are written, then the thread waits."""

    def __init__(self, monkeypatch):
        self.entered, self.open = threading.Event(), threading.Event()
        self.real = memory_file.memmove
        monkeypatch.setattr(memory_file, "memmove", self)

    def __call__(self, target, source, num_bytes):
        self.real(target, source, num_bytes // 2)
        self.entered.set()
        assert self.open.wait(60)
        self.real(target, source, num_bytes)


def test_a_copy_is_written_while_the_state_changes_and_the_ballot_waits_for_it(host, monkeypatch):
    gate = Gate(monkeypatch)
    host.schedule.keep(Version(0, 3))
    assert not gate.entered.is_set()  # It was kept already.
    host.large.step = 4
    host.schedule.keep(Version(0, 4))
    assert gate.entered.wait(60)
    # Half of it is there. It took the place of step 2; step 3 is what a crash leaves here.
    assert host.versions == [(0, 3)]
    host.large.step = 5
    voted, said = threading.Event(), []

    def vote():
        said.append(host.schedule.votes())
        voted.set()

    voter = threading.Thread(target=vote)
    voter.start()
    assert not voted.wait(0.3)
    gate.open.set()
    assert voted.wait(60)
    voter.join()
    assert said[0][1] == 0
    # `versions` finds the data of step 4 in it.
    assert host.versions == [(0, 4), (0, 3)]


def test_a_copy_that_comes_due_while_another_is_written_waits_for_it(host, monkeypatch):
    gate = Gate(monkeypatch)
    host.large.step = 4
    host.schedule.keep(Version(0, 4))
    assert gate.entered.wait(60)
    threading.Timer(0.3, gate.open.set).start()
    host.large.step = 5
    host.schedule.keep(Version(0, 5))
    host.schedule.wait()
    assert host.versions == [(0, 5), (0, 4)]


def test_memory_to_stage_in_is_allocated_once(host):
    blocks = host.schedule.memory._blocks
    before = {share: block.data.data_ptr() for share, block in blocks.items()}
    host.keep(4, 5)
    assert {share: block.data.data_ptr() for share, block in blocks.items()} == before


def test_what_the_thread_raises_is_raised_by_the_next_ballot(host, monkeypatch):
    def fail(*_):
        raise RuntimeError("a message of its own")

    with monkeypatch.context() as broken:
        broken.setattr(memory_file, "memmove", fail)
        host.schedule.keep(Version(0, 4))
        with pytest.raises(RuntimeError, match="a message of its own"):
            host.schedule.votes()
    # Once. The copy before is whole, and the next one takes the place of the broken one.
    assert host.schedule.votes()[1] == 0
    assert host.versions == [(0, 3)]
    host.keep(5)
    assert host.versions == [(0, 5), (0, 3)]


def test_time_that_a_step_waits_for_a_copy_counts_for_the_copy_and_not_for_the_step(
    host, monkeypatch
):
    schedule = host.schedule
    monkeypatch.setattr(schedule, "_interval", CopyInterval("auto"))
    for step in (4, 5, 6):
        gate = Gate(monkeypatch)
        host.large.step = step
        schedule.keep(Version(0, step))
        schedule.step_begins()
        timer = threading.Timer(0.4, gate.open.set)
        timer.start()
        schedule.votes()
        schedule.step_ends()
        timer.join()
        monkeypatch.setattr(memory_file, "memmove", gate.real)
    schedule.votes()
    assert schedule._interval.copy_seconds > 0.3
    assert schedule._interval.trained_seconds < 0.3


def test_automatic_copies_are_as_far_apart_as_their_cost_asks_for(host, monkeypatch):
    schedule, clock = host.schedule, [0.0]
    monkeypatch.setattr(memory_schedule.time, "monotonic", lambda: clock[0])
    schedule._interval = interval = CopyInterval("auto")
    interval.copied(0.02)
    interval.trained_seconds = LOSS_EVERY
    noise = random.Random(0)
    kept = []
    for step in range(4, 4000):
        said = schedule.votes()
        # Step times that vary by a factor of ten must not make copies rare, or frequent.
        clock[0] += noise.choice((0.01, 0.1))
        schedule.step_ends()
        schedule.counted(*said)
        if schedule.is_due(step, stopping=False):
            kept.append(clock[0])
        schedule.step_begins()
    apart = [later - earlier for earlier, later in itertools.pairwise(kept)]
    between = seconds_between_copies(0.02, LOSS_EVERY)
    assert len(apart) > 15
    assert all(between <= each <= between + 0.2 for each in apart)
    assert schedule.at_risk == pytest.approx(between / 0.055, rel=0.1)


@pytest.mark.world_size(2)
def test_automatic_copies_are_of_the_same_steps_where_one_replica_has_no_room(
    shared_path, monkeypatch
):
    directory = shared_path / "memory"
    monkeypatch.setenv("RESILIN_MEMORY_DIR", str(directory))
    monkeypatch.setattr(recovery, "LOSS_EVERY", 1e-3)
    first = resilin.current_job().engine.membership.process == 0
    if not first:
        monkeypatch.setattr(memory_file, "capacity", lambda _: 0)
    due = []
    real = MemorySchedule.is_due

    def is_due(self, step, *, stopping):
        said = real(self, step, stopping=stopping)
        due.append((step, said))
        return said

    monkeypatch.setattr(MemorySchedule, "is_due", is_due)
    job = Job()
    job.train(2)
    everyone = resilin.current_job().engine.gather(due)
    assert everyone[0] == everyone[1]
    assert any(said for _, said in due)


def slow_writer(seconds, of=None):
    """Makes each file take so long that no step is quicker, in the process with this number."""
    real = memory_file.memmove

    def memmove(target, source, num_bytes):
        real(target, source, num_bytes // 2)
        if of is None or of == resilin.current_job().engine.membership.process:
            time.sleep(seconds)
        real(target, source, num_bytes)

    return memmove


KILLED = """
import os, signal, sys
import resilin
from resilin.training.state import memory_file
from tests.training.recovery_job import Job
from tests.training.state.test_memory_schedule import slow_writer
where, step = sys.argv[1], int(sys.argv[2])
memory_file.memmove = slow_writer(0.4)
resilin.checkpoint_to(None, memory_every=1)
job = Job()

def die(*_):
    if job.model.clock.steps == step:
        if where == "raise":
            raise SystemExit("the script fails")
        os.kill(os.getpid(), signal.SIGKILL)

if where == "commit":
    job.train(2, on_step=die)
else:
    job.net.register_forward_pre_hook(die)
    job.train(2)
"""


@pytest.mark.parametrize(
    ("where", "kept"),
    [
        # The next step has begun, and the copy of the last one is half written.
        ("forward", 3),
        # The next step has just been committed: the copy of the last one is complete.
        ("commit", 3),
        # A script that fails is waited for: its last copy is written to its end.
        ("raise", 4),
    ],
)
def test_what_a_process_leaves_that_ends_while_its_thread_writes(tmp_path, where, kept):
    directory = tmp_path / "memory"
    root = Path(__file__).parents[3]
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "RESILIN_MEMORY_DIR": str(directory)}
    result = forked.run(
        [sys.executable, "-c", KILLED, where, "4"],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == (1 if where == "raise" else -signal.SIGKILL), result.stderr
    copies = MemoryCopies(directory)
    newest = copies.scan().versions[0]
    assert newest.step == kept
    # And it is that of its step: the user's own average counts them.
    assert copies.scan().read(newest).state("ema")["num"] == kept
    assert copies.scan().read(newest).state("job")["clock"]["steps"] == kept


@pytest.mark.world_size(2)
def test_no_replica_commits_a_step_before_all_have_completed_the_copy_of_the_last(
    shared_path, monkeypatch
):
    directory = shared_path / "memory"
    monkeypatch.setenv("RESILIN_MEMORY_DIR", str(directory))
    monkeypatch.setattr(memory_file, "memmove", slow_writer(0.2, of=1))
    resilin.checkpoint_to(None, memory_every=1)
    seen = []

    def look(job):
        # What is in the files now is what a SIGKILL of both would leave. The other replica may be
        # one copy ahead, and never overwrites this one.
        copies = MemoryCopies(directory)
        last = job.model.clock.steps - 1
        seen.append(
            [(v.step, len(copies.scan().sums(v))) for v in copies.scan().versions if v.step == last]
        )

    Job().train(1, on_step=look)
    assert seen == [[(step, 2)] for step in range(7)]
    resilin.reset_job()


def test_whoever_ends_a_job_waits_for_its_copy(tmp_path, monkeypatch):
    directory = tmp_path / "memory"
    monkeypatch.setenv("RESILIN_MEMORY_DIR", str(directory))
    monkeypatch.setattr(memory_file, "memmove", slow_writer(0.3))
    resilin.checkpoint_to(None, memory_every=1)
    job = Job()
    for x, y, _ in job.loader:
        if job.model.clock.steps == 2:
            break
        torch.nn.functional.cross_entropy(job.model(x), y).backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
    resilin.reset_job()
    assert MemoryCopies(directory).scan().versions[0].step == 2


# Jobs ------------------------------------------------------------------------------------------

OTHER_JOB = """
import sys
from pathlib import Path
import torch
from resilin.training.state.memory import MemoryCopies, Place
from resilin.training.state.snapshot import Snapshot, Version
from tests.training.recovery_job import Job
tree = {"job": {"clock": {}, "replicas": 1}}
state = Snapshot(Version(0, 7), tree, {})
place = Place(host=0, local_process=0, num_local_processes=1, process=0)
MemoryCopies(Path(sys.argv[1])).keep(state, {}, place)
print(flush=True)
input()
"""


def test_the_state_of_a_job_that_is_alive_is_not_taken(tmp_path, monkeypatch):
    directory = tmp_path / "memory"
    monkeypatch.setenv("RESILIN_MEMORY_DIR", str(directory))
    monkeypatch.setattr(startup, "PATIENCE", 0.3)
    command = [sys.executable, "-c", textwrap.dedent(OTHER_JOB), str(directory)]
    with forked.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout.readline() == b"\n"
            message = f"process {other.pid} of another job .* this job .process {os.getpid()}"
            with pytest.raises(RuntimeError, match=message):
                resilin.resume()
            resilin.reset_job()
            # Should both begin at the same moment, the second to write is refused.
            copies = MemoryCopies(directory)
            with pytest.raises(RuntimeError, match=message):
                copies.keep(
                    Snapshot(Version(0, 8), {}, {}),
                    {},
                    Place(host=0, local_process=0, num_local_processes=1, process=0),
                )
        finally:
            other.kill()
    # A worker that was killed is no other job: who comes next takes up what it left.
    found = MemoryCopies(directory)
    assert (found.scan().writers(), found.scan().versions[0].step) == (set(), 7)


@pytest.mark.parametrize(("every", "cost"), [(1, 0), (4, 3)])
def test_what_a_lost_worker_costs_is_said_and_told_of(tmp_path, monkeypatch, caplog, every, cost):
    caplog.set_level(logging.INFO, "resilin")
    monkeypatch.setenv("RESILIN_MEMORY_DIR", str(tmp_path / "memory"))
    resilin.checkpoint_to(None, memory_every=every)
    told = []
    resilin.current_job().events.listeners.append(told.append)
    job = Job()
    job.train(1)
    assert [event.steps for event in told if isinstance(event, RiskEvent)] == [cost]
    assert ("no completed step" if cost == 0 else "at most 3 completed step") in caplog.text


def test_a_number_that_goes_up_and_down_is_reported_seldom():
    class Copies:
        at_risk, is_measured, is_automatic = 0, True, True

    job = resilin.current_job()
    told = []
    job.events.listeners.append(told.append)
    report = risk.RiskReport(Copies(), job.events)
    for steps in [2, 1, 2, 4, 1, 3, 9, 2, 4] * 100:
        report.update(steps)
    assert [event.steps for event in told] == [2, 4, 9]
    for _ in range(risk.PATIENCE):
        report.update(0)
    assert [event.steps for event in told] == [2, 4, 9, 0]


def test_automatic_copies_promise_no_number_for_good(caplog):
    class Copies:
        at_risk, is_measured, is_automatic = 0, True, True

    report = risk.RiskReport(Copies(), resilin.current_job().events)
    with caplog.at_level("INFO", "resilin"):
        report.update(0)
        report.update(3)
    # The first copies are cheap and many: the number that is told is that of now.
    assert [record.getMessage() for record in caplog.records] == [
        "a lost worker costs no completed step now: copies in memory are made as often as pays off "
        "(memory_every=1: every step)"
    ]


def test_without_memory_copies_all_since_the_last_checkpoint_is_at_risk(tmp_path):
    resilin.checkpoint_to(tmp_path, every=4)
    told, seen = [], []
    resilin.current_job().events.listeners.append(told.append)
    Job().train(1, on_step=lambda job: seen.append(resilin.current_job().recovery.at_risk))
    # A checkpoint counts when it is complete, which is at a later step.
    assert seen[:4] == [1, 2, 3, 4]
    assert [event.steps for event in told if isinstance(event, RiskEvent)][:3] == [1, 2, 4]
