"""The loop of torchtitan's trainer, without what it logs."""

from torch import nn
from torch.utils.data import TensorDataset

import resilin
from tests.speedruns.parts import (
    ACCUMULATED,
    MICRO_BATCH,
    LRSchedulersContainer,
    build_optimizers,
    make_model,
    windows,
)


def train_step(model, optimizers, lr_schedulers, batch):
    optimizers.zero_grad()
    inputs, labels = batch
    loss = model(inputs, labels)
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizers.step()
    lr_schedulers.step()


def main() -> nn.Module:
    resilin.init_process_group()
    model = make_model()
    optimizers = build_optimizers(model)
    lr_schedulers = LRSchedulersContainer(optimizers.optimizers)
    model = resilin.AdaptiveDataParallel(model, optimizers, lr_schedulers.schedulers)
    batches = resilin.AdaptiveDataLoader(
        TensorDataset(*windows()), MICRO_BATCH * ACCUMULATED, max_local_bsz=MICRO_BATCH
    )
    for batch in batches:
        train_step(model, optimizers, lr_schedulers, batch)
    return model.module
