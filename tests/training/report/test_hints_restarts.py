"""Hints of jobs under real launchers: workers that are killed, members that are lost, shards."""

from __future__ import annotations

import signal

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import resilin
from tests.replicas import replica
from tests.training.live.test_live_training import run
from tests.training.report.scheduler_server import Server
from tests.training.report.test_hints import set_environment
from tests.training.test_torchrun import agent, kill, note, step_of, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.fixture
def server():
    made = Server()
    yield made
    made.close()


def variables(server):
    return {
        "RESILIN_SCHEDULER": server.url,
        "RESILIN_SCHEDULER_TOKEN": "secret",
        "RESILIN_JOB": "job-1",
        "RESILIN_ACCELERATOR": "gpu",
        "RESILIN_HINTS_SECONDS": "0.3",
    }


@pytest.mark.nightly(part="jobs")
@pytest.mark.parametrize("options", [[], ["--sharded"]], ids=["whole", "sharded"])
def test_a_restart_by_an_agent_is_measured_and_known_to_the_next_one(tmp_path, server, options):
    with agent(tmp_path, "--pause", "0.1", *options, warm=True, **variables(server)) as process:
        wait_for(lambda: step_of(tmp_path) >= 9, tmp_path)
        assert server.hints[-1].rescale_seconds is None
        kill(note(tmp_path, 0, 1)["pid"], signal.SIGKILL)
        wait_for(lambda: step_of(tmp_path, 1) >= 14, tmp_path)
        (first,) = {each.rescale_seconds for each in server.hints if each.generation == 1}
        kill(note(tmp_path, 1, 0)["pid"], signal.SIGKILL)
        assert process.wait(timeout=120) == 0, (tmp_path / "log").read_text()
    generations = [each.generation for each in server.hints]
    assert generations == sorted(generations)
    assert set(generations) == {0, 1, 2}
    # A rendezvous takes longer than a step, and the test does not last for minutes.
    assert 0.2 < first < 200
    last = server.hints[-1]
    assert (last.steps, last.replicas, last.profiled, last.total) == (28, 2, 2, 28.0)
    assert last.rescale_seconds not in (None, first)
    assert min(each.steps for each in server.hints if each.generation == 1) <= 12
    # Both lives have measured: what the first one has learned is there at once in the second.
    assert all(each.tables for each in server.hints if each.generation > 0)


@pytest.mark.nightly(part="jobs")
def test_a_live_change_is_measured_and_whoever_is_replica_0_reports(tmp_path, server, monkeypatch):
    for name, value in variables(server).items():
        monkeypatch.setenv(name, value)
    faults = [{"member": 0, "at": "backward", "step": 13}]
    run(tmp_path, {"faults": faults, "epochs": 6})
    first = server.hints[0]
    before = [each for each in server.hints if each.generation == first.generation]
    after = [each for each in server.hints if each.generation > first.generation]
    assert {each.rescale_seconds for each in before} == {None}
    assert after
    # The launcher replaces the lost member, which is one more change.
    assert all(0 <= each.rescale_seconds < 100 for each in after)
    last = server.hints[-1]
    assert (last.steps, last.profiled, last.total) == (60, 3, 60.0)
    assert last.generation == max(each.generation for each in server.hints)


@pytest.mark.world_size(2)
def test_a_sharded_model_is_reported_by_one_process(monkeypatch):
    made = Server()
    set_environment(monkeypatch, made.url)
    try:
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        fully_shard(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        model = resilin.AdaptiveDataParallel(net, optimizer)
        data = TensorDataset(torch.randn(320, 4), torch.zeros(320, dtype=torch.long))
        loader = resilin.AdaptiveDataLoader(data, batch_size=16)
        for _ in resilin.remaining_epochs_until(1):
            for x, y in loader:
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert len(made.sent) == 0 if replica() else len(made.sent) > 0
        if replica() == 0:
            last = made.hints[-1]
            assert (last.replicas, last.size_multiple, last.steps) == (2, 1, 20)
            assert last.throughput is not None
    finally:
        made.close()
