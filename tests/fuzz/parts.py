"""What a random program is made of besides its loop: data, model, optimizer, scheduler, average.

All of it is plain PyTorch. Script and oracle build the same parts, and only the loop differs.
"""

from __future__ import annotations

import collections
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedulers
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset, default_collate

from tests.fuzz.program import Program

FEATURES = 3
NUM_TEST = 7
BAD = 3
"""The sample that is not fit for training."""
MAX_NORM = 0.3
"""Threshold of clipping, at the reference batch."""
WARMUP = 5.0
"""Length of the warm-up of the rule `legw`, in reference steps."""


def train_data(p: Program) -> TensorDataset:
    """Inputs, targets, index and weight (tokens) of each sample."""
    generator = torch.Generator().manual_seed(p.data_seed)
    x = torch.randn(p.num_samples, FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randn(p.num_samples, 1, generator=generator, dtype=torch.float64)
    weight = torch.randint(1, 5, (p.num_samples,), generator=generator).double()
    return TensorDataset(x, y, torch.arange(p.num_samples), weight)


def test_data(p: Program) -> TensorDataset:
    generator = torch.Generator().manual_seed(p.data_seed + 1)
    x = torch.randn(NUM_TEST, FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randn(NUM_TEST, 1, generator=generator, dtype=torch.float64)
    return TensorDataset(x, y, torch.zeros(NUM_TEST, dtype=torch.long), torch.ones(NUM_TEST))


# Batches ---------------------------------------------------------------------------------------


def ahead(batches: Iterable[Any], num: int = 1) -> Iterator[Any]:
    """As a generator does that knows which batch is the last one."""
    read: collections.deque[Any] = collections.deque()
    for batch in batches:
        read.append(batch)
        if len(read) > num:
            yield read.popleft()
    yield from read


def preloaded(batches: Iterable[Any]) -> Iterator[Any]:
    """As a prefetcher does: a copy of the next batch is made while one is trained."""
    unread = iter(batches)

    def preload() -> Any:
        batch = next(unread, None)
        return None if batch is None else tuple(part.clone() for part in unpack(batch))

    coming = preload()
    while coming is not None:
        batch, coming = coming, preload()
        yield batch


def on_a_thread(batches: Iterable[Any]) -> Iterator[Any]:
    read: queue.Queue[Any] = queue.Queue(maxsize=2)

    def fill() -> None:
        try:
            for batch in batches:
                read.put(batch)
            read.put(None)
        except BaseException as error:
            read.put(error)

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    while (batch := read.get()) is not None:
        if isinstance(batch, BaseException):
            raise batch
        yield batch
    thread.join()


READERS: dict[str, Callable[[Iterable[Any]], Iterable[Any]]] = {
    "ahead": ahead,
    "deep": partial(ahead, num=3),
    "preloaded": preloaded,
    "thread": on_a_thread,
    "list": list,
}


def as_dict(samples: list[Any]) -> dict[str, Tensor]:
    return dict(zip(("x", "y", "idx", "weight"), default_collate(samples), strict=True))


def time_major(samples: list[Any]) -> list[Tensor]:
    """Inputs of the shape [T, B, 1], as for an RNN."""
    x, *others = default_collate(samples)
    return [x.t().unsqueeze(2), *others]


COLLATES = {"dict": as_dict, "time": time_major}


def unpack(batch: Any) -> list[Tensor]:
    """Inputs, targets, index and weight of a batch."""
    x, *others = batch.values() if isinstance(batch, dict) else batch
    return [x if x.dim() == 2 else x.squeeze(2).t(), *others]


class BadSample(Exception):
    """What a model raises that cannot use a sample."""


class Net(nn.Module):
    """A small model that also counts: each use of a sample gives its `seen` a gradient of 1/B."""

    def __init__(self, p: Program) -> None:
        super().__init__()
        self.kind = p.net
        self.raises = p.bad == "raise"
        hidden = FEATURES if p.net in ("linear", "tied") else 4
        self.first = nn.Linear(FEATURES, hidden)
        if p.net != "linear":
            self.second = nn.Linear(hidden, hidden)
        if p.net == "tied":
            self.second.weight = self.first.weight
        self.head = nn.Linear(hidden, 1)
        if p.net in ("unused", "sometimes"):
            self.extra = nn.Linear(FEATURES, 1)
        self.dropout = nn.Dropout(p.dropout)
        self.seen = nn.Parameter(torch.zeros(p.num_samples))

    def forward(self, x: Tensor, idx: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x)
        if self.raises and self.training and bool((idx == BAD).any()):
            raise BadSample
        if self.kind == "checkpointed":
            hidden = checkpoint(self._middle, hidden, use_reentrant=False)
        elif self.kind != "linear":
            hidden = self._middle(hidden)
        if self.dropout.p:
            hidden = self.dropout(hidden)
        out = self.head(hidden)
        if self.kind == "sometimes":
            chosen = x[:, 0] > 0.8
            if chosen.any():
                out = out + torch.zeros_like(out).index_put((chosen,), self.extra(x[chosen]))
        return out, self.seen[idx]

    def _middle(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(hidden)))


def make_net(p: Program) -> Net:
    torch.manual_seed(p.data_seed)
    net = Net(p).double()
    freeze(p, net, 0)
    return net


def shard(p: Program, net: Net) -> None:
    """Shards the model over all processes, or over pairs of them."""
    world = dist.get_world_size()
    if p.hybrid and world % 2 == 0:
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world,))
    if p.shard != "root":
        for layer in list(net.children()):
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
    if p.shard != "blocks":
        fully_shard(net, mesh=mesh)


