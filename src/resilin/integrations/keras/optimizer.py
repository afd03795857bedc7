"""A Keras optimizer as an optimizer of torch, for `AdaptiveDataParallel` to gate and scale.

Its one parameter group has the hyper-parameters that scaling rules change, under torch's names. A
step sets them in the Keras optimizer for the length of one `apply`, which then clips, decays,
averages and updates as usual.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras  # type: ignore[import-untyped]
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from resilin.compat import keras_names
from resilin.training.bridge.home import Home

_TORCH_NAMES = {"Nadam": "NAdam"}
"""Optimizers that torch spells differently; the rule is chosen by that name."""


class KerasOptimizer(Optimizer):
    """A Keras optimizer; `of` makes one that also has its name.

    Args:
        own: The Keras optimizer, built.
        variables: The variables that it trains.
    """

    def __init__(self, own: Any, variables: list[Any]) -> None:
        self.own = own
        """The Keras optimizer."""
        self.variables = variables
        """The variables that it trains."""
        self._stepping = False
        # Also where an earlier job has not released the optimizer.
        self._ask_own = keras_names.own_rate(own)
        group: dict[str, Any] = {"lr": self._own_lr()}
        if hasattr(own, "beta_1") and hasattr(own, "beta_2"):
            group["betas"] = (float(own.beta_1), float(own.beta_2))
        if getattr(own, "epsilon", None) is not None:
            group["eps"] = float(own.epsilon)
        if hasattr(own, "momentum"):
            # Told, for rules that would change it: the learning rate is inside the velocity, so no
            # momentum and dampening do what they do in torch.
            group["momentum"] = float(own.momentum)
        if own.weight_decay:
            # Keras subtracts lr * weight_decay * variable, whatever the optimizer.
            group.update(weight_decay=float(own.weight_decay), decoupled_weight_decay=True)
        super().__init__([variable.value for variable in variables], group)
        keras_names.replace_rate(own, self._current_rate)

    @classmethod
    def of(cls, own: Any, variables: list[Any]) -> KerasOptimizer:
        """Make one whose class has the name of the Keras optimizer: it decides on the rule."""
        name = type(own).__name__
        named = type(_TORCH_NAMES.get(name, name), (cls,), {"__module__": __name__})
        made: KerasOptimizer = named(own, variables)
        return made

    def release(self) -> None:
        """Restore the Keras optimizer."""
        keras_names.restore_rate(self.own)

    # The learning rate ---------------------------------------------------------------------

    @property
    def schedule(self) -> Any:
        """The LearningRateSchedule of the Keras optimizer; None if it has a plain rate."""
        rate = keras_names.rate_of(self.own)
        scheduled = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
        return rate if scheduled else None

    def _own_lr(self) -> float:
        return float(keras.ops.convert_to_tensor(self._ask_own()))

    def _current_rate(self) -> Any:
        """The learning rate that the Keras optimizer and its callbacks see."""
        if self._stepping or self.schedule is not None:
            return self.param_groups[0]["lr"]
        return self._ask_own()

    def follow(self) -> None:
        """Read the learning rate that callbacks have set, unless a schedule sets it."""
        if self.schedule is None:
            self.param_groups[0]["lr"] = self._own_lr()

    # The step ------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply the gradient with the hyper-parameters of the group."""
        with self._lent():
            self.own.apply([variable.value.grad for variable in self.variables], self.variables)

    @contextmanager
    def _lent(self) -> Iterator[None]:
        """Set the values of the group in the Keras optimizer, and restore its own afterwards."""
        own, group, model = self.own, self.param_groups[0], Home().job.model
        lent: dict[str, Any] = {}
        if "betas" in group:
            lent["beta_1"], lent["beta_2"] = group["betas"]
        if "eps" in group:
            lent["epsilon"] = group["eps"]
        if "weight_decay" in group:
            lent["weight_decay"] = group["weight_decay"]
        if own.use_ema and model is not None:
            lent["ema_momentum"] = own.ema_momentum ** model.factors[0].ema_power
        kept = {name: getattr(own, name) for name in lent}
        self._stepping = True
        try:
            for name, value in lent.items():
                setattr(own, name, value)
            yield
        finally:
            self._stepping = False
            for name, value in kept.items():
                setattr(own, name, value)

    # State ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The variables of the Keras optimizer: moments, iterations, learning rate."""
        return by_name(self.own.variables)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        assign(self.own.variables, state)
        self.follow()


class KerasSchedule(LRScheduler):
    """A LearningRateSchedule of Keras as a scheduler of torch, for a clock to step."""

    def __init__(self, optimizer: KerasOptimizer) -> None:
        self._schedule = optimizer.schedule
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        """The rate after this many steps of the reference run."""
        return [float(keras.ops.convert_to_tensor(self._schedule(self.last_epoch)))]

    def state_dict(self) -> dict[str, Any]:
        """Only the count: the schedule comes from the script."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self.last_epoch = int(state_dict["last_epoch"])
        self.optimizer.param_groups[0]["lr"] = self.get_lr()[0]


def by_name(variables: list[Any]) -> dict[str, torch.Tensor]:
    """The values of variables, under names that are the same in every process.

    Names in Keras depend on how many layers of a kind the process has made before.
    """
    return {
        f"{index}/{variable.name.rpartition('_')[2]}": variable.value.detach()
        for index, variable in enumerate(variables)
    }


def assign(variables: list[Any], state: Mapping[str, Any]) -> None:
    """Set variables to the values that `by_name` returned.

    Raises:
        ValueError: The names differ.
    """
    names = by_name(variables)
    if set(names) != set(state):
        raise ValueError(
            f"the saved variables ({', '.join(sorted(state))}) are not those of the model "
            f"({', '.join(sorted(names))})"
        )
    for variable, name in zip(variables, names, strict=True):
        variable.assign(state[name])
