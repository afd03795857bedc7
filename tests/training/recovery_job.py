"""A small job whose state is kept, as tests and their subprocesses run it."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import resilin

NUM_SAMPLES = 50
BATCH = 8
STEPS_PER_EPOCH = 7


class Ema:
    """Something of the user's own: a running average of the first weight."""

    def __init__(self) -> None:
        self.value = torch.zeros((), dtype=torch.float64)
        self.num = 0

    def update(self, weight: torch.Tensor) -> None:
        self.value = 0.9 * self.value + 0.1 * weight.detach().double()
        self.num += 1

    def state_dict(self) -> dict:
        return {"value": self.value, "num": self.num}

    def load_state_dict(self, state: dict) -> None:
        self.value, self.num = state["value"].clone(), state["num"]


class Job:
    """Everything that a script makes before its loop."""

    def __init__(
        self,
        *,
        features: int = 4,
        num_samples: int = NUM_SAMPLES,
        sharded: bool = False,
        **loader: object,
    ):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(num_samples, features, generator=generator, dtype=torch.float64)
        y = torch.randint(3, (num_samples,), generator=generator)
        dataset = TensorDataset(x, y, torch.arange(num_samples))
        torch.manual_seed(0)
        self.net = torch.nn.Linear(features, 3).double()
        if sharded:
            fully_shard(self.net)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [9, 13], gamma=0.5)
        self.model = resilin.AdaptiveDataParallel(
            self.net, self.optimizer, self.scheduler, stats_every=2
        )
        self.loader = resilin.AdaptiveDataLoader(dataset, batch_size=BATCH, shuffle=True, **loader)
        self.ema = Ema()
        resilin.register("ema", self.ema)
        self.used: list[tuple[int, int]] = []
        self.totals: list[float] = []
        self.evaluations: list[int] = []

    def train(
        self,
        epochs: int,
        on_step=lambda job: None,
        on_evaluation=lambda job: None,
        before_step=lambda: None,
    ) -> None:
        for epoch in resilin.remaining_epochs_until(epochs):
            stats = resilin.Accumulator()
            for x, y, indices in self.loader:
                before_step()
                step = self.model.clock.steps
                loss = F.cross_entropy(self.model(x), y)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                if self.loader.current_samples:
                    self.used += [(epoch, i) for i in indices.tolist()]
                    stats["samples"] += len(indices)
                if self.model.clock.steps > step:
                    self.scheduler.step()
                    self.ema.update(self.weight()[0, 0])
                    on_step(self)
            on_evaluation(self)
            self.evaluations.append(epoch)
            with stats.synchronized():
                self.totals.append(stats["samples"])

    def weight(self) -> torch.Tensor:
        weight = self.net.weight.detach()
        return weight.full_tensor() if isinstance(weight, DTensor) else weight

    def result(self) -> dict:
        return {
            "steps": self.model.clock.steps,
            "weight": self.weight().flatten().tolist(),
            "lr": self.optimizer.param_groups[0]["lr"],
            "ema": [self.ema.value.item(), self.ema.num],
            "totals": self.totals,
            "progress": self.model.clock.progress,
        }


def main() -> None:
    """Runs the job under a launcher; what it does to itself comes from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--long-evaluation", action="store_true")
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--sharded", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    resilin.init_process_group()
    job = Job(num_workers=args.num_workers, sharded=args.sharded)
    resilin.checkpoint_to(args.folder / "checkpoints", every=None, memory_every=1)
    began = resilin.resume()
    engine = resilin.current_job().engine
    note = {
        "pid": os.getpid(),
        "replica": engine.membership.replica,
        "replicas": engine.membership.num_replicas,
        "began": None if began is None else began.step,
    }
    (args.folder / f"start-{engine.membership.generation}-{engine.membership.replica}").write_text(
        json.dumps(note)
    )

    def on_step(job: Job) -> None:
        name = f"step-{engine.membership.generation}-{engine.membership.replica}"
        (args.folder / f"{name}.tmp").write_text(str(job.model.clock.steps))
        (args.folder / f"{name}.tmp").rename(args.folder / name)
        time.sleep(args.pause)

    def on_evaluation(job: Job) -> None:
        if args.long_evaluation:
            (args.folder / f"evaluating-{engine.membership.replica}").touch()
            time.sleep(60)

    job.train(4, on_step, on_evaluation)
    (args.folder / f"result-{engine.membership.replica}").write_text(json.dumps(job.result()))


if __name__ == "__main__":
    main()
