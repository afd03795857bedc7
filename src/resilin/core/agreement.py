"""Check from sums alone whether all replicas have the same number.

A reduction only adds numbers. But `W * sum(h^2) == (sum h)^2` holds for W replicas if and only if
all have the same h (the Cauchy-Schwarz inequality), and in integers it is exact. A hash of 64 bits
is sent in pieces of 16, whose squares a float64 can sum exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

BITS = 16
"""Bits of a piece: the squares of 2^20 replicas' pieces add up to less than 2^53."""
_NUM = 4


def pieces(hash64: int) -> tuple[float, ...]:
    """A hash of 64 bits, in pieces that sums of float64 keep exact."""
    if not 0 <= hash64 < 2**64:
        raise ValueError(f"a hash of 64 bits must be at least 0 and below 2^64, not {hash64}")
    return tuple(float(hash64 >> BITS * place & 2**BITS - 1) for place in range(_NUM))


def squares(parts: Sequence[float]) -> tuple[float, ...]:
    """The squares of the pieces."""
    return tuple(part * part for part in parts)


def all_same(sums: Sequence[float], square_sums: Sequence[float], replicas: int) -> bool:
    """Whether all replicas had the same pieces.

    Args:
        sums: Sums of the pieces over all replicas.
        square_sums: Sums of their squares.
        replicas: Number of replicas.

    Examples:
        >>> all_same([6.0], [12.0], 3), all_same([6.0], [14.0], 3)  # 2, 2, 2 and 1, 2, 3
        (True, False)
    """
    return all(
        replicas * round(square) == round(total) ** 2
        for total, square in zip(sums, square_sums, strict=True)
    )
