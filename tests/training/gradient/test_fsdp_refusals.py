"""Everything that cannot be honoured with a sharded model is refused in one sentence."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import resilin
from resilin.core.ramp import NoiseRamp
from resilin.training.gradient.copies import check_live
from resilin.training.gradient.sharding import find_sharding, refuse_offload
from resilin.training.job import current_job
from tests.training.data.numbered import Numbered
from tests.training.gradient.sharded import Case, Data, adaptive, make_net, make_optimizer, shard

PLAIN = Case(mesh=(2,))


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.1)


def refused(text, net, optimizer=None, **kwargs):
    with pytest.raises(ValueError, match=text):
        resilin.AdaptiveDataParallel(net, optimizer or sgd(net), **kwargs)


@pytest.mark.world_size(2)
def test_what_is_refused_at_construction():
    net = make_net()
    early = make_optimizer(net, 2)
    shard(net, PLAIN)
    refused("make the optimizer after it", net, early)
    matrices = [p for p in net.parameters() if p.dim() == 2]
    refused("each process has a part of those", net, torch.optim.Muon(matrices), rule="sqrt")
    refused("leave it out, and call set_reduce_scatter", net, find_unused_parameters=True)
    refused("bucket_cap_mb .* is an argument of Distributed", net, bucket_cap_mb=25)
    refused("train a sharded model in bfloat16", net, scaler=torch.amp.GradScaler("cpu"))
    mesh = init_device_mesh("cpu", (2,))
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"]
    refused(r"mesh has the processes \[\d\], and fully_shard", net, mesh=alone)
    refused("and no module of this model is", make_net(), mesh=init_device_mesh("cpu", (2,)))
    half = make_net()
    fully_shard(half, mesh=alone)
    refused("cannot be told; if they work on the same data, pass", half)
    old = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    refused(r"\(FSDP1\), and FSDP2 is needed", old)
    refused(r"replicate\(\) is not supported", replicate(nn.Linear(2, 2), mesh=mesh))
    tensor_parallel = make_net()
    parallelize_module(tensor_parallel.block, mesh, {"up": ColwiseParallel()})
    refused("2 parameters are DTensors that fully_shard does not manage", tensor_parallel)
    ignored = set(tensor_parallel.block.up.parameters())
    fully_shard(tensor_parallel, mesh=alone, ignored_params=ignored)
    refused("is a DTensor on the mesh .* does not manage it", tensor_parallel)
    with pytest.raises(ValueError, match="CPUOffloadPolicy is not supported"):
        refuse_offload("weight", "cpu", "cuda")


def not_live(reason, case, size=2, net=None):
    """A live job refuses this model; over several machines, where it cannot run without --live."""
    if net is None:
        net = make_net()
        shard(net, case)
    sharding = find_sharding(net, None, current_job().engine.membership)
    with pytest.raises(ValueError, match=f"{reason}.*Start the job without --live"):
        check_live(net, sharding, size)


@pytest.mark.world_size(2)
def test_what_a_live_job_refuses():
    not_live("the shards of one that is lost are on no other", PLAIN)
    not_live("copies of 1 processes", Case(mesh=(1, 2)), size=1)
    not_live(r"is \[\[0\], \[1\]\]\), and the launcher makes copies of 2", Case(mesh=(2, 1)))
    not_live("by tensor parallelism", Case(mesh=(1, 1), tp=2))
    part = make_net()
    names = ("other", "replicate", "shard")
    mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=names)["replicate", "shard"]
    fully_shard(part, mesh=mesh)
    not_live("is a part of another one", None, net=part)
    separate = make_net()
    shard(separate, Case(mesh=(1, 2)))
    if hasattr(separate, "set_separate_reduce_scatter_group"):  # torch 2.13
        separate.set_separate_reduce_scatter_group(True)
        not_live("set_separate_reduce_scatter_group", None, net=separate)
    whole = make_net()
    with pytest.raises(ValueError, match="no module of this model is"):
        check_live(whole, None, 2)
    check_live(whole, None, 1)
    right = make_net()
    shard(right, Case(mesh=(1, 2)))
    check_live(right, find_sharding(right, None, current_job().engine.membership), 2)


@pytest.mark.world_size(2)
def test_what_a_loop_may_not_do():
    model = adaptive(PLAIN)
    loader = resilin.AdaptiveDataLoader(Data(), 12, max_local_bsz=3)
    batches = iter(loader)
    x, y, _, _ = next(batches)
    F.cross_entropy(model(x), y).backward()
    model.optimizer.step()
    next(batches)
    with pytest.raises(RuntimeError, match="left a micro-batch without a forward pass"):
        model.optimizer.step()
    resilin.reset_job()
    model = adaptive(PLAIN)
    x = torch.ones(4, 6, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="was not called through AdaptiveDataParallel"):
        model.module(x).sum().backward()
    resilin.reset_job()
    model = adaptive(PLAIN)
    output = model(x)
    model.module.set_requires_gradient_sync(False)
    with pytest.raises(RuntimeError, match="no sharded gradient was reduced"):
        output.sum().backward()


@pytest.mark.world_size(2)
def test_an_evaluation_that_leaves_a_replica_out():
    model = adaptive(PLAIN)
    model.eval()
    loader = resilin.AdaptiveDataLoader(Data(num=13), 6)
    batches = iter(loader)
    with torch.no_grad():
        assert [len(model(next(batches)[0])) for _ in range(2)] == [3, 3]
        with pytest.raises(ValueError, match="1 samples leaves out some of 2 replicas"):
            next(batches)


@pytest.mark.world_size(2)
def test_sizes_by_noise_under_tensor_parallelism():
    model = adaptive(Case(mesh=(1,), tp=2))
    membership = current_job().engine.membership
    assert (membership.num_replicas, membership.num_processes) == (1, 2)
    loader = resilin.AdaptiveDataLoader(Data(), 12)
    loader.autoscale_batch_size(24)
    with pytest.raises(ValueError, match=r"\(autoscale\) is not supported under tensor"):
        next(iter(loader))
    loader.set_batch_size(NoiseRamp([12, 24]))
    with pytest.raises(ValueError, match=r"\(ramp\) is not supported under tensor"):
        next(iter(loader))
    assert model.clock.steps == 0


@pytest.mark.world_size(2)
def test_an_evaluation_on_a_stream_is_refused():
    net = fully_shard(torch.nn.Linear(1, 1).double())
    model = resilin.AdaptiveDataParallel(net, torch.optim.SGD(net.parameters(), lr=0.1))
    model.eval()
    with pytest.raises(ValueError, match="cannot be evaluated on a stream by 2 replicas"):
        next(iter(resilin.AdaptiveDataLoader(Numbered(), 6)))
