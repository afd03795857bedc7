import os
import subprocess
import sys

import pytest

import resilin

RUN = {"capture_output": True, "text": True, "timeout": 60, "check": True}


def python(code: str) -> str:
    # Without coverage, which would be measured along.
    env = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    return subprocess.run([sys.executable, "-c", code], env=env, **RUN).stdout.strip()


def test_the_public_names_are_frozen():
    # A new name is a promise: add it here, in the docs and in the changelog.
    assert resilin.__all__ == [
        "EMA",
        "Accumulator",
        "AdaptiveDataLoader",
        "AdaptiveDataParallel",
        "BatchBounds",
        "BatchPlan",
        "BatchSchedule",
        "BatchTrace",
        "CapacityTrace",
        "NoiseRamp",
        "PowerRule",
        "Schedule",
        "accumulate",
        "check_split",
        "checkpoint_to",
        "current_job",
        "describe",
        "events_to",
        "hints",
        "init_process_group",
        "listen",
        "on_one_replica",
        "plan",
        "progress_bar",
        "record",
        "register",
        "remaining_epochs_until",
        "reset_job",
        "resume",
        "sample_generator",
        "sample_rng",
        "stop_when",
    ]
    for name in resilin.__all__:
        assert getattr(resilin, name).__module__.startswith("resilin.")
        assert name in dir(resilin)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        resilin.Trainer  # noqa: B018


@pytest.mark.parametrize("statement", ["import resilin", "import resilin.core"])
def test_torch_stays_unloaded(statement):
    assert python(f"import sys; {statement}; print('torch' in sys.modules)") == "False"


def test_the_core_imports_in_less_time_than_numpy():
    """0.26 s for both where this was written; a machine may be several times slower."""
    code = (
        "import time; start = time.process_time(); import numpy; middle = time.process_time(); "
        "import resilin.core; print((time.process_time() - middle) / (middle - start))"
    )
    # Its own time: the machine may be busy with something else.
    assert min(float(python(code)) for _ in range(5)) < 1.0


def test_the_keras_integration_is_an_attribute_that_loads_no_keras():
    code = "import sys, resilin; resilin.keras; assert 'keras' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
