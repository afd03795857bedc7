"""Programs of the Trainer and of Accelerate that are killed, each as it is undisturbed."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from transformers import (
    EarlyStoppingCallback,
    PrinterCallback,
    TrainerCallback,
    TrainingArguments,
)

import resilin
from resilin.integrations.accelerate import prepare
from resilin.integrations.transformers import ElasticTrainer
from tests.integrations.lives import Life

NUM = 44
BATCH = 8
STEPS = 6
"""Steps of an epoch."""
TIMES = ("runtime", "per_second", "flos")


class Rows(torch.utils.data.Dataset):
    def __init__(self, num: int = NUM) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(num, 4, generator=generator, dtype=torch.float64)
        noise = torch.randn(num, 3, generator=generator, dtype=torch.float64)
        self.labels = (self.x[:, :3] + noise).argmax(1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "labels": self.labels[index]}


class Net(nn.Module):
    config = None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).double()

    def forward(self, x, labels=None):
        logits = self.layers(x)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def weights(net: nn.Module) -> list[list[float]]:
    return [parameter.detach().flatten().tolist() for parameter in net.parameters()]


# The Trainer ---------------------------------------------------------------------------------


class Kill(TrainerCallback):
    """Kills the process at places such as `step 9`, `test 1`, `begin 2` or `over`."""

    def __init__(self, life: Life, *places: str) -> None:
        self._come, self._names = life.die, places
        self._num = 0

    def _at(self, place: str) -> None:
        for name in self._names:
            if name.partition("#")[0] == place:
                self._come(name)

    def on_epoch_begin(self, args, state, control, **kwargs):
        self._at(f"begin {state.global_step}")

    def on_step_begin(self, args, state, control, **kwargs):
        self._at(f"step {state.global_step}")

    def on_step_end(self, args, state, control, **kwargs):
        self._at(f"stepped {state.global_step}")

    def on_prediction_step(self, args, state, control, **kwargs):
        self._at(f"test {state.global_step}")

    def on_evaluate(self, args, state, control, **kwargs):
        self._at(f"tested {state.global_step}")

    def on_save(self, args, state, control, **kwargs):
        self._at(f"saved {state.global_step}")

    def on_train_end(self, args, state, control, **kwargs):
        self._at("over")


class Notes(TrainerCallback):
    """A callback of the user with a memory, which also halves a rate when an epoch begins."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.generator = torch.Generator().manual_seed(3)
        self.epochs = 0

    def on_epoch_begin(self, args, state, control, optimizer=None, **kwargs):
        self.epochs += 1
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.01 * torch.rand((), generator=self.generator).item()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses.append(logs["loss"])


class Patient(EarlyStoppingCallback):
    """A subclass, whose state is that of the stock one."""


def train(life: Life, *places: str, callbacks: Any = (), **settings: Any) -> dict[str, Any]:
    resilin.init_process_group()
    resilin.checkpoint_to(None, memory_every=1)
    defaults = {
        "per_device_train_batch_size": 3,
        "per_device_eval_batch_size": 20,
        "num_train_epochs": 3,
        "optim": "adamw_torch",
        "learning_rate": 0.05,
        "use_cpu": True,
        "report_to": [],
        "logging_steps": 4,
        "save_strategy": "no",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
    }
    args = TrainingArguments(output_dir=str(life.folder / "out"), **{**defaults, **settings})
    net = Net()
    trainer = ElasticTrainer(
        model=net,
        args=args,
        train_dataset=Rows(),
        eval_dataset=Rows(31),
        callbacks=[*callbacks, Kill(life, *places)],
        batch_size=BATCH,
        rule="constant",
    )
    trainer.remove_callback(PrinterCallback)
    done = trainer.train()
    state, job = trainer.state, resilin.current_job()
    return {
        "weights": weights(net),
        "steps": [job.clock.steps, job.clock.samples, state.global_step, state.epoch],
        "logs": [
            {n: v for n, v in log.items() if not any(time in n for time in TIMES)}
            for log in state.log_history
        ],
        "loss": done.training_loss,
        "best": [state.best_metric, state.best_global_step],
        "rate": job.model.optimizer.param_groups[0]["lr"],
        "folders": sorted(path.name for path in (life.folder / "out").glob("checkpoint-*")),
    }


