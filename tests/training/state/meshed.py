"""Small models on meshes of some of the ranks of a world, with AdamW, and what they must hold."""

import itertools
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from resilin.training.state.registry import Registry

WIDTH = 130


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)


class Model(nn.Module):
    """Uneven shards, empty ones (3 rows on 4 ranks), and a buffer that every process has."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)
        self.register_buffer("count", torch.tensor([1.5, 2.5]))


class Place:
    """A mesh of the first ranks, and a group of them; made by all ranks of the world."""

    def __init__(self, kind, *sizes):
        self.kind = kind
        names = {1: ("dp",), 2: ("rep", "dp") if kind == "hsdp" else ("dp", "tp")}[len(sizes)]
        ranks = torch.arange(torch.Size(sizes).numel())
        self.mesh = DeviceMesh("cpu", ranks.reshape(sizes), mesh_dim_names=names)
        self.num = ranks.numel()
        timeout = timedelta(seconds=60)
        self.group = dist.new_group(ranks.tolist(), backend="gloo", timeout=timeout)

    @property
    def is_member(self):
        return dist.get_rank() < self.num

    def model(self, seed):
        torch.manual_seed(seed)
        model = Model()
        if self.kind == "none":
            return model
        mesh = self.mesh
        if self.kind == "dptp":
            # The norms are left alone: each member of a tensor-parallel group has a copy.
            plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
            parallelize_module(model, mesh["tp"], plan)
            mesh = mesh["dp"]
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model


def optimizer_of(model):
    """In two groups, so that numbers of parameters are not the order of the model."""
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    others = [p for name, p in model.named_parameters() if "norm" not in name]
    groups = [{"params": norms, "weight_decay": 0.0}, {"params": others}]
    return torch.optim.AdamW(groups, lr=1e-2)


def train(model, optimizer, steps=2, seed=7):
    """Steps with gradients that are the same whatever the mesh is."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in model.parameters():
            full = torch.randn(parameter.shape, generator=generator)
            if isinstance(parameter, DTensor):
                full = distribute_tensor(full, parameter.device_mesh, parameter.placements)
            parameter.grad = full
        optimizer.step()


def registry_of(model, optimizer):
    registry = Registry()
    registry.add("model", model)
    registry.add("optimizer", optimizer)
    return registry


def tensors_of(model, optimizer):
    found = dict(model.state_dict())
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{key}": value for key, value in state.items()}
    return found


def full_tensors(model, optimizer):
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).clone()
        for name, each in tensors_of(model, optimizer).items()
    }


def check(model, optimizer, expected):
    """Every local part is bitwise that of the whole tensor, at the place where torch has it."""
    found = tensors_of(model, optimizer)
    assert list(found) == list(expected)
    for name, tensor in found.items():
        whole = expected[name]
        if isinstance(tensor, DTensor):
            assert tensor.shape == whole.shape
            [chunk] = tensor.__create_chunk_list__()
            region = zip(chunk.offsets, chunk.sizes, strict=True)
            whole = whole[tuple(slice(begin, begin + size) for begin, size in region)]
            tensor = tensor.to_local()
        assert torch.equal(tensor, whole), name
        assert tensor.dtype == whole.dtype


def local_bytes(model, optimizer, *, shared=True):
    """Bytes of the state on this process; with `shared`, each divided by those that hold it."""
    total = 0.0
    for tensor in tensors_of(model, optimizer).values():
        if not isinstance(tensor, DTensor):
            total += tensor.nbytes
            continue
        pairs = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
        copies = itertools.accumulate((n for n, p in pairs if p.is_replicate()), int.__mul__)
        holders = max(copies, default=1)
        if tensor.device_mesh.mesh_dim_names == ("dp",):
            holders = max(
                1, tensor.device_mesh._get_root_mesh().size() // tensor.device_mesh.size()
            )
        total += tensor.to_local().nbytes / (holders if shared else 1)
    return total
