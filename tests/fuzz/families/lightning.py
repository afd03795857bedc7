"""Programs of Lightning's Trainer: callbacks, schedulers and validation, killed anywhere.

A family is a module with `HOOKS` (the places where its scripts call `kill_point`), `options(dice)`
(a random dict, JSON-compatible) and `write(options)` (the script; every option may be missing). The
script ends with `save(state)`. What an undisturbed run of it saves, a disturbed one must save too.
"""

from __future__ import annotations

import random
from typing import Any

HOOKS = (
    "setup",
    "batch",
    "forward",
    "batch_end",
    "epoch_end",
    "validating",
    "validated",
    "trained",
)


def options(dice: random.Random) -> dict[str, Any]:
    """A random program."""
    chosen: dict[str, Any] = {"epochs": dice.randint(2, 4)}
    if dice.random() < 0.4:
        chosen["max_local_bsz"] = dice.randint(1, 3)
    if dice.random() < 0.4:
        chosen["trace"] = [dice.randint(2, 9) for _ in range(3)]
    if dice.random() < 0.5:
        chosen["optimizer"] = dice.choice(("sgd", "adamw"))
    if dice.random() < 0.6:
        chosen["scheduler"] = dice.choice(("plateau", "epoch", "step"))
    if dice.random() < 0.4:
        chosen["early"] = dice.randint(1, 2)
    if dice.random() < 0.3:
        chosen["ema"] = True
    if dice.random() < 0.3:
        chosen["keep"] = dice.randint(1, 2)
    if dice.random() < 0.3:
        chosen["log"] = True
    if dice.random() < 0.2:
        chosen["clip"] = 0.5
    return chosen


def write(options: dict[str, Any]) -> str:
    """The script of a program."""
    lines = ["from tests.fuzz.families.lightning_program import main", "", f"main({options!r})"]
    return "\n".join(lines) + "\n"
