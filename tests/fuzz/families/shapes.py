"""Programs whose loops have a shape of their own: what a batch is, and who asks for it when.

Each is compared with the same loop in plain PyTorch, which is in `shapes_program.py` as well. What
`tests/fuzz/families/lightning.py` says about a family holds here, too. Some loops mean something
only at one number of replicas, or not at all: these may be refused, by a sentence of their list.
"""

from __future__ import annotations

import random
from typing import Any

HOOKS = (
    "setup",
    "wrapped",
    "epoch",
    "batch",
    "batch",
    "forward",
    "backward",
    "stepped",
    "epoch_end",
    "trained",
)

SHAPES = (
    "passes",
    "endless",
    "zipped",
    "skipping",
    "filtered",
    "changing",
    "hooked",
    "left",
    "timm",
    "nanogpt",
    "lerobot",
    "detectron",
)
"""Names of the functions of `shapes_program.py`."""


def options(dice: random.Random, shape: str | None = None) -> dict[str, Any]:
    """A random program, of a random shape unless one is given."""

    def chance(p: float) -> bool:
        return dice.random() < p

    shape = shape or dice.choice(SHAPES)
    chosen: dict[str, Any] = {
        "shape": shape,
        "data_seed": dice.randrange(1000),
        "num_samples": dice.randint(9, 30),
        "batch_size": dice.randint(2, 8),
        "epochs": dice.randint(1, 3),
        "optimizer": dice.choice(("sgd", "momentum", "adamw")),
        "shuffle": chance(0.7),
    }
    if chance(0.5):
        chosen["max_local_bsz"] = dice.randint(1, 4)
    if chance(0.3):
        chosen["drop_last"] = True
    if chance(0.2):
        chosen["checkpoint_every"] = dice.randint(1, 4)
    if chance(0.2):
        chosen["workers"] = dice.randint(1, 2)
    if chance(0.4) and shape not in ("zipped", "skipping", "timm"):
        chosen["trace"] = [dice.randint(2, 9) for _ in range(3)]
    readers = ("ahead", "deep", "preloaded", "thread", "list")
    if chance(0.4) and shape in ("passes", "zipped", "skipping", "filtered", "changing", "left"):
        # A thread would read on when its loop is left, and a pair of batches is no batch.
        last = {"left": 3, "zipped": 2}.get(shape)
        chosen["reader"] = dice.choice(readers[:last])
    if chance(0.5) and shape in ("passes", "changing", "endless"):
        chosen["collate"] = dice.choice(("dict", "time"))
    if shape == "endless":
        chosen["how"] = dice.choice(("while", "next", "chain", "cycle"))
    elif shape == "zipped":
        chosen["how"] = dice.choice(("cat", "calls", "turns", "labels"))
        chosen["other"] = dice.choice((1, 1, 2))
        if chosen["how"] == "turns" or chance(0.5):
            chosen.pop("max_local_bsz", None)
        if chosen["batch_size"] > chosen["num_samples"] // 3:
            chosen.pop("drop_last", None)
    elif shape == "skipping":
        # All replicas must see alike which steps are left out, and so have samples of them.
        chosen.update(shuffle=False, drop_last=True, batch_size=dice.randint(4, 8))
        chosen.pop("max_local_bsz", None)
    elif shape == "filtered":
        # Of each batch of one process something is left.
        chosen.update(weighed=chance(0.6), drop_last=True, batch_size=dice.randint(4, 8))
        chosen["trace"] = [max(4, size) for size in chosen.pop("trace", [chosen["batch_size"]])]
    elif shape == "changing":
        chosen["how"] = dice.choice(("transform", "transform", "grow"))
        if chance(0.6):
            chosen["workers"] = dice.randint(1, 2)
        if chosen["how"] == "grow":
            chosen.pop("drop_last", None)
    elif shape == "hooked":
        chosen["how"] = dice.choice(("scale", "clamp", "accumulated", "own"))
    elif shape == "left":
        chosen["how"] = dice.choice(("break", "return", "exit"))
        chosen["after"] = dice.randint(1, 6)
    elif shape == "timm":
        chosen["normalise"] = chance(0.2)
        chosen["update_freq"] = dice.choice((1, 1, 1, 1, 2))
        chosen["scaler"] = chance(0.7)
    elif shape == "nanogpt":
        chosen["endless"] = chance(0.3)
        chosen["scaler"] = chance(0.3)
        if chosen["scaler"]:
            # A batch that is read early has the size of the clock as if no step were skipped.
            chosen.pop("trace", None)
    return chosen


def refusals(options: dict[str, Any]) -> tuple[str, ...]:
    """Names in `driver.REFUSALS` by which this program may be refused."""
    shape, how = options["shape"], options.get("how")
    if shape == "timm":
        return (
            *(("accumulation",) if options["update_freq"] > 1 else ()),
            *(("undecided",) if options["normalise"] else ()),
        )
    if shape == "nanogpt":
        return ("over the end",) if options["endless"] else ()
    if shape == "endless":
        return ("kept batch",) if how == "cycle" else ()
    if shape == "zipped":
        # What was read ahead and is joined is no tensor of a batch any more.
        joined = how == "cat" and "reader" in options
        return ("in turn" if how == "turns" else "unequal parts", *("undecided",) * joined)
    if shape == "filtered":
        return ("nothing left", *("fewer rows",) * (not options["weighed"]))
    if options.get("reader") == "preloaded" and options.get("collate") == "time":
        # Of one sample alone its index has the shape that it had, and one number tells too little.
        return ("undecided",)
    return ("hook",) if shape == "hooked" and how == "own" else ()


def write(options: dict[str, Any]) -> str:
    """The script of a program."""
    lines = ["from tests.fuzz.families.shapes_program import main", "", f"main({options!r})"]
    return "\n".join(lines) + "\n"
