"""Digits with the Hugging Face Trainer, at whatever number of processes there is.

    python examples/huggingface_digits.py
    resilin run --nproc 2 examples/huggingface_digits.py --kill-at 30

The global batch is 64 with one process or two. With `--kill-at`, replica 1 kills itself at that
step, as a machine would take it away; the workers are restarted, and the Trainer resumes after the
last step that all of them had completed. That is the step before: a step is complete when its
callbacks have run.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from transformers import TrainerCallback, TrainingArguments

import resilin
from resilin.integrations.transformers import ElasticTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--kill-at", type=int, default=None, metavar="STEP")
parser.add_argument("--output-dir", default=None, help="Default: a new directory.")
options = parser.parse_args()


class Digits(torch.utils.data.Dataset):
    def __init__(self, train: bool) -> None:
        pixels, labels = load_digits(return_X_y=True)
        part = slice(0, 1500) if train else slice(1500, None)
        self.pixels = torch.tensor(pixels[part] / 16, dtype=torch.float32)
        self.labels = torch.tensor(labels[part])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"pixels": self.pixels[index], "labels": self.labels[index]}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(pixels)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class KillOnce(TrainerCallback):
    """Takes replica 1 away, in the first generation of a job."""

    def on_step_end(self, args, state, control, **kwargs):
        engine = resilin.current_job().engine
        first = engine.membership.replica == 1 and engine.num_restarts == 0
        if first and state.global_step == options.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


torch.manual_seed(0)
resilin.init_process_group()
resilin.checkpoint_to(None, memory_every=1)
args = TrainingArguments(
    output_dir=options.output_dir or tempfile.mkdtemp(prefix="resilin-"),
    per_device_train_batch_size=16,  # the largest micro-batch; what else is needed is accumulated
    num_train_epochs=5,
    learning_rate=2e-2,
    lr_scheduler_type="cosine",
    eval_strategy="epoch",
    save_strategy="no",
    logging_steps=24,
    use_cpu=not torch.cuda.is_available(),
    ddp_find_unused_parameters=False,
    dataloader_pin_memory=torch.cuda.is_available(),
    report_to=[],
    disable_tqdm=True,
)
trainer = ElasticTrainer(
    model=Classifier(),
    args=args,
    train_dataset=Digits(train=True),
    eval_dataset=Digits(train=False),
    compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(1) == p.label_ids).mean())},
    callbacks=[KillOnce()],
    batch_size=64,
)
# From the second epoch on, twice as large: learning rate, schedule and length follow.
trainer.set_batch_size(resilin.Schedule(lambda epoch: 64 if epoch < 2 else 128, unit="epochs"))
trainer.train()

if trainer.is_world_process_zero():
    clock = resilin.current_job().clock
    *_, accuracy = (log["eval_accuracy"] for log in trainer.state.log_history if "eval_loss" in log)
    print(f"{clock.steps} steps, {clock.samples} samples, accuracy {accuracy:.3f}")