def freeze(p: Program, net: Net, epoch: int) -> None:
    """Trains the first layer, or not, in this epoch."""
    off = {
        "none": False,
        "first": epoch == 0,
        "once": epoch == 0,
        "last": epoch == p.epochs - 1,
        "always": True,
    }
    net.first.requires_grad_(not off[p.frozen])


def make_optimizer(p: Program, net: Net) -> torch.optim.Optimizer:
    (optimizer,) = make_optimizers(p, net)
    return optimizer


def make_optimizers(p: Program, net: Net) -> list[torch.optim.Optimizer]:
    """The optimizer of the first group, and those of the next ones; the last has all the rest."""
    body = [q for name, q in net.named_parameters() if name != "seen"]
    half = 1 + len(body) // 2 if p.groups == 2 else len(body)
    groups: list[dict[str, Any]] = [{"params": body[:half]}]
    if body[half:]:
        groups.append({"params": body[half:], "lr": 0.01, "weight_decay": 0.002})
    groups.append({"params": [net.seen]})
    kinds = (p.optimizer, *p.others)[: len(groups)]
    made = []
    for number, kind in enumerate(kinds):
        last = number == len(kinds) - 1
        made.append(_optimizer(p, kind, groups[number : None if last else number + 1], net.seen))
    return made


def _optimizer(
    p: Program, kind: str, groups: list[dict[str, Any]], seen: Tensor
) -> torch.optim.Optimizer:
    counting = [group for group in groups if group["params"][0] is seen]
    if kind in ("adam", "adamw"):
        for group in counting:
            group.update(lr=0.1, weight_decay=0.0)
        make = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
        return make(groups, lr=0.02, weight_decay=p.weight_decay)
    for group in counting:
        group.update(lr=1.0, momentum=0, weight_decay=0, nesterov=False)
    return torch.optim.SGD(
        groups,
        lr=0.02,
        momentum=0.0 if kind == "sgd" else 0.9,
        nesterov=kind == "nesterov",
        weight_decay=p.weight_decay,
    )


def each(one_or_several: Any) -> list[Any]:
    return one_or_several if isinstance(one_or_several, list) else [one_or_several]


