"""A Trainer that loses its process at any moment ends as the one that lost nothing.

Compared is what came out: parameters, learning rates, validations, states of callbacks and hooks,
what was logged, and the files. Most kills are exceptions in this process, which then begins anew
with the copies in memory that the lost one has left; one job has real ones.
"""

import json
import logging
import math
import os
import random
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import resilin
from resilin.engine import environment

lightning = pytest.importorskip("lightning.pytorch")
from tests import forked  # noqa: E402
from tests.integrations.lightning_kills import Killer, Lost, fit  # noqa: E402

PRELOAD = ("lightning.pytorch", "torchmetrics", "resilin.integrations.lightning")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::UserWarning:torchmetrics"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*'unkept' does not survive"),
    pytest.mark.filterwarnings("ignore:fit number 1 of this script is done"),
]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("lightning.fabric").setLevel(logging.ERROR)


@pytest.fixture(autouse=True)
def tidy():
    """Lightning leaves a process group and its traces in the environment behind."""
    before, own = dict(os.environ), not dist.is_initialized()
    yield
    resilin.reset_job()
    if own and dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


def undisturbed(directory, settings):
    directory.mkdir()
    resilin.reset_job()
    return fit(directory, settings, Killer(None, real=False))


def disturbed(directory, settings, kills, strict=True):
    """The same, begun anew after each kill; a kill may be at a place that is not reached."""
    directory.mkdir()
    os.environ[environment.MEMORY_DIR] = str(directory / "memory")
    try:
        for kill in (*kills, None):
            resilin.reset_job()
            resilin.checkpoint_to(None, memory_every=1)
            try:
                found = fit(directory, settings, Killer(kill, real=False))
            except Lost:
                continue
            assert kill is None or not strict, f"{kill} was not reached"
            if kill is None:
                return found
            # The job is done, and a script that runs once more has nothing to do.
        raise AssertionError("unreachable")
    finally:
        del os.environ[environment.MEMORY_DIR]


def differences(one, other, path=""):
    """Where two results differ by more than rounding, and how."""
    if isinstance(one, dict) and isinstance(other, dict):
        names = sorted({*one, *other})
        pairs = [(name, one.get(name), other.get(name)) for name in names]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = list(zip(range(len(one)), one, other, strict=True))
    elif isinstance(one, float) and isinstance(other, float):
        same = math.isclose(one, other, rel_tol=1e-10, abs_tol=1e-10)
        return [] if same else [f"{path}: {one} and {other}"]
    else:
        return [] if one == other else [f"{path}: {one} and {other}"]
    return [text for name, a, b in pairs for text in differences(a, b, f"{path}.{name}")]


END = [
    ["validating", 6],
    ["validating", 6],
    ["validated", 12],
    ["epoch end", 12],
    ["epoch start", 18],
]
"""All that lies between the last step of an epoch and the first of the next, one of it twice."""
STEPS = [["step", 1], ["gradient", 1], ["batch", 3], ["batch", 6], ["step", 6], ["batch", 20]]
"""In the first step, in the last one of an epoch, in the one behind a restart, and so on."""
CASES = {
    "end of epoch": ({}, END),
    "steps": ({}, STEPS),
    "last": ({}, [["validated", 24], ["epoch end", 24], ["end", 24]]),
    "stops early": (
        {"patience": 0, "trainer": {"max_epochs": 8}},
        [["batch", 9], ["validating", 12]],
    ),
    "stops late": (
        {"patience": 1, "trainer": {"max_epochs": 9, "val_check_interval": 2, "min_epochs": 3}},
        [["validated", 4], ["validating", 6], ["step", 14], ["epoch end", 18]],
    ),
    "ema": ({"average": "ema"}, [*END, ["end", 24]]),
    "swa": (
        {"average": "swa", "scheduler": "none"},
        [["validating", 6], ["batch", 9], ["epoch end", 18], ["batch", 20]],
    ),
    "two loaders": (
        {"loaders": 2, "trainer": {"limit_val_batches": 2}},
        [["validating", 6], ["epoch end", 12]],
    ),
    "every other epoch": (
        {"scheduler": "epoch", "trainer": {"check_val_every_n_epoch": 2}},
        [["epoch end", 6], ["validating", 12], ["step", 13], ["epoch end", 18]],
    ),
    "max_steps": (
        {"trainer": {"max_steps": 12, "max_epochs": -1}, "fits": []},
        [["epoch end", 6], ["validating", 12], ["end", 12]],
    ),
    "max_steps in an epoch": (
        {"trainer": {"max_steps": 10, "max_epochs": -1, "gradient_clip_val": 0.5}},
        [["batch", 8], ["end", 10]],
    ),
    "by step": ({"scheduler": "step"}, [["validating", 6], ["batch", 8]]),
    "by epoch": ({"scheduler": "epoch"}, [["batch", 6], ["validating", 6], ["epoch end", 12]]),
    "two fits": (
        {"fits": [2]},
        [
            ["batch", 8],
            ["end", 12],
            ["epoch start", 12],
            ["step", 13],
            ["validating", 18],
            ["end", 24],
        ],
    ),
}


