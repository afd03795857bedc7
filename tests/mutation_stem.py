"""Runs pytest in forks of a process that has imported torch: one line of JSON for each run.

Nothing of the repository is imported here: each run takes it from the copy that it is told.
Answers the pid of the run, which leads a session, and its exit code at its end.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
from typing import Any

import pytest

PRELOAD = (
    "numpy",
    "torch._dynamo",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.run",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
)


def run(said: dict[str, Any]) -> int:
    os.environ.clear()
    os.environ.update(said["env"])
    os.chdir(said["cwd"])
    # In place of the directory of this file, as for any script.
    sys.path[:1] = said["paths"]
    sys.dont_write_bytecode = True
    from tests.forked import keep_template

    keep_template()
    return int(pytest.main(said["args"]))


def fork(said: dict[str, Any]) -> int:
    """The pid of the run; its output goes to a file of that session alone."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setsid()
        with open(said["output"], "wb") as output, open(os.devnull) as empty:
            os.dup2(empty.fileno(), 0)
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        try:
            code = run(said)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def main() -> None:
    for name in PRELOAD:
        importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        pid = fork(json.loads(line))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
