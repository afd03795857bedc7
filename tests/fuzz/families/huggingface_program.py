"""The programs of the family `huggingface`, with options."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback, TrainingArguments

import resilin
from resilin.integrations.accelerate import prepare
from resilin.integrations.transformers import ElasticTrainer
from tests.fuzz import parts
from tests.fuzz.hooks import folder, kill_point, save
from tests.fuzz.program import Program


class Rows(Dataset):
    """The data of the other programs, by name."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(zip(("x", "y", "idx", "weight"), self._data[index], strict=True))


class Net(torch.nn.Module):
    """The network of the other programs, with its loss."""

    def __init__(self, p: Program) -> None:
        super().__init__()
        self.p = p
        self.net = parts.make_net(p)

    def forward(self, x: Any, y: Any, idx: Any, weight: Any) -> dict[str, Any]:
        out, seen = self.net(x, idx)
        loss = parts.sample_loss(self.p, out, y, seen, weight)
        if not self.training:
            loss = ((out - y) ** 2).mean()
        return {"loss": loss, "logits": out.detach()}


class Points(TrainerCallback):
    """Places where the process may be killed."""

    def on_epoch_begin(self, args, state, control, **kwargs):
        kill_point("epoch_begin")

    def on_step_begin(self, args, state, control, **kwargs):
        kill_point("batch")

    def on_step_end(self, args, state, control, **kwargs):
        kill_point("batch_end")

    def on_epoch_end(self, args, state, control, **kwargs):
        kill_point("epoch_end")

    def on_prediction_step(self, args, state, control, **kwargs):
        kill_point("validating")

    def on_evaluate(self, args, state, control, **kwargs):
        kill_point("validated")

    def on_save(self, args, state, control, **kwargs):
        kill_point("saved")


class Notes(TrainerCallback):
    def __init__(self) -> None:
        self.steps = 0
        self.scores: list[float] = []

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.scores.append(metrics["eval_loss"])


def _settings(options: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the Trainer."""
    settings: dict[str, Any] = {
        "num_train_epochs": options.get("epochs", 2),
        "max_steps": options.get("max_steps", -1),
        "max_grad_norm": options.get("clip", 0.0),
        "lr_scheduler_type": options.get("scheduler", "constant"),
        "logging_steps": 1000,
        "save_strategy": "no",
    }
    if logging := options.get("logging"):
        by_epoch = logging == "epoch"
        settings |= {"logging_strategy": "epoch"} if by_epoch else {"logging_steps": logging}
    if evaluate := options.get("evaluate"):
        settings |= {"eval_strategy": evaluate, "eval_steps": 4}
        if options.get("best") or options.get("early"):
            settings |= {
                "save_strategy": evaluate,
                "save_steps": 4,
                "metric_for_best_model": "loss",
            }
            settings |= {"load_best_model_at_end": True, "save_total_limit": 2}
    return settings


def run_trainer(options: dict[str, Any], p: Program) -> dict[str, Any]:
    args = TrainingArguments(
        output_dir=str(folder() / "out"),
        per_device_train_batch_size=options.get("max_local_bsz", 4),
        per_device_eval_batch_size=30,
        optim="adamw_torch",
        learning_rate=0.02,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
        prediction_loss_only=True,
        **_settings(options),
    )
    net, notes = Net(p), Notes()
    callbacks: list[Any] = [notes]
    if options.get("early") and options.get("evaluate"):
        callbacks.append(EarlyStoppingCallback(options["early"], 0.001))
    trainer = ElasticTrainer(
        model=net,
        args=args,
        train_dataset=Rows(parts.train_data(p)),
        eval_dataset=Rows(parts.test_data(p)),
        callbacks=[*callbacks, Points()],
        batch_size=p.batch_size,
        rule="linear",
    )
    trainer.remove_callback(PrinterCallback)
    trainer.can_return_loss = True
    if sizes := options.get("trace"):
        trainer.set_batch_size(lambda clock: sizes[min(clock.steps // 2, len(sizes) - 1)])
    trainer.train()
    kill_point("trained")
    state = trainer.state
    return {
        "parameters": {name: q.detach().clone() for name, q in net.named_parameters()},
        "steps": [state.global_step, resilin.current_job().clock.steps, notes.steps],
        "epoch": state.epoch,
        "logs": [[log["step"], "loss" in log, "eval_loss" in log] for log in state.log_history],
        "best": state.best_global_step,
        "scores": len(notes.scores),
    }


def run_loop(options: dict[str, Any], p: Program) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    net = Net(p)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    loader = resilin.AdaptiveDataLoader(
        Rows(parts.train_data(p)),
        p.batch_size,
        max_local_bsz=options.get("max_local_bsz"),
        shuffle=True,
    )
    if sizes := options.get("trace"):
        loader.set_batch_size(lambda clock: sizes[min(clock.steps // 2, len(sizes) - 1)])
    held = DataLoader(Rows(parts.test_data(p)), batch_size=5)
    given = [net, optimizer, loader, held]
    if options.get("scheduler"):
        given.append(scheduler)
    model, optimizer, batches, held, *rest = prepare(accelerator, *given, rule="linear")
    job = resilin.current_job()
    for _ in resilin.remaining_epochs_until(p.epochs):
        kill_point("epoch_begin")
        model.train()
        for batch in batches:
            kill_point("batch")
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                if accelerator.sync_gradients and options.get("clip"):
                    accelerator.clip_grad_norm_(model.parameters(), options["clip"])
                optimizer.step()
                for each in rest:
                    each.step()
                optimizer.zero_grad()
            kill_point("batch_end")
        kill_point("epoch_end")
        model.eval()
        with torch.no_grad():
            for batch in held:
                model(**batch)
                kill_point("validating")
        kill_point("validated")
    kill_point("trained")
    return {
        "parameters": {name: q.detach().clone() for name, q in net.named_parameters()},
        "steps": [job.clock.steps, job.clock.samples],
        "rate": optimizer.param_groups[0]["lr"],
    }


def main(options: dict[str, Any]) -> None:
    """Trains, and saves the final state."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    p = Program(num_samples=22, epochs=options.get("epochs", 2), net="mlp")
    resilin.init_process_group()
    kill_point("setup")
    resilin.checkpoint_to(None, memory_every=1)
    run = run_loop if options.get("loop") == "accelerate" else run_trainer
    save(run(options, p))
