"""JAX and TensorFlow: a step that is compiled once.

The batch is planned before the first step: as many equal micro-batches as fit, accumulated by the
optimizer of Keras, with the learning rate that the rule gives at this one scale. One process
trains. A setting that would change later is rejected, since a compiled step would ignore it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import keras  # type: ignore[import-untyped]

from resilin.compat.keras_names import rate_of
from resilin.core import _validate
from resilin.core.plan import BatchPlan
from resilin.core.rules import Scaling, ScalingRule, get_rule
from resilin.engine.group import num_launched
from resilin.integrations.keras.data import is_array
from resilin.integrations.keras.refusals import check_model
from resilin.training.bridge.home import Home

_DEFAULTS: Mapping[str, Any] = {
    "memory_budget": None,
    "drop_last": False,
    "seed": None,
    "batch_weight": None,
    "stats_every": "auto",
    "schedule_by": "rule",
}
"""Settings that a compiled step does not support, and their defaults."""


def refusal(setting: str, value: Any, why: str = "its step is compiled once") -> ValueError:
    """The error for a setting that this backend does not support."""
    backend = keras.backend.backend()
    return ValueError(
        f"{setting} ({value!r}) is not supported by the {backend} backend: {why}; set "
        "KERAS_BACKEND=torch"
    )


def accumulate(optimizer: Any, steps: int) -> Any:
    """Make a Keras optimizer step on every `steps`-th batch, with the mean of the gradients.

    This is the accumulation of Keras itself, for any backend and any loop. It can be set only
    before the optimizer is built. Batches must be equally large.

    Args:
        optimizer: An optimizer of Keras, or its name.
        steps: Batches per optimizer step.

    Returns:
        The optimizer.

    Raises:
        ValueError: The optimizer is built already.
    """
    optimizer = keras.optimizers.get(optimizer)
    _validate.whole("steps", steps, at_least=1)
    wanted = steps if steps > 1 else None
    if optimizer.gradient_accumulation_steps == wanted:
        return optimizer
    if optimizer.built:
        raise ValueError(
            f"gradient_accumulation_steps ({optimizer.gradient_accumulation_steps}) cannot become "
            f"{wanted} in an optimizer that is built: make a new one"
        )
    optimizer.gradient_accumulation_steps = wanted
    return optimizer


class Compiled:
    """A Keras model whose batch is planned before its step is compiled.

    Args:
        model: The Keras model.
        reference: The reference batch.
        max_local_bsz: Most samples that are run at once.
        rule: Name of a static rule or a rule of your own; asked only if the batch is another one.
    """

    def __init__(
        self, model: Any, reference: int, max_local_bsz: Any, rule: str | ScalingRule
    ) -> None:
        self._model = model
        self._reference = reference
        self.batch_size = reference
        """The global batch size."""
        if max_local_bsz == "auto":
            raise refusal("max_local_bsz", max_local_bsz)
        self._max_local_bsz = max_local_bsz
        self._rule = rule
        self._prepared: Any = None
        present = Home().engine.membership.num_processes
        if (processes := max(num_launched(), present)) > 1:
            raise refusal("the number of processes", processes, "resilin trains in one with it")

    def check(self, settings: Mapping[str, Any]) -> None:
        """Reject settings that need a step which is not compiled."""
        for name, value in settings.items():
            if value != _DEFAULTS.get(name):
                raise refusal(name, value)

    def set_batch_size(self, batch_size: Any) -> None:
        """Set the batch size of all steps."""
        if not isinstance(batch_size, int):
            raise refusal("set_batch_size", batch_size)
        _validate.whole("batch_size", batch_size, at_least=1)
        if self._prepared is not None and batch_size != self.batch_size:
            raise refusal(
                "set_batch_size", batch_size, f"its step is compiled for {self.batch_size}"
            )
        self.batch_size = batch_size

    @property
    def plan(self) -> BatchPlan:
        """The split of the batch into micro-batches of one size.

        Raises:
            ValueError: There is none.
        """
        plan = BatchPlan(self.batch_size, 1, max_local_bsz=self._max_local_bsz)
        sizes = plan.micro_batches(0)
        if len(set(sizes)) > 1:
            raise refusal(
                "batch_size",
                self.batch_size,
                f"under max_local_bsz ({self._max_local_bsz}) it splits into micro-batches of "
                f"{sizes[0]} and {sizes[-1]} samples, which the optimizer of Keras takes for equal",
            )
        return plan

    def fit(self, arguments: Mapping[str, Any]) -> Any:
        """Train with the batches of the plan.

        Args:
            arguments: The arguments of `fit`.
        """
        plan, x = self.plan, arguments["x"]
        if not is_array(x):
            raise refusal("x", type(x).__name__, "its micro-batches are cut from arrays")
        samples = len(keras.tree.flatten(x)[0])
        if arguments["validation_data"] is None:
            # Keras rounds down as well.
            samples = math.floor(samples * (1 - arguments["validation_split"]))
        if samples % self.batch_size:
            raise refusal(
                "the number of samples",
                samples,
                f"it must be a multiple of the batch size ({self.batch_size}), or the last "
                "micro-batches would count too much",
            )
        self._prepare(plan)
        held = arguments["validation_batch_size"] or plan.batch_size
        batches = {"batch_size": plan.batch_size, "validation_batch_size": held}
        return self._model.fit(**{**arguments, **batches})

    def _prepare(self, plan: BatchPlan) -> None:
        """Set accumulation and learning rate, once per optimizer."""
        optimizer = self._model.optimizer
        if self._prepared is optimizer:
            return
        check_model(self._model, weighted=False)
        factor = self._factor()
        rate = rate_of(optimizer)
        scheduled = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
        if not scheduled and callable(rate) and not hasattr(rate, "assign"):
            raise refusal("learning_rate", rate)
        accumulate(optimizer, plan.steps)
        if scheduled:
            scale = self.batch_size / self._reference
            optimizer.learning_rate = _Scaled(rate, factor, scale, plan.steps)
        elif factor != 1:
            rate.assign(rate * factor)
        self._prepared = optimizer

    def _factor(self) -> float:
        """Factor on the learning rate at this scale, for all steps."""
        scale = self.batch_size / self._reference
        if scale == 1:
            return 1.0
        if self._rule == "auto":
            raise refusal(
                "rule",
                "auto",
                f"the batch size is {self.batch_size} and not {self._reference}, and a rule has "
                "to be chosen that needs no noise, such as 'linear' or 'sqrt'",
            )
        rule = get_rule(self._rule)
        if rule.adaptive:
            raise refusal("rule", self._rule, "it follows the noise of the gradient, step by step")
        factors = rule.factors(Scaling(scale, scale, scale, 0.0))
        later = rule.factors(Scaling(scale, scale, scale, 1e6))
        decays = factors.weight_decay != 1 and self._model.optimizer.weight_decay
        powers = (factors.beta_power, factors.momentum_power, factors.eps)
        if factors != later or powers != (1, 1, 1) or decays:
            raise refusal("rule", self._rule, "it changes more than the learning rate")
        return factors.lr


@keras.saving.register_keras_serializable("resilin")
class _Scaled(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """A schedule of the reference run, read at another batch size.

    The optimizers of Keras count batches in it, also those that are only accumulated.
    """

    def __init__(self, schedule: Any, factor: float, scale: float, steps: int) -> None:
        self._schedule, self._factor = schedule, factor
        self._scale, self._steps = scale, steps

    def __call__(self, step: Any) -> Any:
        done = keras.ops.floor_divide(step, self._steps)
        reference = keras.ops.floor(keras.ops.cast(done, "float32") * self._scale)
        return self._schedule(keras.ops.cast(reference, "int32")) * self._factor

    def get_config(self) -> dict[str, Any]:
        return {
            "schedule": keras.saving.serialize_keras_object(self._schedule),
            "factor": self._factor,
            "scale": self._scale,
            "steps": self._steps,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> _Scaled:
        schedule = keras.saving.deserialize_keras_object(config.pop("schedule"))
        return cls(schedule, **config)
