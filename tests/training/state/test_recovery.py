"""State that is kept and restored, within one process or a fixed set of them."""

import contextlib
import logging
import os
import signal
import time
from datetime import timedelta

import pytest
import torch

import resilin
from resilin.core.recovery import Version
from resilin.engine.group import LAUNCHER_ENV
from resilin.training.job import current_job
from resilin.training.state.checkpoint import Checkpoints
from resilin.training.state.checkpoint_schedule import CheckpointSchedule
from resilin.training.state.settings import StateSettings
from tests.replicas import replica
from tests.training.recovery_job import NUM_SAMPLES, STEPS_PER_EPOCH, Job


class Crash(Exception):
    """The script fails."""


def crash_at(step):
    def on_step(job):
        if job.model.clock.steps == step:
            raise Crash

    return on_step


def at(version):
    """Which state it is, without the random number of the start that reached it."""
    return version.generation, version.step, version.epoch


def undisturbed(epochs=3):
    resilin.reset_job()
    job = Job()
    job.train(epochs)
    resilin.reset_job()
    return job.result()


def run(folder, epochs=3, every=1, **hooks):
    """Runs a job to its end, or to a crash: as a new process would, with all objects new."""
    resilin.reset_job()
    resilin.checkpoint_to(folder, every=every, memory_every=1)
    job = Job()
    try:
        # Saves that take no time: no step comes while one is in flight.
        job.train(epochs, before_step=wait_for_save, **hooks)
    except Crash:
        pass
    finally:
        wait_for_save()
        resilin.reset_job()
    return job


def wait_for_save():
    # A crash of the script leaves a save in flight to its thread, which ends before the process.
    recovery = resilin.current_job().recovery
    if recovery is not None and recovery._saves.checkpoints is not None:
        recovery._saves.checkpoints.wait()


def wait_for_thread():
    # How the save has ended is for the training to find out.
    while resilin.current_job().recovery._saves.checkpoints.saving:
        time.sleep(0.001)


@pytest.mark.parametrize("step", [1, 3, STEPS_PER_EPOCH, STEPS_PER_EPOCH + 1, 12])
def test_a_crash_within_an_epoch_goes_on_behind_the_last_checkpoint(tmp_path, step):
    first = run(tmp_path, on_step=crash_at(step))
    second = run(tmp_path)
    assert second.result() == {**undisturbed(), "totals": second.totals}
    # The step that crashed was not completed: it is made again, and nothing else is.
    kept = [pair for pair in first.used if pair not in second.used]
    assert sorted(kept + second.used) == [(e, i) for e in range(3) for i in range(NUM_SAMPLES)]
    assert len(first.used) - len(kept) <= 8


def test_sums_of_the_epoch_under_way_are_restored(tmp_path):
    run(tmp_path, on_step=crash_at(10))
    assert run(tmp_path).totals == [NUM_SAMPLES, NUM_SAMPLES]


def test_a_crash_between_two_epochs_repeats_the_evaluation_and_no_data(tmp_path):
    def crash(job):
        if len(job.evaluations) == 1:
            raise Crash

    first = run(tmp_path, on_evaluation=crash)
    assert first.evaluations == [0]
    second = run(tmp_path)
    assert second.evaluations == [1, 2]
    assert {epoch for epoch, _ in second.used} == {2}
    assert second.result() == {**undisturbed(), "totals": [NUM_SAMPLES, NUM_SAMPLES]}


def test_a_finished_job_has_nothing_left_to_do(tmp_path):
    first = run(tmp_path, every=None)
    second = run(tmp_path, every=None)
    assert second.used == []
    assert second.result() == {**first.result(), "totals": []}


def test_a_longer_loop_goes_on_from_a_finished_one(tmp_path):
    run(tmp_path, epochs=2)
    job = run(tmp_path, epochs=3)
    assert job.result() == {**undisturbed(3), "totals": [NUM_SAMPLES]}


