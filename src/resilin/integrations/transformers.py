"""Transformers: a Trainer whose global batch does not depend on the number of processes.

`ElasticTrainer` is the stock Trainer with another step. One step of the Trainer is one optimizer
step over the global batch: `training_step` runs all micro-batches of this replica, so
`global_step`, `logging_steps`, `save_steps` and callbacks count optimizer steps, however many
micro-batches each of them has. `max_steps` and `num_train_epochs` are those of the reference run,
read from the clock of the rule. A `checkpoint-N` folder also carries clocks, cursor and noise, so
that a run resumes in the middle of an epoch at another number of processes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import fsdp

from resilin.compat import transformers_names
from resilin.core.rules import ScalingRule
from resilin.integrations import accelerate
from resilin.integrations.folders import load_state, read_state, save_state
from resilin.integrations.trainer_data import ORDERS, DataSettings, ElasticData
from resilin.integrations.trainer_losses import WINDOW
from resilin.integrations.trainer_progress import ReferenceRun
from resilin.integrations.trainer_state import TRAINER_PARTS, TrainerPart
from resilin.telemetry.extras import load
from resilin.training.bridge.carried import own_step
from resilin.training.bridge.home import Home
from resilin.training.parallel import AdaptiveDataParallel, ScheduleBy
from resilin.training.script.events import record
from resilin.training.start import start

__all__ = ["ElasticTrainer", "ElasticTrainerMixin"]

_hf: Any = load("transformers", "hf", "resilin.integrations.transformers")
_utils: Any = load("accelerate.utils", "hf", "resilin.integrations.transformers")


class ElasticTrainerMixin(ElasticData):
    """Makes any Trainer elastic: `class Mine(ElasticTrainerMixin, Seq2SeqTrainer)`.

    `per_device_train_batch_size` of the arguments is the largest micro-batch that a process runs at
    once; how many of them a step takes follows from `batch_size` and the number of processes.
    Where the Trainer counts items (tokens), micro-batches weigh by them, so the gradient is the
    mean over all tokens of the global batch; else they weigh by samples.

    Args:
        *args: Arguments of the Trainer.
        batch_size: The reference batch: the global batch, over all processes, that
            `learning_rate`, `max_steps` and `warmup_steps` are meant for.
        rule: As in `AdaptiveDataParallel`.
        schedule_by: Who steps the scheduler: `rule`, a clock, or `user` for once per optimizer
            step, as the stock Trainer does.
        max_local_bsz: Most samples in a micro-batch, in place of `per_device_train_batch_size`;
            `auto` measures what fits into memory.
        batch_weight: Returns the weight of a collated micro-batch, in place of its items.
        stats_every: As in `AdaptiveDataParallel`: how often noise is measured.
        **kwargs: Arguments of the Trainer.

    Raises:
        ValueError: The arguments have a setting that resilin does not support.
        MissingNameError: This version of Transformers lacks a name that resilin needs.
    """

    model: Any
    optimizer: Any
    is_fsdp_enabled: bool
    state: Any
    control: Any

    def __init__(
        self,
        *args: Any,
        batch_size: int,
        rule: str | ScalingRule = "auto",
        schedule_by: ScheduleBy = "rule",
        max_local_bsz: int | Literal["auto"] | None = None,
        batch_weight: Callable[[Any], Any] | None = None,
        stats_every: int | Literal["auto"] = "auto",
        **kwargs: Any,
    ) -> None:
        transformers_names.check()
        super().__init__(*args, **kwargs)
        _refuse(self)
        self._begin_data(
            DataSettings(
                batch_size=batch_size, max_local_bsz=max_local_bsz, batch_weight=batch_weight
            )
        )
        self._adaptive = {"rule": rule, "schedule_by": schedule_by, "stats_every": stats_every}
        self._made_scheduler = False
        self._part: TrainerPart | None = None
        # Before all other callbacks, which then see the corrected numbers.
        self.callback_handler.callbacks.insert(0, _CountSteps(lambda: self._part))

    # The step ------------------------------------------------------------------------------

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Run this replica's part of a step, micro-batch by micro-batch.

        Returns:
            Its part of the step's loss; the mean over all processes is that of the global batch.
        """
        assert isinstance(model, AdaptiveDataParallel)
        assert self._micro_batches is not None
        assert self._part is not None
        home = Home()
        total = torch.zeros((), device=self.args.device)
        while True:
            micro = home.micro_batch
            assert micro is not None
            items = self._items(inputs, self.args.device)
            with self._by_micro_batch():
                loss = super().training_step(model, inputs, items)
            record(loss=loss)
            if micro.weight:
                total += loss * micro.weight
            if micro.last:
                break
            inputs = next(self._micro_batches)
            # The stock loop counts the operations of the first micro-batch.
            transformers_names.add_operations(self, float(self.floating_point_ops(inputs)))
        assert model.step_weight is not None
        self._part.step_lr = self.stock_learning_rate()
        return total * (home.engine.membership.num_replicas / model.step_weight)

    def around_learning_rate(self, stock: Callable[..., Any]) -> Any:
        """The learning rate of the last step: the clock has stepped the schedule since."""
        lr = None if self._part is None else self._part.step_lr
        return stock() if lr is None else lr

    def around_epoch(
        self,
        stock: Callable[..., Any],
        *,
        epoch: int,
        resume_from_checkpoint: Any = None,
        **kwargs: Any,
    ) -> None:
        """Run one epoch, whose end the loader decides, or only the end of it."""
        part = self._part
        assert part is not None
        Home().set_epoch(epoch)
        kwargs["num_update_steps_per_epoch"] = sys.maxsize
        if part.resumes:
            resume_from_checkpoint = None
        part.put_back()
        if part.end_is_due:
            part.end_is_due = False
            self._end_epoch(epoch, **kwargs)
        else:
            stock(epoch=epoch, resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        # Closes the iteration, so that the job knows that the loop has left it.
        self._micro_batches = None
        part.epochs_over = epoch + 1
        if self.control.should_training_stop:
            # The loop may have left the epoch early, also the first one.
            part.epochs_over = min(epoch + 1, self._training_loader().epochs_done)

    def _end_epoch(
        self,
        epoch: int,
        model: Any,
        trial: Any,
        ignore_keys_for_eval: Any,
        start_time: Any,
        **_: Any,
    ) -> None:
        """Log, save and evaluate, as the stock loop does after the last step of an epoch."""
        assert self._part is not None
        self.control.should_epoch_stop = True
        self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
        transformers_names.end_epoch(
            self,
            model,
            trial,
            epoch,
            ignore_keys_for_eval,
            start_time,
            grad_norm=self._part.grad_norm,
            learning_rate=self._part.step_lr,
        )

    def around_grad_norm(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The gradient norm of the last step; a resumed process logs it at the end of an epoch."""
        norm = stock(*args, **kwargs)
        if self._part is not None:
            self._part.grad_norm = norm
        return norm

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, with the batch size, gain, noise scale and progress of the step added."""
        if "loss" in logs and self._part is not None:
            logs = {**logs, **self._part.read_out()}
        super().log(logs, *args, **kwargs)

    # Beginning and end ---------------------------------------------------------------------

    def around_beginning(
        self,
        stock: Callable[..., Any],
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        """Start the job, and resume from the newest of its state and a checkpoint folder."""
        home = Home()
        loader = self._training_loader()
        self._make_model(max_steps)
        home.set_total_epochs(math.ceil(max_steps / num_update_steps_per_epoch))
        stock(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        saved = self.state
        part = self._part = TrainerPart(self, ReferenceRun(home, loader, float(max_steps)))
        part.register(home.registry)
        recovery = start(home.job)
        part.resumes = recovery.resumed is not None
        loader.take_part()
        if resume_from_checkpoint is not None:
            state = read_state(resume_from_checkpoint)
            # After the loss of a worker, the job is further than the checkpoint that it began with.
            if part.resumes and state["version"][1] > home.clock.steps:
                part.resumes = False
                self.state = saved
                transformers_names.load_weights(self, resume_from_checkpoint)
            if not part.resumes:
                part.forget()
                # Folders of resilin 0.1 do not say where a log had begun.
                older = () if WINDOW in state["tree"] else (WINDOW,)
                load_state(state, *TRAINER_PARTS, *older)
                part.epochs_over = loader.epochs_done
        self.state.init_training_references(self, max_steps, num_train_epochs, trial)
        # The steps of an epoch are done, and the process was lost before its evaluation.
        part.end_is_due = part.resumes and loader.has_passed(part.epochs_over)
        # Training that a callback has stopped does not resume for the epochs that are left. From a
        # checkpoint it does: a run that was stopped by a time limit resumes from it later.
        same_run = part.resumes and "memory" in recovery.resumed_from
        limit = part.stopped if same_run or part.stopped != math.inf else None
        over = limit is not None and limit >= max_steps
        part.stopped = limit
        return (num_train_epochs if over else part.epochs_over), 0

    def _make_model(self, max_steps: int) -> None:
        """Wrap the model, as soon as the length of the run is known."""
        if self._made_scheduler:
            self.lr_scheduler = None
        self.create_optimizer()
        # An optimizer that an earlier run has prepared would bypass the gate.
        self.optimizer = accelerate.bare_optimizer(self.optimizer)
        self._made_scheduler = self.lr_scheduler is None
        self.create_scheduler(num_training_steps=max_steps)
        transformers_names.keep_scheduler(self)
        wrapped, (self.optimizer,), (self.lr_scheduler,) = accelerate.wrap(
            self.accelerator, self.model, [self.optimizer], [self.lr_scheduler], **self._adaptive
        )
        self.model_wrapped = wrapped
        if self.is_fsdp_enabled:
            self.model = wrapped.module
            if hasattr(self.model, "generate"):
                fsdp.register_fsdp_forward_method(self.model, "generate")

    def around_preparation(
        self,
        stock: Callable[..., Any],
        max_steps: int,
        train_dataloader: Any,
        resume_from_checkpoint: str | None,
    ) -> Any:
        """Prepare the parts; a checkpoint is not loaded over the newer state of the job."""
        assert self._part is not None
        checkpoint = None if self._part.resumes else resume_from_checkpoint
        if not self.is_fsdp_enabled:
            return stock(max_steps, train_dataloader, checkpoint)
        # The Trainer would take the wrapped model for the sharded one, and save and load that.
        self.is_fsdp_enabled = False
        try:
            prepared = stock(max_steps, train_dataloader, None)
        finally:
            self.is_fsdp_enabled = True
        if checkpoint is not None:
            transformers_names.load_weights(self, checkpoint)
            with own_step(accelerate.bare_optimizer(self.optimizer), loads=True):
                transformers_names.load_optimizer(self, checkpoint)
        return prepared

    def around_saving(self, stock: Callable[..., Any], output_dir: str) -> None:
        """Save the state of the job in the checkpoint folder as well."""
        with own_step(accelerate.bare_optimizer(self.optimizer), loads=False):
            # Where there is no state yet, that of a sharded model is made by a step of zeros.
            stock(output_dir)
        save_state(output_dir, *TRAINER_PARTS, write=self.args.should_save)

    def around_end(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """End the job before the Trainer reports the run."""
        assert self._part is not None
        self._part.end()
        Home().end_training()
        return stock(*args, **kwargs)


class ElasticTrainer(ElasticTrainerMixin, _hf.Trainer):  # type: ignore[misc]
    """The stock Trainer, elastic; see `ElasticTrainerMixin` for what it adds.

    Examples:
        ```python
        trainer = ElasticTrainer(
            model=model, args=args, train_dataset=train, batch_size=256, rule="adamscale"
        )
        trainer.train(resume_from_checkpoint=True)
        ```
    """


class _CountSteps(_hf.TrainerCallback):  # type: ignore[misc]
    """Corrects the counters of the stock loop, and records evaluations as events of the job.

    Args:
        part: Returns the state of the run that is under way.
    """

    def __init__(self, part: Callable[[], TrainerPart | None]) -> None:
        self._part = part

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore what the hooks of other callbacks will reset."""
        part = self._part()
        assert part is not None
        part.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Correct the counters, also those of progress bars."""
        part = self._part()
        assert part is not None
        part.run.count(state)
        for callback in part.callbacks:
            bar = getattr(callback, "training_bar", None)
            if bar is not None:
                bar.total = state.max_steps

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the metrics of an evaluation."""
        if Home().job.recorder is not None:
            metrics: Mapping[str, Any] = kwargs["metrics"]
            record({name: value for name, value in metrics.items() if isinstance(value, float)})


def _refuse(trainer: Any) -> None:
    """Reject settings of the arguments that resilin does not support.

    Raises:
        ValueError: Names the setting, its value and the value that it must have.
    """
    args = trainer.args
    accelerate.refuse(trainer.accelerator)
    wanted: dict[str, tuple[Any, str]] = {
        "gradient_accumulation_steps": (1, "the step accumulates what batch_size needs"),
        "auto_find_batch_size": (False, "pass max_local_bsz='auto'"),
        "average_tokens_across_devices": (True, "weights are of the global batch"),
        "ignore_data_skip": (False, "a run resumes at its cursor, which costs nothing"),
        "include_num_input_tokens_seen": ("no", "the clock of the job counts"),
        "dataloader_in_order": (True, "samples come in the order of the sample stream"),
    }
    for name, (value, reason) in wanted.items():
        found = getattr(args, name, value)
        if found != value:
            raise ValueError(f"{name} ({found!r}) must be {value!r}: {reason}")
    if args.train_sampling_strategy not in ORDERS:
        raise ValueError(
            f"train_sampling_strategy ({args.train_sampling_strategy!r}) must be one of "
            f"{', '.join(ORDERS)}: the order is that of the sample stream"
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"n_gpu ({args.n_gpu}) must be at most 1: start one process per device, as with "
            "`resilin run --nproc`"
        )
    optim = str(getattr(args.optim, "value", args.optim))
    if "lomo" in optim or "layerwise" in optim:
        raise ValueError(f"optim ({optim!r}) steps within the backward pass, before it is complete")
