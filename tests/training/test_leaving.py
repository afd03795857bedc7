"""A loop that is left before it is over: what it has made is saved, by all replicas or by none."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import resilin
from resilin.core.events import FaultEvent
from resilin.engine import base
from resilin.telemetry.read import read_events
from resilin.training import leaving
from resilin.training.job import current_job
from resilin.training.state.checkpoint import Checkpoints
from tests import forked
from tests.replicas import num_replicas, replica

STEPS = 6
"""Steps per epoch."""


class Early(Exception):
    """The loop has had enough."""


def made(folder, every=1000):
    """A model with dropout, its optimizer, scheduler and loader: all that a resumed run needs."""
    resilin.reset_job()
    resilin.checkpoint_to(folder, every=every)
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Dropout(0.3), torch.nn.Linear(5, 2))
    optimizer = torch.optim.SGD(net.double().parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.8)
    model = resilin.AdaptiveDataParallel(net, optimizer, scheduler)
    data = torch.arange(47 * 4).reshape(47, 4).double() / 100
    loader = resilin.AdaptiveDataLoader(
        torch.utils.data.TensorDataset(data), batch_size=8, shuffle=True
    )
    return model, optimizer, scheduler, loader


def train(
    job,
    leave=lambda steps: None,
    epochs=3,
    top=lambda steps: None,
    loop=resilin.remaining_epochs_until,
):
    """A loop that ends where `leave` or `top` returns True, and by what they raise."""
    model, optimizer, scheduler, loader = job
    for _ in loop(epochs):
        for (x,) in loader:
            if top(model.clock.steps):
                return
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if leave(model.clock.steps):
                return


def train_plainly(job, leave):
    """The same without the loop over epochs."""
    train(job, leave, loop=range)


def saved(folder):
    """Steps of the checkpoints there are."""
    return [each.version.step for each in Checkpoints(str(folder), keep=9).commits()]


def end_script(monkeypatch):
    """What happens when the script of this process has ended."""
    monkeypatch.setattr(leaving, "_registered", [os.getpid()])
    leaving._at_end()


def parameters(job):
    return torch.cat([p.detach().flatten() for p in job[0].parameters()])


def at(step):
    return lambda steps: steps == step


def raises(error, step):
    def leave(steps):
        if steps == step:
            raise error

    return leave


@pytest.mark.parametrize("how", ["tail", "head", "exit", "caught"])
def test_a_run_that_was_left_continues_as_if_it_had_not_been(tmp_path, monkeypatch, how):
    undisturbed = made(tmp_path / "whole")
    train(undisturbed)
    for step in (4, STEPS, 9):
        job = made(tmp_path / "left")
        if how == "tail":
            train(job, at(step))
        elif how == "head":
            train(job, top=at(step))
        else:
            error = SystemExit(0) if how == "exit" else Early()
            with pytest.raises(type(error)):
                train(job, raises(error, step))
            assert step not in saved(tmp_path / "left")
            end_script(monkeypatch)
        assert saved(tmp_path / "left")[0] == step
    resumed = made(tmp_path / "left")
    train(resumed)
    assert resumed[0].clock == undisturbed[0].clock
    assert torch.equal(parameters(resumed), parameters(undisturbed))


def test_a_break_out_of_both_loops_saves_what_there_is(tmp_path):
    model, optimizer, _, loader = made(tmp_path)
    for _ in resilin.remaining_epochs_until(10**6):
        for (x,) in loader:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if model.clock.steps == 8:
                break
        if model.clock.steps == 8:
            break
    assert saved(tmp_path) == [8]


def test_a_loop_over_epochs_within_a_generator_is_left_as_well(tmp_path):
    job = made(tmp_path)

    def shown(epochs):
        yield from epochs

    for _ in shown(resilin.remaining_epochs_until(3)):
        next(iter(job[3]))
        break
    assert saved(tmp_path) == [0]


def test_a_loop_that_fails_is_not_taken_for_one_that_was_left(tmp_path, monkeypatch):
    """The body of its last step is not over: a scheduler may not have stepped."""
    job = made(tmp_path)
    with pytest.raises(Early):
        train(job, raises(Early(), 4))
    monkeypatch.setattr(sys, "last_value", Early(), raising=False)
    end_script(monkeypatch)
    assert saved(tmp_path) == []


@pytest.mark.parametrize("step", [STEPS + 2, 3 * STEPS])
def test_a_loop_without_the_loop_over_epochs_is_saved_when_the_script_ends(
    tmp_path, monkeypatch, step
):
    train_plainly(made(tmp_path), at(step))
    assert saved(tmp_path) == []
    end_script(monkeypatch)
    assert saved(tmp_path) == [step]


@pytest.mark.parametrize("change", ["in place", "behind autograd", "dtype"])
def test_what_a_script_makes_of_its_model_afterwards_is_not_saved(
    tmp_path, monkeypatch, caplog, change
):
    job = made(tmp_path)
    train_plainly(job, at(5))
    net = job[0].module
    if change == "in place":
        net.load_state_dict({name: 2 * value for name, value in net.state_dict().items()})
    elif change == "dtype":
        net.bfloat16()
    else:
        net[0].weight.data.mul_(2)
    end_script(monkeypatch)
    assert saved(tmp_path) == []
    assert "after step 5, which is not saved: the model was changed since" in caplog.text


def test_parameters_that_are_not_numbers_are_the_same_as_before(tmp_path, monkeypatch):
    job = made(tmp_path)
    job[0].module[2].weight.data.fill_(torch.nan)
    train_plainly(job, at(2))
    end_script(monkeypatch)
    assert saved(tmp_path) == [2]


def test_an_optimizer_that_was_interrupted_leaves_nothing_to_save(tmp_path, caplog):
    job = made(tmp_path)
    model, optimizer, _, loader = job

    def interrupted(self, *args, **kwargs):
        self.param_groups[0]["params"][0].data.add_(1)
        raise KeyboardInterrupt

    for _ in resilin.remaining_epochs_until(1):
        for (x,) in loader:
            model(x).square().mean().backward()
            hook = optimizer.register_step_post_hook(lambda *_: interrupted(optimizer))
            with contextlib.suppress(KeyboardInterrupt):
                optimizer.step()
            hook.remove()
            break
        break
    assert saved(tmp_path) == []
    assert "after step 0, which is not saved: its optimizer was interrupted" in caplog.text


def test_a_script_that_has_trained_nothing_saves_nothing_at_its_end(tmp_path, monkeypatch):
    job = made(tmp_path)
    resilin.resume()
    job[0].eval()
    for (x,) in job[3]:
        job[0](x)
    end_script(monkeypatch)
    assert saved(tmp_path) == []


CHAINED = """
import itertools, torch, resilin
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
model = resilin.AdaptiveDataParallel(net, optimizer)
data = torch.utils.data.TensorDataset(torch.ones(8, 2))
loader = resilin.AdaptiveDataLoader(data, batch_size=2)
batches = itertools.chain(loader, loader)
for (x,) in batches:
    model(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if model.clock.steps == 2:
        break
"""


def test_a_generator_that_is_still_open_when_the_script_ends_says_nothing(tmp_path):
    # A new interpreter: what is looked at is how it ends.
    command = [sys.executable, "-c", CHAINED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_child_that_a_script_forks_saves_nothing_at_its_end(tmp_path):
    train_plainly(made(tmp_path), at(5))
    child = os.fork()
    if child == 0:
        leaving._at_end()
        os._exit(0)
    os.waitpid(child, 0)
    assert saved(tmp_path) == []


# Ctrl-C -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_the_step_and_a_second_one_is_not_waited_for(tmp_path, caplog):
    undisturbed = made(tmp_path / "whole")
    train(undisturbed)

    def interrupt(steps):
        if steps == 3:
            os.kill(os.getpid(), signal.SIGINT)

    job = made(tmp_path / "left")
    with pytest.raises(KeyboardInterrupt):
        train(job, top=interrupt)
    assert "interrupted: the job stops after this step" in caplog.text
    assert saved(tmp_path / "left") == [4]
    # A notebook goes on in the same process; a script is started again.
    reached = []

    def insist(steps):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        reached.append(steps)

    with pytest.raises(KeyboardInterrupt):
        train(job, top=insist)
    assert reached == []
    job = made(tmp_path / "left")
    train(job)
    assert torch.equal(parameters(job), parameters(undisturbed))


@pytest.mark.usefixtures("interruptible")
def test_a_handler_of_the_script_keeps_its_ctrl_c(tmp_path):
    def own(number, frame):
        raise Early

    before = signal.signal(signal.SIGINT, own)
    try:
        with pytest.raises(Early):
            train(made(tmp_path), top=lambda steps: os.kill(os.getpid(), signal.SIGINT))
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


# Several replicas ---------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["tail", "head", "end"])
@pytest.mark.world_size(2)
def test_replicas_that_leave_together_save_together(shared_path, monkeypatch, place):
    job = made(shared_path / "left")
    if place == "end":
        train_plainly(job, at(5))
        end_script(monkeypatch)
    elif place == "tail":
        train(job, lambda steps: steps == 5 and (time.sleep(replica() / 2) or True))
    else:
        train(job, top=at(5))
    dist.barrier()
    assert saved(shared_path / "left") == [5]
    undisturbed = made(shared_path / "whole")
    train(undisturbed)
    resumed = made(shared_path / "left")
    train(resumed)
    assert torch.equal(parameters(resumed), parameters(undisturbed))


@pytest.mark.world_size(2)
def test_nobody_waits_for_a_replica_that_goes_on(shared_path, monkeypatch, caplog):
    monkeypatch.setattr(base, "TOGETHER", 0.5)
    job = made(shared_path)
    if replica():
        with pytest.raises(Early):
            train(job, raises(Early(), 4))
    else:
        train(job, at(4))
        assert "replica 0 of 2 has left the loop after step 4" in caplog.text
    dist.barrier()
    assert saved(shared_path) == []


@pytest.mark.world_size(2)
def test_a_group_that_was_destroyed_saves_nothing_by_halves(shared_path, monkeypatch, caplog):
    train_plainly(made(shared_path), at(4))
    dist.barrier()
    count = num_replicas()
    monkeypatch.setattr(
        type(current_job().engine), "find_membership", lambda self: base.Membership()
    )
    current_job().engine._membership = None
    end_script(monkeypatch)
    assert f"{count} processes have made it, and 1 is left of their group" in caplog.text
    assert saved(shared_path) == []


# Under a launcher ---------------------------------------------------------------------------------

JOB = Path(__file__).with_name("left_job.py")
EARLY = "ended at step 4, in epoch 1 of 3, before its epochs were over"


def launched(tmp_path, how, where, *options):
    command = [sys.executable, "-m", "resilin.cli", "run", "--warm", "--nproc", "2", "--run-dir"]
    command += [tmp_path / "run", "--memory-dir", tmp_path / "memory", "--rdzv-id", "job7"]
    done = forked.run(
        [*map(str, (*command, *options, JOB, how, where))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.returncode, [line.removeprefix("resilin: ") for line in done.stderr.splitlines()]


@pytest.mark.processes
@pytest.mark.parametrize("options", [(), ("--live",)], ids=["restart", "live"])
def test_a_job_that_was_left_is_no_failure_and_says_so(tmp_path, options):
    code, lines = launched(tmp_path, "exit", tmp_path / "kept", *options)
    assert code == 0, lines
    assert lines[-1] == EARLY, lines
    assert saved(tmp_path / "kept") == [4]
    assert not (tmp_path / "memory" / "job7").exists()
    faults = [each for each in read_events(tmp_path / "run") if type(each) is FaultEvent]
    assert [(each.kind, each.detail) for each in faults] == [("left", EARLY[len("ended ") :])]


@pytest.mark.nightly(part="jobs")
@pytest.mark.parametrize("options", [(), ("--live",)], ids=["restart", "live"])
def test_what_is_nowhere_else_stays_in_memory_and_is_resumed(tmp_path, options):
    code, lines = launched(tmp_path, "return", "nowhere", "--left-code", "75", *options)
    assert code == 75, lines
    assert lines[-2] == EARLY, lines
    assert lines[-1].startswith(f"kept the latest state in {tmp_path}/memory/job7: resume with")
    code, lines = launched(tmp_path, "on", "nowhere", *options)
    assert code == 0, lines
    assert lines[-1] == "finished", lines
    assert any("at step 4" in line for line in lines), lines


@pytest.mark.nightly(part="jobs")
def test_a_replica_that_leaves_alone_holds_nobody_up(tmp_path):
    began = time.monotonic()
    code, lines = launched(tmp_path, "alone", tmp_path / "kept", "--max-restarts", "1")
    assert code == 1, lines
    assert time.monotonic() - began < 4 * base.TOGETHER
    assert any("has left the loop after step 4, and the others have not" in each for each in lines)
    assert any("the script ended early on rank 0" in each for each in lines)


@pytest.mark.nightly(part="jobs")
def test_a_member_of_a_live_job_may_leave_alone(tmp_path):
    code, lines = launched(tmp_path, "alone", tmp_path / "kept", "--live")
    assert code == 0, lines
    assert lines[-1].startswith("finished"), lines
    assert saved(tmp_path / "kept") == [24]