def test_a_second_loop_in_the_same_process_goes_on(tmp_path):
    resilin.checkpoint_to(tmp_path, every=None)
    job = Job()
    job.train(1)
    job.train(3)
    steps = [commit.version.step for commit in Checkpoints(tmp_path).commits()]
    assert steps == [3 * STEPS_PER_EPOCH, STEPS_PER_EPOCH]
    assert job.result() == undisturbed(3)


@pytest.mark.parametrize(
    ("every", "expected"),
    [(4, [12, 8, 4]), (None, [14]), (timedelta(hours=1), [14]), (timedelta(microseconds=1), None)],
)
def test_checkpoints_come_as_often_as_asked(tmp_path, every, expected):
    resilin.checkpoint_to(tmp_path, every=every, keep=100)
    job = Job()
    job.train(2, before_step=wait_for_save)
    steps = [commit.version.step for commit in Checkpoints(tmp_path).commits()]
    if expected is None:
        assert len(steps) > 7
    else:
        # The end of the job is always saved.
        assert steps == (expected if expected == [14] else [14, *expected])


def test_a_job_that_dies_more_often_than_it_saves_counts_from_its_last_checkpoint(tmp_path):
    def schedule(every):
        settings = StateSettings(checkpoint_dir=str(tmp_path), checkpoint_every=every)
        job = current_job()
        return CheckpointSchedule(settings, job.engine, job.registry, job.events)

    resumed = schedule(4)
    resumed.start(6, Version(1, 6), from_checkpoint=False)
    assert resumed.is_due(6)
    run(tmp_path, epochs=1, every=5)
    assert [commit.version.step for commit in Checkpoints(tmp_path).commits()] == [7, 5]
    resumed = schedule(4)
    resumed.start(6, Version(1, 6), from_checkpoint=False)
    assert [step for step in range(6, 12) if resumed.is_due(step)] == [9, 10, 11]
    # One that resumes from a checkpoint counts from that.
    resumed.start(7, Version(1, 7), from_checkpoint=True)
    assert [step for step in range(6, 13) if resumed.is_due(step)] == [11, 12]


def test_what_is_kept_is_bounded(tmp_path):
    run(tmp_path, every=1)
    assert len(Checkpoints(tmp_path).commits()) == 3


def test_a_failing_checkpoint_does_not_stop_the_training(tmp_path, caplog):
    folder = tmp_path / "checkpoints"

    def on_step(job):
        if job.model.clock.steps == 4:
            folder.rename(tmp_path / "away")
            folder.write_text("a file where the directory was")
        if job.model.clock.steps == 9:
            folder.unlink()
            (tmp_path / "away").rename(folder)

    caplog.set_level(logging.ERROR, "resilin")
    resilin.checkpoint_to(folder, every=2)
    job = Job()
    # Else a slow save might last from before the directory went until it is back.
    job.train(2, on_step, before_step=wait_for_thread)
    assert job.model.clock.steps == 14
    failed = [line for line in caplog.messages if "was not saved" in line]
    assert failed
    assert all(line.startswith("a checkpoint failed; training continues: ") for line in failed)
    # Each is told once.
    assert len(set(failed)) == len(failed)
    assert Checkpoints(folder).commits()[0].version.step == 14


@pytest.mark.world_size(2)
def test_a_failed_checkpoint_is_told_by_one_replica(shared_path, caplog):
    folder = shared_path / "checkpoints"
    caplog.set_level(logging.WARNING, "resilin")
    resilin.checkpoint_to(folder, every=2)

    def on_step(job):
        if job.model.clock.steps == 1 and not replica():
            folder.write_text("a file where the directory should be")
        if job.model.clock.steps == 1:
            resilin.current_job().engine.gather(None)

    Job().train(1, on_step, before_step=wait_for_thread)
    failed = [line for line in caplog.messages if "was not saved" in line]
    assert len(set(failed)) == len(failed)
    assert bool(failed) == (replica() == 0)


