"""Contenders of `overhead.py`: the same training loop in plain PyTorch, DDP, resilin and peers.

Each is a generator that makes one optimizer step per `next`, on batches of the same size from the
same data, with the same optimizer. Data come from a loader in all of them, because a step of
resilin begins in its loader: a stock `DataLoader` with a `DistributedSampler`, or an
`AdaptiveDataLoader`. The dataset indexes a tensor once per batch, so that loading costs next to
nothing, and what a loader itself does is not hidden behind it.
"""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import resilin
from resilin.engine import environment
from resilin.training.data.iteration import Iterations
from resilin.training.passes import Passes

LOCAL_BATCH = 64
"""Samples of a micro-batch."""
KEPT = 4096
"""Different samples in the data; more positions than that have the same ones again."""
NUM_SAMPLES = 65536
"""Samples of an epoch: one that ends every few steps would be no training."""

Steps = Iterator[None]


@dataclass(frozen=True, slots=True)
class Model:
    """An MLP of equal layers and a small head."""

    width: int
    depth: int
    sharded: bool = False
    """Whether `fully_shard` divides it among the processes, in units of at most 8 layers."""

    @property
    def num_parameters(self) -> int:
        return self.depth * (self.width + 1) * self.width + (self.width + 1) * 10

    def make(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        layers = (
            layer
            for _ in range(self.depth)
            for layer in (nn.Linear(self.width, self.width), nn.ReLU())
        )
        model = nn.Sequential(*layers, nn.Linear(self.width, 10))
        if self.sharded:
            # A few layers have a unit each, as the blocks of a large model have.
            each = 2 * (8 if self.depth > 8 else 1)
            for start in range(0, 2 * self.depth, each):
                fully_shard(list(model[start : start + each]))
            fully_shard(model)
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


class Samples:
    """A dataset that fetches a batch as one."""

    def __init__(self, model: Model) -> None:
        generator = torch.Generator().manual_seed(0)
        self._x = torch.randn(KEPT, model.width, generator=generator)
        self._y = torch.randint(0, 10, (KEPT,), generator=generator)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._x[index % KEPT], self._y[index % KEPT]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        which = torch.tensor(indices).remainder_(KEPT)
        return self._x[which], self._y[which]


def as_it_is(batch: Any) -> Any:
    return batch


def micro_batches(world: int) -> int:
    """Micro-batches of a step: two on one process, where one alone has no noise to measure."""
    return 2 if world == 1 else 1


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def stock_batches(model: Model) -> Iterator[tuple[Tensor, Tensor]]:
    """Micro-batches of a stock loader, epoch after epoch."""
    data: Any = Samples(model)
    sampler: DistributedSampler[Any] = DistributedSampler(
        data, num_replicas=world_size(), rank=int(os.environ["RANK"])
    )
    loader = DataLoader(data, LOCAL_BATCH, sampler=sampler, collate_fn=as_it_is)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


def bare(model: Model) -> Steps:
    """Plain PyTorch, without DDP."""
    net, optimizer = model.make()
    num = micro_batches(world_size())
    for index, (x, y) in enumerate(stock_batches(model), start=1):
        (F.cross_entropy(net(x), y) / num).backward()
        if index % num == 0:
            optimizer.step()
            optimizer.zero_grad()
            yield


def plain(model: Model) -> Steps:
    """DDP as its documentation has it."""
    dist.init_process_group("gloo")
    net, optimizer = model.make()
    return synced(model, DistributedDataParallel(net, gradient_as_bucket_view=True), optimizer)


def plain_sharded(model: Model) -> Steps:
    """FSDP2 as its documentation has it."""
    dist.init_process_group("gloo")
    net, optimizer = model.make()
    for x, y in stock_batches(model):
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def synced(model: Model, ddp: DistributedDataParallel, optimizer: Any) -> Steps:
    """Steps of a model in DDP that synchronises in the last micro-batch alone."""
    num = micro_batches(world_size())
    for index, (x, y) in enumerate(stock_batches(model), start=1):
        ddp.require_backward_grad_sync = index % num == 0
        (F.cross_entropy(ddp(x), y) / num).backward()
        if index % num == 0:
            optimizer.step()
            optimizer.zero_grad()
            yield


Optimizers = Callable[[nn.Module], list[torch.optim.Optimizer]]


def ours(
    model: Model,
    stats_every: int | Literal["auto"] = "auto",
    *,
    records: bool = False,
    optimizers_of: Optimizers | None = None,
) -> Steps:
    """A script for `resilin run`, with an autoscaler that may choose among one batch size."""
    resilin.init_process_group("gloo")
    net, optimizer = model.make()
    optimizers = [optimizer] if optimizers_of is None else optimizers_of(net)
    num = micro_batches(world_size())
    batch_size = LOCAL_BATCH * num * world_size()
    loader = resilin.AdaptiveDataLoader(
        Samples(model), batch_size, shuffle=True, max_local_bsz=LOCAL_BATCH, collate_fn=as_it_is
    )
    loader.autoscale_batch_size(batch_size)
    adaptive = resilin.AdaptiveDataParallel(net, optimizers, stats_every=stats_every)
    index = 0
    for _ in resilin.remaining_epochs_until(10**9):
        for x, y in loader:
            loss = F.cross_entropy(adaptive(x), y)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            if records:
                resilin.record(loss=loss)
            index += 1
            if index % num == 0:
                yield


def without_log(model: Model) -> Steps:
    os.environ[environment.RUN_DIR] = environment.OFF
    return ours(model, records=True)


def without_identity(model: Model) -> Steps:
    """The same as `ours`, which takes the batch that was handed out last for the trained one."""
    Iterations.follow = lambda *_, **__: None  # type: ignore[method-assign]
    Passes._read = lambda _, current: current.steps  # type: ignore[method-assign]
    return ours(model)


def halves(net: nn.Module) -> list[list[Tensor]]:
    """The matrices and the rest, as Muon and AdamW have them."""
    parameters = list(net.parameters())
    return [[p for p in parameters if p.dim() == 2], [p for p in parameters if p.dim() < 2]]


def one_of_two_groups(net: nn.Module) -> list[torch.optim.Optimizer]:
    groups = [{"params": half} for half in halves(net)]
    return [torch.optim.SGD(groups, lr=0.01, momentum=0.9)]


def two(net: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(half, lr=0.01, momentum=0.9) for half in halves(net)]


LAUNCHERS: list[subprocess.Popen[bytes]] = []
"""The launcher of this process, if it is the first of a live job: it ends with this process."""


def live(model: Model) -> Steps:
    """The same as `ours` with the engine of `resilin run --live`, whose launcher does nothing."""
    rank = int(os.environ["RANK"])
    path = Path(os.environ[environment.RUN_DIR]).parent / "socket"
    if rank == 0:
        script = str(Path(__file__).with_name("overhead_launcher.py"))
        command = [sys.executable, script, str(path), str(world_size()), str(os.getppid())]
        LAUNCHERS.append(subprocess.Popen(command, stdin=subprocess.PIPE))
    while not path.exists():
        time.sleep(0.05)
    os.environ.update({environment.LIVE: str(path), environment.MEMBER: f"worker-{rank}"})
    return ours(model)


def fairscale(model: Model) -> Steps:
    """FairScale's AdaScale, over stock DDP."""
    from fairscale.optim import AdaScale

    dist.init_process_group("gloo")
    net, optimizer = model.make()
    ddp = DistributedDataParallel(net)
    num = micro_batches(world_size())
    return synced(model, ddp, AdaScale(optimizer, num_gradients_to_accumulate=num))


def adaptdl(model: Model) -> Steps:
    """AdaptDL, alone: without its scheduler, and without checkpoints."""
    os.environ.update(
        ADAPTDL_MASTER_ADDR=os.environ["MASTER_ADDR"],
        ADAPTDL_MASTER_PORT=os.environ["MASTER_PORT"],
        ADAPTDL_NUM_REPLICAS=os.environ["WORLD_SIZE"],
        ADAPTDL_REPLICA_RANK=os.environ["RANK"],
        ADAPTDL_NUM_NODES="1",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it uses pkg_resources
        import adaptdl.torch as theirs
    logging.disable(logging.INFO)
    theirs.init_process_group("gloo")
    net, optimizer = model.make()
    batch_size = LOCAL_BATCH * world_size()
    loader = theirs.AdaptiveDataLoader(
        Samples(model), batch_size, shuffle=True, drop_last=True, collate_fn=as_it_is
    )
    loader.autoscale_batch_size(batch_size)
    adaptive = theirs.AdaptiveDataParallel(net, optimizer)
    for _ in theirs.remaining_epochs_until(10**9):
        for x, y in loader:
            if len(x) != LOCAL_BATCH:
                raise RuntimeError(f"a batch of {len(x)} samples where others have {LOCAL_BATCH}")
            F.cross_entropy(adaptive(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


NEVER = 10**9
"""Steps between two measurements of a contender that measures its first step alone."""
CONTENDERS: dict[str, Callable[[Model], Steps]] = {
    "plain": plain,
    "control": plain,
    "never": lambda model: ours(model, NEVER),
    "default": ours,
    "every": lambda model: ours(model, 1),
    "bare": bare,
}
TELEMETRY: dict[str, Callable[[Model], Steps]] = {
    "without": without_log,
    "without_again": without_log,
    "events": lambda model: ours(model, records=True),
}
IDENTITY: dict[str, Callable[[Model], Steps]] = {
    "without": without_identity,
    "without_again": without_identity,
    "identity": ours,
}
SHARDED: dict[str, Callable[[Model], Steps]] = {
    "plain": plain_sharded,
    "control": plain_sharded,
    "default": ours,
    "every": lambda model: ours(model, 1),
}
SEVERAL: dict[str, Callable[[Model], Steps]] = {
    "joint": lambda model: ours(model, optimizers_of=one_of_two_groups),
    "joint_again": lambda model: ours(model, optimizers_of=one_of_two_groups),
    "two": lambda model: ours(model, optimizers_of=two),
}
LIVE: dict[str, Callable[[Model], Steps]] = {"restart": ours, "restart_again": ours, "live": live}
PEERS: dict[str, Callable[[Model], Steps]] = {"fairscale": fairscale, "adaptdl": adaptdl}
