"""The gate around `optimizer.step` and `zero_grad`, of the optimizer and of the module.

It is the one place where a user's optimizer is touched, and it can be taken off again. While a
step is still being accumulated, both calls wait: they return without doing anything. When the
step is complete, `step` applies the factors of the scaling rule, steps, and restores what the
optimizer had, so that schedulers and checkpoints only ever see the user's own values.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from resilin.compat.torch_names import (
    is_counted,
    mark_counted,
    multiply_all,
    note_called,
    uncompiled,
)
from resilin.core import _validate
from resilin.training.gates.patch import Patch
from resilin.training.gates.scheduler import SchedulerGate

_MARK = "_resilin_gate"


class StepOwner(Protocol):
    """Owner of a gate, which decides when a step is complete. Optimizers have numbers there."""

    def step_waits(self, number: int) -> bool:
        """Asked by `optimizer.step`: whether the step is still being accumulated."""
        ...

    def gradient_waits(self, number: int | None) -> bool:
        """Asked by `zero_grad`, of an optimizer or of the module: whether it is still needed."""
        ...

    def schedule_waits(self) -> bool:
        """Asked by `scheduler.step`: whether the body works on a step that is incomplete."""
        ...

    def make_step(self, number: int, own: Callable[[], Any]) -> Any:
        """Makes the step with the optimizer's own method, or refuses to.

        Returns:
            The result of that method; None if it was not called.
        """
        ...


def taken_apart(given: Optimizer | Sequence[Optimizer]) -> tuple[list[Optimizer], list[Optimizer]]:
    """Optimizers as they step, and the containers that only step others.

    A container is an optimizer with an attribute `optimizers`, whose own groups have no `lr`.

    Args:
        given: An optimizer, or several that step together.

    Raises:
        ValueError: There is none, or two of them have the same parameter.
    """
    optimizers: list[Optimizer] = []
    containers: list[Optimizer] = []
    for optimizer in [given] if isinstance(given, Optimizer) else given:
        inner = getattr(optimizer, "optimizers", None)
        if inner is None or any("lr" in group for group in optimizer.param_groups):
            optimizers.append(optimizer)
        else:
            containers.append(optimizer)
            more, nested = taken_apart(list(inner))
            optimizers += more
            containers += nested
    if not optimizers:
        raise ValueError("optimizer ([]) must be an optimizer, or a list of at least one")
    owners: dict[Tensor, Optimizer] = {}
    for optimizer in optimizers:
        for parameter in parameters_of(optimizer):
            if owners.setdefault(parameter, optimizer) is not optimizer:
                raise ValueError(
                    f"{type(owners[parameter]).__name__} and {type(optimizer).__name__} have the "
                    f"same parameter, of shape {tuple(parameter.shape)}: optimizers that step "
                    "together must have parameters of their own"
                )
    return optimizers, containers


def groups_of(optimizers: Iterable[Optimizer]) -> list[dict[str, Any]]:
    """The parameter groups of all of these, in order."""
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def parameters_of(*optimizers: Optimizer) -> list[Tensor]:
    """The parameters of all of these, in order."""
    return [parameter for group in groups_of(optimizers) for parameter in group["params"]]


def name_of(optimizers: Iterable[Optimizer]) -> str:
    """What a log calls them, such as `Muon+AdamW`."""
    return "+".join(type(optimizer).__name__ for optimizer in optimizers)


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuses an optimizer that cannot get a gate.

    Raises:
        ValueError: It has one, or its `step` needs a closure.
    """
    if gate_of(optimizer) is not None:
        raise ValueError(
            f"{type(optimizer).__name__} is gated already: it belongs to one "
            "AdaptiveDataParallel or one accumulate() at a time"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__}.step needs a closure, which it calls as often as it "
            "likes; a step whose batch is accumulated cannot be repeated like that"
        )


