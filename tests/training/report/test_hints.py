"""Hints of a job, as a real HTTP server gets them: contents, times, failures, restarts."""

from __future__ import annotations

import itertools
import logging
import math
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import resilin
from resilin.core.hints import JobHints
from resilin.training.report import measured as measured_module
from resilin.training.report import reporter as reporter_module
from resilin.training.report import scheduler as scheduler_module
from tests.cli.live.certificates import Signer
from tests.counted.loop import Setup, train
from tests.replicas import replica
from tests.training.report.scheduler_server import GOOD, MENU, Server
from tests.training.sizing.test_autoscale import Clock
from tests.training.test_host_reads import stalls

BATCH = 16


class Loop:
    """A training loop with steps of a given duration."""

    def __init__(
        self, *, autoscaled=False, epochs=1, samples=400, rule="adascale", clock=None, **loader
    ):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(samples, 4, generator=generator)
        self.net = torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.model = resilin.AdaptiveDataParallel(self.net, self.optimizer, rule=rule)
        self.loader = resilin.AdaptiveDataLoader(
            TensorDataset(x, (x[:, 0] > 0).long()), batch_size=BATCH, shuffle=True, **loader
        )
        if autoscaled:
            self.loader.autoscale_batch_size(4 * BATCH, local_bsz_bounds=(2, 32))
        self.epochs = epochs
        self.clock = clock

    def run(self, seconds=0.0, steps=None):
        for _ in resilin.remaining_epochs_until(self.epochs):
            for x, y in self.loader:
                F.cross_entropy(self.model(x), y).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                if self.clock is None:
                    time.sleep(seconds)
                else:
                    self.clock.advance(seconds)
                if steps is not None and self.model.clock.steps >= steps:
                    return


@pytest.fixture
def server():
    """A scheduler that answers with a menu."""
    made = Server()
    yield made
    made.close()


@pytest.fixture
def cluster(server, monkeypatch):
    """The environment of a job of a cluster, and its scheduler."""
    set_environment(monkeypatch, server.url)
    # No record is left out because the machine is slow.
    monkeypatch.setattr(reporter_module, "ALLOWANCE", math.inf)
    return server


def set_environment(monkeypatch, url, **more):
    names = {"SCHEDULER": url, "SCHEDULER_TOKEN": "secret", "JOB": "job-1", "HINTS_SECONDS": "0.05"}
    for name, value in {**names, "ACCELERATOR": "gpu", **more}.items():
        monkeypatch.setenv(f"RESILIN_{name}", value)


@pytest.fixture
def clock(monkeypatch):
    """Time of steps that passes when the test says so: the same on every machine."""
    made = Clock()
    monkeypatch.setattr(time, "perf_counter", made)
    return made


def threads():
    return [each for each in threading.enumerate() if each.name == "resilin-hints"]


# Contents ---------------------------------------------------------------------------------------


def test_a_fixed_batch_reports_its_throughput(cluster, clock):
    Loop(samples=60 * BATCH, clock=clock).run(0.5)
    assert set(cluster.requests) == {("PUT", "/jobs/job-1/hints", "Bearer secret")}
    last = cluster.hints[-1]
    assert (last.job, last.accelerator, last.fixed) == ("job-1", "gpu", True)
    assert (last.reference, last.batch_size) == (BATCH, BATCH)
    assert (last.min_replicas, last.max_replicas, last.profiled) == (1, BATCH, 1)
    assert (last.steps, last.progress, last.total) == (60, 60.0, 60.0)
    assert last.end == "declared"
    assert last.rescale_seconds is None
    assert abs(last.time - time.time()) < 60
    assert float(last.goodput(1, 1)) == pytest.approx(BATCH / 0.5, rel=0.02)
    (own,) = last.tables
    assert own.kind == "gpu"
    assert list(zip(own.sizes, own.hosts, strict=True)) == [tuple(each) for each in MENU["gpu"]]
    assert own.goodput[0] == pytest.approx(float(last.goodput(1, 1)))
    assert 0 < own.spread[0] < own.spread[-1]


def test_the_first_hints_come_after_the_first_steps_and_then_at_intervals(cluster, monkeypatch):
    monkeypatch.setenv("RESILIN_HINTS_SECONDS", "0.2")
    Loop(samples=100 * BATCH).run(0.01)
    steps = [each.steps for each in cluster.hints]
    # Steps are measured when the next one begins.
    assert steps[0] == reporter_module.FIRST
    assert steps[-1] == 100
    times = [each.time for each in cluster.hints]
    # The second one has a menu for the first time; from then on they keep their distance.
    assert cluster.hints[0].tables == ()
    assert cluster.hints[1].tables
    gaps = [b - a for a, b in itertools.pairwise(times[1:-1])]
    assert gaps
    assert min(gaps) > 0.15


