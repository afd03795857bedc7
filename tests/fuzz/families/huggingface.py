"""Programs of the elastic Trainer and of Accelerate, killed anywhere."""

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
    "validated",
    "saved",
    "trained",
)


def options(dice: random.Random) -> dict[str, Any]:
    """A random program."""
    chosen: dict[str, Any] = {"epochs": dice.randint(2, 4)}
    if dice.random() < 0.4:
        chosen["loop"] = "accelerate"
    if dice.random() < 0.5:
        chosen["max_local_bsz"] = dice.randint(1, 3)
    if dice.random() < 0.4:
        chosen["trace"] = [dice.randint(2, 9) for _ in range(3)]
    if dice.random() < 0.5:
        chosen["scheduler"] = dice.choice(("linear", "cosine"))
    if dice.random() < 0.4:
        chosen["clip"] = 0.5
    if dice.random() < 0.6:
        chosen["evaluate"] = dice.choice(("epoch", "steps"))
    if dice.random() < 0.4:
        chosen["best"] = True
    if dice.random() < 0.3:
        chosen["early"] = dice.randint(1, 2)
    if dice.random() < 0.3:
        chosen["max_steps"] = dice.randint(3, 14)
    if dice.random() < 0.5:
        chosen["logging"] = dice.choice(("epoch", 3))
    return chosen


def write(options: dict[str, Any]) -> str:
    """The script of a program."""
    lines = ["from tests.fuzz.families.huggingface_program import main", "", f"main({options!r})"]
    return "\n".join(lines) + "\n"
