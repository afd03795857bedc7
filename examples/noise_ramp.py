"""A batch that grows as the measured noise of the gradient allows.

    python examples/noise_ramp.py
    torchrun --nproc-per-node 2 examples/noise_ramp.py

Early in training the gradient is mostly signal, and a large batch wastes samples. Later it is
mostly noise. The ramp starts at 16 and grows along a list, each time that the lower bound of the
noise scale is above the next size. The learning rate, tuned for 16, follows by the rule.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import resilin
from resilin import current_job
from resilin.core.events import DecisionEvent

NUM, CLASSES, EPOCHS = 4000, 10, 3


def data():
    """Points around one center for each class; every tenth label is wrong."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(CLASSES, 20, generator=generator)
    y = torch.randint(CLASSES, (NUM,), generator=generator)
    x = centers[y] + torch.randn(NUM, 20, generator=generator)
    y[::10] = torch.randint(CLASSES, (len(y[::10]),), generator=generator)
    return TensorDataset(x, y)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    resilin.init_process_group()

    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    model = resilin.AdaptiveDataParallel(net, optimizer)
    loader = resilin.AdaptiveDataLoader(data(), batch_size=16, shuffle=True)
    loader.set_batch_size(resilin.NoiseRamp((16, 32, 64, 128, 256)))

    decisions = []
    resilin.listen(lambda event: decisions.append(event))
    for epoch in resilin.remaining_epochs_until(EPOCHS):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if current_job().engine.membership.replica == 0:
            clock, size = model.clock, loader.current_batch_size
            print(
                f"epoch {epoch}: {clock.steps} steps, {clock.samples} samples, batch {size}, "
                f"noise scale {model.noise.phi:.0f}"
            )
    for event in decisions:
        if isinstance(event, DecisionEvent):
            print(f"step {event.step}: {event.batch_size_before} -> {event.batch_size}")
            print(f"  {event.reason}")


if __name__ == "__main__":
    main()
