"""The constant batch of `ramp.py` as a script: a checkpoint every 100 steps, for `resilin branch`.

    python benchmarks/ramp_job.py checkpoints
    resilin branch checkpoints/step-000000000400-... --sizes 1,2,4,8,16 --samples 2048 \
        benchmarks/ramp_job.py checkpoints

docs/guides/branch.md has what came out.
"""

from __future__ import annotations

import sys

import torch
from accuracy_tasks import TASKS, Rows
from ramp import warmed_cosine
from torch.nn import functional

import resilin

BATCH, STEPS, WINDOWS = 8, 800, 25_600
"""Windows in a batch, steps until the learning rate has fallen, and all windows there are."""


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task = TASKS["bytes"]
    parts = [task.data(i).train for i in range(WINDOWS // 3200)]
    columns = zip(*(part.columns for part in parts), strict=True)
    data = Rows(*(torch.cat(column) for column in columns))
    model = task.model()
    (optimizer,) = task.optimizers["adamw"](model)
    scheduler = warmed_cosine(optimizer, STEPS)
    parallel = resilin.AdaptiveDataParallel(
        model, optimizer, scheduler, schedule_by="rule", stats_every=1
    )
    loader = resilin.AdaptiveDataLoader(
        data, BATCH, shuffle=True, seed=0, max_local_bsz=64, collate_fn=Rows.collate
    )
    resilin.checkpoint_to(sys.argv[1], every=100, keep=100)
    for _ in resilin.remaining_epochs_until(1):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(parallel(inputs), labels)
            loss.backward()
            optimizer.step()
            resilin.record(loss=loss)


if __name__ == "__main__":
    main()
