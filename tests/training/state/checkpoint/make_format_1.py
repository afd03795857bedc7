"""Makes `format_1/`: a checkpoint of format 1, and how that run ends undisturbed.

Run once, in two processes, with resilin 0.1.0 in front of the path:

    PYTHONPATH=/path/to/its/src:. torchrun --nproc-per-node 2 \\
        tests/training/state/checkpoint/make_format_1.py tests/training/state/checkpoint/format_1
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import resilin
from tests.training.recovery_job import Job

EPOCHS = 3
SAVED_STEP = 10


class Enough(Exception):
    """The script fails: nothing but the checkpoint is left of it."""


def stop(job: Job) -> None:
    if job.model.clock.steps == SAVED_STEP + 2:
        raise Enough


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    resilin.init_process_group()
    undisturbed = Job()
    undisturbed.train(EPOCHS)
    if resilin.current_job().engine.replica == 0:
        folder.mkdir(parents=True)
        (folder / "expected.json").write_text(json.dumps(undisturbed.result(), indent=1) + "\n")
    resilin.reset_job()
    resilin.checkpoint_to(folder, every=SAVED_STEP, memory_every=None)
    try:
        Job().train(EPOCHS, on_step=stop)
    except Enough:
        resilin.reset_job()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
