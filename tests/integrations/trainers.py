"""Trainers, elastic and stock, that tell what they did."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments

import resilin
from resilin.integrations.transformers import ElasticTrainer
from tests.integrations.parts import LR, Mean, Numbers


class Watch(TrainerCallback):
    """Writes down each optimizer step: its samples, learning rate, and what it did to `w`.

    And the number of steps of the whole run, as the Trainer knows it after each.
    """

    def __init__(self, model: Mean) -> None:
        self.model = model
        self.steps: list[list[int]] = []
        self.lrs: list[float] = []
        self.ws = [model.w.detach().clone()]
        self.ends: list[int] = []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.lrs.append(kwargs["optimizer"].param_groups[0]["lr"])

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(self.model.ids)
        self.model.ids = []
        self.ends.append(state.max_steps)
        self.ws.append(self.model.w.detach().clone())

    @property
    def weights(self) -> list[float]:
        """By how much the gradient of each step counts."""
        pairs = zip(self.ws, self.ws[1:], self.lrs, strict=False)
        return [round(((a - b)[0] / lr).item(), 4) for a, b, lr in pairs if lr]


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == self.step


def arguments(directory: Any, **settings: Any) -> TrainingArguments:
    defaults = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "optim": "sgd",
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "use_cpu": True,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "ddp_find_unused_parameters": False,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(output_dir=str(directory), **{**defaults, **settings})


def make(
    directory: Any, *, elastic: bool = True, callbacks: tuple[Any, ...] = (), **settings: Any
) -> tuple[Any, Watch]:
    """A Trainer, elastic or stock, and what watches it. Trains a job of its own."""
    own = {
        name: settings.pop(name)
        for name in ("batch_size", "rule", "schedule_by", "stats_every")
        if name in settings
    }
    resilin.reset_job()
    model = Mean()
    watch = Watch(model)
    args = arguments(directory, **settings)
    common = {
        "model": model,
        "args": args,
        "train_dataset": Numbers(),
        "eval_dataset": Numbers(),
        "callbacks": [watch, *callbacks],
    }
    if not elastic:
        return Trainer(**common), watch
    return ElasticTrainer(**common, **{"batch_size": 16, "rule": "constant", **own}), watch


def used(watch: Watch) -> list[int]:
    return [sample for step in watch.steps for sample in step]