def test_a_new_menu_is_answered_at_once_and_an_old_one_at_intervals(cluster, monkeypatch):
    monkeypatch.setenv("RESILIN_HINTS_SECONDS", "1000")
    loop = Loop()
    loop.run(steps=8)
    sender = resilin.current_job().reporter._sender
    cluster.wait_for(lambda: sender.answer)
    loop.run(steps=12)
    cluster.wait_for(lambda: len(cluster.sent) == 2)
    assert cluster.hints[1].tables
    assert cluster.hints[1].steps <= 9
    loop.run(steps=20)
    sender.flush()
    assert len(cluster.sent) == 2


def test_an_autoscaled_job_reports_its_bounds_and_noise(cluster):
    Loop(autoscaled=True, samples=100 * BATCH).run(0.005)
    last = cluster.hints[-1]
    assert not last.fixed
    assert last.bounds.local_bsz_bounds == (2, 32)
    assert last.max_replicas == 2 * BATCH
    assert last.noise is not None
    assert last.tables[0].goodput[0] > 0


@pytest.mark.parametrize(
    ("loader", "batch_size", "replicas"),
    [({}, 24, (1, 24)), ({"max_local_bsz": 4}, 8, (1, 8))],
)
def test_a_batch_that_the_script_sets_is_the_one_that_stays(cluster, loader, batch_size, replicas):
    loop = Loop(samples=20 * BATCH, **loader)
    loop.loader.set_batch_size(batch_size)
    loop.run(0.005)
    last = cluster.hints[-1]
    assert (last.reference, last.batch_size, last.fixed) == (BATCH, batch_size, True)
    assert (last.min_replicas, last.max_replicas) == replicas


def test_a_run_that_ends_by_samples_is_complete_at_its_end(cluster, clock):
    loop = Loop(samples=60 * BATCH, rule="linear", clock=clock)
    loop.loader.set_batch_size(4 * BATCH)
    loop.run(0.5)
    last = cluster.hints[-1]
    assert (last.clock, last.steps) == ("samples", 15)
    assert last.progress == last.total == 60
    assert float(last.goodput(1, 1)) == pytest.approx(4 * BATCH / 0.5, rel=0.02)


def test_a_pause_between_epochs_is_no_step_time(cluster, clock):
    loop = Loop(samples=4 * BATCH + 8, epochs=4)
    for _ in resilin.remaining_epochs_until(4):
        for x, y in loop.loader:
            F.cross_entropy(loop.model(x), y).backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            clock.advance(0.01)
        clock.advance(0.3)
    measured = resilin.current_job().measured
    assert {key.local_bsz for key in measured.profile.windows} == {BATCH}
    steps = [each for window in measured.profile.windows.values() for each in window]
    assert len(steps) == 9  # all of a window
    assert max(each.compute_seconds for each in steps) < 0.3


def test_a_kind_that_the_menu_names_otherwise_is_that_of_a_cluster_of_one_kind(
    cluster, monkeypatch
):
    monkeypatch.delenv("RESILIN_ACCELERATOR")
    Loop().run(0.01)
    last = cluster.hints[-1]
    assert last.accelerator == "cpu"
    assert [table.kind for table in last.tables] == ["gpu"]


def test_of_several_kinds_only_those_that_were_measured_have_a_table(cluster, monkeypatch):
    both = {**MENU, "cpu": [[1, 1]]}
    body = b'{"replicas": null, "leaves": 5, "menu": %s}' % str(both).replace("'", '"').encode()
    cluster.answer = lambda: (200, body)
    Loop().run(0.01)
    assert [table.kind for table in cluster.hints[-1].tables] == ["gpu"]


@pytest.mark.world_size(2)
def test_replica_0_alone_reports_for_two(monkeypatch, clock):
    server = Server()
    set_environment(monkeypatch, server.url)
    try:
        Loop(samples=40 * BATCH, clock=clock).run(0.5)
        dist.barrier()
        if replica() == 1:
            assert server.sent == []
            assert threads() == []
            # It has measured for the case that it becomes replica 0.
            assert resilin.current_job().measured.num_here > 0
            return
        last = server.hints[-1]
        assert (last.replicas, last.profiled) == (2, 2)
        assert float(last.goodput(1, 2)) == pytest.approx(BATCH / 0.5, rel=0.05)
        assert last.steps == 40
    finally:
        server.close()


