"""Functions with bit-identical results on every machine.

`+ - * /` and the square root are exact to the last bit by IEEE 754; `math.exp` and powers come from
the C library of the machine, and libraries differ in the last bit. Replicas on different machines
must not base decisions on those. `decimal` has its own arithmetic, which is the same everywhere.
"""

from __future__ import annotations

import functools
import math
from decimal import Context, Decimal

_CONTEXT = Context(prec=25, Emin=-999999, Emax=999999, traps=[])
_WIDE = Context(prec=36, Emin=-999999, Emax=999999, traps=[])


def exp(x: float) -> float:
    """`math.exp(x)`, the same bits everywhere."""
    return float(_CONTEXT.exp(Decimal(x)))


def power(base: float, exponent: float) -> float:
    """`base**exponent` for `base` of at least 0, the same bits everywhere.

    The powers 0, 1, 0.5, -0.5 and -1, and those of 1, are correctly rounded.
    """
    if exponent == 0 or base == 1:
        return 1.0
    if exponent == 1:
        return float(base)
    if exponent == 0.5:
        return math.sqrt(base)
    if base <= 0 or not math.isfinite(base) or not math.isfinite(exponent):
        return float(base**exponent)
    if exponent == -0.5:
        return 1 / math.sqrt(base)
    if exponent == -1:
        return 1 / base
    return float(_CONTEXT.exp(_WIDE.multiply(Decimal(exponent), _ln(base))))


def geometric(base: float, terms: float) -> tuple[float, float]:
    """`base**terms` and `(1 - base**terms) / (1 - base)`, the same bits everywhere.

    The second is the sum of `terms` powers of `base`, from `base**0` on, continued to any real
    number of terms above 0. At `base` 1 it is `terms`; one term is exactly 1.
    """
    if base in (0, 1) or terms == 1:
        return float(base), 1.0 if base == 0 else float(terms)
    power = _WIDE.exp(_WIDE.multiply(Decimal(terms), _ln(base)))
    # Both differences may be small: they keep 17 leading digits in the wide context.
    total = _WIDE.divide(_WIDE.subtract(1, power), _WIDE.subtract(1, Decimal(base)))
    return float(power), float(total)


@functools.lru_cache(maxsize=64)
def _ln(x: float) -> Decimal:
    # Momentum and betas are the same in every step; `Context.power` would take 15 times as long.
    return _WIDE.ln(Decimal(x))
