"""Transformers: a Trainer whose global batch does not depend on the number of processes.

`ElasticTrainer` is the stock Trainer with another step. One step of the Trainer is one optimizer
step over the global batch: `training_step` runs all micro-batches of this replica, so
`global_step`, `logging_steps`, `save_steps` and callbacks count optimizer steps whatever is
accumulated. `max_steps` and `num_train_epochs` are those of the reference run, read from the clock
of the rule. A `checkpoint-N` folder also carries clocks, cursor and noise, so that a run goes on in
the middle of an epoch at another number of processes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from resilin.core.rules import ScalingRule
from resilin.integrations import accelerate
from resilin.integrations.folders import load_state, read_state, save_state
from resilin.integrations.trainer_state import TRAINER_PARTS, TrainerPart
from resilin.telemetry.extras import load
from resilin.training.job import Job, current_job
from resilin.training.lifecycle import end_training, start
from resilin.training.loader import AdaptiveDataLoader
from resilin.training.parallel import AdaptiveDataParallel, ScheduleBy
from resilin.training.script.events import record
from resilin.training.sizing.batch_size import BatchSize

__all__ = ["ElasticTrainer", "ElasticTrainerMixin"]

_hf: Any = load("transformers", "hf", "resilin.integrations.transformers")
_utils: Any = load("accelerate.utils", "hf", "resilin.integrations.transformers")
_Base: Any = object
_ORDERS = {"random": True, "sequential": False}
"""Whether to shuffle, by the sampling strategies that the sample stream has."""


class ElasticTrainerMixin(_Base):  # type: ignore[misc]
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
        schedule_by: What steps the scheduler: `rule`, a clock, or `user` for once per optimizer
            step, as the stock Trainer does.
        max_local_bsz: Most samples in a micro-batch, in place of `per_device_train_batch_size`;
            `auto` finds out what fits into memory.
        batch_weight: Gives the weight of a collated micro-batch, in place of its items.
        stats_every: As in `AdaptiveDataParallel`: how often noise is measured.
        **kwargs: Arguments of the Trainer.

    Raises:
        ValueError: The arguments have a setting that cannot be honoured.
    """

    optimizer: Any
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
        super().__init__(*args, **kwargs)
        _refuse(self)
        self._reference_batch = batch_size
        self._adaptive = {"rule": rule, "schedule_by": schedule_by, "stats_every": stats_every}
        self._max_local_bsz = max_local_bsz
        self._batch_weight = batch_weight
        self._sizing: Callable[[AdaptiveDataLoader], None] | None = None
        self._elastic: tuple[Job, AdaptiveDataLoader] | None = None
        self._made_scheduler = False
        self._goes_on_by_itself = False
        self._micro_batches: Iterator[Any] | None = None
        self._reference_steps = 0.0
        self._step_lr: float | None = None
        self._grad_norm: Any = None
        self._part: TrainerPart | None = None
        self._end_is_due = False
        # First of all callbacks: the others are to see what it corrects.
        self.callback_handler.callbacks.insert(0, _Counting(self))

    # The batch size ------------------------------------------------------------------------

    def set_batch_size(self, batch_size: BatchSize) -> None:
        """Sets the global batch size from the next step on, also while it trains.

        Args:
            batch_size: As in `AdaptiveDataLoader.set_batch_size`: a number, a `BatchTrace`, a
                `Schedule`, or a function of the clock.
        """
        self._size(lambda loader: loader.set_batch_size(batch_size))

    def autoscale_batch_size(self, max_batch_size: int, **bounds: Any) -> None:
        """Lets resilin choose the global batch size while it trains.

        Args:
            max_batch_size: Upper limit of the global batch.
            **bounds: As in `AdaptiveDataLoader.autoscale_batch_size`; micro-batches have at most
                `per_device_train_batch_size` samples if nothing else is said.
        """
        if self._max_local_bsz != "auto":
            bounds = {"local_bsz_bounds": (0, self._largest_micro_batch), **bounds}
        self._size(lambda loader: loader.autoscale_batch_size(max_batch_size, **bounds))

    @property
    def _largest_micro_batch(self) -> Any:
        return self._max_local_bsz or self.args.per_device_train_batch_size

    def _size(self, sizing: Callable[[AdaptiveDataLoader], None]) -> None:
        self._sizing = sizing
        if self._elastic is not None and self._elastic[0] is current_job():
            sizing(self._elastic[1])

    def get_total_train_batch_size(self, args: Any) -> int:
        """The reference batch: it does not depend on the number of processes."""
        return self._reference_batch

    # Data ----------------------------------------------------------------------------------

    def get_train_dataloader(self) -> AdaptiveDataLoader:
        """An `AdaptiveDataLoader` with the settings of the stock Trainer's loader."""
        job = current_job()
        if self._elastic is not None and self._elastic[0] is job:
            return self._elastic[1]
        stock, args = super().get_train_dataloader(), self.args
        loader = AdaptiveDataLoader(
            stock.dataset,
            self._reference_batch,
            shuffle=_ORDERS[args.train_sampling_strategy],
            drop_last=args.dataloader_drop_last,
            max_local_bsz=self._largest_micro_batch,
            seed=args.seed if args.data_seed is None else args.data_seed,
            batch_weight=self._weigh if self._counts or self._batch_weight else None,
            collate_fn=stock.collate_fn,
            num_workers=stock.num_workers,
            pin_memory=stock.pin_memory,
            prefetch_factor=stock.prefetch_factor,
            multiprocessing_context=stock.multiprocessing_context,
            worker_init_fn=stock.worker_init_fn,
        )
        if self._sizing is not None:
            self._sizing(loader)
        self._elastic = (job, loader)
        return loader

    @property
    def _counts(self) -> bool:
        """Whether the Trainer counts items: the loss is then a mean over them."""
        return bool(self.model_accepts_loss_kwargs or self.compute_loss_func is not None)

    def _weigh(self, batch: Any) -> float:
        """The weight of a micro-batch: what its loss is a mean over."""
        if self._batch_weight is not None:
            return float(self._batch_weight(batch))
        items = self._items(batch, torch.device("cpu"))
        return float(_utils.find_batch_size(batch) if items is None else items)

    def _items(self, batch: Any, device: torch.device) -> Any:
        """What the Trainer counts in a micro-batch; None if its loss is a mean over samples."""
        with self._by_micro_batch():
            return self._get_num_items_in_batch([batch], device)

    @contextmanager
    def _by_micro_batch(self) -> Iterator[None]:
        """Items are those of a micro-batch: the weights of the step average over all of them."""
        self.args.average_tokens_across_devices = False
        try:
            yield
        finally:
            self.args.average_tokens_across_devices = True

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], None]:
        """The first micro-batch of the next step; `training_step` fetches the others."""
        self._micro_batches = epoch_iterator
        batch = next(epoch_iterator, None)
        if batch is None:
            # The stock loop counts on `len(dataloader)` batches, and there may be more or fewer.
            self.control.should_epoch_stop = True
        return ([] if batch is None else [batch]), None

    # The step ------------------------------------------------------------------------------

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Runs this replica's part of a step, micro-batch by micro-batch.

        Returns:
            Its part of the step's loss; the mean over all processes is that of the global batch.
        """
        assert isinstance(model, AdaptiveDataParallel)
        assert self._micro_batches is not None
        job = current_job()
        total = torch.zeros((), device=self.args.device)
        while True:
            micro = job.micro_batch
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
            # The stock loop counts those of the first micro-batch.
            self.current_flos += float(self.floating_point_ops(inputs))
        assert model.step_weight is not None
        self._step_lr = super()._get_learning_rate()
        return total * (job.engine.membership.num_replicas / model.step_weight)

    def _get_learning_rate(self) -> float:
        """The learning rate of the last step: the clock has moved the schedule on since."""
        lr: float = super()._get_learning_rate() if self._step_lr is None else self._step_lr
        return lr

    def _run_epoch(self, *, epoch: int, resume_from_checkpoint: Any = None, **kwargs: Any) -> None:
        assert self._part is not None
        current_job().timeline.epoch = epoch
        kwargs["num_update_steps_per_epoch"] = sys.maxsize
        if self._goes_on_by_itself:
            resume_from_checkpoint = None
        self._part.put_back()
        if self._end_is_due:
            self._end_is_due = False
            self._end_epoch(epoch, **kwargs)
        else:
            super()._run_epoch(epoch=epoch, resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        # Closes the iteration where it was left, so that the job knows of it.
        self._micro_batches = None
        self._part.epochs_over = epoch + 1
        if self.control.should_training_stop:
            # It may have been left early, also in the first epoch.
            self._part.epochs_over = min(epoch + 1, self._training_loader().epochs_done)

    def _end_epoch(
        self,
        epoch: int,
        model: Any,
        trial: Any,
        ignore_keys_for_eval: Any,
        start_time: Any,
        **_: Any,
    ) -> None:
        """What the stock loop does behind the last step of an epoch: evaluate, save, log."""
        self.control.should_epoch_stop = True
        self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
        self._maybe_log_save_evaluate(
            self._tr_loss,
            self._grad_norm,
            model,
            trial,
            epoch,
            ignore_keys_for_eval,
            start_time,
            learning_rate=self._step_lr,
        )

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        self._grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        return self._grad_norm

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Logs, with what resilin knows of the step: batch size, gain, noise scale, progress."""
        if "loss" in logs and self._part is not None:
            logs = {**logs, **self._part.read_out()}
        super().log(logs, *args, **kwargs)

    # Beginning and end ---------------------------------------------------------------------

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        job = current_job()
        loader = self._training_loader()
        self._make_model(max_steps)
        self._reference_steps = float(max_steps)
        job.timeline.total_epochs = math.ceil(max_steps / num_update_steps_per_epoch)
        super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        saved = self.state
        part = self._part = TrainerPart(self)
        part.register(job)
        recovery = start(job)
        self._goes_on_by_itself = recovery.resumed is not None
        loader.take_part()
        if resume_from_checkpoint is not None:
            state = read_state(resume_from_checkpoint)
            # After the loss of a worker, the job knows more than the checkpoint that it began with.
            if self._goes_on_by_itself and state["version"][1] > job.clock.steps:
                self._goes_on_by_itself = False
                self.state = saved
                self._load_from_checkpoint(resume_from_checkpoint)
            if not self._goes_on_by_itself:
                part.forget()
                load_state(state, *TRAINER_PARTS)
                part.epochs_over = loader.epochs_done
        self.state.init_training_references(self, max_steps, num_train_epochs, trial)
        # The steps of an epoch are done, and the process was lost before its evaluation.
        self._end_is_due = self._goes_on_by_itself and loader.has_passed(part.epochs_over)
        # Training that has stopped does not begin again for the epochs that it has left out. A
        # checkpoint is another matter: a run that was stopped by the clock goes on from it later.
        same_run = self._goes_on_by_itself and "memory" in recovery.resumed_from
        limit = part.stopped if same_run or part.stopped != math.inf else None
        over = limit is not None and limit >= max_steps
        part.stopped = limit
        return (num_train_epochs if over else part.epochs_over), 0

    def _training_loader(self) -> AdaptiveDataLoader:
        loader = self.get_train_dataloader()
        if not isinstance(loader, AdaptiveDataLoader):
            raise ValueError(
                f"get_train_dataloader() returns a {type(loader).__name__}, and an elastic Trainer "
                "needs an AdaptiveDataLoader"
            )
        return loader

    def _make_model(self, max_steps: int) -> None:
        """Wraps the model as soon as the length of the run is known; the stock code finds it so."""
        if self._made_scheduler:
            self.lr_scheduler = None
        self.create_optimizer()
        # Bare, also if it was prepared in an earlier run: that would step past the gate.
        self.optimizer = accelerate.bare_optimizer(self.optimizer)
        self._made_scheduler = self.lr_scheduler is None
        self.create_scheduler(num_training_steps=max_steps)
        self._created_lr_scheduler = False
        self.model_wrapped, self.lr_scheduler = accelerate.wrap(
            self.accelerator, self.model, self.optimizer, self.lr_scheduler, **self._adaptive
        )

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        # What the job has restored by itself is newer than what the checkpoint holds.
        checkpoint = None if self._goes_on_by_itself else resume_from_checkpoint
        return super()._prepare_for_training(max_steps, train_dataloader, checkpoint)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        save_state(output_dir, *TRAINER_PARTS, write=self.args.should_save)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        assert self._part is not None
        self._part.put_back()
        if self._part.stopped is None or self._part.stopped < self._reference_steps:
            early = self._reference_steps - self._steps_done() > 1e-6
            self._part.stopped = math.inf if early else self._reference_steps
        end_training(current_job())
        return super()._finalize_training(*args, **kwargs)

    def _steps_done(self) -> float:
        """Reference steps that are done, by the clock of the rule."""
        job = current_job()
        assert job.model is not None
        reference = job.timeline.reference or self._training_loader()._reference()
        return job.clock.read(job.model.rule.clock, reference)

    def _count_step(self) -> None:
        """Says how far the run has come, in its own words, behind each step."""
        job, state = current_job(), self.state
        assert job.model is not None
        assert job.timeline.reference is not None
        assert job.timeline.reference.steps_per_epoch is not None
        done = self._steps_done()
        state.epoch = round(done / job.timeline.reference.steps_per_epoch, 9)
        # As many optimizer steps as will be made at the pace of this one.
        by_progress = job.model.rule.clock == "progress"
        pace = job.model.gain if by_progress else job.model.scale
        left = math.ceil((self._reference_steps - done) / pace - 1e-6)
        state.max_steps = state.global_step + max(0, left)


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


