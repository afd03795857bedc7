"""Ray Train: its guides on fault tolerance, checkpoints and elastic training.

A host is a node of a Ray cluster. This script runs on the head, which has no worker. The batch of a
worker follows the number of workers, so the global batch stays.
"""

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import task
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader


def train(config: dict[str, Any]) -> None:
    net, optimizer, dataset = task.make()
    ledger = task.Ledger(net, task.in_group())
    context = ray.train.get_context()
    step = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as place:
            state = torch.load(Path(place) / "state.pt", weights_only=True)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    model = prepare_model(net)
    batch_size = task.BATCH // context.get_world_size()
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True, generator=generator)
    loader = prepare_data_loader(loader)
    first, skip = divmod(step, len(loader))
    for epoch in range(first, task.EPOCHS):
        if context.get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            if epoch == first and number < skip:
                continue
            loss = model(**batch)["loss"]
            loss.backward()
            ledger.begin(epoch, step + 1)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            ledger.done(step)
            if step % task.SAVE_EVERY == 0:
                with tempfile.TemporaryDirectory() as place:
                    saved = None
                    if context.get_world_rank() == 0:
                        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
                        torch.save({**state, "step": step}, Path(place) / "state.pt")
                        saved = Checkpoint.from_directory(place)
                    ray.train.report({"step": step}, checkpoint=saved)
    if context.get_world_rank() == 0:
        task.finish(net)


if __name__ == "__main__":
    ray.init(address=sys.argv[1], log_to_driver=False)
    first = not (task.FOLDER / "elasticity").exists()
    while first and ray.cluster_resources().get("CPU", 0) < task.NUM_HOSTS:
        time.sleep(0.1)  # all begin with all hosts
    trainer = TorchTrainer(
        train,
        train_loop_config={},
        scaling_config=ScalingConfig(
            num_workers=(1, task.NUM_HOSTS), elastic_resize_monitor_interval_s=2.0
        ),
        run_config=RunConfig(
            name="elasticity",
            storage_path=os.fspath(task.FOLDER),
            failure_config=FailureConfig(max_failures=-1),
        ),
    )
    trainer.fit()
