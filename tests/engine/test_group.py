import os

import pytest
import torch
import torch.distributed as dist

import resilin
from resilin.engine.group import LAUNCHER_ENV, detect


def test_a_process_of_its_own_is_a_job_of_one(monkeypatch):
    for name in LAUNCHER_ENV:
        monkeypatch.delenv(name, raising=False)
    resilin.init_process_group()
    assert not dist.is_initialized()
    engine = detect()
    assert (engine.membership.num_replicas, engine.membership.replica) == (1, 0)


def test_half_an_environment_is_an_error(monkeypatch):
    for name in LAUNCHER_ENV:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="RANK set, WORLD_SIZE, MASTER_ADDR, MASTER_PORT missing"):
        resilin.init_process_group()


@pytest.mark.world_size(2, init=False)
def test_joining_leaving_and_joining_again():
    for _ in range(3):
        resilin.init_process_group()
        resilin.init_process_group()
        assert dist.get_backend() == "gloo"
        engine = detect()
        assert (engine.membership.num_replicas, engine.membership.replica) == (
            2,
            int(os.environ["RANK"]),
        )
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 2
        with pytest.raises(ValueError, match="backend 'gloo', but 'nccl' was asked for"):
            resilin.init_process_group("nccl")
        dist.barrier()
        dist.destroy_process_group()
        assert engine.membership.num_replicas == 1