class _Counting(_hf.TrainerCallback):  # type: ignore[misc]
    """Corrects what the stock loop counts, and records evaluations with the events of the job."""

    def __init__(self, trainer: ElasticTrainerMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self._trainer._part is not None
        self._trainer._part.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._count_step()
        for callback in self._trainer.callback_handler.callbacks:
            bar = getattr(callback, "training_bar", None)
            if bar is not None:
                bar.total = state.max_steps

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if current_job().recorder is not None:
            metrics: Mapping[str, Any] = kwargs["metrics"]
            record({name: value for name, value in metrics.items() if isinstance(value, float)})


def _refuse(trainer: Any) -> None:
    """Raises a ValueError for a setting of the arguments that cannot be honoured."""
    args = trainer.args
    accelerate.refuse(trainer.accelerator)
    wanted: dict[str, tuple[Any, str]] = {
        "gradient_accumulation_steps": (1, "the step accumulates what batch_size needs"),
        "auto_find_batch_size": (False, "pass max_local_bsz='auto'"),
        "average_tokens_across_devices": (True, "weights are of the global batch"),
        "ignore_data_skip": (False, "a run goes on at its cursor, which costs nothing"),
        "include_num_input_tokens_seen": ("no", "the clock of the job counts"),
        "dataloader_in_order": (True, "samples come in the order of the sample stream"),
    }
    for name, (value, reason) in wanted.items():
        told = getattr(args, name, value)
        if told != value:
            raise ValueError(f"{name} ({told!r}) must be {value!r}: {reason}")
    if args.train_sampling_strategy not in _ORDERS:
        raise ValueError(
            f"train_sampling_strategy ({args.train_sampling_strategy!r}) must be one of "
            f"{', '.join(_ORDERS)}: the order is that of the sample stream"
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"n_gpu ({args.n_gpu}) must be at most 1: start one process per device, as with "
            "`resilin run --nproc`"
        )
    optim = str(getattr(args.optim, "value", args.optim))
    if "lomo" in optim or "layerwise" in optim:
        raise ValueError(f"optim ({optim!r}) steps within the backward pass, before it is complete")