def make_scheduler(p: Program, optimizer: torch.optim.Optimizer) -> Any:
    if p.scheduler == "none":
        return None
    per_epoch = -(-p.num_samples // p.batch_size)
    total = {
        "epoch": p.epochs + 1,
        "clock": p.epochs * per_epoch,
        "step": p.epochs * p.num_samples + 1,
    }[p.schedule]
    lrs = [group["lr"] for group in optimizer.param_groups]
    momentum = not isinstance(optimizer, torch.optim.SGD)
    third = max(1, total // 3)
    make = getattr(schedulers, p.scheduler)
    arguments: dict[str, Any] = {
        "StepLR": {"step_size": third, "gamma": 0.7},
        "MultiStepLR": {"milestones": [1, third + 1], "gamma": 0.6},
        "ExponentialLR": {"gamma": 0.93},
        "CosineAnnealingLR": {"T_max": total},
        "CosineAnnealingWarmRestarts": {"T_0": third},
        "LinearLR": {"start_factor": 0.3, "total_iters": third},
        "ConstantLR": {"factor": 0.4, "total_iters": third},
        "PolynomialLR": {"total_iters": 2 * third, "power": 2.0},
        "LambdaLR": {"lr_lambda": lambda n: 1 / (1 + 0.1 * n)},
        "MultiplicativeLR": {"lr_lambda": lambda n: 0.97},
        "CyclicLR": {
            "base_lr": [lr / 4 for lr in lrs],
            "max_lr": lrs,
            "step_size_up": third,
            "cycle_momentum": False,
        },
        "OneCycleLR": {"max_lr": lrs, "total_steps": total, "cycle_momentum": momentum},
        "ReduceLROnPlateau": {"factor": 0.5, "patience": 0},
    }.get(p.scheduler, {})
    if p.scheduler == "SequentialLR":
        chain = [
            schedulers.LinearLR(optimizer, 0.5, total_iters=third),
            schedulers.ExponentialLR(optimizer, 0.95),
        ]
        return schedulers.SequentialLR(optimizer, chain, milestones=[third])
    if p.scheduler == "ChainedScheduler":
        return schedulers.ChainedScheduler(
            [schedulers.ConstantLR(optimizer, 0.5, third), schedulers.ExponentialLR(optimizer, 0.9)]
        )
    return make(optimizer, **arguments)


def make_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)


def sample_loss(p: Program, out: Tensor, y: Tensor, seen: Tensor, weight: Tensor) -> Tensor:
    """The mean over samples, or over tokens."""
    # The gradient is bounded, so that no program diverges and blows rounding errors up.
    per_sample = F.huber_loss(out, y, reduction="none").squeeze(1) + seen
    if p.weights == "samples":
        return per_sample.mean()
    return (per_sample * weight).sum() / weight.sum()


def overflow(loss: Tensor, idx: Tensor, scaler: torch.amp.GradScaler) -> Tensor:
    """Makes the loss infinite where a certain sample is in the batch and the scale is high."""
    if scaler.get_scale() > 300 and bool((idx == 1).any()):
        return loss * torch.inf
    return loss


class Ema:
    """A moving average of all parameters; the user's own object, with state."""

    def __init__(self, net: nn.Module) -> None:
        self.values = [q.detach().clone() for q in net.parameters()]
        self.num = 0

    def update(self, net: nn.Module) -> None:
        self.num += 1
        for value, parameter in zip(self.values, net.parameters(), strict=True):
            value.mul_(0.9).add_(parameter.detach(), alpha=0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "num": self.num}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num = state["num"]
        for value, saved in zip(self.values, state["values"], strict=True):
            value.copy_(saved)


class Diary:
    """What the rule did in each step; the user's own object, with state."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def append(self, epoch: int, model: Any) -> None:
        self.steps.append(
            {
                "epoch": epoch,
                "samples": model.clock.samples,
                "lr": [factor.lr for factor in model.factors],
                "beta_power": [factor.beta_power for factor in model.factors],
                "weight_decay": [factor.weight_decay for factor in model.factors],
                "momentum_power": [factor.momentum_power for factor in model.factors],
            }
        )

    def state_dict(self) -> dict[str, Any]:
        return {"steps": list(self.steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = list(state["steps"])


class History:
    """What evaluations said; the user's own object, with state."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def append(self, value: float) -> None:
        self.values.append(float(value))

    def state_dict(self) -> dict[str, Any]:
        return {"values": list(self.values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = list(state["values"])


def plain(value: Any) -> Any:
    """State without what cannot be compared: functions, and resilin's own attributes."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if not callable(v)}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, Tensor):
        return whole(value).clone()
    return value


def whole(tensor: Tensor) -> Tensor:
    """The tensor, put together if it is sharded; all replicas have to ask."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def final_state(
    net: Net,
    optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer],
    scheduler: Any,
    scaler: Any,
    ema: Ema | None,
    history: History,
    steps: int,
    samples: int,
) -> dict[str, Any]:
    """What must be the same in the script and in the oracle. There may be several optimizers."""
    state: dict[str, Any] = {
        "parameters": {name: whole(q).clone() for name, q in net.named_parameters()},
        "optimizer": [plain(own.state_dict()) for own in each(optimizer)],
        "history": list(history.values),
        "steps": steps,
        "samples": samples,
    }
    if scheduler not in (None, []):
        state["scheduler"] = [
            {
                "last_epoch": getattr(own, "last_epoch", None),
                "last_lr": list(own.get_last_lr()),
            }
            for own in each(scheduler)
        ]
    if scaler is not None:
        state["scaler"] = plain(scaler.state_dict())
    if ema is not None:
        state["ema"] = plain(ema.state_dict())
    return state