def test_hints_without_a_cluster_measure_from_the_first_call_on(clock):
    Loop()
    with pytest.raises(ValueError, match="nothing to tell before"):
        resilin.hints()
    resilin.reset_job()
    loop = Loop(clock=clock)
    loop.run(steps=3)
    assert resilin.current_job().measured is None
    assert resilin.hints()["throughput"] is None
    loop.run(0.5, steps=20)
    told = JobHints.from_json(resilin.hints(max_replicas=4))
    assert float(told.goodput(1, 1)) == pytest.approx(BATCH / 0.5, rel=0.02)
    assert told.job is None
    assert told.speedup.replicas == (1, 2, 4)
    assert threads() == []
    assert "measured" not in resilin.current_job().state_dict()


def test_a_loader_of_another_library_reports_the_batches_that_it_makes(cluster):
    net = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = resilin.AdaptiveDataParallel(net, optimizer, batch_size=BATCH)
    data = TensorDataset(torch.randn(320, 4), torch.zeros(320, dtype=torch.long))
    for x, y in torch.utils.data.DataLoader(data, batch_size=BATCH):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
    cluster.wait_for(lambda: len(cluster.sent) > 1)
    last = cluster.hints[-1]
    assert (last.reference, last.batch_size, last.fixed) == (BATCH, BATCH, True)
    assert (last.total, last.end) == (None, "unknown")
    assert 0 < float(last.goodput(1, 1)) < BATCH / 0.01


class Shards:
    """A stream of data whose length nobody knows."""

    num_shards = 2
    fingerprint = "shards"

    def open(self, shard, num_shards, epoch):
        for index in range(80):
            yield torch.full((4,), float(index)), index % 2


def test_the_end_of_a_stream_is_estimated_from_its_epochs(cluster):
    loop = Loop()
    loop.loader = resilin.AdaptiveDataLoader(Shards(), batch_size=BATCH)
    loop.epochs = 4
    loop.run(0.01)
    ends = {(each.steps > 10, each.end, each.total) for each in cluster.hints if each.steps != 10}
    assert ends == {(False, "unknown", None), (True, "estimated", 40.0)}
    assert cluster.hints[-1].progress == 40


# Schedulers that fail ---------------------------------------------------------------------------


def warnings_of(caplog):
    return [each for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        ((400, b'{"error": "job.time must be finite"}'), "400 Bad Request: .*must be finite"),
        ((409, b""), "409 Conflict"),
        ((500, b"\xff" * 10_000), "500 "),
        ((302, b""), "302 "),
        ((200, b"<html>welcome</html>"), "the answer must be JSON"),
        ((200, b'{"replicas": 1}'), "menu is missing"),
        ((200, b'{"replicas": 1, "leaves": null, "menu": {"a": [[0, 0]]}}'), "must be at least 1"),
        ((200, b" " * 2_000_000), "must have at most 1048576 bytes"),
    ],
    ids=["400", "409", "500", "redirect", "html", "partial", "zero", "long"],
)
def test_a_scheduler_that_refuses_or_answers_garbage_gets_one_warning(cluster, caplog, reply, text):
    cluster.answer = lambda: reply
    Loop().run(0.01)
    assert len(cluster.sent) > 2
    assert {path for _, path, _ in cluster.requests} == {"/jobs/job-1/hints"}
    (warning,) = warnings_of(caplog)
    assert re.search(text, warning.getMessage())
    assert len(warning.getMessage()) < 1000
    assert resilin.current_job().measured.menu == {}


def test_silence_lasts_until_it_answers_again(cluster, caplog):
    caplog.set_level(logging.INFO, "resilin")
    replies = itertools.chain([(500, b"")] * 2, [GOOD] * 2, itertools.repeat((500, b"")))
    cluster.answer = lambda: next(replies)
    Loop(samples=100 * BATCH).run(0.01)
    said = [each.getMessage() for each in caplog.records if "the scheduler at" in each.getMessage()]
    assert len(said) == 3
    assert "answers again" in said[1]


def test_a_scheduler_that_is_away_costs_neither_steps_nor_the_end(monkeypatch, caplog):
    server = Server()
    server.close()
    set_environment(monkeypatch, server.url)
    Loop().run(0.01)
    assert resilin.current_job().clock.steps == 25
    assert len(warnings_of(caplog)) == 1


