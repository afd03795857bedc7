"""A Trainer in a live job.

In a file of its own, without `PRELOAD`: the worker has to see how the script imports the Trainer.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests import forked

pytestmark = pytest.mark.nightly(part="frameworks")

pytest.importorskip("transformers")


def test_asked_to_be_live_the_trainer_says_why_not_and_a_kill_restarts_it():
    example = Path(__file__).parents[2] / "examples" / "huggingface_digits.py"
    command = [sys.executable, "-m", "resilin.cli", "run", "--live", "--warm", "--nproc", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = forked.run(
        [*command, example, "--kill-at", "30"], capture_output=True, text=True, timeout=240, env=env
    )
    assert done.returncode == 0, done.stderr
    assert "not live: a live job needs a loop of your own" in done.stderr
    assert "at step 29 from memory" in done.stderr
