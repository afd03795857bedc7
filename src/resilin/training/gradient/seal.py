"""Whether anybody changed the gradient since it was last looked at."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable

from torch import Tensor

from resilin.compat.torch_names import version_of
from resilin.training.gradient import refusals
from resilin.training.gradient.norms import sqr_norms
from resilin.training.gradient.parameters import Parameters

_FIRST = 4
"""Last step in which contents are compared on a device that queues its work."""


class Seal:
    """Remembers which tensors the gradients are, and their versions.

    Every change in place raises the version of a tensor, except one through `.data` and within
    some fused kernels. With `contents`, norms are compared as well, which sees those, too, and
    costs a pass over the gradient.
    """

    def __init__(self, grads: Iterable[Tensor], *, contents: bool) -> None:
        self._grads = list(grads)
        self._versions = list(map(version_of, self._grads))
        self._norms = self._measure() if contents else []

    def _measure(self) -> list[float]:
        norms: list[float] = sqr_norms(self._grads).tolist() if self._grads else []
        return norms

    def holds(self, grads: Iterable[Tensor]) -> bool:
        """Whether these are the same tensors, unchanged."""
        now = list(grads)
        if len(now) != len(self._grads) or not all(map(operator.is_, now, self._grads)):
            return False
        if list(map(version_of, now)) != self._versions:
            return False
        if not self._norms:
            return True
        return all(
            norm == known or (math.isnan(norm) and math.isnan(known))
            for norm, known in zip(self._measure(), self._norms, strict=True)
        )


class Seals:
    """Refuses changes of the gradient by anybody but the step and its reducer.

    Contents are compared in the first steps, and in ever fewer later ones. On a device that queues
    its work, which the host would have to wait for, only in the first ones.

    Args:
        parameters: The parameters of the model.
        queues: Whether they are on such a device.
    """

    def __init__(self, parameters: Parameters, *, queues: bool = False) -> None:
        self._parameters = parameters
        self._queues = queues
        self._seal: Seal | None = None
        self._used: Seal | None = None
        self._allowed = 0
        self._num_steps = 0

    def begin_step(self) -> None:
        """Counts a step."""
        self._num_steps += 1

    @property
    def _chosen(self) -> bool:
        return self._num_steps & (self._num_steps - 1) == 0

    @property
    def _thorough(self) -> bool:
        return self._chosen and not (self._queues and self._num_steps > _FIRST)

    def close(self) -> None:
        """Seals the gradient as it is now."""
        self._seal = Seal(self._parameters.grads(), contents=self._thorough)

    def open(self) -> None:
        """Takes the seal off."""
        self._seal = None

    def verify(self, *, complete: bool) -> None:
        """Refuses a gradient that was changed since it was sealed.

        Args:
            complete: Whether it is the gradient of a whole step, which may be changed where the
                user has asked for it.

        Raises:
            RuntimeError: It was changed.
        """
        if self._seal is None or (self._allowed and complete):
            return
        if not self._seal.holds(self._parameters.grads()):
            raise RuntimeError(refusals.CHANGED if complete else refusals.CHANGED_BETWEEN)

    def allow(self) -> None:
        """Allows changes of a complete gradient, until `forbid` was called as often."""
        self._allowed += 1

    def forbid(self) -> None:
        """Ends what `allow` began."""
        self._allowed -= 1

    def use(self) -> None:
        """Remembers the gradient that a step was made with: it has to be zeroed."""
        self._used = Seal(self._parameters.grads(), contents=False) if self._chosen else None

    def forget_used(self) -> None:
        """Forgets the step before."""
        self._used = None

    def check_zeroed(self) -> None:
        """Refuses a backward pass onto the gradient of the step before.

        Raises:
            RuntimeError: That gradient is still there.
        """
        used, self._used = self._used, None
        if used is not None and (grads := self._parameters.grads()) and used.holds(grads):
            raise RuntimeError(refusals.NOT_ZEROED)
