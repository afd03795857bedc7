"""Keras with JAX and with TensorFlow: a batch that is planned before the step is compiled."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly(part="frameworks")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["jax", "tensorflow"])
def test_a_step_that_is_compiled_honours_its_plan_and_refuses_the_rest(backend, tmp_path):
    for package in ("keras", backend):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    command = [sys.executable, Path(__file__).with_name("keras_compiled_job.py"), tmp_path]
    env = {**os.environ, "KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=env)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["plan"] == [4, 8, 32]
    assert told["accumulated"] < 2e-5
    assert told["scaled"] < 2e-5
    # Behind 4 steps of twice the batch, before and after it was saved; and times sqrt(4).
    assert told["rates"] == pytest.approx([0.2 * 0.8**8, 0.2 * 0.8**8, 0.2], rel=1e-5)
    assert {"accuracy", "loss", "val_accuracy", "val_loss"} <= {*told["logs"]}
    # Upstream (3.15): schedules count batches, and a change of the accumulation goes unnoticed.
    assert told["upstream_scheduled"] > 0.01
    assert told["upstream_stepped"] == [False, True] * 8
    messages = [
        f"autoscale_batch_size (64) is not supported by the {backend} backend",
        "set_batch_size (Schedule(",
        f"by the {backend} backend: its step is compiled for 32",
        "the batch size is 64 and not 32, and a rule has to be chosen that needs no noise",
        "rule ('adascale') is not supported",
        "rule ('sqrt') is not supported",
        "it changes more than the learning rate",
        "max_local_bsz (7) it splits into micro-batches of 7 and 6 samples",
        "the number of samples (64) is not supported",
        "max_local_bsz ('auto') is not supported",
        "stats_every (1) is not supported",
        "its micro-batches are cut from arrays",
        "the number of processes (2) is not supported",
        "find_unused_parameters (True) is not supported",
    ]
    for text, message in zip(told["refused"], messages, strict=True):
        assert message in text
        assert f"the {backend} backend" in text
        assert text.endswith("set KERAS_BACKEND=torch")