def test_a_scheduler_that_hangs_stops_no_step_and_delays_the_end_by_a_moment(cluster, monkeypatch):
    monkeypatch.setattr(scheduler_module, "TIMEOUT", 600.0)
    cluster.answer = cluster.hang
    loop = Loop(samples=100 * BATCH)
    loop.run(0.002)
    # One request is open; everything that followed was replaced by what is newer.
    assert len(cluster.sent) == 1
    (thread,) = threads()
    assert thread.daemon
    assert resilin.current_job().clock.steps == 100
    began = time.perf_counter()
    resilin.current_job().reporter.finish(lambda: cluster.hints[0])
    assert time.perf_counter() - began < 30


def test_a_job_whose_scheduler_hangs_exits(cluster, tmp_path):
    """A process of its own: a thread that is not a daemon would keep it."""
    cluster.answer = cluster.hang
    script = (
        "from tests.training.report.test_hints import Loop, scheduler_module\n"
        "scheduler_module.TIMEOUT = 600.0\n"
        "Loop().run(0.01)"
    )
    root = Path(__file__).parents[3]
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        timeout=120,  # the request itself would take longer
        check=True,
    )
    assert len(cluster.sent) == 1


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"SCHEDULER": "ftp://x"}, "must be http"),
        ({"SCHEDULER": "nonsense"}, "must be http"),
        ({"JOB": ""}, "must be the id of the job"),
        ({"SCHEDULER_TOKEN": "a\nb"}, "printable"),
        ({"HINTS_SECONDS": "often"}, "must be a number of seconds above 0"),
        ({"HINTS_SECONDS": "-1"}, "must be a number of seconds above 0"),
        ({"SCHEDULER": "https://x", "SCHEDULER_CA": "/nowhere"}, "file with a certificate"),
    ],
)
def test_a_wrong_environment_is_a_warning_and_nothing_is_measured(
    monkeypatch, caplog, variables, text
):
    set_environment(monkeypatch, "http://127.0.0.1:9", **variables)
    Loop().run(steps=10)
    (warning,) = warnings_of(caplog)
    assert text in warning.getMessage()
    assert resilin.current_job().measured is None
    assert threads() == []


def test_an_error_in_the_hints_ends_the_reports_and_not_the_training(cluster, monkeypatch, caplog):
    def broken(sources):
        raise RuntimeError("broken")

    monkeypatch.setattr("resilin.training.hints.job_hints", broken)
    Loop().run(0.005)
    assert resilin.current_job().clock.steps == 25
    assert len(warnings_of(caplog)) == 1
    assert cluster.sent == []


def test_a_scheduler_with_a_certificate_is_trusted_by_its_authority_alone(
    monkeypatch, tmp_path, caplog
):
    signer = Signer(tmp_path, "ca")
    signed = signer.sign("scheduler")
    server = Server(certificate=(signed.certificate, signed.key))
    try:
        set_environment(monkeypatch, server.url, SCHEDULER_CA=signer.ca)
        Loop().run(0.01)
        assert server.hints[-1].steps == 25
        assert warnings_of(caplog) == []
        resilin.reset_job()
        num = len(server.sent)
        monkeypatch.setenv("RESILIN_SCHEDULER_CA", Signer(tmp_path, "other").ca)
        Loop().run(0.01)
        assert len(server.sent) == num
        (warning,) = warnings_of(caplog)
        assert "CERTIFICATE_VERIFY_FAILED" in warning.getMessage()
    finally:
        server.close()


def test_a_redirection_does_not_get_the_token(cluster):
    other = Server()
    try:
        cluster.answer = lambda: (307, b"")
        cluster.location = f"{other.url}/jobs/job-1/hints"
        Loop().run(0.01)
        assert cluster.sent
        assert other.requests == []
    finally:
        other.close()


# Cost -------------------------------------------------------------------------------------------


def test_without_a_scheduler_nothing_is_measured_in_a_step(monkeypatch):
    """The methods that do the work are not called at all."""
    called = []
    for owner, name in [
        (measured_module.Measured, "step_begins"),
        (measured_module.Measured, "committed"),
        (reporter_module.Reporter, "between_steps"),
    ]:
        monkeypatch.setattr(owner, name, lambda *_, name=name: called.append(name))
    Loop().run(steps=10)
    assert called == []
    assert resilin.current_job().reporter is None
    assert threads() == []


