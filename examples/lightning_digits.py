"""Digits with Lightning's Trainer, on any number of processes.

    python examples/lightning_digits.py
    resilin run --nproc 2 examples/lightning_digits.py

Two things are resilin's: the strategy, and the loader, whose batch size is the global one. Whatever
launches it, each optimizer step has the same samples; with `--max-batch-size` the batch grows while
it trains, and the learning rate follows.
"""

import argparse

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import resilin
from resilin.integrations.lightning import ElasticStrategy, launched

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--max-batch-size", type=int, default=256)
args = parser.parse_args()


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return F.cross_entropy(self.net(inputs), targets)

    def validation_step(self, batch, batch_idx):
        inputs, targets = batch
        correct = (self.net(inputs).argmax(dim=1) == targets).float().mean()
        self.log("accuracy", correct, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        # In reference steps: right for whatever batch sizes the run will have.
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


pixels, labels = load_digits(return_X_y=True)
inputs, targets = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
train, test = order[:1280], order[1280:]

L.seed_everything(0)
loader = resilin.AdaptiveDataLoader(
    TensorDataset(inputs[train], targets[train]), batch_size=32, shuffle=True
)
loader.autoscale_batch_size(args.max_batch_size, local_bsz_bounds=(8, 64))

trainer = L.Trainer(
    strategy=ElasticStrategy(),
    max_epochs=args.epochs,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    **launched(),
)
trainer.fit(Digits(), loader, DataLoader(TensorDataset(inputs[test], targets[test]), 128))

metrics = trainer.callback_metrics
if trainer.is_global_zero:
    print(
        f"{trainer.world_size} replicas, {trainer.global_step} steps, "
        f"progress {metrics['resilin/progress']:.0f}, batch {metrics['resilin/batch_size']:.0f}, "
        f"accuracy {metrics['accuracy']:.3f}"
    )
