"""A checkpoint of format 1, as resilin 0.1.0 wrote it: `make_format_1.py` made it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import resilin
from resilin.training.state.checkpoint import Checkpoints
from tests.training.recovery_job import Job
from tests.training.state.checkpoint.make_format_1 import EPOCHS, SAVED_STEP

FOLDER = Path(__file__).parent / "format_1"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())


def test_its_tensors_are_read_as_whole_ones():
    (commit,) = Checkpoints(FOLDER).commits()
    written = json.loads((Path(commit.path) / "COMMIT.json").read_bytes())["commit"]
    assert (written["format"], written["resilin"]) == (1, "0.1.0")
    assert [len(pieces) for pieces in commit.tensors.values()] == [1] * len(written["tensors"])
    assert all(pieces[0].placement.is_whole for pieces in commit.tensors.values())
    snapshot = Checkpoints(FOLDER).load(commit)
    assert list(snapshot.tensors) == list(written["tensors"])
    assert snapshot.state("job")["clock"]["steps"] == SAVED_STEP
    assert snapshot.state("ema")["num"] == SAVED_STEP
    target = {"model.weight": torch.zeros(3, 4, dtype=torch.float64)}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(target, checkpoint_id=commit.path)
    assert torch.equal(snapshot.tensors["model.weight"], target["model.weight"])


def resume(folder):
    """Goes on from a copy of the checkpoint, to the end."""
    resilin.checkpoint_to(folder, every=None, memory_every=None)
    job = Job()
    assert resilin.resume().step == SAVED_STEP
    job.train(EPOCHS)
    formats = {
        path.parent.name: json.loads(path.read_bytes())["commit"]["format"]
        for path in folder.glob("step-*/COMMIT.json")
    }
    # What is saved next has the new format, beside the old one.
    assert sorted(formats.values()) == [1, 2]
    result = job.result()
    assert result["steps"] == EXPECTED["steps"]
    assert result["lr"] == EXPECTED["lr"]
    assert result["weight"] == pytest.approx(EXPECTED["weight"], rel=1e-9)
    assert result["ema"] == pytest.approx(EXPECTED["ema"], rel=1e-9)
    # Epoch 0 was complete before.
    assert result["totals"] == EXPECTED["totals"][1:]


@pytest.mark.world_size(2)
def test_a_job_goes_on_from_it(shared_path):
    if resilin.current_job().engine.membership.replica == 0:
        shutil.copytree(FOLDER, shared_path / "run")
    torch.distributed.barrier()
    resume(shared_path / "run")


def test_a_job_of_another_size_goes_on_from_it(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "run")
    resume(tmp_path / "run")