# Memory --------------------------------------------------------------------------------------


def test_the_memory_copy_holds_the_last_completed_step(tmp_path, monkeypatch):
    monkeypatch.setenv("RESILIN_MEMORY_DIR", str(tmp_path / "memory"))
    first = run(None, on_step=crash_at(10))
    resilin.reset_job()
    job = Job()
    assert at(resilin.resume()) == (0, 9, 1)
    assert resilin.current_job().engine.membership.generation == 1
    job.train(3)
    assert job.result() == {**undisturbed(), "totals": [NUM_SAMPLES, NUM_SAMPLES]}
    assert len(first.used) + len(job.used) == 3 * NUM_SAMPLES + 8


def test_the_newer_one_of_memory_and_checkpoint_wins(tmp_path, monkeypatch):
    monkeypatch.setenv("RESILIN_MEMORY_DIR", str(tmp_path / "memory"))
    run(tmp_path / "checkpoints", every=4, on_step=crash_at(10))
    run(tmp_path / "checkpoints", every=None, on_step=crash_at(11))
    resilin.checkpoint_to(tmp_path / "checkpoints")
    Job()
    assert at(resilin.resume()) == (1, 10, 1)
    resilin.reset_job()
    for path in (tmp_path / "memory").iterdir():
        path.unlink()
    resilin.checkpoint_to(tmp_path / "checkpoints")
    Job()
    assert at(resilin.resume()) == (0, 8, 1)


def test_a_stale_copy_of_an_earlier_generation_does_not_win(tmp_path, monkeypatch):
    monkeypatch.setenv("RESILIN_MEMORY_DIR", str(tmp_path / "stale"))
    run(tmp_path / "checkpoints", every=2, on_step=crash_at(12))
    monkeypatch.setenv("RESILIN_MEMORY_DIR", str(tmp_path / "new"))
    run(tmp_path / "checkpoints", every=1, on_step=crash_at(11 + 1))
    # The first host comes back: it stood at step 11 of generation 0; generation 1 is at 11 too.
    monkeypatch.setenv("RESILIN_MEMORY_DIR", str(tmp_path / "stale"))
    resilin.checkpoint_to(tmp_path / "checkpoints")
    Job()
    assert resilin.resume().generation == 1


def test_memory_copies_can_be_switched_off(tmp_path, monkeypatch):
    monkeypatch.setenv("RESILIN_MEMORY_DIR", str(tmp_path / "memory"))
    resilin.checkpoint_to(None, memory_every=None)
    Job().train(1)
    assert not (tmp_path / "memory").exists()


# Lost again before the first step is over -----------------------------------------------------


def crash(*_):
    raise Crash


WHERE = {
    "first step": {"before_step": crash},
    "after the start": {},
    "evaluation": {"on_evaluation": crash},
}


@pytest.mark.parametrize("place", ["memory", "checkpoint"])
@pytest.mark.parametrize("where", WHERE)
def test_a_job_that_is_lost_twice_repeats_nothing(tmp_path, monkeypatch, where, place):
    """The loader registers late: what is kept before that must have its state all the same."""
    if place == "memory":
        monkeypatch.setenv("RESILIN_MEMORY_DIR", str(tmp_path / "memory"))
    folder = tmp_path / "checkpoints" if place == "checkpoint" else None
    jobs = [run(folder, on_evaluation=crash)]
    for _ in range(2):
        resilin.reset_job()
        resilin.checkpoint_to(folder, every=1, memory_every=1)
        jobs.append(Job())
        resilin.resume()
        with contextlib.suppress(Crash):
            if where == "after the start":
                # An orderly stop here saves what there is.
                recovery = resilin.current_job().recovery
                recovery._saves.save(recovery._version())
            else:
                jobs[-1].train(3, **WHERE[where])
        wait_for_save()
        resilin.reset_job()
    jobs.append(run(folder))
    assert jobs[-1].result() == {**undisturbed(), "totals": jobs[-1].totals}
    used = sorted(pair for job in jobs for pair in job.used)
    assert used == [(e, i) for e in range(3) for i in range(NUM_SAMPLES)]


