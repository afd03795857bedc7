"""A job whose batch size follows a policy; it notes the sizes of its steps.

python sizes_job.py DIRECTORY schedule|ramp|cap EPOCHS
"""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import resilin
from resilin.core.rules import PowerRule
from tests.training.sizing.noisy_data import noisy_data

NUM = 1600
POLICIES = {
    "schedule": lambda: resilin.BatchSchedule.parse("0:8 5K:16 9K:40"),
    "ramp": lambda: resilin.NoiseRamp((8, 16, 4096)),
    "cap": lambda: 64,
}


def main(directory: Path, policy: str, epochs: int) -> None:
    """Train until this epoch; replica 0 adds the sizes of its steps to a file."""
    resilin.init_process_group()
    torch.manual_seed(0)
    net = torch.nn.Linear(10, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
    model = resilin.AdaptiveDataParallel(
        net, optimizer, rule=PowerRule(1, momentum=True), stats_every=1
    )
    loader = resilin.AdaptiveDataLoader(
        noisy_data(NUM),
        batch_size=8,
        shuffle=True,
        batch_weight=lambda batch: 5 * len(batch[0]),
        noise_cap=policy == "cap",
    )
    loader.set_batch_size(POLICIES[policy]())
    resilin.checkpoint_to(directory / "checkpoints", every=None)
    sizes = []
    for _ in resilin.remaining_epochs_until(epochs):
        for inputs, labels in loader:
            before = model.clock
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            if model.clock.steps > before.steps:
                sizes.append(model.clock.samples - before.samples)
    membership = resilin.current_job().engine.membership
    if membership.replica == 0:
        noted = {
            "replicas": membership.num_replicas,
            "sizes": sizes,
            "next": loader.current_batch_size,
        }
        (directory / f"epochs-{epochs}").write_text(json.dumps(noted))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