if not hasattr(lightning.callbacks, "EMAWeightAveraging"):
    del CASES["ema"]  # Lightning 2.6 has it


@pytest.mark.parametrize("case", CASES)
def test_a_killed_fit_ends_as_the_undisturbed_one(tmp_path, case):
    settings, kills = CASES[case]
    whole = undisturbed(tmp_path / "whole", settings)
    found = disturbed(tmp_path / "killed", settings, [[*kill, 0] for kill in kills])
    assert differences(whole, found) == []


def random_case(seed):
    """Settings and kills, by chance: any place of any step, some of them twice in a row."""
    dice = random.Random(seed)
    trainer = {"max_epochs": dice.choice([2, 3, 4])}
    settings = {"trainer": trainer, "loaders": dice.choice([1, 1, 2])}
    kinds = ["plateau", "epoch", "step", "none"]
    settings["average"] = dice.choice([None, "ema", "swa"])
    settings["patience"] = dice.choice([0, 1, 9])
    if dice.random() < 0.3:
        trainer["val_check_interval"] = dice.choice([2, 3, 4])
        kinds.remove("plateau")
    elif dice.random() < 0.3:
        trainer["check_val_every_n_epoch"] = 2
        kinds.remove("plateau")
    if settings["average"] == "swa":
        kinds.remove("step")
    settings["scheduler"] = dice.choice(kinds)
    if dice.random() < 0.3:
        trainer["gradient_clip_val"] = 0.5
    if dice.random() < 0.2:
        trainer["min_epochs"] = 2
    if dice.random() < 0.25 and trainer["max_epochs"] > 2:
        settings["fits"] = [dice.randint(1, 2)]
    kills = sorted(
        ([dice.choice(PLACES), dice.randint(0, 6 * trainer["max_epochs"]), 0] for _ in range(6)),
        key=lambda kill: kill[1],
    )
    return settings, [kill for kill in kills for _ in range(dice.choice([1, 1, 2]))]


PLACES = ("step", "gradient", "batch", "validating", "validated", "epoch end", "epoch start", "end")


@pytest.mark.nightly(part="frameworks")
@pytest.mark.parametrize("seed", range(int(os.environ.get("LIGHTNING_SEEDS", "4"))))
def test_random_programs_under_random_kills_end_as_undisturbed(tmp_path, seed):
    settings, kills = random_case(seed)
    whole = undisturbed(tmp_path / "whole", settings)
    found = disturbed(tmp_path / "killed", settings, kills, strict=False)
    assert differences(whole, found) == [], (settings, kills)


# Five starts of two processes, one after the other: it ends them itself if they hang.
@pytest.mark.nightly(part="frameworks")
@pytest.mark.timeout(360)
def test_lost_workers_cost_no_validation_no_state_and_no_file(tmp_path):
    settings = {"average": "ema"}
    whole = undisturbed(tmp_path / "whole", settings)
    kills = [["validating", 6, 1], ["validated", 12, 0], ["epoch end", 12, 1], ["gradient", 19, 1]]
    directory = tmp_path / "killed"
    directory.mkdir()
    job = Path(__file__).with_name("lightning_kills.py")
    words = json.dumps({**settings, "kills": kills})
    command = [sys.executable, "-m", "resilin.cli", "run", "--warm", "--nproc", "2"]
    command += [job, directory, words]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "RESILIN_RUN_DIR": "off"}
    done = forked.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    found = json.loads((directory / "result.json").read_text())
    assert found.pop("lives") == len(kills) + 1
    assert differences(whole, found) == []