class Gate:
    """Stands before one optimizer until `remove` is called."""

    def __init__(self, optimizer: Optimizer, owner: StepOwner, number: int = 0) -> None:
        check_optimizer(optimizer)
        self.optimizer = optimizer
        self.number = number
        """Number of the optimizer among those of its owner."""
        self.steps = False
        """Whether the optimizer's own `step` runs right now."""
        self._owner = owner
        # Both may hang on the instance already: schedulers put a wrapper there.
        self._step, self._zero_grad = optimizer.step, optimizer.zero_grad
        # Bound methods, because schedulers made later ask them for __func__.
        replaced = {
            "step": MethodType(self._make_step(), optimizer),
            "zero_grad": MethodType(self._make_zero_grad(), optimizer),
            _MARK: self,
        }
        self._patch = Patch(optimizer, replaced)
        self.schedulers = SchedulerGate(optimizer, owner.schedule_waits)
        """Makes the schedulers of the optimizer wait as well."""

    def _make_step(self) -> Any:
        gate = self

        def step(optimizer: Optimizer, closure: Any = None, **kwargs: Any) -> Any:
            return gate.step(closure, **kwargs)

        # Schedulers look for this mark and warn if a later gate hides it.
        if is_counted(self._step):
            mark_counted(step)
        return step

    def step(self, closure: Callable[[], Any] | None, **kwargs: Any) -> Any:
        """Stands in for the optimizer's own method: waits, or has the owner make the step.

        Args:
            closure: Computes the loss, if the loop passes one; it is called once.
            **kwargs: Further arguments of the optimizer's own method.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._owner.step_waits(self.number):
            return loss
        own = functools.partial(self._step_itself, **kwargs)
        result = self._owner.make_step(self.number, own)
        return result if closure is None else loss

    def _step_itself(self, **kwargs: Any) -> Any:
        self.steps = True
        try:
            return self._step(**kwargs)
        finally:
            self.steps = False

    def _make_zero_grad(self) -> Any:
        gate = self

        def zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
            if not gate._owner.gradient_waits(gate.number):
                gate._zero_grad(set_to_none=set_to_none)

        return zero_grad

    def remove(self) -> None:
        """Gives the optimizer its own methods back."""
        counted = is_counted(self.optimizer.step)
        self._patch.remove()
        if counted and not is_counted(self.optimizer.step):
            # A scheduler made since then has put its wrapper around the gate, and misses it.
            vars(self.optimizer)["step"] = _counted(self.optimizer.step)
        self.schedulers.remove()


def _counted(own: Any) -> Any:
    """An optimizer's own step with what a scheduler puts around it."""

    @functools.wraps(own.__func__)
    def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        note_called(optimizer)
        return own.__func__(optimizer, *args, **kwargs)

    mark_counted(step)
    return MethodType(step, own.__self__)


_ZERO_GRAD_OWNERS: WeakKeyDictionary[nn.Module, StepOwner] = WeakKeyDictionary()
"""Owners of the `zero_grad` of a module; copies of the module are not in it."""


def _zero_grad(module: nn.Module, set_to_none: bool = True) -> None:
    owner = _ZERO_GRAD_OWNERS.get(module)
    if owner is None or not owner.gradient_waits(None):
        type(module).zero_grad(module, set_to_none=set_to_none)


# Pickled as the module's own method of that name, so that a gated module can still be saved.
_zero_grad.__name__ = "zero_grad"


class ModuleGate:
    """Makes `zero_grad` of modules wait as that of the optimizer does, until `remove`."""

    def __init__(self, module: nn.Module, owner: StepOwner) -> None:
        # A compiled module and the one within it.
        inner = uncompiled(module)
        self._modules = [module] if inner is module else [module, inner]
        for gated in self._modules:
            _ZERO_GRAD_OWNERS[gated] = owner
        self._patches = [
            Patch(gated, {"zero_grad": MethodType(_zero_grad, gated)}) for gated in self._modules
        ]

    def remove(self) -> None:
        """Gives the modules their own method back."""
        for gated, patch in zip(self._modules, self._patches, strict=True):
            _ZERO_GRAD_OWNERS.pop(gated, None)
            patch.remove()


def gate_of(optimizer: Optimizer) -> Gate | None:
    """The gate that stands before this optimizer, if any."""
    gate: Gate | None = getattr(optimizer, _MARK, None)
    return gate


class _EveryFew:
    """The owner behind `accumulate`: every n-th call is a step."""

    def __init__(self, optimizer: Optimizer, steps: int) -> None:
        self._optimizer = optimizer
        self._steps = steps
        self._calls = 0

    def step_waits(self, number: int) -> bool:
        if not self._calls and (gate := gate_of(self._optimizer)) is not None:
            gate.schedulers.settle()
        self._calls += 1
        return self._calls < self._steps

    def schedule_waits(self) -> bool:
        return self._calls > 0

    def gradient_waits(self, number: int | None) -> bool:
        return self._calls > 0

    def make_step(self, number: int, own: Callable[[], Any]) -> Any:
        grads = [
            parameter.grad
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        multiply_all(grads, 1 / self._steps)
        self._calls = 0
        return own()


def accumulate(optimizer: Optimizer, steps: int) -> Optimizer:
    """Makes an optimizer step on every `steps`-th call, with the mean of the gradients.

    This is gradient accumulation for any loop, without anything else of resilin. In between,
    `step` and `zero_grad` wait. The mean is exact for micro-batches of equal size; for unequal
    ones use `AdaptiveDataParallel`, which knows the sizes. Calling it again changes the number of
    steps, at the next whole step; 1 takes the gate off. Schedulers of the optimizer wait, too: what
    is called after `optimizer.step()` counts its steps.

    Args:
        optimizer: Any optimizer whose `step` does not need a closure.
        steps: Micro-batches per optimizer step.

    Returns:
        The same optimizer.

    Raises:
        ValueError: `steps` is below 1, or micro-batches are waiting right now.
    """
    _validate.whole("steps", steps, at_least=1)
    if (gate := gate_of(optimizer)) is not None:
        owner = gate._owner
        if not isinstance(owner, _EveryFew):
            raise ValueError("the optimizer belongs to an AdaptiveDataParallel, which accumulates")
        if owner._calls:
            raise ValueError(
                f"{owner._calls} of {owner._steps} micro-batches are waiting; change the number "
                "of steps between two optimizer steps"
            )
        gate.remove()
    if steps > 1:
        Gate(optimizer, _EveryFew(optimizer, steps))
    return optimizer