def trainer_epochs(life):
    """Evaluation, saving and logs at the ends of epochs, the best model, early stopping."""
    notes, patient = Notes(), Patient(2, 0.02)
    places = ["step 0", "stepped 4", "test 6", "test 6#2", "tested 12", "saved 12", "begin 12"]
    told = train(
        life,
        *places,
        "stepped 15",
        "over",
        callbacks=[notes, patient],
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        save_total_limit=2,
        num_train_epochs=9,
        lr_scheduler_type="cosine",
        warmup_steps=5,
        learning_rate=0.3,
    )
    memory = [notes.losses, notes.epochs, torch.rand(1, generator=notes.generator).item()]
    return {**told, "memory": memory, "patience": patient.early_stopping_patience_counter}


def trainer_steps(life):
    """Steps that log, evaluate and save in their own rhythm; clipping, smoothing, `max_steps`."""
    places = ["stepped 2", "test 5", "stepped 7", "step 9", "saved 10", "test 14", "over"]
    return train(
        life,
        *places,
        eval_strategy="steps",
        eval_steps=5,
        eval_on_start=True,
        save_strategy="steps",
        save_steps=5,
        max_steps=14,
        max_grad_norm=0.5,
        label_smoothing_factor=0.1,
        lr_scheduler_type="linear",
        warmup_steps=3,
    )


def trainer_two(life):
    """Two replicas."""
    places = [["stepped 4", "test 12"], ["stepped 6", "step 8", "step 8#2", "tested 12"]]
    return train(life, *places[life.replica], eval_strategy="epoch", callbacks=[Notes()])


trainer_two.replicas = 2


# Accelerate ----------------------------------------------------------------------------------


def loop(life: Life, *places: str, folder: bool = False) -> dict[str, Any]:
    """A loop with everything that a script of Accelerate has."""
    resilin.init_process_group()
    resilin.checkpoint_to(None, memory_every=1)
    accelerator = Accelerator(cpu=True)
    net, rows = Net(), Rows()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=3 * STEPS)
    loader = resilin.AdaptiveDataLoader(rows, BATCH, max_local_bsz=3, shuffle=True)
    held = torch.utils.data.DataLoader(Rows(30), batch_size=15)
    model, held, optimizer, loader, scheduler = prepare(
        accelerator, net, held, optimizer, loader, scheduler, rule="constant"
    )
    saved = life.folder / "accelerate"
    if folder and (saved / "done").exists():
        accelerator.load_state(str(saved))

    def at(place: str) -> None:
        for name in places:
            if name.partition("#")[0] == place:
                life.die(name)

    seen, losses = resilin.Accumulator(), resilin.Accumulator()
    job = resilin.current_job()
    for epoch in resilin.remaining_epochs_until(3):
        model.train()
        for batch in loader:
            at(f"step {job.clock.steps}")
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen["samples"] += loader.current_samples
            if accelerator.sync_gradients:
                at(f"stepped {job.clock.steps}")
        model.eval()
        for batch in held:
            with torch.no_grad():
                losses[f"epoch {epoch}"] += model(**batch)["loss"].item()
            at(f"test {epoch}")
        if folder:
            accelerator.save_state(str(saved))
            (saved / "done").touch()
    with seen.synchronized():
        samples = seen["samples"]
    return {
        "weights": weights(net),
        "steps": [job.clock.steps, job.clock.samples, samples],
        "rate": optimizer.param_groups[0]["lr"],
    }


def accelerate_one(life):
    return loop(life, "step 0", "stepped 4", "step 4", "test 0", "test 0#2", "stepped 13", "test 2")


def accelerate_two(life):
    places = [["stepped 4", "test 1"], ["step 5", "step 5#2", "test 1#2", "stepped 17"]]
    return loop(life, *places[life.replica])


accelerate_two.replicas = 2


def accelerate_folder(life):
    """With folders of Accelerate beside the memory of the host: the newer state counts."""
    return loop(life, "stepped 4", "test 0", "stepped 9", "step 12", "stepped 16", folder=True)


PROGRAMS = {
    function.__name__: function
    for function in (
        trainer_epochs,
        trainer_steps,
        trainer_two,
        accelerate_one,
        accelerate_two,
        accelerate_folder,
    )
}
KILLS = {
    "trainer_epochs": 9,
    "trainer_steps": 7,
    "trainer_two": 6,
    "accelerate_one": 7,
    "accelerate_two": 6,
    "accelerate_folder": 5,
}
"""How many of its kills a program comes by."""
