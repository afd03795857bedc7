"""Loops that leave something out, fail, or evaluate in between, with a sharded model."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import resilin
from tests.replicas import replica
from tests.training.gradient.sharded import (
    Case,
    Data,
    adaptive,
    full,
    gather_parts,
    make_net,
    relative_error,
)

HYBRID = Case(mesh=(2, 1), groups=1)
PLAIN = Case(mesh=(2,), style="ignored")


def expected(parts, data):
    """The gradient of one process over the micro-batches that had a backward pass."""
    net = make_net()
    indices = torch.tensor([index for part, weight in parts if weight for index in part])
    F.cross_entropy(net(data.x[indices]), data.y[indices]).backward()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def assert_same(model, parts, data):
    whole = expected(parts, data)
    mine = {n: full(p.grad) for n, p in model.module.named_parameters() if p.grad is not None}
    assert mine.keys() == whole.keys()
    assert max(relative_error(mine[name], whole[name]) for name in whole) < 1e-11


def steps_with(model, leaves_out):
    """One step of four micro-batches; `leaves_out(index)` says which have no backward pass."""
    data, parts = Data(), []
    loader = resilin.AdaptiveDataLoader(data, 24, max_local_bsz=3)
    for index, (x, y, _, indices) in enumerate(loader):
        output = model(x)
        left = leaves_out(index)
        parts.append((indices.tolist(), 0 if left else len(x)))
        if not left:
            F.cross_entropy(output, y).backward()
        if index < 3:
            model.optimizer.step()
            model.optimizer.zero_grad()
            continue
        return loader, parts, data
    raise AssertionError


@pytest.mark.world_size(2)
@pytest.mark.parametrize("case", [PLAIN, HYBRID], ids=["fsdp", "hsdp"])
def test_backward_passes_that_one_replica_leaves_out(case):
    for left in ({0}, {1, 2}, {3}):
        resilin.reset_job()
        model = adaptive(case)
        _, parts, data = steps_with(model, lambda i, left=left: replica() == 0 and i in left)
        if 3 in left:
            # Nothing was reduced on this replica by its own backward pass.
            assert not model.step_waits()
        assert_same(model, gather_parts(parts), data)
        model.optimizer.step()
        assert model.clock.samples == 24 - 3 * len(left)


@pytest.mark.world_size(2)
def test_an_evaluation_and_a_failed_forward_pass_in_between():
    model = adaptive(HYBRID)
    data = Data()
    loader = resilin.AdaptiveDataLoader(data, 12, max_local_bsz=3)
    failing = model.module.head.register_forward_pre_hook(lambda *_: 1 / 0)
    x, *_ = next(iter(loader))
    with pytest.raises(ZeroDivisionError):
        model(x)
    failing.remove()
    steps, parts = 0, []
    for x, y, _, indices in loader:
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
        F.cross_entropy(model(x), y).backward()
        parts.append((indices.tolist(), len(x)))
        if model.step_weight is not None:
            if steps == 0:
                assert_same(model, gather_parts(parts), data)
            steps, parts = steps + 1, []
        nn.Linear(1, 1)  # a registration, which must not look like a new parameter
        model.optimizer.step()
        model.optimizer.zero_grad()
        if steps == 2:
            break
    assert model.clock.steps == 2


class Sometimes(nn.Module):
    """A unit that is called twice, and one that only some micro-batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(6, 6)
        self.never = nn.Linear(6, 6)
        self.sometimes = nn.Linear(6, 3)
        self.head = nn.Linear(6, 3)
        self.use = True

    def forward(self, x):
        h = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        return self.head(h) + (self.sometimes(h) if self.use else 0)


def sometimes(mesh):
    torch.manual_seed(3)
    net = Sometimes().double()
    for unit in (net.twice, net.sometimes):
        fully_shard(unit, mesh=mesh)
    fully_shard(net, mesh=mesh)
    groups = [{"params": [p]} for p in net.parameters()]
    return resilin.AdaptiveDataParallel(
        net, torch.optim.SGD(groups, lr=0.1), rule="constant", stats_every=1
    )


