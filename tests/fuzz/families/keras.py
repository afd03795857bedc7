"""Programs of `resilin.keras`: several calls of `fit`, callbacks with a memory, killed anywhere.

Keras takes means in float32 whatever the model, so what depends on how a batch is split among
replicas agrees to about seven digits only. The programs therefore have micro-batches of one sample.
"""

from __future__ import annotations

import random
from typing import Any

HOOKS = (
    "setup",
    "batch",
    "batch_end",
    "epoch_begin",
    "epoch_end",
    "validating",
    "between",
    "fit_end",
    "trained",
)


def options(dice: random.Random) -> dict[str, Any]:
    """A random program."""
    chosen: dict[str, Any] = {"epochs": [dice.randint(1, 3) for _ in range(dice.randint(1, 3))]}
    if dice.random() < 0.5:
        chosen["optimizer"] = dice.choice(("adam", "ema", "cosine"))
    if dice.random() < 0.4:
        chosen["trace"] = [dice.randint(2, 9) for _ in range(3)]
    if dice.random() < 0.6:
        chosen["validate"] = True
    if dice.random() < 0.4:
        chosen["early"] = dice.choice(("stop", "best"))
    if dice.random() < 0.4:
        chosen["rates"] = dice.choice(("plateau", "falls"))
    if dice.random() < 0.4:
        chosen["between"] = dice.choice(("compile", "freeze", "rate"))
    if dice.random() < 0.5:
        chosen["notes"] = True
    if dice.random() < 0.3:
        chosen["keep"] = True
    if dice.random() < 0.3:
        chosen["rows"] = True
    return chosen


def write(options: dict[str, Any]) -> str:
    """The script of a program."""
    lines = ["from tests.fuzz.families.keras_program import main", "", f"main({options!r})"]
    return "\n".join(lines) + "\n"
