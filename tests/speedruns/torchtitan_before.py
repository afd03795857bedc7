"""The loop of torchtitan's trainer, without what it logs."""

import torch
from torch import nn

from tests.speedruns.parts import (
    ACCUMULATED,
    MICRO_BATCH,
    STEPS,
    LRSchedulersContainer,
    build_optimizers,
    make_model,
    windows,
)


def batch_generator():
    inputs, targets = windows()
    yield from zip(inputs.split(MICRO_BATCH), targets.split(MICRO_BATCH), strict=True)


def train_step(model, optimizers, lr_schedulers, data_iterator):
    optimizers.zero_grad()
    for _ in range(ACCUMULATED):
        inputs, labels = next(data_iterator)
        loss = model(inputs, labels) / ACCUMULATED
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizers.step()
    lr_schedulers.step()


def main() -> nn.Module:
    model = make_model()
    optimizers = build_optimizers(model)
    lr_schedulers = LRSchedulersContainer(optimizers.optimizers)
    data_iterator = batch_generator()
    for _ in range(STEPS):
        train_step(model, optimizers, lr_schedulers, data_iterator)
    return model