def test_a_run_with_nothing_to_do_writes_no_state_and_loses_none(tmp_path):
    run(tmp_path, epochs=2)
    before = sorted(tmp_path.iterdir())
    run(tmp_path, epochs=2)
    assert sorted(tmp_path.iterdir()) == before
    job = run(tmp_path, epochs=3)
    assert job.result() == {**undisturbed(3), "totals": [NUM_SAMPLES]}


def test_a_released_model_stays_in_the_last_checkpoint(tmp_path):
    resilin.checkpoint_to(tmp_path, every=None)
    job = Job()
    job.train(1, on_evaluation=lambda job: job.model.release())
    resilin.reset_job()
    again = run(tmp_path, epochs=1)
    assert torch.equal(again.net.weight, job.net.weight)


class Draws:
    """A random generator, which every replica has of its own."""

    def __init__(self, replica):
        self.generator = torch.Generator().manual_seed(replica)
        self.loaded = []

    def state_dict(self):
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state):
        self.loaded.append(state is not None)
        if state is not None:
            self.generator.set_state(state["state"])

    def next(self):
        return torch.rand((), generator=self.generator).item()


@pytest.mark.parametrize("place", ["memory", "checkpoint", "both"])
@pytest.mark.world_size(2)
def test_each_replica_goes_on_with_its_own_random_numbers(shared_path, monkeypatch, place):
    directory = "off" if place == "checkpoint" else str(shared_path / "memory")
    monkeypatch.setenv("RESILIN_MEMORY_DIR", directory)
    folder = None if place == "memory" else shared_path / "checkpoints"
    drawn = {}
    for at in (4, 4, 11, None):
        resilin.reset_job()
        resilin.checkpoint_to(folder, every=1, memory_every=1)
        job, draws = Job(), Draws(replica())
        if at != 4:
            resilin.current_job().registry.add_own("draws", draws)
        resilin.resume()
        if at == 4:
            # Late, and in the second life after a state was kept without it.
            resilin.current_job().registry.add_own("draws", draws)

        def on_step(job, at=at, draws=draws):
            drawn[job.model.clock.steps] = draws.next()
            if job.model.clock.steps == at:
                raise Crash

        with contextlib.suppress(Crash):
            job.train(2, on_step, before_step=wait_for_save)
        wait_for_save()
    resilin.reset_job()
    plain = Draws(replica())
    assert drawn == {step: plain.next() for step in range(1, 15)}


@pytest.mark.world_size(2)
def test_a_host_that_got_the_state_from_another_keeps_a_copy_at_once(shared_path, monkeypatch):
    here = shared_path / f"memory-{replica()}"
    monkeypatch.setenv("RESILIN_MEMORY_DIR", str(here))
    run(None, on_step=crash_at(5))
    if replica():
        for path in here.iterdir():
            path.unlink()
    before = sorted(here.iterdir())
    resilin.checkpoint_to(None, memory_every=1)
    Job()
    version = resilin.resume()
    versions = resilin.current_job().recovery._copies.memory.scan().versions
    resilin.reset_job()
    assert at(version) == (0, 4, 0)
    # Else a loss of the one host that has it would lose it.
    assert at(versions[0]) == (1, 4, 0)
    assert set(before) <= set(here.iterdir())
    # Now that both have it, nothing is written.
    before = sorted(here.iterdir())
    resilin.checkpoint_to(None, memory_every=1)
    Job()
    resilin.resume()
    resilin.reset_job()
    assert sorted(here.iterdir()) == before


# Refused -------------------------------------------------------------------------------------


def test_the_state_of_another_model_is_refused(tmp_path):
    run(tmp_path, epochs=1)
    resilin.checkpoint_to(tmp_path)
    Job(features=5)
    with pytest.raises(ValueError, match=r"another model: weight was \(3, 4\) torch.float64"):
        resilin.resume()


