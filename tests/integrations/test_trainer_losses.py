"""The loss that a Trainer logs, over a resume in the middle of the steps that one log covers."""

import json

import pytest
import torch.distributed as dist

pytest.importorskip("transformers")
import resilin
from tests.integrations.parts import alone, forget, is_first
from tests.integrations.trainers import StopAt, make

pytestmark = pytest.mark.nightly(part="frameworks")

PRELOAD = ("datasets", "transformers.trainer", "resilin.integrations.transformers")
SETTINGS = {"logging_steps": 4, "save_strategy": "steps", "save_steps": 5, "num_train_epochs": 1}


def logged(folder, *, start=None, stop=None, job=None, **settings):
    """The losses that a run logs, by step, and its mean loss at the end."""
    callbacks = (StopAt(stop),) if stop else ()
    settings = {**SETTINGS, "batch_size": 6, **settings}
    trainer, _ = make(folder, callbacks=callbacks, **settings)
    if job is not None:
        resilin.checkpoint_to(job, memory_every=None)
    done = trainer.train(resume_from_checkpoint=start and str(start))
    found = {log["step"]: log["loss"] for log in trainer.state.log_history if "loss" in log}
    return found, done.training_loss


def assert_same(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert found[1] == pytest.approx(expected[1], rel=1e-6)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    losses, mean = logged(tmp_path_factory.mktemp("undisturbed"))
    assert [*losses] == [4, 8, 12, 16]
    assert len({*losses.values()}) == 4
    return losses, mean


def test_a_run_resumed_from_a_folder_logs_the_losses_of_the_undisturbed_run(tmp_path, undisturbed):
    logged(tmp_path, stop=6)
    assert_same(logged(tmp_path, start=tmp_path / "checkpoint-5"), undisturbed)


def test_a_run_resumed_from_the_state_of_the_job_does_so_too(tmp_path, undisturbed):
    state = tmp_path / "state"
    logged(tmp_path, stop=6, job=state)
    assert_same(logged(tmp_path, job=state), undisturbed)


def test_a_folder_that_does_not_say_where_a_log_began_logs_the_steps_since(tmp_path, undisturbed):
    logged(tmp_path, stop=6)
    path = tmp_path / "checkpoint-5" / "resilin.json"
    state = json.loads(path.read_text())
    del state["tree"]["trainer/window"]
    path.write_text(json.dumps(state))
    losses, _ = logged(tmp_path, start=tmp_path / "checkpoint-5")
    assert losses[8] != pytest.approx(undisturbed[0][8], rel=1e-3)
    assert losses[12] == pytest.approx(undisturbed[0][12], rel=1e-6)


@pytest.mark.world_size(2, init=False)
def test_another_number_of_processes_logs_the_same_losses(shared_path):
    parts = shared_path / "parts"
    if is_first():
        with alone():
            expected = logged(shared_path / "whole")
            logged(parts, stop=5)
    resilin.init_process_group()
    forget()
    logged(parts, start=parts / "checkpoint-5", stop=10)
    dist.barrier()
    dist.destroy_process_group()
    if is_first():
        with alone():
            assert_same(logged(parts, start=parts / "checkpoint-10"), expected)
