"""Functions with bit-identical results on every machine.

`+ - * /` and the square root are exact to the last bit by IEEE 754; `math.exp` and powers come from
the C library of the machine, and libraries differ in the last bit. Replicas on different machines
must not base decisions on those. `decimal` has its own arithmetic, which is the same everywhere.
"""

from __future__ import annotations

import math
from decimal import Context, Decimal

_CONTEXT = Context(prec=25, Emin=-999999, Emax=999999, traps=[])


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
    return float(_CONTEXT.power(Decimal(base), Decimal(exponent)))
