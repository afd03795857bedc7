"""Warm workers: forked from a process that has already imported torch.

Most of the downtime after a fault is spent starting Python and importing torch in the new workers.
With `--warm` the agent keeps a process ready that has done both (the fork server of
multiprocessing, with torch's own support for it), and a worker starts with the first line of its
script. The script runs as in a normal process, with two differences: Python's command-line options
do not reach it, and `multiprocessing.parent_process()` is not None. Its own children, such as those
of a DataLoader, use the usual start method. Nothing touches CUDA before the fork; this has not been
run on a GPU yet.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from typing import NoReturn

from resilin.compat.python_names import run_exit_functions

PRELOAD = (
    "numpy",
    "torch._dynamo",  # what building an optimizer imports
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.run",
    "resilin.training.script.epochs",
    "resilin.training.script.checkpoints",
    "resilin.training.loader",
    "resilin.training.parallel",
)
"""Modules that are already imported in every worker."""


def start_server() -> None:
    """Start the process that workers are forked from, with the current environment."""
    multiprocessing.set_forkserver_preload(list(PRELOAD))
    forkserver.ensure_running()


def run_script(script: str, *arguments: str) -> None:
    """Run a script in this process as if it were the main program.

    Returns:
        Nothing, if the script succeeded. torch takes the return of this function for success, so
        `sys.exit(0)` must not pass through.

    Raises:
        SystemExit: The script ended with another exit code, or failed.
    """
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    run_program(lambda: runpy.run_path(script, run_name="__main__"))


def run_program(program: Callable[[], object]) -> None:
    """Run a function in this process, which was forked, as if it were the main program.

    Raises:
        SystemExit: It ended with an exit code other than 0, or failed.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    import numpy as np

    # A normal process would have its own random numbers.
    np.random.seed()
    # Children must not use the method that started this process: a forkserver would run the script
    # again in each worker of a DataLoader.
    multiprocessing.set_start_method(None, force=True)
    code: object = None
    process = os.getpid()
    try:
        program()
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        error = sys.exc_info()
        sys.last_type, sys.last_value, sys.last_traceback = error
        sys.excepthook(*error)
        code = 1
    try:
        # Children of multiprocessing exit without running these.
        run_exit_functions()
    finally:
        if os.getpid() != process:
            _end_child(code)
    if code not in (None, 0):
        raise SystemExit(code)


def _end_child(code: object) -> NoReturn:
    """End a process that the program has forked: what has started the program is not its own."""
    number = code if isinstance(code, int) else int(code is not None)
    try:
        if number is not code and code is not None:
            print(code, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(number & 0xFF)
