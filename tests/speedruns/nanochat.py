"""The loop of nanochat's pre-training, without what it logs."""

from torch import nn
from torch.utils.data import TensorDataset

import resilin
from tests.speedruns.parts import (
    ACCUMULATED,
    MICRO_BATCH,
    STEPS,
    make_model,
    setup_optimizer,
    windows,
)


def get_lr_multiplier(step: int) -> float:
    return min(1.0, 2 * (STEPS - step) / STEPS)


def get_muon_momentum(step: int) -> float:
    return 0.85 + 0.10 * min(step / 12, 1)


def get_weight_decay(step: int) -> float:
    return 0.2 * (1 - step / STEPS)


def main() -> nn.Module:
    resilin.init_process_group()
    model = make_model()
    optimizer = setup_optimizer(model)
    model = resilin.AdaptiveDataParallel(model, optimizer)
    train_loader = resilin.AdaptiveDataLoader(
        TensorDataset(*windows()), MICRO_BATCH * ACCUMULATED, max_local_bsz=MICRO_BATCH
    )
    for x, y in train_loader:
        loss = model(x, y)
        loss.backward()
        step = model.clock.steps
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * get_lr_multiplier(step)
            if group["kind"] == "muon":
                group["momentum"] = get_muon_momentum(step)
                group["weight_decay"] = get_weight_decay(step)
        optimizer.step()
        model.zero_grad(set_to_none=True)
    return model.module
