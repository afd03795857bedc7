"""What a job tells of itself: which events, when, and at what cost."""

import logging
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import resilin
from resilin.core.events import (
    CheckpointEvent,
    EpochEvent,
    FaultEvent,
    MetricsEvent,
    RescaleEvent,
    StartEvent,
    StepEvent,
)
from resilin.telemetry.read import read_events
from resilin.training.report import recorder

NUM = 48


def make(*, batch_size=8, rule="constant", lr=0.1, **loader_kwargs):
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(NUM, 3), torch.randn(NUM, 1))
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule=rule)
    loader = resilin.AdaptiveDataLoader(dataset, batch_size=batch_size, **loader_kwargs)
    return model, optimizer, loader


def train(model, optimizer, loader, epochs=1, each=lambda loss: None):
    for _ in resilin.remaining_epochs_until(epochs):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            each(loss)


@pytest.fixture
def told(every_step_told):
    """All events of the job, as a listener hears them."""
    heard = []
    resilin.listen(heard.append)
    return heard


def of(kind, events):
    return [event for event in events if type(event) is kind]


def test_a_run_is_told_from_its_start_to_its_epochs(told):
    model, optimizer, loader = make(batch_size=8, max_local_bsz=6, rule="linear")
    loader.set_batch_size(lambda clock: 8 if clock.steps < 3 else 24)
    train(model, optimizer, loader)
    resilin.reset_job()
    (start,) = of(StartEvent, told)
    assert (start.reference, start.replicas, start.total_steps) == (8, 1, 6.0)
    assert start.optimizer == "SGD"
    assert not start.resumed
    steps = of(StepEvent, told)
    assert [step.step for step in steps] == [1, 2, 3, 4]
    assert [step.batch_size for step in steps] == [8, 8, 8, 24]
    assert [step.local_bsz for step in steps] == [4, 4, 4, 6]
    assert [step.accumulation_steps for step in steps] == [2, 2, 2, 4]
    assert [step.samples for step in steps] == [8, 16, 24, 48]
    assert [step.lr_factor for step in steps] == [1, 1, 1, 3]
    assert {step.lr for step in steps} == {0.1}
    assert all(step.seconds > 0 for step in steps)
    (epoch,) = of(EpochEvent, told)
    assert (epoch.epoch, epoch.samples, epoch.step) == (0, 48, 4)
    assert told.index(start) == 0
    assert not of(RescaleEvent, told)


def test_the_learning_rate_told_is_the_one_of_the_step(told):
    model, optimizer, loader = make()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(model, optimizer, loader, each=lambda loss: scheduler.step())
    assert [step.lr for step in of(StepEvent, told)] == [0.1 * 0.5**i for i in range(6)]


def test_what_a_step_records_is_the_mean_over_its_micro_batches(told):
    model, optimizer, loader = make(batch_size=12, max_local_bsz=8, lr=0.0)
    x, y = loader.dataset.tensors
    train(
        model, optimizer, loader, each=lambda loss: resilin.record({"a/b": 2}, loss=loss.detach())
    )
    expected = [
        nn.functional.mse_loss(model(x[i : i + 12]), y[i : i + 12]).item()
        for i in range(0, NUM, 12)
    ]
    steps = of(StepEvent, told)
    assert [step.loss for step in steps] == pytest.approx(expected, rel=1e-5)
    assert [dict(step.metrics) for step in steps] == [{"a/b": 2.0}] * 4
    assert not of(MetricsEvent, told)


def test_what_is_recorded_between_steps_is_an_event_of_its_own(told):
    model, optimizer, loader = make()
    with pytest.raises(ValueError, match=r"before the job had started: call resilin\.resume"):
        resilin.record(accuracy=0.5)
    resilin.resume()
    resilin.record(accuracy=0.25)
    train(model, optimizer, loader)
    resilin.record(accuracy=torch.tensor(0.5))
    events = of(MetricsEvent, told)
    assert [(event.step, dict(event.values)) for event in events] == [
        (0, {"accuracy": 0.25}),
        (6, {"accuracy": 0.5}),
    ]