@pytest.mark.world_size(1)
@pytest.mark.parametrize("autoscale", [False, True])
def test_nothing_is_read_from_a_device_for_the_hints(counted, monkeypatch, autoscale):
    server = Server()
    set_environment(monkeypatch, server.url, HINTS_SECONDS="0.000001")
    monkeypatch.setattr(reporter_module, "ALLOWANCE", 100.0)
    try:
        run = train(counted, Setup(measured=True, autoscale=autoscale))
        resilin.current_job().reporter._sender.flush()
        assert server.hints[-1].throughput is not None
        assert not stalls(run), "\n\n".join(map(str, stalls(run)))
    finally:
        server.close()


@pytest.mark.parametrize(("allowance", "kept"), [(0.0, 1), (1e6, 99)])
def test_of_very_short_steps_only_some_are_kept(cluster, monkeypatch, allowance, kept):
    # The first one is free; the time for a second one would be there after hours.
    monkeypatch.setattr(measured_module, "SHARE", 1e-9)
    monkeypatch.setattr(measured_module, "ALLOWANCE", allowance)
    Loop(samples=100 * BATCH).run()
    assert resilin.current_job().measured.num_here == kept


def test_records_take_a_small_part_of_the_time(cluster, monkeypatch):
    monkeypatch.setenv("RESILIN_HINTS_SECONDS", "0.000001")
    monkeypatch.setattr(reporter_module, "ALLOWANCE", 0.0)
    made = []

    def slow(self, max_replicas):
        began = time.perf_counter()
        time.sleep(0.01)
        made.append(time.perf_counter() - began)
        return self

    monkeypatch.setattr(JobHints, "with_speedup", slow)
    began = time.perf_counter()
    Loop(samples=150 * BATCH).run(0.01)
    elapsed = time.perf_counter() - began
    # One that is under way may exceed the share, and the last one is not limited.
    assert sum(made[:-2]) <= reporter_module.SHARE * elapsed
    assert len(made) >= 2


# Restarts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpu", "NVIDIA A100/80.GB %s"])
def test_what_was_measured_survives_a_restart_and_its_cost_is_known(
    cluster, tmp_path, monkeypatch, kind
):
    monkeypatch.setenv("RESILIN_ACCELERATOR", kind)
    resilin.checkpoint_to(tmp_path, every=None)
    loop = Loop(epochs=4)
    loop.run(0.01, steps=30)
    resilin.current_job().recovery.finish()
    before = resilin.current_job().measured
    assert before.rescale_seconds is None
    resilin.reset_job()
    time.sleep(0.5)
    resilin.checkpoint_to(tmp_path, every=None)
    num = len(cluster.sent)
    loop = Loop(epochs=4)
    assert resilin.resume().step == 30
    loop.run(0.01, steps=60)
    after = resilin.current_job().measured
    assert after.profile.clock > before.profile.clock
    first = cluster.hints[num]
    # At once after the first step, with the menu that was known before.
    assert first.steps == 31
    assert first.generation == 1
    assert first.tables
    assert 0.4 < first.rescale_seconds < 30
    (kept,) = after.changes
    resilin.current_job().recovery.finish()
    resilin.reset_job()
    resilin.checkpoint_to(tmp_path, every=None)
    loop = Loop(epochs=4)
    assert resilin.resume().step == 60
    loop.run(0.01, steps=65)
    assert resilin.current_job().measured.changes[0] == kept
    assert len(resilin.current_job().measured.changes) == 2


@pytest.mark.parametrize("launch", ["same", "another"])
def test_another_launch_is_not_charged_for_hours_without_machines(cluster, monkeypatch, launch):
    monkeypatch.setenv("RESILIN_MEMORY_DIR", "off")
    loop = Loop()
    engine = resilin.current_job().engine
    monkeypatch.setattr(type(engine), "memory_name", "same")
    loop.run(0.01, steps=10)
    measured = resilin.current_job().measured
    state = measured.state()
    state["last"][0] -= 7 * 3600
    monkeypatch.setattr(type(engine), "memory_name", launch)
    measured.load(state)
    engine.raise_generation(1)
    loop.run(0.01, steps=20)
    (seconds,) = measured.changes
    if launch == "same":
        assert seconds == pytest.approx(7 * 3600, abs=60)
    else:
        assert 0 < seconds <= measured_module.launch_age(engine)


@pytest.mark.parametrize(
    "state", [None, 7, {}, {"profiles": []}, {"profiles": {"a": {"clock": 1}}}]
)
def test_measurements_that_cannot_be_read_are_left_out(cluster, caplog, state):
    loop = Loop()
    loop.run(steps=3)
    job = resilin.current_job()
    job.load_state_dict({**job.state_dict(), "measured": state})
    assert len(warnings_of(caplog)) == (state is not None)
    assert job.clock.steps == 3