def test_the_state_of_another_dataset_is_refused(tmp_path):
    run(tmp_path, epochs=1)
    resilin.checkpoint_to(tmp_path)
    job = Job(num_samples=60)
    with pytest.raises(ValueError, match="another sample stream: num_samples was 50 and is 60"):
        job.train(2)


def test_settings_after_the_start_are_refused(tmp_path):
    resilin.checkpoint_to(tmp_path)
    Job().train(1)
    with pytest.raises(ValueError, match="before remaining_epochs_until"):
        resilin.checkpoint_to(tmp_path)


def test_state_that_nobody_registers_is_told(tmp_path):
    run(tmp_path, epochs=1)
    resilin.checkpoint_to(tmp_path)
    job = Job()
    resilin.current_job().registry.remove("ema")
    with pytest.warns(UserWarning, match="state with 'ema', which nothing in this script"):
        job.train(2)


def test_something_registered_that_has_no_state_yet_is_told(tmp_path):
    run(tmp_path, epochs=1)
    resilin.checkpoint_to(tmp_path)
    job = Job()
    resilin.register("other", torch.nn.Linear(1, 1))
    with pytest.warns(UserWarning, match="'other' is not in the state"):
        job.train(2)


# Asked to stop -------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_a_signal_saves_and_ends_behind_the_step(tmp_path, number, code):
    resilin.checkpoint_to(tmp_path, every=None)
    job = Job()

    def on_step(job):
        if job.model.clock.steps == 5:
            os.kill(os.getpid(), number)

    with pytest.raises(SystemExit) as ended:
        job.train(3, on_step)
    assert ended.value.code == code
    steps = job.model.clock.steps
    # Asked within step 5, told in the ballot of step 6.
    assert steps == 6
    assert Checkpoints(tmp_path).commits()[0].version.step == steps
    resilin.reset_job()
    assert signal.getsignal(number) == signal.SIG_DFL
    assert run(tmp_path).result() == {**undisturbed(), "totals": [NUM_SAMPLES] * 3}


def test_a_poller_ends_the_job_with_a_code_that_asks_for_a_restart(tmp_path):
    asked = []
    resilin.checkpoint_to(tmp_path, every=None)
    resilin.stop_when(lambda: len(asked) > 3, every=timedelta(milliseconds=1))
    job = Job()

    def on_step(job):
        asked.append(1)
        if len(asked) > 3:
            assert resilin.current_job().engine.stop.wait(10)

    with pytest.raises(SystemExit) as ended:
        job.train(3, on_step)
    assert ended.value.code == 75
    assert Checkpoints(tmp_path).commits()[0].version.step == job.model.clock.steps


@pytest.mark.world_size(3, init=False)
def test_all_replicas_stop_at_the_same_step_and_any_number_goes_on(shared_path, monkeypatch):
    resilin.init_process_group()
    resilin.checkpoint_to(shared_path, every=3)
    job = Job()

    def on_step(job):
        if replica() == 1 and job.model.clock.steps == 10:
            resilin.current_job().engine.stop.request("the machine goes away")

    with pytest.raises(SystemExit) as ended:
        job.train(3, on_step)
    assert ended.value.code == 75
    # The sums that replicas had added by then are one sum now.
    resilin.current_job().engine.gather(None)
    newest = Checkpoints(shared_path).commits()[0]
    assert at(newest.version) == (0, job.model.clock.steps, 1)
    assert 10 < newest.version.step <= 12
    first = replica() == 0
    torch.distributed.destroy_process_group()
    if not first:
        return
    for name in LAUNCHER_ENV:
        monkeypatch.delenv(name)
    job = run(shared_path)
    assert job.totals == [NUM_SAMPLES] * 2
    expected = undisturbed()
    assert job.model.clock.steps == expected["steps"]
    assert job.result()["weight"] == pytest.approx(expected["weight"], rel=1e-10)
