"""Runs `main()` of an example, and kills a worker in it where a test says.

    python tests/killed.py EXAMPLE RESULT [--rank RANK --at PLACE --call NUMBER] [ARGUMENTS]

The worker with that rank is killed the first time that the job runs: before a call of the wrapped
model (`training` or `evaluation`), before or after it renames a file (`writing`, `written`), or
before an optimizer of that name steps, such as `AdamW`. The process that reports for the job writes
the parameters of the module that `main()` returns.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import signal
import sys
from collections import Counter
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import resilin


def main() -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser()
    parser.add_argument("example", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--rank", type=int, default=-1)
    parser.add_argument("--at", default="training")
    parser.add_argument("--call", type=int, default=0)
    args, sys.argv[1:] = parser.parse_known_args()
    torch.set_num_threads(1)
    calls: Counter[str] = Counter()
    # In a live job, a worker that takes the place of another one has a number of its own.
    member = os.environ.get("RESILIN_MEMBER", os.environ.get("RANK", "0"))
    number = int(re.search(r"(\d+)$", member)[1])
    forward, replace = resilin.AdaptiveDataParallel.forward, os.replace

    def die(place: str) -> None:
        calls[place] += 1
        mark = args.result.with_suffix(".killed")
        here = number == args.rank and place == args.at
        if here and calls[place] == args.call and not mark.exists():
            mark.write_text(str(resilin.current_job().clock.steps))
            os.kill(os.getpid(), signal.SIGKILL)

    def dying_forward(self, *inputs, **named):
        die("training" if self.training else "evaluation")
        return forward(self, *inputs, **named)

    def dying_replace(source, target):
        if Path(target).suffix == ".pt":
            die("writing")
        replace(source, target)
        if Path(target).suffix == ".pt":
            die("written")

    register_optimizer_step_pre_hook(lambda optimizer, *_: die(type(optimizer).__name__))
    resilin.AdaptiveDataParallel.forward, os.replace = dying_forward, dying_replace
    module = runpy.run_path(str(args.example))["main"]()
    if resilin.current_job().engine.membership.is_first:
        args.result.write_text(json.dumps([p.tolist() for p in module.parameters()]))


if __name__ == "__main__":
    main()
