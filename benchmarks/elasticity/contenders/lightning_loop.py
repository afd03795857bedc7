"""Lightning's Trainer under torchrun: its guides on torchrun and on checkpoints.

`ModelCheckpoint` saves within epochs, and `ckpt_path="last"` resumes. The batch of a worker follows
the number of workers, so the global batch stays.
"""

import os

import lightning as L
import task
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.optimizer, _ = task.make()

    def training_step(self, batch, batch_idx):
        return self.net(**batch)["loss"]

    def configure_optimizers(self):
        return self.optimizer

    def on_train_start(self) -> None:
        self.ledger = task.Ledger(self.net, task.in_group())

    def on_before_optimizer_step(self, optimizer) -> None:
        self.ledger.begin(self.current_epoch, self.global_step + 1)

    def on_train_batch_end(self, outputs, batch, batch_idx) -> None:
        self.ledger.done(self.global_step)


L.seed_everything(0)
world = int(os.environ["WORLD_SIZE"])
loader = DataLoader(task.Digits(), batch_size=task.BATCH // world, shuffle=True)
saving = ModelCheckpoint(task.FOLDER, every_n_train_steps=task.SAVE_EVERY, save_last=True)
trainer = L.Trainer(
    max_epochs=task.EPOCHS,
    accelerator="cpu",
    strategy="ddp",
    devices=1,
    num_nodes=world,
    callbacks=[saving],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
module = Module()
trainer.fit(module, loader, ckpt_path="last")
if trainer.is_global_zero:
    task.finish(module.net)
