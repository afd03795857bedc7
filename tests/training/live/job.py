"""A live job that dies where a test says: each member knows its number, and kills itself there.

The model counts how often each sample was in a committed step: `seen` has the gradient 1/B for each
sample of a step, and a learning rate of 1.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

import resilin
from resilin.engine.lost import PeerLost
from resilin.training.ballot import Ballot
from resilin.training.job import current_job

SETTINGS = json.loads(os.environ["LIVE_TEST"])
MEMBER = os.environ.get("RESILIN_MEMBER", os.environ.get("RANK", "0"))
NUMBER = int(re.search(r"(\d+)$", MEMBER)[1])
N, BATCH = SETTINGS.get("samples", 240), 24
FEATURES = set(SETTINGS.get("features", ()))


def die(place: str, **now: int) -> None:
    """Kills this process if a fault is due here."""
    for fault in SETTINGS.get("faults", ()):
        due = all(fault.get(name, value) == value for name, value in now.items())
        if fault["member"] == NUMBER and fault["at"] == place and due:
            if fault.get("once") and Path(SETTINGS["marks"]).read_text():
                continue
            mark(f"{place} {NUMBER}")
            if "exit" in fault:
                sys.exit(fault["exit"])
            os.kill(os.getpid(), getattr(signal, fault.get("signal", "SIGKILL")))
            if fault.get("signal") == "SIGTERM":
                fault["member"] = None  # asked once


def mark(text: str) -> None:
    with Path(SETTINGS["marks"]).open("a") as file:
        file.write(text + "\n")


def await_change() -> None:
    """Waits until this member knows that somebody joins, unless all are there already."""
    engine = current_job().engine
    full = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    while engine.changes is not None and engine.membership.num_replicas < full:
        if engine.changes.sees_change:
            break
        time.sleep(0.01)


class Net(nn.Module):
    """A small network that counts its samples."""

    def __init__(self) -> None:
        super().__init__()
        middle: nn.Module = nn.Tanh()
        if "batch_norm" in FEATURES:
            middle = nn.Sequential(nn.BatchNorm1d(16), nn.Tanh())
        if "dropout" in FEATURES:
            middle = nn.Sequential(nn.Dropout(0.1), nn.Tanh())
        self.net = nn.Sequential(nn.Linear(8, 16), middle, nn.Linear(16, 2))
        self.seen = nn.Parameter(torch.zeros(N))

    def forward(self, x, indices):
        return self.net(x), self.seen[indices]

    def load_state_dict(self, *args, **kwargs):
        die("healing")
        return super().load_state_dict(*args, **kwargs)


class Shards:
    """A dataset as a stream of shards of unequal lengths, some of which are empty."""

    num_shards = 7

    def __init__(self, dataset: TensorDataset) -> None:
        self._dataset = dataset
        self.fingerprint = f"shards of {len(dataset)}"

    def open(self, shard: int, num_shards: int, epoch: int):
        # Shard 5 has half of the samples, shard 0 has none.
        for index in range(len(self._dataset)):
            if (5 if index % 2 else 1 + index // 2 % 6) == shard:
                yield self._dataset[index]


def shard(net: Net) -> None:
    """Shards the model over all processes, or each copy of it over two."""
    world = dist.get_world_size()
    sizes = (world,) if "fsdp" in FEATURES else (world // 2, 2)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("copies", "shards")[-len(sizes) :])
    fully_shard(net.net[0], mesh=mesh)
    fully_shard(net, mesh=mesh)


def whole(tensor: torch.Tensor) -> list[float]:
    """All numbers of a parameter."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.flatten().tolist()


def die_in_a_question() -> None:
    """Has this member die after it has taken part in a question, before it has the answer."""
    own = resilin.Accumulator._add_up

    def add_up(self, peers):
        found = own(self, peers)
        die("in_question", epoch=current_job().epoch)
        return found

    resilin.Accumulator._add_up = add_up


def lose_ballots() -> None:
    """Has this member lose a ballot that others have complete, where a test says."""
    own = Ballot.sums

    def sums(self):
        found = own(self)
        for fault in SETTINGS.get("faults", ()):
            now = {"member": NUMBER, "at": "ballot", "step": current_job().clock.steps}
            if fault == now:
                mark(f"ballot {NUMBER}")
                fault["member"] = None  # once
                raise PeerLost("a test has lost the ballot")
        return found

    Ballot.sums = sums


