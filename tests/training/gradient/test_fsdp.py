"""Sharded models train as one whole process does, on every mesh.

Each world trains many cases, because processes take longer to start than a case takes to train.
Float64 leaves no room in which rounding could hide a wrong weight.
"""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from resilin.engine.collectives import wait_for
from resilin.training.gradient.copies import add_over_copies
from tests.replicas import replica
from tests.training.gradient.sharded import Case, check, train

ONE = [
    Case(mesh=(1,), weigh="loader", clip=0.05),
]
TWO = [
    Case(mesh=(2,)),
    Case(mesh=(2,), style="ignored", weigh="block", clip=0.05, adam=True, steps=10),
    Case(mesh=(2,), style="blocks", groups=1, set_to_none=False, steps=10),
    Case(
        mesh=(2,), style="pair", weigh="loader", options={"reshard_after_forward": False}, steps=10
    ),
    Case(mesh=(2,), penalty=0.01, steps=10),
    Case(mesh=(1, 2), weigh="block"),
    Case(mesh=(2, 1), style="ignored", clip=0.05),
    Case(mesh=(1,), tp=2, clip=0.05, steps=10),
    Case(mesh=(2,), dtype=torch.float32, tolerance=1e-4, noise_tolerance=1e-3, steps=10),
]
FOUR = [
    Case(mesh=(4,), weigh="block", clip=0.05),
    Case(mesh=(2, 2), style="ignored"),
    Case(mesh=(2, 2), style="ignored", weigh="block", clip=0.05, live=True),
    Case(mesh=(2, 2), penalty=0.01, steps=10, live=True),
    Case(mesh=(2, 1), tp=2, weigh="block", steps=10),
    Case(mesh=(2,), tp=2, style="ignored", weigh="loader", clip=0.05),
]


@pytest.mark.world_size(1)
def test_one_process():
    for case in ONE:
        check(case)


@pytest.mark.world_size(2)
def test_two_processes():
    for case in TWO:
        check(case)


@pytest.mark.nightly(part="jobs")
@pytest.mark.world_size(4)
def test_four_processes():
    for case in FOUR:
        check(case)


@pytest.mark.world_size(2)
def test_half_precision_measures_the_same_noise():
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    _, exact, _ = train(Case(mesh=(2,), dtype=torch.float32, steps=20), compared=False)
    _, half, model = train(
        Case(mesh=(2,), dtype=torch.float32, policy=mixed, steps=20), compared=False
    )
    assert all(torch.isfinite(p.to_local()).all() for p in model.module.parameters())
    for group in range(2):
        for part in ("sqr_norm", "trace"):
            first, second = (
                sum(getattr(noise[group], part) for noise in noises if noise is not None)
                for noises in (exact, half)
            )
            assert second == pytest.approx(first, rel=0.05)


@pytest.mark.world_size(2)
def test_copies_read_the_device_only_where_one_lacks_a_gradient(monkeypatch):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards"))

    def split(values):
        return DTensor.from_local(torch.tensor(values), mesh["shards"], [Shard(0)])

    parameters = [torch.nn.Parameter(split([0.0, 0.0])) for _ in range(3)]
    reads = []
    own = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: reads.append(t.numel()) or own(t))

    def add(*grads):
        reads.clear()
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = None if grad is None else split(grad)
        add_over_copies(parameters, mesh.get_group("copies"), wait_for)
        read = reads.count(len(parameters))  # DTensor reads its mesh
        return read, [None if p.grad is None else own(p.grad.to_local()) for p in parameters]

    mine = [1.0, 2.0 + replica()]
    assert add(mine, mine, mine) == (0, [[2.0, 5.0]] * 3)
    unused = (None, None) if replica() else (mine, None)
    assert add(mine, *unused) == (1, [[2.0, 5.0], [1.0, 2.0], None])
