"""Sharded models beside one whole process: a network, its meshes, and the comparison."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import Dataset

import resilin
from resilin.core.noise import from_sums
from resilin.core.stream import SampleStream
from resilin.engine.copies import make_groups
from resilin.training.job import current_job

SIZES = (24, 7, 12, 5, 31, 3, 16, 9, 2, 40)
REFERENCE = 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(10)
        self.up = nn.Linear(10, 12)
        self.down = nn.Linear(12, 10)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """A frozen layer, one that is called twice, a block, and a head with few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 10)
        self.frozen.requires_grad_(False)
        self.shared = nn.Linear(10, 10)
        self.block = Block()
        self.last = nn.LayerNorm(10)
        self.head = nn.Linear(10, 3)
        self.scale = nn.Parameter(torch.ones(10))

    def forward(self, x):
        h = torch.tanh(self.frozen(x)) * self.scale
        h = torch.tanh(self.shared(torch.tanh(self.shared(h))))
        return self.head(self.last(self.block(h)))


class Data(Dataset):
    """Samples, labels, tokens (some samples have none), and their own indices."""

    def __init__(self, dtype=torch.float64, num=203) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(num, 6, generator=generator, dtype=torch.float64).to(dtype)
        self.y = torch.randint(0, 3, (num,), generator=generator)
        self.tokens = torch.randint(0, 5, (num,), generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index], self.tokens[index], index


def mean_loss(output, y, tokens):
    return F.cross_entropy(output, y)


def token_loss(output, y, tokens):
    each = F.cross_entropy(output, y, reduction="none")
    return (each * tokens).sum() / tokens.sum()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to shard and to train."""

    mesh: tuple[int, ...]
    tp: int = 1
    style: str = "nested"
    weigh: str | None = None
    clip: float | None = None
    groups: int = 2
    dtype: torch.dtype = torch.float64
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    penalty: float = 0.0
    adam: bool = False
    set_to_none: bool = True
    tolerance: float = 1e-11
    noise_tolerance: float = 1e-9
    steps: int = 30
    live: bool = False
    """Whether copies could come and go: FSDP reduces within a copy alone."""
    options: dict[str, Any] = field(default_factory=dict)


def make_net(dtype=torch.float64) -> Net:
    torch.manual_seed(2)
    return Net().to(dtype)


def make_optimizer(net: nn.Module, groups: int, adam: bool = False):
    named = [(n, p) for n, p in net.named_parameters() if not n.startswith("frozen")]
    if groups == 1:
        parts = [{"params": [p for _, p in named]}]
    else:
        # Weights and biases alternate in the columns of a flat gradient.
        first = [p for n, p in named if n.endswith("bias") or n == "scale"]
        rest = [p for n, p in named if not (n.endswith("bias") or n == "scale")]
        parts = [{"params": first}, {"params": rest, "lr": 0.03}]
    if adam:
        return torch.optim.AdamW(parts, lr=0.01)
    return torch.optim.SGD(parts, lr=0.05, momentum=0.9, weight_decay=1e-3)


def shard(net: Net, case: Case):
    """Shards a network as the case says; returns its data-parallel mesh."""
    shape = case.mesh if case.tp == 1 else (*case.mesh, case.tp)
    names = ("replicate", "shard")[-len(case.mesh) :] + (("tp",) if case.tp > 1 else ())
    whole = init_device_mesh("cpu", shape, mesh_dim_names=names)
    mesh = whole if case.tp == 1 else whole[tuple(n for n in names if n != "tp")]
    if case.tp > 1:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(net.block, whole["tp"], plan)
    kwargs = {"mesh": mesh, "mp_policy": case.policy, **case.options}
    if case.style == "nested":
        fully_shard(net.shared, **kwargs)
        fully_shard(net.block, **kwargs)
        fully_shard(net, **kwargs)
    elif case.style == "ignored":
        ignored = {net.scale, net.head.bias}
        fully_shard(net.block, **kwargs)
        fully_shard(net, ignored_params=ignored, **kwargs)
    elif case.style == "blocks":
        fully_shard(net.shared, **kwargs)
        fully_shard(net.block, **kwargs)
    elif case.style == "pair":
        fully_shard(net.block, **kwargs)
        fully_shard([net.last, net.head], **kwargs)
        fully_shard(net, **kwargs)
    else:
        fully_shard(net, **kwargs)
    return mesh


def full(tensor: Any) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "device_mesh") else tensor


def relative_error(a, b) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp_min(1e-12))


def penalty_of(net: nn.Module):
    total = 0.0
    for parameter in net.parameters():
        if parameter.requires_grad:
            term = parameter.square().sum()
            total = total + (term.full_tensor() if hasattr(term, "device_mesh") else term)
    return total


class Whole:
    """One process that trains on each whole batch, and knows every micro-gradient."""

    def __init__(self, case: Case, data: Data, loss: Callable[..., Any]) -> None:
        self.case, self.data, self.loss = case, data, loss
        self.net = make_net(case.dtype)
        self.optimizer = make_optimizer(self.net, case.groups, case.adam)
        self.stream, self.cursor, self.steps = SampleStream(len(data), seed=5), 0, 0

    def _grads(self, indices):
        loss = self.loss(
            self.net(self.data.x[indices]), self.data.y[indices], self.data.tokens[indices]
        )
        if self.case.penalty:
            loss = loss + self.case.penalty * penalty_of(self.net)
        trained = [p for p in self.net.parameters() if p.requires_grad]
        return dict(zip(trained, torch.autograd.grad(loss, trained), strict=True))

    def noise(self, parts):
        """Noise per group, of the gradients of all micro-batches (indices, weight)."""
        parts = [(indices, weight) for indices, weight in parts if weight]
        grads = [self._grads(torch.tensor(indices)) for indices, _ in parts]
        weights = [weight for _, weight in parts]
        total, found = sum(weights), []
        for group in self.optimizer.param_groups:
            mean = {
                p: sum(w * g[p] for w, g in zip(weights, grads, strict=True)) / total
                for p in group["params"]
            }
            terms = sum(
                w * sum(float(g[p].double().square().sum()) for p in group["params"])
                for w, g in zip(weights, grads, strict=True)
            )
            found.append(
                from_sums(
                    batch_size=total,
                    num_micro_batches=len(parts),
                    weighted_sqr_norm=terms / total,
                    mean_sqr_norm=sum(float(m.double().square().sum()) for m in mean.values()),
                )
            )
        return found

    def step(self):
        span = self.stream.batch(self.cursor, SIZES[self.steps % len(SIZES)])
        grads = self._grads(torch.from_numpy(self.stream.indices(span)))
        for parameter, grad in grads.items():
            parameter.grad = grad.clone()
        norm = None
        if self.case.clip is not None:
            norm = nn.utils.clip_grad_norm_(list(grads), self.case.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.cursor, self.steps = span.stop, self.steps + 1
        return grads, norm


def gather_parts(mine):
    """The micro-batches of all replicas, once each."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (current_job().engine.membership.replica, mine))
    return [part for parts in dict(everyone).values() for part in parts]


