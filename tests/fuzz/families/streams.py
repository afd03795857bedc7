"""Programs on streams: shards of unequal length, with and without workers, killed anywhere.

Lengths are 0 and 1 as often as any other, and there may be more replicas than shards. What
`tests/fuzz/families/lightning.py` says about a family holds here, too.
"""

from __future__ import annotations

import random
from typing import Any

HOOKS = (
    "setup",
    "wrapped",
    "epoch",
    "batch",
    "forward",
    "stepped",
    "epoch_end",
    "evaluating",
    "evaluated",
    "trained",
)
PLACES = (
    "training/data/shards/",
    "training/data/shards/cursor.py",
    "training/data/shards/fetching.py",
    "training/data/shards/supply.py",
    "training/data/shards/reading.py",
    "training/data/shards/news.py",
    "training/passes.py",
    "training/state/memory.py",
    "training/state/recovery.py",
    "training/",
    "core/",
)
"""Files of resilin in which a replica may be killed; see `tests.fuzz.program.PLACES`."""


def options(dice: random.Random) -> dict[str, Any]:
    """A random program."""
    num_shards = dice.choice((1, 2, 3, dice.randint(4, 9)))
    longest = dice.choice((1, 4, 12))
    lengths = [dice.choice((0, 1, longest, dice.randint(0, longest))) for _ in range(num_shards)]
    lengths[dice.randrange(num_shards)] = dice.randint(9, 20)
    chosen: dict[str, Any] = {
        "lengths": lengths,
        "how": dice.choice(("read", "skip", "state", "state")),
        "batch_size": dice.randint(2, 8),
        "epochs": dice.randint(1, 3),
    }
    if chosen["how"] == "state":
        chosen["bookmark_every"] = dice.choice((1, 2, 5))
    if dice.random() < 0.5:
        chosen["workers"] = dice.choice((1, 2, 2))
    if dice.random() < 0.4:
        chosen["shuffle"] = True
    if dice.random() < 0.4:
        chosen["max_local_bsz"] = dice.randint(1, 3)
    if dice.random() < 0.5:
        chosen["trace"] = [dice.randint(1, 12) for _ in range(3)]
    if dice.random() < 0.4:
        chosen["optimizer"] = dice.choice(("sgd", "adamw"))
    if dice.random() < 0.3:
        chosen["drop_last"] = True
    if dice.random() < 0.3:
        chosen["weights"] = True
    if dice.random() < 0.4:
        chosen["evaluate"] = dice.choice(("stream", "indexed"))
    if dice.random() < 0.2:
        chosen["break_after"] = dice.randint(1, 3)
    return chosen


def write(options: dict[str, Any]) -> str:
    """The script of a program."""
    lines = ["from tests.fuzz.families.streams_program import main", "", f"main({options!r})"]
    return "\n".join(lines) + "\n"