def test_an_evaluation_in_the_loop_is_no_part_of_the_step(told):
    model, optimizer, loader = make()

    def evaluate(loss):
        model.eval()
        resilin.record(accuracy=1.0)
        model.train()

    train(model, optimizer, loader, each=evaluate)
    assert [event.step for event in of(MetricsEvent, told)] == [1, 2, 3, 4, 5, 6]
    assert not any(step.metrics for step in of(StepEvent, told))


@pytest.mark.parametrize("value", [torch.zeros(2), "high", None, [1.0, 2.0]])
def test_only_single_numbers_are_recorded(value):
    resilin.resume()
    with pytest.raises(ValueError, match=r"loss .* must be one number"):
        resilin.record(loss=value)


def test_a_stock_loader_is_told_of_too(told):
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="constant", batch_size=4)
    for _ in range(3):
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        resilin.record(loss=1.5)
    resilin.reset_job()  # the last step is over when the job is
    steps = of(StepEvent, told)
    assert [(step.step, step.batch_size, step.loss) for step in steps] == [
        (1, 4, 1.5),
        (2, 4, 1.5),
        (3, 4, 1.5),
    ]
    assert of(StartEvent, told)[0].reference == 4


def test_telling_keeps_to_its_share_however_slow_a_listener_is():
    model, optimizer, loader = make(batch_size=1)
    told = []
    resilin.listen(told.append)
    resilin.listen(lambda event: time.sleep(0.02))
    train(model, optimizer, loader, epochs=4)
    steps = of(StepEvent, told)
    # 192 steps, of which the allowance pays for about five.
    assert 1 <= len(steps) <= 2 + recorder.ALLOWANCE / 0.02
    assert resilin.current_job().clock.steps == 4 * NUM


def test_a_listener_that_fails_is_told_no_more_and_training_goes_on(told, caplog):
    model, optimizer, loader = make()
    calls = []

    def broken(event):
        calls.append(event)
        raise OSError("the server is gone")

    resilin.listen(broken)
    with caplog.at_level(logging.ERROR, logger="resilin"):
        train(model, optimizer, loader)
    assert len(calls) == 1
    assert len(of(StepEvent, told)) == 6
    assert "the server is gone" in caplog.text
    assert "receives no more events" in caplog.text
    with pytest.raises(ValueError, match="must be a function"):
        resilin.listen("tensorboard")


def test_events_are_written_where_the_script_says(tmp_path, monkeypatch):
    monkeypatch.delenv("RESILIN_RUN_DIR")
    model, optimizer, loader = make()
    resilin.events_to(tmp_path / "run")
    train(model, optimizer, loader)
    with pytest.raises(ValueError, match="after the job had started"):
        resilin.events_to(tmp_path)
    resilin.reset_job()
    events = list(read_events(tmp_path / "run"))
    assert [type(event).__name__ for event in events] == [
        "StartEvent",
        *["StepEvent"] * 6,
        "EpochEvent",
    ]


