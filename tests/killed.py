"""Runs `main()` of an example, and kills a worker in it where a test says.

    python tests/killed.py EXAMPLE RESULT [--rank RANK --call NUMBER]

The worker with that rank is killed before a call of the wrapped model in training, the first time
that the job runs. The process that reports for the job writes the parameters of the module that
`main()` returns.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import signal
from pathlib import Path

import torch

import resilin


def main() -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser()
    parser.add_argument("example", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--rank", default="")
    parser.add_argument("--call", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    calls, own = 0, resilin.AdaptiveDataParallel.forward

    def forward(self, *inputs, **named):
        nonlocal calls
        calls += self.training
        mark = args.result.with_suffix(".killed")
        if os.environ.get("RANK") == args.rank and calls == args.call and not mark.exists():
            mark.write_text(str(self.clock.steps))
            os.kill(os.getpid(), signal.SIGKILL)
        return own(self, *inputs, **named)

    resilin.AdaptiveDataParallel.forward = forward
    module = runpy.run_path(str(args.example))["main"]()
    if resilin.current_job().engine.membership.is_first:
        args.result.write_text(json.dumps([p.tolist() for p in module.parameters()]))


if __name__ == "__main__":
    main()
