"""Whether anybody changed the gradient since it was last looked at."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable

from torch import Tensor

from resilin.compat.torch_names import version_of
from resilin.training.gradient.norms import sqr_norms


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
