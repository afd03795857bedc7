"""The loop of nanochat's pre-training, without what it logs."""

from torch import nn

from tests.speedruns.parts import (
    ACCUMULATED,
    MICRO_BATCH,
    STEPS,
    make_model,
    setup_optimizer,
    windows,
)


def get_batches():
    inputs, targets = windows()
    while True:
        yield from zip(inputs.split(MICRO_BATCH), targets.split(MICRO_BATCH), strict=True)


def get_lr_multiplier(step: int) -> float:
    return min(1.0, 2 * (STEPS - step) / STEPS)


def get_muon_momentum(step: int) -> float:
    return 0.85 + 0.10 * min(step / 12, 1)


def get_weight_decay(step: int) -> float:
    return 0.2 * (1 - step / STEPS)


def main() -> nn.Module:
    model = make_model()
    optimizer = setup_optimizer(model)
    train_loader = get_batches()
    x, y = next(train_loader)
    for step in range(STEPS):
        for _ in range(ACCUMULATED):
            loss = model(x, y)
            (loss / ACCUMULATED).backward()
            x, y = next(train_loader)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * get_lr_multiplier(step)
            if group["kind"] == "muon":
                group["momentum"] = get_muon_momentum(step)
                group["weight_decay"] = get_weight_decay(step)
        optimizer.step()
        model.zero_grad(set_to_none=True)
    return model
