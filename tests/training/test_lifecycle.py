"""A step that fails moves nothing and is issued again; the run is the one without the failure."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import resilin
from resilin.training import step_timer
from tests.replicas import gathered

ROWS, BATCH = 48, 8


class Failing:
    """Makes `all_committed` of the engine answer False in the given calls, counted from 0."""

    def __init__(self, *calls):
        self.calls, self.asked = calls, 0
        self.engine = resilin.current_job().engine
        self.own = self.engine.all_committed

    def __enter__(self):
        self.engine.all_committed = self.answer
        return self

    def __exit__(self, *_):
        self.engine.all_committed = self.own

    def answer(self):
        self.asked += 1
        return self.asked - 1 not in self.calls


class Run:
    """A loop with a scheduler, a clocked or a stepped one, and what it has seen."""

    def __init__(self, *, scaler=False, clip=False, schedule_by="user", batch=2 * BATCH, **loader):
        resilin.reset_job()
        torch.manual_seed(0)
        net = nn.Linear(3, 1)
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaler else None
        self.model = resilin.AdaptiveDataParallel(
            net,
            self.optimizer,
            self.scheduler,
            schedule_by=schedule_by,
            scaler=self.scaler,
            rule="adascale",
            stats_every=1,
        )
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(ROWS, 3, generator=generator)
        data = TensorDataset(torch.arange(ROWS), x, x.sum(1, keepdim=True))
        self.loader = resilin.AdaptiveDataLoader(
            data, batch_size=BATCH, shuffle=True, seed=3, **loader
        )
        self.loader.set_batch_size(batch)
        self.clip, self.by_user = clip, schedule_by == "user"
        self.seen, self.steps, self.events = [], [], []
        resilin.listen(self.events.append)

    def body(self, batch):
        rows, x, y = batch
        loss = nn.functional.mse_loss(self.model(x), y)
        self.seen.append(rows.tolist())
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.scaler is None:
            if self.clip:
                self.model.clip_grad_norm_(0.5)
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        if self.by_user:
            self.scheduler.step()
        self.steps.append(self.model.clock.steps)

    def train(self, epochs=2):
        for _ in resilin.remaining_epochs_until(epochs):
            for batch in self.loader:
                self.body(batch)
        return self

    @property
    def result(self):
        """All that a failure must not change."""
        job = resilin.current_job()
        return (
            [p.tolist() for p in self.model.parameters()],
            job.clock,
            self.model.noise,
            self.loader.state_dict(),
            self.scheduler.state_dict(),
            None if self.scaler is None else self.scaler.state_dict(),
            self.model._scaling.estimates.schedule._measured,
        )


def used(run):
    """The rows of the micro-batches, without those of steps that failed."""
    before, rows = 0, []
    for step, seen in zip(run.steps, run.seen, strict=True):
        if step > before:
            rows += seen
        before = step
    return rows


SETTINGS = [
    {},
    {"clip": True},
    {"scaler": True},
    {"schedule_by": "progress"},
    {"num_workers": 1},
    {"batch": BATCH},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_failed_step_is_issued_again_and_the_run_is_the_one_without_it(settings):
    whole = Run(**settings).train()
    result, seen = whole.result, whole.seen
    again = Run(**settings)
    with Failing(1, 4, 5) as engine:
        again.train()
    assert again.result == result
    assert engine.asked == again.model.clock.steps + 3
    # The failed attempts are seen twice, each time with the same samples.
    assert [rows for rows in again.seen if rows not in seen] == []
    assert len(again.seen) > len(seen)
    told = [event.step for event in again.events if type(event).__name__ == "StepEvent"]
    assert told == sorted(set(told))


def test_a_failed_step_moves_nothing():
    run = Run(max_local_bsz=BATCH)
    loader = iter(run.loader)
    batch = next(loader)
    before = run.result
    with Failing(0):
        run.body(batch)
        run.body(next(loader))
    assert run.result == before
    assert run.loader.state_dict()["cursor"] == 0
    first = run.seen[:]
    run.seen.clear()
    for _ in range(2):
        run.body(next(loader))
    assert run.seen == first
    assert run.model.clock.steps == 1
    assert run.loader.state_dict()["cursor"] == 2 * BATCH


@pytest.mark.world_size(2)
def test_replicas_issue_a_failed_step_again_together():
    whole = Run().train()
    result, rows = whole.result, gathered(used(whole))
    run = Run()
    with Failing(2):
        run.train()
    assert run.result == result
    assert gathered(used(run)) == rows


def test_of_zipped_loaders_one_begins_the_step(monkeypatch, every_step_told):
    """A step that began twice would last no time at all, and to measure would cost too much."""
    run = Run(batch=BATCH)
    other = resilin.AdaptiveDataLoader(run.loader.dataset, batch_size=BATCH, fingerprint="other")
    now = 0.0
    monkeypatch.setattr(step_timer, "time", SimpleNamespace(perf_counter=lambda: now))
    for batch, _ in zip(run.loader, other, strict=False):
        run.body(batch)
        resilin.record(loss=1.0)
        now += 1.0  # a step that is measured has two micro-batches
        assert run.model.job.timer.usual in (2.0, float("inf"))
    told = [event for event in run.events if type(event).__name__ == "StepEvent"]
    # What is recorded belongs to the step.
    assert [(event.seconds, event.loss) for event in told] == [(2.0, 1.0)] * (ROWS // BATCH)


def test_loaders_that_are_zipped_issue_their_parts_of_a_failed_step_again():
    def train(*calls):
        run = Run()
        other = resilin.AdaptiveDataLoader(
            TensorDataset(torch.arange(ROWS)), batch_size=BATCH, seed=5, fingerprint="other"
        )
        other.set_batch_size(2 * BATCH)
        pairs = []
        with Failing(*calls):
            for _ in resilin.remaining_epochs_until(1):
                for batch, (more,) in zip(run.loader, other, strict=True):
                    before = run.model.clock.steps
                    run.body(batch)
                    if run.model.clock.steps > before:
                        pairs.append((batch[0].tolist(), more.tolist()))
        return pairs, run.result, other.state_dict()

    assert train(1) == train()


def test_a_batch_of_an_outer_loop_is_used_once_a_later_step_was_committed():
    def train(*calls):
        run = Run()
        outer = resilin.AdaptiveDataLoader(
            TensorDataset(torch.arange(4)), batch_size=2, seed=5, fingerprint="outer"
        )
        seen = []
        with Failing(*calls):
            for (rows,) in outer:
                seen.append(rows.tolist())
                for batch in run.loader:
                    run.body(batch)
        return seen, run.result

    assert train(0, 2) == train()


def test_a_failed_step_of_another_loader_is_lost(caplog):
    run = Run(batch=BATCH)
    data = torch.utils.data.DataLoader(run.loader.dataset, batch_size=BATCH)
    resilin.current_job().timeline.reference = None
    model = run.model
    model._scaling.reference._batch_size = BATCH
    with Failing(0):
        for batch in data:
            run.body(batch)
    assert model.clock.steps == ROWS // BATCH - 1
    assert "cannot issue its samples again" in caplog.text
