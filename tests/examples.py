"""How many examples hypothesis draws: as many as a test asks for, or a share of them.

`EXAMPLES` in the environment is the number of a test that does not say: 100, and less where the
same tests run more than once. The others follow in proportion.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

USUAL = 100
NUMBER = int(os.environ.get("EXAMPLES", USUAL))


def examples(usual: int, *, derandomize: bool | None = None) -> settings:
    """A decorator: this many examples by default, and `EXAMPLES` percent of them."""
    number = max(1, usual * NUMBER // USUAL)
    if derandomize is None:
        return settings(max_examples=number)
    return settings(max_examples=number, derandomize=derandomize)


def load_profile() -> None:
    """Judge examples by what they return, not by how long a busy machine takes for them."""
    settings.register_profile(
        "resilin",
        deadline=None,
        max_examples=NUMBER,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize=False,
    )
    settings.load_profile("resilin")
