"""The program of the family `lightning`, with options."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning as L
import torch
from lightning.pytorch import callbacks
from torch.utils.data import DataLoader

import resilin
from resilin.integrations.lightning import ElasticStrategy, launched
from tests.fuzz import parts
from tests.fuzz.hooks import folder, kill_point, save
from tests.fuzz.program import Program


class Module(L.LightningModule):
    def __init__(self, p: Program, options: dict[str, Any]) -> None:
        super().__init__()
        self.p, self.options = p, options
        self.net = parts.make_net(p)

    def training_step(self, batch, batch_idx):
        kill_point("batch")
        x, y, idx, weight = batch
        out, seen = self.net(x, idx)
        kill_point("forward")
        loss = parts.sample_loss(self.p, out, y, seen, weight)
        if self.options.get("log"):
            self.log("loss", loss.detach(), on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        kill_point("batch_end")

    def on_train_epoch_end(self):
        kill_point("epoch_end")

    def validation_step(self, batch, batch_idx):
        kill_point("validating")
        x, y, idx, _ = batch
        out, _ = self.net(x, idx)
        self.log("val", ((out - y) ** 2).mean(), on_epoch=True)

    def on_validation_end(self):
        kill_point("validated")

    def configure_optimizers(self):
        optimizer = parts.make_optimizer(self.p, self.net)
        kind = self.options.get("scheduler")
        if kind == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
            scheduler = plateau(optimizer, factor=0.5, patience=0)
            chosen = {"scheduler": scheduler, "monitor": "val"}
            return {"optimizer": optimizer, "lr_scheduler": chosen}
        if kind in ("epoch", "step"):
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return [optimizer], [{"scheduler": scheduler, "interval": kind}]
        return optimizer


def main(options: dict[str, Any]) -> None:
    """Trains, and saves the final state."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    p = Program(
        num_samples=22,
        epochs=options.get("epochs", 3),
        net="mlp",
        optimizer=options.get("optimizer", "momentum"),
    )
    resilin.init_process_group()
    kill_point("setup")
    loader = resilin.AdaptiveDataLoader(
        parts.train_data(p), batch_size=4, shuffle=True, max_local_bsz=options.get("max_local_bsz")
    )
    if sizes := options.get("trace"):
        loader.set_batch_size(lambda clock: sizes[min(clock.steps // 2, len(sizes) - 1)])
    resilin.checkpoint_to(None, memory_every=1)
    chosen: list[L.Callback] = []
    if options.get("early"):
        chosen.append(callbacks.EarlyStopping("val", patience=options["early"] - 1))
    if options.get("ema"):
        chosen.append(callbacks.EMAWeightAveraging(decay=0.9))
    keeper = None
    if options.get("keep"):
        keeper = callbacks.ModelCheckpoint(
            str(folder() / "kept"),
            monitor="val",
            save_top_k=options["keep"],
            filename="{epoch}-{step}",
        )
        chosen.append(keeper)
    trainer = L.Trainer(
        strategy=ElasticStrategy(rule="linear"),
        max_epochs=p.epochs,
        accelerator="cpu",
        precision="64-true",
        logger=False,
        callbacks=chosen,
        enable_checkpointing=keeper is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        default_root_dir=str(folder()),
        gradient_clip_val=options.get("clip"),
        **launched(),
    )
    module = Module(p, options)
    trainer.fit(module, loader, DataLoader(parts.test_data(p), batch_size=4))
    kill_point("trained")
    state = {
        "parameters": {name: q.detach().clone() for name, q in module.net.named_parameters()},
        "optimizer": parts.plain(trainer.optimizers[0].state_dict()),
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "metrics": {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if not name.startswith("resilin/")
        },
    }
    if keeper is not None:
        state["best"] = str(keeper.best_model_path).rpartition("/")[2]
        state["best_score"] = float(keeper.best_model_score)
    save(state)
