"""Nothing that processes tell each other is pickled: not in a start, a checkpoint, or a sum."""

import pickle

import pytest
import torch
import torch.distributed as dist

import resilin
from resilin.engine.collectives import State
from resilin.training.state.checkpoint import Checkpoints
from resilin.training.state.snapshot import Snapshot, Version


@pytest.fixture
def no_pickle(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("something was pickled, or read from a pickle")

    monkeypatch.setattr(pickle, "loads", refuse)
    for name in ("_object_to_tensor", "_tensor_to_object"):
        monkeypatch.setattr(dist.distributed_c10d, name, refuse)


@pytest.mark.world_size(2)
def test_what_is_refused_here_is_what_objects_go_through(no_pickle):
    with pytest.raises(AssertionError, match="pickled"):
        dist.all_gather_object([None, None], {})


@pytest.mark.world_size(2)
def test_a_job_that_is_saved_restored_and_summed_sends_no_pickle(no_pickle, shared_path):
    for life in range(2):
        resilin.reset_job()
        resilin.checkpoint_to(shared_path / "checkpoints")
        net = torch.nn.Linear(1, 1)
        optimizer = torch.optim.Adam(net.parameters())
        model = resilin.AdaptiveDataParallel(net, optimizer)
        data = torch.utils.data.TensorDataset(torch.arange(16.0)[:, None])
        loader = resilin.AdaptiveDataLoader(data, batch_size=4, shuffle=True)
        job, stats = resilin.current_job(), resilin.Accumulator()
        me = job.engine.membership
        for _ in resilin.remaining_epochs_until(life + 1):
            for (x,) in loader:
                model(x).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                stats["steps"] += 1
                stats["only", me.replica] += 1
        with stats.synchronized():
            counted = dict(stats)
        steps = 4 * (life + 1)
        assert counted == {"steps": 2 * steps, ("only", 0): steps, ("only", 1): steps}
        assert job.clock.steps == steps
    everyone = job.engine.collectives().gather_states(State(me.replica, {"w": net.weight}))
    assert [each.tree for each in everyone] == [0, 1]
    assert everyone[0].tensors["w"].equal(everyone[1].tensors["w"])
    group = job.engine.group("storage")
    found = Checkpoints(shared_path / "checkpoints").newest(group)
    assert isinstance(found, Snapshot)
    assert found.version.step == 8
    assert Version.from_json(found.version.to_json()) == found.version
