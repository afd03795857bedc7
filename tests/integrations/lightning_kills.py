"""A Trainer with everything that remembers, killed wherever it is told.

`resilin run lightning_kills.py DIRECTORY SETTINGS` dies in life i where the i-th kill of the
settings (JSON) says: the place, how many steps were made, and the replica. Replica 0 writes what it
ends with to `DIRECTORY/result.json`. Tests also call `fit` in their own process, where a kill is an
exception.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import (
    Checkpoint,
    EarlyStopping,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import resilin
from resilin.integrations.lightning import ElasticStrategy, launched

NUM, BATCH, VALID = 43, 8, 40
"""Samples, and those of a step: 6 steps to an epoch, of which replicas have unequal parts. And
samples to validate on, which two replicas can share without a sampler that repeats some."""


def data(num: int = NUM) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x @ torch.arange(4.0, dtype=torch.float64)).sin())


class Net(L.LightningModule):
    def __init__(self, settings: dict[str, Any], rate: float = 0.2) -> None:
        super().__init__()
        self.save_hyperparameters({"rate": rate, "phase": "warm"})
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        self.settings = settings
        self.seen = torchmetrics.SumMetric()
        self.memory = torch.zeros(3, dtype=torch.float64)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self.net(x).squeeze(1), y)
        once = {"on_step": False, "on_epoch": True}
        self.log("train", loss, sync_dist=True, **once)
        self.log("largest", y.max(), sync_dist=True, reduce_fx="max", **once)
        self.log("samples", float(len(y)), sync_dist=True, reduce_fx="sum", **once)
        self.seen.update(len(y))
        self.log("seen", self.seen, **once)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        name = "val" if self.settings.get("loaders", 1) == 1 else f"val{dataloader_idx}"
        loss = F.mse_loss(self.net(x).squeeze(1), y)
        # Up and down, so that there is something to stop, to keep and to reduce.
        loss = loss * (1 + 0.3 * (self.current_epoch % 3))
        self.log(name, loss, sync_dist=True, add_dataloader_idx=False)

    def on_validation_end(self):
        if not self.trainer.sanity_checking:
            self.memory[0] += 1

    def on_train_epoch_end(self):
        self.memory[1] += self.trainer.callback_metrics["train"]
        self.hparams.phase = f"epoch {self.current_epoch}"

    def on_save_checkpoint(self, checkpoint):
        checkpoint["memory"] = self.memory
        checkpoint["unkept"] = object()

    def on_load_checkpoint(self, checkpoint):
        self.memory = checkpoint["memory"].clone()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.rate, momentum=0.9)
        kind = self.settings.get("scheduler", "plateau")
        if kind == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            monitor = "val" if self.settings.get("loaders", 1) == 1 else "val1"
            return [optimizer], [{"scheduler": plateau, "monitor": monitor}]
        if kind == "none":
            return optimizer
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        return [optimizer], [{"scheduler": scheduler, "interval": kind}]


class Diary(L.Callback):
    """Counts what it is called for; it survives by its state_dict alone."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.rates: list[float] = []
        self.values: list[list[float]] = []

    def count(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1

    def on_train_batch_end(self, trainer, *_):
        self.count("batch")
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_validation_start(self, trainer, *_):
        if not trainer.sanity_checking:
            self.count("validation")

    def on_validation_end(self, trainer, *_):
        if not trainer.sanity_checking:
            self.count("validated")

    def on_train_epoch_start(self, trainer, *_):
        self.count("epoch")

    def on_train_epoch_end(self, trainer, *_):
        self.count("epoch end")
        names = ("train", "largest", "samples", "seen")
        self.values.append([float(trainer.callback_metrics[name]) for name in names])

    def on_train_end(self, trainer, *_):
        self.count("end")

    def state_dict(self):
        return {"calls": self.calls, "rates": self.rates, "values": self.values}

    def load_state_dict(self, state):
        vars(self).update(state)


class Lost(BaseException):
    """Stands for a kill in a process that has to go on."""


class Killer(Checkpoint):
    """The last of the callbacks: dies at a place, after so many steps."""

    def __init__(self, kill: list[Any] | None, *, real: bool) -> None:
        self.place, self.step, _ = kill or (None, 0, 0)
        self.real = real

    def at(self, place: str, trainer: Any) -> None:
        if place == self.place and trainer.global_step == self.step and not trainer.sanity_checking:
            if self.real:
                os.kill(os.getpid(), signal.SIGKILL)
            raise Lost(place)

    def on_train_batch_start(self, trainer, *_):
        self.at("step", trainer)

    def on_before_optimizer_step(self, trainer, *_):
        self.at("gradient", trainer)

    def on_train_batch_end(self, trainer, *_):
        self.at("batch", trainer)

    def on_validation_batch_end(self, trainer, *_):
        self.at("validating", trainer)

    def on_validation_end(self, trainer, *_):
        self.at("validated", trainer)

    def on_train_epoch_end(self, trainer, *_):
        self.at("epoch end", trainer)

    def on_train_epoch_start(self, trainer, *_):
        self.at("epoch start", trainer)

    def on_train_end(self, trainer, *_):
        self.at("end", trainer)


def averaging(settings: dict[str, Any]) -> list[L.Callback]:
    kind = settings.get("average")
    if kind == "ema":
        from lightning.pytorch.callbacks import EMAWeightAveraging  # since 2.6

        return [EMAWeightAveraging(decay=0.9)]
    if kind == "swa":
        return [StochasticWeightAveraging(0.05, swa_epoch_start=2, annealing_epochs=2)]
    return []


def fit(directory: Path, settings: dict[str, Any], killer: Killer) -> dict[str, Any]:
    """Trains, and says what came out of it."""
    loader = resilin.AdaptiveDataLoader(data(), batch_size=BATCH, shuffle=True, max_local_bsz=3)
    monitor = "val" if settings.get("loaders", 1) == 1 else "val1"
    best = ModelCheckpoint(directory / "best", "{epoch}", monitor, save_top_k=2, save_last=True)
    steps = ModelCheckpoint(directory / "steps", "same", every_n_train_steps=4, save_top_k=-1)
    stop = EarlyStopping(monitor, patience=settings.get("patience", 9))
    diary = Diary()
    trainer = L.Trainer(
        strategy=ElasticStrategy(rule="linear"),
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[diary, stop, best, steps, *averaging(settings), killer],
        **{"max_epochs": 4, **settings.get("trainer", {})},
        **launched(),
    )
    net = Net(settings)
    loaders = [DataLoader(data(VALID), batch_size=9) for _ in range(settings.get("loaders", 1))]
    for epochs in (*settings.get("fits", ()), trainer.max_epochs):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(net, loader, loaders)
    tested = trainer.callback_metrics
    files = sorted(str(path.relative_to(directory)) for path in directory.glob("*/*.ckpt"))
    return {
        "weights": [w.tolist() for w in net.parameters()],
        "memory": net.memory.tolist(),
        "phase": net.hparams.phase,
        "metrics": {key: float(value) for key, value in tested.items() if "/" not in key},
        "diary": diary.state_dict(),
        "stopped": [stop.wait_count, stop.stopped_epoch, float(stop.best_score)],
        "best": [os.path.basename(best.best_model_path), float(best.best_model_score)],
        "last": [os.path.basename(best.last_model_path), os.path.basename(steps.best_model_path)],
        "files": files,
        "saved": {name: saved(directory / name) for name in files},
        "epoch": [trainer.current_epoch, trainer.global_step],
    }


def saved(path: Path) -> list[float]:
    """Of which step a file is, and what is in it."""
    checkpoint = torch.load(path, weights_only=False)
    weights = torch.cat([value.flatten() for value in checkpoint["state_dict"].values()])
    return [checkpoint["global_step"], float(weights.double().norm())]


def main() -> None:
    directory, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    warnings.simplefilter("ignore")
    resilin.checkpoint_to(None, memory_every=1)
    life, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    kill = settings["kills"][life] if life < len(settings["kills"]) else None
    mine = kill is not None and kill[2] == rank
    result = fit(directory, settings, Killer(kill if mine else None, real=True))
    if rank == 0:
        (directory / "result.json").write_text(json.dumps({**result, "lives": life + 1}))


if __name__ == "__main__":
    main()
