"""Hooks of the user on gradients of parameters, called once per step with the complete gradient.

In plain PyTorch they get the gradient of the batch. In the backward pass of a micro-batch they
would get a part of it, and what most of them make of the parts does not add up to what they make
of the whole. So they wait while a step is under way, and are called when its gradient is complete.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from resilin.compat.torch_names import hooks_of, version_of
from resilin.training.gradient.parameters import Parameters

_OURS_AND_TORCHS = ("resilin.", "torch.distributed.", "torch.nn.parallel.", "torch.optim.")
"""Modules whose hooks belong to the backward pass."""


class _Waiting:
    """Stands in for a hook, in its place: called by autograd, it does nothing within a step."""

    __slots__ = ("_hooks", "own")

    def __init__(self, own: Callable[[Tensor], Any], hooks: ParameterHooks) -> None:
        self.own = own
        # torch keeps hooks where no garbage collector looks.
        self._hooks = weakref.ref(hooks)

    def __call__(self, tensor: Tensor) -> Any:
        hooks = self._hooks()
        return self.own(tensor) if hooks is None or not hooks.wait else None


class ParameterHooks:
    """Makes the hooks of a model's parameters wait for the complete gradient.

    Args:
        parameters: The parameters.
        sharded: Those for which torch calls no tensor hooks: FSDP computes their gradients.
    """

    def __init__(self, parameters: Parameters, sharded: Collection[Tensor] = ()) -> None:
        self._parameters = parameters
        self._sharded = sharded
        self._hooked: list[Tensor] = []
        self.wait = False
        """Whether a step is under way."""

    def begin_step(self) -> None:
        """Makes all hooks wait that there are now."""
        self.wait = True
        self._hooked.clear()
        trained = self._parameters.trained
        for parameter, (before, after) in zip(trained, map(hooks_of, trained), strict=True):
            if before or after:
                of_tensor = {} if parameter in self._sharded else before or {}
                for hooks in (of_tensor, after or {}):
                    for key, hook in list(hooks.items()):
                        if not (isinstance(hook, _Waiting) or _belongs(hook)):
                            hooks[key] = _Waiting(hook, self)
                if any(_own((*of_tensor.values(), *(after or {}).values()))):
                    self._hooked.append(parameter)

    @torch.no_grad()
    def call(self) -> None:
        """Calls them, with a gradient that is complete.

        Raises:
            RuntimeError: One of them has changed the parameter, or removed the gradient.
        """
        # As in a backward pass, which comes to the last parameters first.
        for parameter in reversed(self._hooked):
            if parameter.grad is None:
                continue
            before, after = hooks_of(parameter)
            if parameter not in self._sharded:
                _replace(parameter, _passed_through(_own((before or {}).values()), parameter.grad))
            grad, version = parameter.grad, version_of(parameter)
            for hook in _own((after or {}).values()):
                hook(parameter)
                if parameter.grad is None or version_of(parameter) != version:
                    what = "removed the gradient" if parameter.grad is None else "changed the value"
                    raise RuntimeError(
                        f"a hook on {self._parameters.name(parameter)} has {what} in the backward "
                        "pass, as an optimizer within it does: a step is made by optimizer.step() "
                        "alone, when all replicas have its gradient; take the hook off, and leave "
                        "the step to the optimizer of the AdaptiveDataParallel"
                    )
            new, parameter.grad = parameter.grad, grad
            _replace(parameter, new)

    def release(self) -> None:
        """Puts the hooks back."""
        for parameter in self._parameters.all:
            for hooks in hooks_of(parameter):
                for key, hook in list((hooks or {}).items()):
                    if isinstance(hook, _Waiting):
                        hooks[key] = hook.own


def _belongs(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(_OURS_AND_TORCHS)


def _own(hooks: Iterable[Any]) -> Iterator[Callable[[Tensor], Any]]:
    """The hooks that wait."""
    return (hook.own for hook in list(hooks) if isinstance(hook, _Waiting))


def _passed_through(hooks: Iterator[Callable[[Tensor], Any]], grad: Tensor) -> Tensor:
    """What tensor hooks make of a gradient; the gradient itself if they leave it as it is."""
    first = next(hooks, None)
    if first is None:
        return grad
    # They may keep what they get, and the memory of the gradient is used again.
    given = now = grad.clone()
    version = version_of(given)
    for hook in (first, *hooks):
        result = hook(now)
        now = now if result is None else result
    return grad if now is given and version_of(given) == version else now


def _replace(parameter: Tensor, new: Tensor) -> None:
    """Gives a parameter this gradient, in the memory of the one that it has."""
    grad = parameter.grad
    if grad is None or new is grad:
        return
    if new.shape == grad.shape and grad.layout is new.layout is torch.strided:
        grad.copy_(new)
    else:
        parameter.grad = new
