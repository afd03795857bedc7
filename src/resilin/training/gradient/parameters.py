"""The parameters of a module, those that are trained now, and their gradients."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from resilin.compat.torch_names import multiply_all
from resilin.training.gradient.sharding import is_sharded

_TRAINED = operator.attrgetter("requires_grad")
_GRAD = operator.attrgetter("grad")
_DTYPE = operator.attrgetter("dtype")


class Parameters:
    """All parameters of a module when it was wrapped, and those that require a gradient.

    Freezing and unfreezing between two steps is fine. New parameters are not: neither the
    optimizer nor the other replicas have them. Registrations are noticed through the hooks of
    `nn.Module`, so that steps in which nothing is registered cost nothing.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        named = dict(module.named_parameters())
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in named.items()}
        self.all: list[Tensor] = list(named.values())
        self._sharded = {name for name, parameter in named.items() if is_sharded(parameter)}
        self._dtypes = list(map(_DTYPE, self.all))
        self._device = self.all[0].device if self.all else None
        self.pattern: list[bool] = []
        """Those that are trained, as of the last `update`."""
        self.trained: list[Tensor] = []
        """Those that are."""
        self.signature = 0
        """A number below 2**20 that tells patterns apart."""
        self._registered = False
        self._hooks = [
            register_module_parameter_registration_hook(self._notice),
            register_module_module_registration_hook(self._notice),
        ]
        self.update()

    def _notice(self, *_: Any) -> None:
        self._registered = True

    def update(self) -> None:
        """Takes over which parameters are trained now."""
        self.pattern = self._now()
        self.trained = [p for p, trained in zip(self.all, self.pattern, strict=True) if trained]
        self.signature = zlib.crc32(bytes(self.pattern)) & 0xFFFFF

    def _now(self) -> list[bool]:
        return list(map(_TRAINED, self.all))

    def changed(self) -> list[str]:
        """Names of parameters that were frozen or unfrozen since the last `update`."""
        now = self._now()
        if now == self.pattern:
            return []
        pairs = zip(self.all, now, self.pattern, strict=True)
        return [self._names[parameter] for parameter, new, old in pairs if new != old]

    def check(self) -> None:
        """Refuses parameters that were added, converted or moved since the module was wrapped.

        Raises:
            ValueError: There are such parameters; the message names the first one.
        """
        dtypes, first = list(map(_DTYPE, self.all)), next(iter(self.all), None)
        if first is not None and first.device != self._device:
            self._refuse_conversion(first, self._device, first.device)
        if dtypes != self._dtypes:
            of_all = zip(self.all, self._dtypes, dtypes, strict=True)
            self._refuse_conversion(*next(each for each in of_all if each[1] != each[2]))
        if not self._registered:
            return
        self._registered = False
        named = dict(self._module.named_parameters())
        # Between a forward and a backward pass FSDP shows whole parameters in place of its shards.
        new = (name for name, p in named.items() if p not in self._names)
        if added := [name for name in new if name not in self._sharded]:
            # Look again: the error may be caught, and the parameters removed.
            self._registered = True
            raise ValueError(
                f"{len(added)} parameters were added after the module was wrapped ({added[0]} is "
                f"the first; there were {len(self.all)}, and now there are {len(named)}): neither "
                "the optimizer's gate nor the other replicas know them; add parameters before "
                "AdaptiveDataParallel, or release() it and wrap the module again"
            )

    def _refuse_conversion(self, parameter: Tensor, was: object, now: object) -> None:
        raise ValueError(
            f"{self._names[parameter]} was {was} when the module was wrapped, and is {now}: "
            "replicas reduce gradients of the type and on the device that they had then; call "
            "double(), bfloat16(), to() and the like before AdaptiveDataParallel"
        )

    def name(self, parameter: Tensor) -> str:
        """The name of a parameter."""
        return self._names[parameter]

    def describe(self, names: Sequence[str]) -> str:
        """Words about a change of these parameters."""
        first = names[0] if names else "none"
        return f"{len(names)} parameters ({first} is the first)" if len(names) > 1 else first

    # Their gradients -----------------------------------------------------------------------

    def grads(self) -> list[Tensor]:
        """The gradients that trained parameters have; of sharded ones, the part of this process."""
        return self.local([grad for grad in map(_GRAD, self.trained) if grad is not None])

    def local(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """These gradients or parameters, and of sharded ones the part of this process."""
        if not self._sharded:
            return list(tensors)
        found: list[Any] = list(tensors)
        # With gradients enabled, each call would make another view.
        with torch.no_grad():
            return [each.to_local() if is_sharded(each) else each for each in found]

    def grads_by_parameter(self) -> dict[Tensor, Tensor]:
        """The same with their parameters."""
        return {p: p.grad for p in self.trained if p.grad is not None}

    def scale_grads(self, factor: float) -> None:
        """Multiplies the gradients."""
        if factor != 1 and (grads := self.grads()):
            multiply_all(grads, factor)

    def clear_grads(self) -> None:
        """Removes the gradients."""
        for parameter in self.trained:
            parameter.grad = None

    def take_grads(self) -> dict[Tensor, Tensor]:
        """Removes the gradients, and returns them."""
        grads = self.grads_by_parameter()
        self.clear_grads()
        return grads

    def release(self) -> None:
        """Takes the hooks off."""
        for hook in self._hooks:
            hook.remove()
