"""HF Trainer, which uses Accelerate, under torchrun: its guides on torchrun and on checkpoints.

`save_steps` saves within epochs, and `resume_from_checkpoint` resumes. The batch of a worker
follows the number of workers, so the global batch stays.
"""

import os

import task
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Kept(TrainerCallback):
    """Writes the ledger."""

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.ledger = task.Ledger(net, task.in_group())

    def on_pre_optimizer_step(self, args, state, control, **kwargs) -> None:
        steps = state.max_steps // task.EPOCHS
        self.ledger.begin(state.global_step // steps, state.global_step + 1)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.ledger.done(state.global_step)


net, optimizer, dataset = task.make()
world = int(os.environ["WORLD_SIZE"])
arguments = TrainingArguments(
    output_dir=str(task.FOLDER / "checkpoints"),
    per_device_train_batch_size=task.BATCH // world,
    num_train_epochs=task.EPOCHS,
    lr_scheduler_type="constant",
    max_grad_norm=0.0,
    save_steps=task.SAVE_EVERY,
    save_total_limit=2,
    remove_unused_columns=False,
    use_cpu=True,
    ddp_backend="gloo",
    disable_tqdm=True,
    report_to=[],
    seed=0,
)
trainer = Trainer(
    model=net,
    args=arguments,
    train_dataset=dataset,
    optimizers=(optimizer, None),
    callbacks=[Kept()],
)
os.makedirs(arguments.output_dir, exist_ok=True)
trainer.train(resume_from_checkpoint=get_last_checkpoint(arguments.output_dir))
if trainer.is_world_process_zero():
    task.finish(net)
