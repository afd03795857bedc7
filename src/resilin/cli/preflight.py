"""Checks before any worker is started, so that a certain failure is reported once, in one sentence.

Workers that cannot find their script, or cannot open their checkpoint directory, fail after every
restart. The agent would restart them until it gives up, and bury the reason in their tracebacks.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from resilin.cli.errors import say
from resilin.engine import environment


def check(args: argparse.Namespace) -> None:
    """Check the script, the endpoint and the checkpoint directory.

    Raises:
        OSError: The script does not exist, or cannot be read.
        ValueError: A module cannot be found; the file system of the checkpoints cannot be opened.
        ImportError: The package for that file system is not installed.
    """
    if args.module:
        _check_module(args.training_script)
    elif args.no_python:
        if shutil.which(args.training_script) is None:
            raise ValueError(f"{args.training_script!r} is not a command that can be executed")
    else:
        _check_script(args.training_script)
    url = args.checkpoint_dir or os.environ.get(environment.CHECKPOINT_DIR)
    if url:
        _check_url(url)


def _check_script(script: str) -> None:
    path = Path(script)
    if path.is_dir():
        # As Python does: a directory or a zip file is run through its `__main__.py`.
        path = path / "__main__.py"
    if not path.exists():
        raise FileNotFoundError(f"there is no script {script!r} (looked in {Path.cwd()})")
    if not os.access(path, os.R_OK):
        raise PermissionError(f"the script {script!r} cannot be read by user {os.getuid()}")


def _check_module(module: str) -> None:
    # Only its first part: looking for the rest would import it here.
    first = module.partition(".")[0]
    known = first in sys.builtin_module_names or first in sys.modules
    if not known and PathFinder.find_spec(first, [os.getcwd(), *sys.path]) is None:
        raise ValueError(f"there is no module {module!r}: {first!r} is not on the Python path")


def _check_url(url: str) -> None:
    from resilin.training.state.checkpoint.storage import open_storage

    try:
        open_storage(url)
    except ImportError as error:
        raise ImportError(
            f"checkpoints cannot be written to {url}: a package is missing ({error}); install it "
            "with pip where the job runs"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"checkpoints cannot be written to {url}: {error} (use a path, or a URL with a "
            "protocol that fsspec knows)"
        ) from error
    except Exception as error:
        # For example a network error, which may be over when the workers try.
        say(f"{url} could not be opened; workers will try again ({type(error).__name__}: {error})")