def adaptive(case: Case, **kwargs):
    """A sharded model with its optimizer."""
    net = make_net(case.dtype)
    shard(net, case)
    optimizer = make_optimizer(net, case.groups, case.adam)
    if case.live:
        counts = dist.get_rank(), dist.get_world_size(), case.mesh[1]
        groups = make_groups(*counts, timedelta(minutes=1))
        current_job().engine.copy_groups = lambda: groups
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return resilin.AdaptiveDataParallel(
            net, optimizer, rule="constant", stats_every=1, **kwargs
        )


def train(case: Case, *, compared: bool = True):
    """Trains, and compares each step; returns the worst errors, and the noise of each step."""
    resilin.reset_job()
    data = Data(case.dtype)
    loss = token_loss if case.weigh else mean_loss
    whole = Whole(case, data, loss)
    model = adaptive(case)
    optimizer = model.optimizer
    loader = resilin.AdaptiveDataLoader(
        data,
        batch_size=REFERENCE,
        shuffle=True,
        seed=5,
        max_local_bsz=5,
        batch_weight=None if case.weigh != "loader" else lambda batch: batch[2].sum(),
    )
    loader.set_batch_size(lambda clock: SIZES[clock.steps % len(SIZES)])
    worst = {"grad": 0.0, "param": 0.0, "noise": 0.0, "norm": 0.0}
    mine, noises, most = [], [], 0
    while model.clock.steps < case.steps:
        for x, y, tokens, indices in loader:
            weight = float(tokens.sum()) if case.weigh else float(len(x))
            if case.weigh == "block":
                with model.weight(weight if loader.current_samples else 0.0):
                    output = model(x)
            else:
                output = model(x)
            value = loss(output, y, tokens)
            if case.penalty:
                value = value + case.penalty * penalty_of(model.module)
            value.backward()
            mine.append((indices.tolist(), weight if loader.current_samples else 0.0))
            result = model._steps.step.result
            if result is None:
                optimizer.step()
                optimizer.zero_grad(set_to_none=case.set_to_none)
                continue
            most, parts = max(most, len(mine)), gather_parts(mine)
            mine = []
            noise = None if result.noise is None else result.noise.read()
            noises.append(noise)
            if compared:
                # The sizes repeat after that, and each of its gradients takes time.
                if noise is not None and whole.steps < len(SIZES):
                    for a, b in zip(noise, whole.noise(parts), strict=True):
                        for one, other in ((a.sqr_norm, b.sqr_norm), (a.trace, b.trace)):
                            error = abs(one - other) / max(abs(b.sqr_norm), abs(b.trace))
                            worst["noise"] = max(worst["noise"], error)
                named = dict(whole.net.named_parameters())
                # Later gradients show in the parameters, which cost less to compare.
                shown = whole.steps < len(SIZES) or whole.steps + 1 == case.steps
                present = model.module.named_parameters() if shown else ()
                got = {name: full(p.grad) for name, p in present if p.grad is not None}
                grads, norm = whole.step()
                assert not shown or {n for n, p in named.items() if p in grads} == set(got)
                for name, grad in got.items():
                    worst["grad"] = max(worst["grad"], relative_error(grad, grads[named[name]]))
            if case.clip is not None:
                clipped = model.clip_grad_norm_(case.clip, policy="fixed")
                if compared:
                    worst["norm"] = max(worst["norm"], relative_error(clipped, norm))
            optimizer.step()
            optimizer.zero_grad(set_to_none=case.set_to_none)
            if compared and whole.steps % 10 == 0:
                for name, parameter in model.module.named_parameters():
                    error = relative_error(full(parameter), named[name])
                    worst["param"] = max(worst["param"], error)
            if model.clock.steps >= case.steps:
                break
    assert most > 1
    assert any(noise is not None for noise in noises)
    return worst, noises, model


def check(case: Case) -> None:
    worst, _, _ = train(case)
    assert worst["param"] < case.tolerance, (case, worst)
    assert worst["grad"] < case.tolerance, (case, worst)
    assert worst["norm"] < case.tolerance, (case, worst)
    assert worst["noise"] < case.noise_tolerance, (case, worst)