@pytest.mark.world_size(2)
def test_parameters_without_a_gradient_and_a_unit_that_is_called_twice():
    model = sometimes(init_device_mesh("cpu", (2,)))
    torch.manual_seed(3)
    whole = Sometimes().double()
    data, parts = Data(), []
    loader = resilin.AdaptiveDataLoader(data, 12, max_local_bsz=3)
    for x, y, _, indices in loader:
        F.cross_entropy(model(x), y).backward()
        parts.extend(indices.tolist())
        if model.step_weight is not None:
            break
        model.optimizer.step()
    everyone = torch.tensor([index for part in gather_parts([parts]) for index in part])
    F.cross_entropy(whole(data.x[everyone]), data.y[everyone]).backward()
    named = dict(whole.named_parameters())
    for name, parameter in model.module.named_parameters():
        if name.startswith("never"):
            assert parameter.grad is None
        else:
            assert relative_error(full(parameter.grad), named[name].grad) < 1e-11
    # The columns of the root are unknown, with one parameter group for each of them.
    assert model._steps.step.result.noise.read() is None


@pytest.mark.world_size(2)
def test_a_unit_that_the_last_micro_batch_leaves_out_under_hsdp():
    """It is refused where torch would not reduce it over copies any more; newer versions do."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = sometimes(mesh)
    torch.manual_seed(3)
    whole, data = Sometimes().double(), Data()
    batches = iter(resilin.AdaptiveDataLoader(data, 12, max_local_bsz=3))
    for use in (True, False):
        x, y, _, indices = next(batches)
        model.module.use = whole.use = use
        loss = F.cross_entropy(model(x), y)
        refused = ""
        try:
            loss.backward()
        except RuntimeError as error:
            refused = str(error)
        if refused:
            assert not use
            assert "had a gradient in earlier micro-batches of the step" in refused
            return
        everyone = torch.tensor([i for part in gather_parts([indices.tolist()]) for i in part])
        (F.cross_entropy(whole(data.x[everyone]), data.y[everyone]) / 2).backward()
        if use:
            model.optimizer.step()
    for (name, sharded), exact in zip(
        model.module.named_parameters(), whole.parameters(), strict=True
    ):
        if exact.grad is None:
            assert sharded.grad is None, name
        else:
            assert relative_error(full(sharded.grad), exact.grad) < 1e-11, name


@pytest.mark.world_size(2)
def test_freezing_leaving_a_step_and_release():
    model = adaptive(PLAIN)
    data = Data()
    loader = resilin.AdaptiveDataLoader(data, 12, max_local_bsz=3)
    batches, parts = iter(loader), []

    def one(*, leaves=False):
        x, y, _, indices = next(batches)
        loss = F.cross_entropy(model(x), y)
        if not leaves:
            loss.backward()
        return indices.tolist(), len(x)

    def end():
        model.optimizer.step()
        model.optimizer.zero_grad()

    frozen = [p for name, p in model.module.named_parameters() if name.startswith("block")]
    for parameter in frozen:
        parameter.requires_grad_(False)
    for _ in range(2):
        parts.append(one())
        if model.step_weight is None:
            end()
    whole = expected(gather_parts(parts), data)
    for name, parameter in model.module.named_parameters():
        if name.startswith("block"):
            assert parameter.grad is None
        elif parameter.grad is not None:
            assert relative_error(full(parameter.grad), whole[name]) < 1e-11
    end()
    one()
    end()
    one(leaves=replica() == 0)
    if replica() == 1:
        end()  # it waits for good: another replica has left the step
    with pytest.warns(UserWarning, match="left the last micro-batch of a step without"):
        one()
    end()
    one()
    end()
    assert model.clock.steps == 2
    net = model.module
    model.release()
    # FSDP averages over processes again, as it does without resilin.
    whole = make_net()
    whole.load_state_dict({name: full(p) for name, p in net.named_parameters()})
    net(data.x[: 2 + replica()]).square().mean().backward()
    for num in (2, 3):
        (whole(data.x[:num]).square().mean() / 2).backward()
    assert relative_error(full(net.head.weight.grad), whole.head.weight.grad) < 1e-11