def main() -> None:
    die_in_a_question()
    lose_ballots()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    resilin.init_process_group()
    die("start")
    if "copies" in FEATURES:
        resilin.checkpoint_to(None, memory_every=1)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 8, generator=generator, dtype=torch.float64)
    y = torch.randint(2, (N,), generator=generator)
    net = Net().double()
    if FEATURES & {"fsdp", "hsdp"}:
        shard(net)
    optimizer = torch.optim.SGD(
        [
            {"params": net.net.parameters(), "lr": 0.05, "momentum": 0.9},
            {"params": [net.seen], "lr": 1.0},
        ]
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, [lambda epoch: 0.9**epoch, lambda epoch: 1.0]
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if "scaler" in FEATURES else None
    model = resilin.AdaptiveDataParallel(net, optimizer, scheduler, scaler=scaler)
    ema = resilin.EMA(model, 0.9) if "ema" in FEATURES else None
    as_data = Shards if "stream" in FEATURES else lambda dataset: dataset
    loader = resilin.AdaptiveDataLoader(
        as_data(TensorDataset(x, y, torch.arange(N))),
        batch_size=BATCH,
        shuffle=True,
        drop_last=True,
        num_workers=2 if "workers" in FEATURES else 0,
    )
    if "accumulation" in FEATURES:
        loader.autoscale_batch_size(BATCH, local_bsz_bounds=(1, 5), gradient_accumulation=True)
    held_out = TensorDataset(x[:50], y[:50], torch.arange(50))
    held = resilin.AdaptiveDataLoader(as_data(held_out), 10)
    sums, cleared, counted = [], [], resilin.Accumulator()
    if "asks_first" in FEATURES:
        with counted.synchronized():
            pass
    for epoch in resilin.remaining_epochs_until(SETTINGS.get("epochs", 4)):
        stats = resilin.Accumulator()
        for inputs, labels, indices in loader.prefetch("cpu") if "prefetch" in FEATURES else loader:
            step = current_job().clock.steps
            die("forward", step=step)
            weighed = model.weight(float(len(inputs))) if "weight" in FEATURES else None
            with weighed or contextlib.nullcontext():
                output, seen = model(inputs, indices)
            output.register_hook(lambda _, now=step: die("backward", step=now))
            loss = F.cross_entropy(output, labels) + seen.mean()
            (loss if scaler is None else scaler.scale(loss)).backward()
            die("before_step", step=step)
            if "clip" in FEATURES:
                model.clip_grad_norm_(1e9)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            die("after_step", step=step)
            stats["samples"] += loader.current_samples
            counted["samples"] += loader.current_samples
            if step in SETTINGS.get("wait_at", ()):
                await_change()
        die("end_of_epoch", epoch=epoch)
        scheduler.step()
        with stats.synchronized():
            total = stats["samples"]
        sums.append(total)
        die("before_clear", epoch=epoch)
        with counted.synchronized():
            cleared.append(counted["samples"])
        die("in_clear", epoch=epoch)
        counted.clear()
        net.eval()
        with torch.no_grad(), ema.applied() if ema else contextlib.nullcontext():
            evaluated = resilin.Accumulator()
            for inputs, _, indices in held:
                model(inputs, indices)
                evaluated["samples"] += len(inputs)
                die("evaluation", epoch=epoch)
            with evaluated.synchronized():
                pass
        net.train()
        die("after_epoch", epoch=epoch)
    buffers = [float(b) for b in net.buffers() if b.dim() == 0]
    report = {
        "member": MEMBER,
        "steps": current_job().clock.steps,
        "replicas": current_job().engine.membership.num_replicas,
        "generation": current_job().engine.membership.generation,
        "lr": optimizer.param_groups[0]["lr"],
        "sums": sums,
        "cleared": cleared,
        "buffers": buffers,
        "scale": None if scaler is None else scaler.get_scale(),
        "seen": sorted({round(-BATCH * v, 9) for v in whole(net.seen)}),
        "averages": [] if ema is None else whole(ema.state_dict()["averages"]["net.0.weight"]),
        "parameters": [v for p in net.net.parameters() for v in whole(p)],
    }
    mark("end " + json.dumps(report))


if __name__ == "__main__":
    sys.exit(main())
