"""SGD's momentum for a step that is worth more or fewer reference steps than one."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from resilin.core import _exact, _validate


@dataclass(frozen=True, slots=True)
class ScaledMomentum:
    """Settings of SGD's momentum for one step; see `scaled_momentum`."""

    momentum: float
    """Decay of the buffer in this step."""
    dampening: float
    """Dampening that gives the gradient its share of the buffer."""
    gradient: float
    """The same share as a factor on the gradient and its weight decay, at the user's dampening."""


_LEAST_MOMENTUM = 2.0**-126
"""Smallest momentum of a step: SGD takes 0 for "no momentum" and then leaves the buffer out."""


@functools.lru_cache(maxsize=64)
def scaled_momentum(momentum: float, dampening: float, power: float) -> ScaledMomentum:
    """SGD's momentum for a step that is worth `power` reference steps.

    With momentum mu, dampening d and gradient g (weight decay included), a reference step makes
    the buffer `b <- mu * b + (1 - d) * g`. After r of them with the same gradient it is

        b <- mu^r * b + (1 - d) * c * g,    c = 1 + mu + ... + mu^(r-1) = (1 - mu^r) / (1 - mu),

    which is what one step does here, for any real r above 0. So the buffer forgets as much per
    unit of progress as in the reference run, however that is cut into steps. It also keeps its
    scale: under a constant gradient it tends to `(1 - d) / (1 - mu) * g` at every r, and the length
    of a step, and with it the share of the weight decay, follows the learning rate alone. If r
    changes from step to step, nothing jumps. At r = 1 all is as it was; for mu -> 0, c tends to 1,
    and for mu -> 1 to r.

    There are two ways to say it to SGD, equal but for rounding:

    - momentum `mu^r` and dampening `1 - (1 - d) * c`. Not for the first step of a parameter, where
      SGD sets `b = g` whatever the dampening, and not for Nesterov's momentum, which steps along
      `g + mu * b`: the gradient there would lack its factor c.
    - momentum `mu^r`, the user's dampening, and the gradient and weight decay times c. A first step
      is then `b = c * g`, and Nesterov's `c * g + mu^r * b`, which tends to `g / (1 - mu)` as in
      the reference run.

    Args:
        momentum: The momentum at the reference batch.
        dampening: The dampening at the reference batch.
        power: Worth of the step in reference steps, r.
    """
    _validate.real("momentum", momentum, at_least=0)
    _validate.real("dampening", dampening)
    _validate.real("power", power, above=0)
    if power == 1 or momentum == 0:
        return ScaledMomentum(momentum, dampening, 1.0)
    decay, share = _exact.geometric(momentum, power)
    return ScaledMomentum(
        momentum=max(decay, _LEAST_MOMENTUM),
        dampening=1 - (1 - dampening) * share,
        gradient=share,
    )
