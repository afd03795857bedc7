"""A Trainer that loses a worker: `resilin run --nproc 2 lightning_job.py DIRECTORY`.

Each replica writes down the samples of each step that it has made. In the first generation,
replica 1 kills itself behind its seventh step, in the first epoch.
"""

import json
import os
import signal
import sys
import warnings
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import resilin
from resilin.integrations.lightning import ElasticStrategy, launched

warnings.simplefilter("ignore")
NUM = 103


class Job(L.LightningModule):
    def __init__(self, directory):
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Linear(6, 3)
        self.engine = resilin.current_job().engine
        self.file = (directory / f"{self.engine.membership.replica}-{os.getpid()}.jsonl").open("w")
        self.samples = []

    def training_step(self, batch, batch_idx):
        x, y, index = batch
        if resilin.current_job().micro_batch.weight:
            self.samples += index.tolist()
        return F.cross_entropy(self.net(x), y)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        step = self.global_step - 1
        assert step == resilin.current_job().clock.steps - 1
        line = {
            "generation": self.engine.membership.generation,
            "step": step,
            "samples": self.samples,
        }
        print(json.dumps(line), file=self.file, flush=True)
        self.samples = []
        if (
            self.engine.membership.generation == 0
            and self.engine.membership.replica == 1
            and step == 6
        ):
            os.kill(os.getpid(), signal.SIGKILL)

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        by_epoch = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [by_epoch]


def main() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM, 6, generator=generator)
    data = TensorDataset(x, x[:, :3].argmax(dim=1), torch.arange(NUM))
    loader = resilin.AdaptiveDataLoader(data, batch_size=10, shuffle=True, max_local_bsz=3)
    resilin.checkpoint_to(None, memory_every=1)
    trainer = L.Trainer(
        strategy=ElasticStrategy(rule="linear"),
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **launched(),
    )
    job = Job(Path(sys.argv[1]))
    trainer.fit(job, loader, DataLoader(data, batch_size=50))
    lr = trainer.optimizers[0].param_groups[0]["lr"]
    print(f"ended: epoch {trainer.current_epoch}, step {trainer.global_step}, lr {lr:g}")


if __name__ == "__main__":
    main()
