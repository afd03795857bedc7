"""What can be seen to fail before any worker is started: then it fails once, in one sentence.

Workers that cannot find their script, or cannot open the place of their checkpoints, fail in each
life. The agent would restart them until it gives up, and the reason would be in their tracebacks.
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
    """Checks the script and the place of the checkpoints.

    Raises:
        OSError: The script is not there, or cannot be read.
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
        # As Python does: a directory, or a zip file, is run by the `__main__.py` in it.
        path = path / "__main__.py"
    if not path.exists():
        raise FileNotFoundError(f"there is no script {script!r} (looked in {Path.cwd()})")
    if not os.access(path, os.R_OK):
        raise PermissionError(f"the script {script!r} cannot be read by user {os.getuid()}")


def _check_module(module: str) -> None:
    # Only its first part: to look for the rest would import it, here.
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
            f"checkpoints cannot go to {url}: a package is missing ({error}); pip install it where "
            "the job runs"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"checkpoints cannot go to {url}: {error} (a path, or a URL of a protocol that fsspec "
            "knows)"
        ) from error
    except Exception as error:
        # Such as of a network, which may be there when the workers try.
        say(f"{url} could not be opened here, workers will try ({type(error).__name__}: {error})")
