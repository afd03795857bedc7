"""`Model`: a Keras model that trains with a global batch, wherever it runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import keras  # type: ignore[import-untyped]

from resilin.compat import keras_names
from resilin.core import _validate
from resilin.core.rules import ScalingRule
from resilin.engine.group import init_process_group
from resilin.integrations.keras import compiled, data, fit
from resilin.integrations.keras.progress import NAME, Progress
from resilin.integrations.keras.refusals import check_fit, check_model, check_step, is_writer
from resilin.integrations.keras.steps import Steps
from resilin.training.bridge.home import Home
from resilin.training.loader import AdaptiveDataLoader
from resilin.training.parallel import ScheduleBy
from resilin.training.script.plan import PresentPlan, plan
from resilin.training.sizing.batch_size import BatchSize
from resilin.training.start import start


class Model:
    """Trains a compiled Keras model with one global batch size, on any number of processes.

    `fit` is resilin's; all other attributes are those of the Keras model: `evaluate`, `predict`,
    `save`, `summary`, `optimizer` and so on. Under torchrun or `resilin run` it joins the other
    processes automatically.

    Args:
        model: The Keras model; build and compile it before `fit`.
        batch_size: The reference batch: the global batch, over all processes, that the learning
            rate and its schedule were tuned for.
        max_local_bsz: Most samples that a process runs at once; more are accumulated. `auto`
            measures what fits into memory.
        rule: Name of a scaling rule or a rule of your own; `auto` chooses by the optimizer.
        schedule_by: Clock of a LearningRateSchedule: the clock of the `rule`, another clock, or
            `user` for optimizer steps, as Keras does.
        memory_budget: Bytes that a micro-batch may take, for `auto`, as in `AdaptiveDataLoader`.
        drop_last: Whether to drop the remainder of an epoch, once for all processes.
        seed: Chooses the order of the samples.
        batch_weight: Returns the weight of a micro-batch, such as its number of tokens; None weighs
            by samples.
        stats_every: Measure the noise every so many steps; `auto` where the rule or the autoscaler
            needs it.
        **ddp_kwargs: Passed on to DistributedDataParallel, such as `find_unused_parameters`.

    Raises:
        ValueError: A setting is not supported; `fit` checks the remaining ones.
        MissingNameError: In `fit`: this version of Keras lacks a name that resilin needs.
    """

    def __init__(
        self,
        model: Any,
        batch_size: int,
        max_local_bsz: int | Literal["auto"] | None = None,
        *,
        rule: str | ScalingRule = "auto",
        schedule_by: ScheduleBy = "rule",
        memory_budget: int | None = None,
        drop_last: bool = False,
        seed: int | None = None,
        batch_weight: Callable[[Any], Any] | None = None,
        stats_every: int | Literal["auto"] = "auto",
        **ddp_kwargs: Any,
    ) -> None:
        if not isinstance(model, keras.Model):
            raise ValueError(f"model ({model!r}) must be a keras.Model")
        self.model = model
        """The Keras model."""
        self.batch_size = _validate.whole("batch_size", batch_size, at_least=1)
        """The reference batch."""
        self._max_local_bsz = max_local_bsz
        self._loading: dict[str, Any] = {
            "memory_budget": memory_budget,
            "drop_last": drop_last,
            "seed": seed,
            "batch_weight": batch_weight,
        }
        self._training = {"rule": rule, "stats_every": stats_every, **ddp_kwargs}
        self._schedule_by: ScheduleBy = schedule_by
        self._sizing: Callable[[AdaptiveDataLoader], None] | None = None
        self._loader: AdaptiveDataLoader | None = None
        self._steps: Steps | None = None
        self._progress: Progress | None = None
        self._compiled: compiled.Compiled | None = None
        if keras.backend.backend() == "torch":
            init_process_group()
        else:
            self._compiled = compiled.Compiled(model, self.batch_size, max_local_bsz, rule)
            others = {"stats_every": stats_every, "schedule_by": schedule_by, **ddp_kwargs}
            self._compiled.check({**self._loading, **others})

    def __getattr__(self, name: str) -> Any:
        """Read an attribute of the Keras model."""
        if name.startswith("__") or name == "model":
            raise AttributeError(name)
        return getattr(self.model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the Keras model, such as `trainable`."""
        if name.startswith("_") or name in ("model", "batch_size"):
            super().__setattr__(name, value)
        else:
            setattr(self.model, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the Keras model."""
        return self.model(*args, **kwargs)

    # The batch size ------------------------------------------------------------------------

    @property
    def plan(self) -> PresentPlan:
        """The split of the next step over the present processes."""
        limit = None if self._max_local_bsz == "auto" else self._max_local_bsz
        return plan(self.current_batch_size, limit)

    @property
    def current_batch_size(self) -> int:
        """The global batch size of the next step."""
        if self._compiled is not None:
            return self._compiled.batch_size
        return self.batch_size if self._loader is None else self._loader.current_batch_size

    def set_batch_size(self, batch_size: BatchSize) -> None:
        """Set the global batch size from the next step on, also during training.

        Args:
            batch_size: As in `AdaptiveDataLoader.set_batch_size`: a number, a `BatchTrace`, a
                `BatchSchedule`, a `Schedule`, or a function of the clock. With a compiled backend
                a number, before the first step.
        """
        if self._compiled is not None:
            self._compiled.set_batch_size(batch_size)
        else:
            self._size(lambda loader: loader.set_batch_size(batch_size))

    def autoscale_batch_size(self, max_batch_size: int, **bounds: Any) -> None:
        """Let resilin choose the global batch size during training.

        Args:
            max_batch_size: Upper limit of the global batch.
            **bounds: As in `AdaptiveDataLoader.autoscale_batch_size`; micro-batches have at most
                `max_local_bsz` samples by default.
        """
        if self._compiled is not None:
            raise compiled.refusal("autoscale_batch_size", max_batch_size)
        if isinstance(self._max_local_bsz, int):
            bounds = {"local_bsz_bounds": (0, self._max_local_bsz), **bounds}
        self._size(lambda loader: loader.autoscale_batch_size(max_batch_size, **bounds))

    def _size(self, sizing: Callable[[AdaptiveDataLoader], None]) -> None:
        self._sizing = sizing
        if self._loader is not None:
            sizing(self._loader)

    # Training ------------------------------------------------------------------------------

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: dict[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: Any = 1,
    ) -> Any:
        """Train the model, with the arguments of `keras.Model.fit`.

        A batch of Keras is one optimizer step: callbacks, logs and the progress bar count steps.
        Metrics are those of the global batch, on all processes. If the job has kept its state,
        training resumes from there, in the middle of an epoch.

        Args:
            x: Arrays, a torch Dataset, or an `AdaptiveDataLoader`.
            y: Targets, where `x` is made of arrays.
            batch_size: Left out, or that of the Model.
            epochs: The number of the last epoch.
            verbose: As in Keras; only the first process prints.
            callbacks: A list of callbacks. Those of Keras that write run in the first process.
            validation_split: As in Keras: this part of the arrays, from their end, is held out.
            validation_data: As in Keras; every process evaluates all of it.
            shuffle: Whether each epoch has an order of its own.
            class_weight: Weights of classes, where `x` is made of arrays.
            sample_weight: Weights of samples, where `x` is made of arrays.
            initial_epoch: The number of epochs before the first.
            steps_per_epoch: Must be None.
            validation_steps: As in Keras.
            validation_batch_size: As in Keras; by default what a process runs at once.
            validation_freq: As in Keras.

        Returns:
            The History.

        Raises:
            ValueError: A setting is not supported.
        """
        arguments = {name: value for name, value in locals().items() if name != "self"}
        check_fit(self.batch_size, arguments)
        if self._compiled is not None:
            return self._compiled.fit(arguments)
        check_model(self.model, weighted=self._loading["batch_weight"] is not None)
        check_step(self.model)
        keras_names.check(self.model)
        given, held = (x, y, sample_weight), validation_data
        if validation_split and held is None:
            given, held = data.hold_out(given, validation_split)
        progress = self._begin_call()
        span = range(initial_epoch, epochs)
        number, first = progress.call(len(span))
        make = partial(self._make_loader, number)
        loader = data.make_loader(*given, class_weight, shuffle=shuffle, make=make)
        if loader.batch_size != self.batch_size:
            raise ValueError(
                f"batch_size ({loader.batch_size}) of the AdaptiveDataLoader must be that of the "
                f"Model ({self.batch_size})"
            )
        self._loader = loader
        if self._sizing is not None:
            self._sizing(loader)
        keras_names.build(self.model, loader.example())
        start(progress.home.job)
        if progress.is_over(number):
            return progress.skip(number)
        loader.take_part()
        steps = self._make_steps(progress)
        everyone = fit.list_callbacks(callbacks)
        progress.watch(everyone, is_writer)
        listed = fit.make_callbacks(
            self.model, everyone, verbose=verbose, epochs=epochs, steps=len(loader)
        )
        if validation_batch_size is None:
            validation_batch_size = self.plan.batch_size
        return fit.run(
            self.model,
            steps,
            progress,
            loader,
            listed,
            fit.Call(number=number, first=first, epochs=span),
            fit.evaluation(held, validation_batch_size, validation_steps),
            validation_freq,
        )

    def _begin_call(self) -> Progress:
        known, home = self._progress, Home()
        if known is not None and known.home.is_current:
            # It may have been removed by release().
            home.registry.add(NAME, known)
            return known
        job = home.job
        other = job.model is not None or job.epoch > 0
        if other and home.registry.restored(NAME) is None:
            raise ValueError(
                f"the job has trained something else for {job.epoch} epochs, and it can train only "
                "one model: call resilin.reset_job() to begin another job"
            )
        self._progress = Progress(self.model)
        return self._progress

    def _make_loader(self, number: int, dataset: Any, **settings: Any) -> AdaptiveDataLoader:
        return AdaptiveDataLoader(
            dataset,
            self.batch_size,
            max_local_bsz=self._max_local_bsz,
            # Each call of `fit` has a loader of its own, also over the same data.
            fingerprint=f"fit {number}: {type(dataset).__qualname__}[{len(dataset)}]",
            **self._loading,
            **settings,
        )

    def _make_steps(self, progress: Progress) -> Steps:
        known = self._steps
        if known is not None and known.parallel is Home().job.model:
            same = known.optimizer.own is self.model.optimizer
            if same and known.trains(self.model.trainable_variables):
                return known
            known.release()
        masked = self._loading["batch_weight"] is not None
        self._steps = Steps(
            self.model, self._schedule_by, progress, masked=masked, **self._training
        )
        return self._steps

    def train_on_batch(self, *args: Any, **kwargs: Any) -> None:
        """Reject it: it would bypass resilin."""
        raise ValueError(
            "train_on_batch() makes a step of any size that no other process knows of: use fit(), "
            "or write a loop with AdaptiveDataParallel"
        )

    def release(self) -> None:
        """Restore the Keras model; it can be trained without resilin, or compiled again."""
        if self._steps is not None:
            self._steps.release()
            self._steps = None
        if self._progress is not None:
            self._progress.home.registry.remove(NAME)
