"""A cap on the batch: no larger than the noise allows, whatever size is offered.

A step at k times the reference batch is worth `gain(k)` reference steps. What a batch has above
that many reference batches removes noise and adds no progress. The cap leaves it out: an offered
batch of k reference batches becomes `s = floor(gain(k))` of them. With the linear rule, a momentum
to the power of s and the samples clock (`PowerRule(1, momentum=True)`), the run then has the
samples, and nearly the gradient noise, of the reference run.

It helps where many epochs are made over little data with SGD: the noise that a larger batch
removes is what such a run generalises by. It hurts where data are fresh, as in one epoch over much
data, which profits from less noise, and it lost on a small language model with Adam.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from resilin.core import _validate
from resilin.core.noise import Noise

MOVE = 1.25
"""Ratio by which the noise scale has to change before the cap follows: estimates fluctuate."""
_LEAST, _MOST = 1e-6, 1e18
"""Noise scales beyond these limit the batch as they do; they are finite in any file."""


@dataclass(frozen=True, slots=True)
class NoiseCap:
    """The cap of one moment. A value: `observe` returns the next one.

    Examples:
        >>> cap = NoiseCap(32).observe(96.0)
        >>> [cap.limit(size) for size in (16, 32, 64, 100, 512)]
        [16, 32, 32, 64, 96]
    """

    reference: int
    """The reference batch size."""
    phi: float | None = None
    """Noise scale that the cap follows, in samples; None until it was measured."""

    def __post_init__(self) -> None:
        _validate.whole("reference", self.reference, at_least=1)
        if self.phi is not None:
            _validate.real("phi", self.phi, above=0)

    def limit(self, offered: int) -> int:
        """The batch size for an offered one: a whole multiple of the reference batch, or less.

        Up to the reference batch it is what is offered. While the noise is unknown, it is at most
        the reference batch.
        """
        _validate.whole("the offered batch size", offered, at_least=1)
        if offered <= self.reference:
            return offered
        if self.phi is None:
            return self.reference
        gain = Noise(1.0, self.phi).gain(offered, self.reference)
        # Without a signal the gain is the scale, up to rounding.
        steps = min(math.floor(gain * (1 + 1e-9)), offered // self.reference)
        return max(1, steps) * self.reference

    def observe(self, phi: float) -> NoiseCap:
        """The cap after a noise scale of `phi` samples was measured: the same after small changes.

        Args:
            phi: The noise scale; may be infinite. Without an estimate (NaN) nothing changes.
        """
        if math.isnan(phi):
            return self
        phi = min(max(phi, _LEAST), _MOST)
        if self.phi is not None and self.phi / MOVE < phi < self.phi * MOVE:
            return self
        return replace(self, phi=phi)
