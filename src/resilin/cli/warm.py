"""Warm workers: forked from a process that has imported torch already.

Most of the time in which a job stands still after a fault goes into starting Python and importing
torch in the new workers. With `--warm` the agent keeps a process at hand that has done both (the
fork server of multiprocessing, with torch's own support for it), and a worker begins with the
first line of its script. The script runs as it would by itself, with these differences: Python's
own command-line options do not reach it, and `multiprocessing.parent_process()` is not None there.
Its own children, such as those of a DataLoader, start by the usual method. Nothing touches CUDA
before the fork; that was not run on a GPU yet.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from multiprocessing import forkserver

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
"""Modules that workers find imported."""


def start_server() -> None:
    """Starts the process that workers are forked from, with the environment of now."""
    multiprocessing.set_forkserver_preload(list(PRELOAD))
    forkserver.ensure_running()


def run_script(script: str, *arguments: str) -> None:
    """Runs a script in this process as if it had been started by itself.

    Returns:
        Nothing, if the script ended well. torch takes the return of this function for success, so
        `sys.exit(0)` must not pass through.

    Raises:
        SystemExit: The script ended with another exit code, or failed.
    """
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    import numpy as np

    # A process of its own would have got random numbers of its own.
    np.random.seed()
    # The method that started this process is not that of its children: a forkserver would run the
    # script once more in each worker of a DataLoader.
    multiprocessing.set_start_method(None, force=True)
    code: object = None
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        error = sys.exc_info()
        sys.last_type, sys.last_value, sys.last_traceback = error
        sys.excepthook(*error)
        code = 1
    # Children of multiprocessing leave without these.
    run_exit_functions()
    if code not in (None, 0):
        raise SystemExit(code)