def test_arguments_of_the_script_are_not_told(told, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--token", "secret"])
    train(*make())
    (started,) = of(StartEvent, told)
    assert started.script == "train.py"


def test_the_launcher_goes_before_the_script(tmp_path, monkeypatch):
    monkeypatch.setenv("RESILIN_RUN_DIR", str(tmp_path / "launcher"))
    model, optimizer, loader = make()
    resilin.events_to(tmp_path / "script")
    train(model, optimizer, loader)
    resilin.reset_job()
    assert not (tmp_path / "script").exists()
    assert len(of(StepEvent, read_events(tmp_path / "launcher"))) == 6


def test_a_job_with_local_checkpoints_writes_beside_them(tmp_path, monkeypatch):
    monkeypatch.delenv("RESILIN_RUN_DIR")
    model, optimizer, loader = make()
    resilin.checkpoint_to(tmp_path, every=2)
    train(model, optimizer, loader)
    resilin.reset_job()
    events = list(read_events(tmp_path / "events"))
    saved = of(CheckpointEvent, events)
    assert saved[-1].step == 6
    assert all(event.action == "saved" and event.num_bytes > 0 for event in saved)
    # The next process resumes there, and reports it.
    model, optimizer, loader = make()
    resilin.checkpoint_to(tmp_path)
    train(model, optimizer, loader, epochs=2)
    resilin.reset_job()
    events = list(read_events(tmp_path / "events"))
    (rescale,) = of(RescaleEvent, events)
    assert (rescale.step, rescale.generation) == (6, 1)
    assert (rescale.replicas_before, rescale.replicas) == (1, 1)
    assert rescale.reason == "resumed at step 6 (checkpoint)"
    assert rescale.seconds > 0
    assert [start.resumed for start in of(StartEvent, events)] == [False, True]
    assert [step.step for step in of(StepEvent, events)] == list(range(1, 13))


def test_without_a_place_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv("RESILIN_RUN_DIR")
    monkeypatch.chdir(tmp_path)
    train(*make())
    resilin.reset_job()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.world_size(2)
def test_replica_0_tells_and_others_tell_of_their_own_faults(
    shared_path, monkeypatch, every_step_told
):
    monkeypatch.setenv("RESILIN_RUN_DIR", str(shared_path))
    told = []
    resilin.listen(told.append)
    model, optimizer, loader = make(batch_size=12)
    failed = []

    def fail_once(loss):
        if dist.get_rank() == 1 and not failed:
            failed.append(True)
            raise torch.OutOfMemoryError("full")

    for _ in resilin.remaining_epochs_until(1):
        for x, y in loader:
            with loader.retry_smaller():
                loss = nn.functional.mse_loss(model(x), y)
                fail_once(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    resilin.reset_job()
    dist.barrier()
    events = list(read_events(shared_path))
    assert [step.step for step in of(StepEvent, events)] == [1, 2, 3, 4]
    assert {step.replicas for step in of(StepEvent, events)} == {2}
    (fault,) = of(FaultEvent, events)
    assert (fault.kind, fault.replica) == ("out_of_memory", 1)
    assert {type(event) for event in told} == (
        {FaultEvent} if dist.get_rank() else {StartEvent, StepEvent, EpochEvent}
    )


class Writer:
    """What to_tensorboard needs of a SummaryWriter; the sinks are tested with the real one."""

    def __init__(self):
        self.scalars = {}

    def add_scalar(self, tag, scalar_value, global_step=None, walltime=None):
        self.scalars[tag, global_step] = scalar_value

    def add_text(self, *args, **kwargs):
        raise AssertionError("numbers only")


def test_model_and_loader_write_to_tensorboard_when_asked():
    model, optimizer, loader = make(batch_size=8, max_local_bsz=6, rule="linear")
    loader.set_batch_size(16)
    writer = Writer()

    def write(loss):
        if model.clock.steps == 2:
            model.to_tensorboard(writer, 2)
            loader.to_tensorboard(writer, 2, prefix="data/")

    train(model, optimizer, loader, each=write)
    # A linear rule needs no noise, so none was measured.
    assert writer.scalars == {
        ("resilin/gain", 2): 1.0,
        ("resilin/scale", 2): 2.0,
        ("resilin/progress", 2): 2.0,
        ("resilin/lr_factor", 2): 2.0,
        ("data/batch_size", 2): 16,
        ("data/local_bsz", 2): 6,
        ("data/accumulation_steps", 2): 3,
        ("data/replicas", 2): 1,
    }


@pytest.mark.world_size(1)
def test_a_tensor_of_a_device_is_told_when_the_device_has_passed_it(counted, told):
    counted.set_lag(2)  # asked once per step: a report comes two steps after its step
    model, optimizer, loader = make()
    steps, before = [], []

    def each(loss):
        steps.append(model.clock.steps)
        before.append(len(of(StepEvent, told)))
        resilin.record(loss=torch.full((), float(model.clock.steps), device=counted.device))

    train(model, optimizer, loader, each=each)
    assert before[:4] == [0, 0, 0, 1]
    resilin.reset_job()  # reports the rest, for which it may wait
    events = of(StepEvent, told)
    assert [event.step for event in events] == steps
    assert [event.loss for event in events] == [float(step) for step in steps]
    assert counted.told("read") == []


@pytest.mark.world_size(1)
def test_a_flush_waits_for_no_device(counted, told):
    counted.set_lag(
        1000
    )  # as one that hangs in a reduction: the log is flushed by a watching thread
    model, optimizer, loader = make()
    waited = []

    def each(loss):
        resilin.record(loss=torch.ones((), device=counted.device))
        model.job.recorder.flush()
        waited.append(len(counted.told("wait")) + len(counted.told("read")))

    train(model, optimizer, loader, each=each)
    assert len(waited) > 1
    assert not any(waited)
