"""Schedulers in the loop count optimizer steps; under a clock they end where the run does."""

import copy
import gc
import pickle
import shutil
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as lrs
from torch.utils.data import TensorDataset

import resilin
from resilin.training.gates import scheduler as gates
from resilin.training.job import current_job

TOTAL = 12


def sequential(optimizer):
    warm = lrs.LinearLR(optimizer, 0.1, 1.0, total_iters=4)
    return lrs.SequentialLR(optimizer, [warm, lrs.CosineAnnealingLR(optimizer, TOTAL - 4)], [4])


def chained(optimizer):
    return lrs.ChainedScheduler(
        [lrs.ConstantLR(optimizer, 0.5, total_iters=3), lrs.ExponentialLR(optimizer, 0.9)]
    )


class Warmup(lrs.LRScheduler):
    """As users write them: it hands over to another scheduler when it is done."""

    def __init__(self, optimizer, after):
        self.after = after
        super().__init__(optimizer)

    def get_lr(self):
        return [base * min(1.0, (self.last_epoch + 1) / 4) for base in self.base_lrs]

    def step(self, epoch=None):
        if self.last_epoch >= 4:
            self.after.step()
        else:
            super().step()

    def state_dict(self):
        own = {k: v for k, v in vars(self).items() if k not in ("optimizer", "after")}
        return {**own, "after": self.after.state_dict()}

    def load_state_dict(self, state):
        state = dict(state)
        self.after.load_state_dict(state.pop("after"))
        vars(self).update(state)


MAKE = {
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda i: 1 / (1 + i)),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda i: 0.9),
    "StepLR": lambda o: lrs.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [3, 7], 0.5),
    "ConstantLR": lambda o: lrs.ConstantLR(o, 0.5, total_iters=5),
    "LinearLR": lambda o: lrs.LinearLR(o, 0.1, 1.0, total_iters=8),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, TOTAL, 2.0),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, TOTAL),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 5),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=TOTAL + 1),
    "SequentialLR": sequential,
    "ChainedScheduler": chained,
    "Warmup": lambda o: Warmup(o, lrs.ExponentialLR(o, 0.7)),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, factor=0.5, patience=1),
}


def test_every_scheduler_of_torch_is_here():
    kinds = [k for k in vars(lrs).values() if isinstance(k, type)]
    made = {k.__name__ for k in kinds if issubclass(k, lrs.LRScheduler)}
    assert made - {"LRScheduler", "_LRScheduler"} <= set(MAKE)


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True))


def parts():
    torch.manual_seed(0)
    net = nn.Linear(4, 1, dtype=torch.float64)
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)


def tell(scheduler, step):
    """A step of the scheduler; one that follows a metric is given one by step."""
    if isinstance(scheduler, lrs.ReduceLROnPlateau):
        scheduler.step((3.0, 2.0, 2.5, 2.5, 2.5, 1.0)[step % 6])
    else:
        scheduler.step()


def rates(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


def plain(*names, order="after"):
    """Learning rates of the steps of a plain loop, and where its schedulers end."""
    net, optimizer = parts()
    schedulers = [MAKE[name](optimizer) for name in names]
    told = []
    x, y = data().tensors
    for step in range(TOTAL):
        F.mse_loss(net(x[step * 8 : step * 8 + 8]), y[step * 8 : step * 8 + 8]).backward()
        if order == "before":
            for scheduler in schedulers:
                tell(scheduler, step)
        told.append(rates(optimizer))
        optimizer.step()
        if order == "after":
            for scheduler in schedulers:
                tell(scheduler, step)
        optimizer.zero_grad()
    return told, net.weight.detach(), [s.state_dict() for s in schedulers]


def elastic(*names, made="before", order="after", local=None, batch_size=8):
    """The same in a loop of resilin, whose body does not look at what a step is."""
    net, optimizer = parts()
    schedulers = [MAKE[name](optimizer) for name in names] if made == "before" else []
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="constant")
    if made == "after":
        schedulers = [MAKE[name](optimizer) for name in names]
    loader = resilin.AdaptiveDataLoader(data(), batch_size=batch_size, max_local_bsz=local)
    told = []
    for x, y in loader:
        if order == "first":
            for scheduler in schedulers:
                tell(scheduler, model.clock.steps)
        F.mse_loss(model(x), y).backward()
        step = model.clock.steps
        if order == "before":
            for scheduler in schedulers:
                tell(scheduler, step)
        rate = rates(optimizer)
        optimizer.step()
        if model.clock.steps > step:
            told.append(rate)
        if order == "after":
            for scheduler in schedulers:
                tell(scheduler, step)
        optimizer.zero_grad()
    return told, net.weight.detach(), [s.state_dict() for s in schedulers], model


def simple(state):
    """What of a state can be compared: no functions."""
    if isinstance(state, dict):
        return {k: simple(v) for k, v in state.items() if not callable(v) and k != "_scale_fn_ref"}
    if isinstance(state, list):
        return [simple(value) for value in state]
    return state


WORLDS = [pytest.param(1), pytest.param(2, marks=pytest.mark.world_size(2))]


@pytest.mark.parametrize("world", WORLDS)
def test_every_scheduler_in_the_loop_steps_once_per_optimizer_step(world):
    for name in MAKE:
        rate, weight, (state,) = plain(name)
        for made, local in (("before", 1 if world == 2 else 2), ("after", None)):
            resilin.reset_job()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                told, got, (kept,), model = elastic(name, made=made, local=local)
            case = (name, made, local)
            assert model.clock.steps == TOTAL, case
            assert told == rate, case
            assert simple(kept) == simple(state), case
            torch.testing.assert_close(got, weight, rtol=1e-12, atol=1e-14, msg=str(case))


def test_two_schedulers_of_one_optimizer_both_count_its_steps():
    rate, weight, states = plain("ExponentialLR", "StepLR")
    told, got, kept, _ = elastic("ExponentialLR", "StepLR", local=2)
    assert told == rate
    assert simple(kept) == simple(states)
    torch.testing.assert_close(got, weight)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("local", [None, 2])
def test_a_scheduler_that_is_stepped_before_the_optimizer(local):
    rate, _, (state,) = plain("ExponentialLR", order="before")
    told, _, (kept,), _ = elastic("ExponentialLR", order="before", local=local)
    assert told == rate
    assert simple(kept) == simple(state)
    resilin.reset_job()
    told, _, (kept,), _ = elastic("ExponentialLR", order="first", local=local)
    assert told == rate
    assert simple(kept) == simple(state)


def test_a_call_for_any_micro_batch_counts_once_its_step_is_complete():
    net, optimizer = parts()
    scheduler = lrs.StepLR(optimizer, 1, 0.5)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="constant")
    loader = resilin.AdaptiveDataLoader(data(), batch_size=8, max_local_bsz=2)
    told = []
    for number, (x, y) in enumerate(loader):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        if number in (4, 5, 14, 15):  # the second step, twice, and the fourth
            scheduler.step()
        told.append((model.clock.steps, scheduler.last_epoch))
        optimizer.zero_grad()
    assert dict(told[3::4]) == {1: 0, 2: 0, 3: 1, 4: 2, **dict.fromkeys(range(5, 13), 2)}
    assert told[8] == (2, 1)  # when the body of the second step was over


def test_outside_the_loop_it_steps_as_always():
    net, optimizer = parts()
    scheduler = lrs.StepLR(optimizer, 1, 0.5)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="constant")
    loader = resilin.AdaptiveDataLoader(data(), batch_size=8, max_local_bsz=2)
    for epoch in range(2):
        for number, (x, y) in enumerate(loader):
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if epoch and number == 5:
                break  # in the middle of a step
        scheduler.step()
        assert scheduler.last_epoch == epoch + 1


def test_a_step_that_a_scaler_skips_counts_as_in_plain_pytorch():
    net, optimizer = parts()
    scheduler = lrs.ExponentialLR(optimizer, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="constant", scaler=scaler)
    loader = resilin.AdaptiveDataLoader(data(), batch_size=8, max_local_bsz=4)
    for number, (x, y) in enumerate(loader):
        loss = F.mse_loss(model(x), y)
        scaler.scale(loss * (float("inf") if number == 7 else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
    assert model.clock.steps == TOTAL - 1
    assert scheduler.last_epoch == TOTAL


def test_other_optimizers_keep_their_schedulers():
    net, optimizer = parts()
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    theirs = [lrs.StepLR(other, 1)]
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="constant")
    theirs.append(lrs.StepLR(other, 1))
    loader = resilin.AdaptiveDataLoader(data(), batch_size=8, max_local_bsz=2)
    for x, y in loader:
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        other.step()
        for scheduler in theirs:
            assert type(scheduler) is lrs.StepLR
            scheduler.step()
    assert [s.last_epoch for s in theirs] == [4 * TOTAL] * 2


@pytest.mark.world_size(1)  # models of other tests may still have their gates
@pytest.mark.filterwarnings(
    "ignore:Seems like `optimizer.step:UserWarning"
)  # of torch's own copies
def test_nothing_of_the_gate_is_in_states_and_copies():
    for handed in (True, False):
        resilin.reset_job()
        net, optimizer = parts()
        scheduler = sequential(optimizer)
        before = set(scheduler.state_dict())
        model = resilin.AdaptiveDataParallel(
            net, optimizer, scheduler, schedule_by="samples" if handed else "user"
        )
        assert isinstance(scheduler, lrs.SequentialLR)
        assert type(scheduler).__name__ == "SequentialLR"
        assert set(scheduler.state_dict()) == before
        assert {"step", "state_dict"}.isdisjoint(vars(scheduler))
        torch.save(scheduler.state_dict(), "/dev/null")
        for twin in (copy.deepcopy(scheduler), pickle.loads(pickle.dumps(scheduler))):
            assert type(twin) is lrs.SequentialLR
            assert type(twin._schedulers[0]) is lrs.LinearLR
            twin.optimizer.step()
            twin.step()
            assert twin.last_epoch == 1
        assert scheduler.last_epoch == 0
        scheduler.load_state_dict(scheduler.state_dict())
        model.release()
        assert type(scheduler) is lrs.SequentialLR
        assert [type(s) for s in scheduler._schedulers] == [lrs.LinearLR, lrs.CosineAnnealingLR]
        assert "optimizer" not in vars(lrs.LRScheduler)
        optimizer.step()
        scheduler.step()
        assert scheduler.last_epoch == 1


def test_a_scheduler_that_was_made_under_the_gate_works_without_it():
    net, optimizer = parts()
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="constant")
    scheduler = lrs.StepLR(optimizer, 1)
    model.release()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        F.mse_loss(net(data().tensors[0]), data().tensors[1]).backward()
        optimizer.step()
        scheduler.step()
    assert scheduler.last_epoch == 1


def assert_waits_for_four(net, optimizer, scheduler):
    """The scheduler counts one step for four micro-batches."""
    x, y = data().tensors
    for _ in range(12):
        F.mse_loss(net(x), y).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert scheduler.last_epoch == 3


@pytest.mark.world_size(1)  # models of other tests may still have their gates
def test_accumulate_makes_schedulers_wait_too():
    for made in ("before", "after"):
        net, optimizer = parts()
        scheduler = lrs.StepLR(optimizer, 1) if made == "before" else None
        resilin.accumulate(optimizer, 4)
        scheduler = scheduler or lrs.StepLR(optimizer, 1)
        assert_waits_for_four(net, optimizer, scheduler)
        resilin.accumulate(optimizer, 1)
        assert type(scheduler) is lrs.StepLR
    assert "optimizer" not in vars(lrs.LRScheduler)


@pytest.mark.world_size(1)  # it changes what the collector knows
def test_a_scheduler_that_was_frozen_is_found():
    net, optimizer = parts()
    scheduler = lrs.StepLR(optimizer, 1)
    plateau = lrs.ReduceLROnPlateau(optimizer)
    gc.freeze()
    frozen = gc.get_freeze_count()
    resilin.accumulate(optimizer, 4)
    assert gc.get_freeze_count() > 0.9 * frozen  # the script wants them frozen
    assert_waits_for_four(net, optimizer, scheduler)
    gc.freeze()
    # One that was found hides others: they wait from when they show up.
    resilin.accumulate(optimizer, 1)
    later = lrs.StepLR(optimizer, 1)
    resilin.accumulate(optimizer, 4)
    optimizer.step()
    for hidden in (scheduler, plateau):
        with pytest.raises(RuntimeError, match="would count micro-batches and not steps"):
            hidden.step(*[1.0] * (hidden is plateau))
    F.mse_loss(net(data().tensors[0]), data().tensors[1]).backward()
    for _ in range(3):
        optimizer.step()
    assert scheduler.optimizer is plateau.optimizer is optimizer
    scheduler.last_epoch = 0
    assert_waits_for_four(net, optimizer, scheduler)
    assert_waits_for_four(net, optimizer, later)


def test_a_scheduler_that_nobody_holds_is_let_go():
    net, optimizer = parts()
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="constant")
    lrs.StepLR(optimizer, 1)
    gc.collect()
    assert gates.schedulers_of(optimizer) == []
    assert model._steps.gates[0].schedulers.outermost() == {}
    assert list(model._steps.gates[0].schedulers.outermost()) == []
    kept = lrs.StepLR(optimizer, 1)
    # As in a rerun of the script.
    assert model._steps.gates[0].schedulers.outermost() == {"StepLR/1": kept}


# Under a clock ---------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("make", ["OneCycleLR", "SequentialLR"])
def test_a_schedule_of_n_steps_ends_with_the_run(make, known):
    overshot = 0
    for seed in range(4):
        resilin.reset_job()
        torch.manual_seed(seed)
        set_ = TensorDataset(torch.randn(80, 5), torch.randn(80, 1))
        net = nn.Linear(5, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        loader = resilin.AdaptiveDataLoader(set_, batch_size=8, shuffle=True)
        total = 3 * len(loader)
        if make == "OneCycleLR":
            scheduler = lrs.OneCycleLR(optimizer, 0.1, total_steps=total + 1)
        else:
            warm = lrs.LinearLR(optimizer, 0.1, 1, total_iters=5)
            cosine = lrs.CosineAnnealingLR(optimizer, total - 5)
            scheduler = lrs.SequentialLR(optimizer, [warm, cosine], [5])
        model = resilin.AdaptiveDataParallel(
            net, optimizer, scheduler, schedule_by="rule", stats_every=1
        )
        loader.set_batch_size(48)
        for epoch in resilin.remaining_epochs_until(3) if known else range(3):
            for x, y in loader:
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            if not known:
                # Any epoch may be the last one.
                assert scheduler.last_epoch == (epoch + 1) * len(loader)
        assert scheduler.last_epoch == total
        assert scheduler.get_last_lr()[0] < 1e-6
        overshot += model.progress >= total + 1
    assert overshot


def test_a_run_that_is_made_longer_gets_the_steps_it_had_overshot():
    torch.manual_seed(0)
    net, optimizer = parts()
    scheduler = lrs.StepLR(optimizer, 1000)
    model = resilin.AdaptiveDataParallel(
        net, optimizer, scheduler, rule="adascale", schedule_by="rule", stats_every=1
    )
    loader = resilin.AdaptiveDataLoader(data(), batch_size=8, shuffle=True)
    loader.set_batch_size(56)

    def train(epochs):
        for _ in resilin.remaining_epochs_until(epochs):
            for x, y in loader:
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

    train(1)
    assert scheduler.last_epoch == 12
    assert model.progress > 13
    state = model._steps.schedulers[0].state_dict()
    train(2)
    assert scheduler.last_epoch == 24
    # The same after a restart in between, when the count is all that is left of the overshoot.
    model._steps.schedulers[0].load_state_dict(state)
    assert scheduler.last_epoch == 12
    assert model._steps.schedulers[0]._made == 12


def test_a_clock_and_the_loop_cannot_both_step_it():
    net, optimizer = parts()
    scheduler = sequential(optimizer)
    model = resilin.AdaptiveDataParallel(
        net, optimizer, scheduler, rule="constant", schedule_by="rule"
    )
    loader = resilin.AdaptiveDataLoader(data(), batch_size=8, max_local_bsz=2)
    for x, y in loader:
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="stepped by the samples clock"):
            scheduler.step()
        optimizer.zero_grad()
    assert scheduler.last_epoch == TOTAL


# Across restarts -------------------------------------------------------------------------------


@pytest.mark.parametrize("made", ["before", "after", "late"])
def test_schedulers_that_nobody_handed_over_survive_a_restart(tmp_path, made):
    def script(steps):
        """A life of the job that ends after so many of its steps."""
        resilin.reset_job()
        resilin.checkpoint_to(tmp_path, every=None)
        net, optimizer = parts()

        def make():
            names = ("SequentialLR", "MultiplicativeLR", "StepLR", "CosineAnnealingLR")
            return [*(MAKE[name](optimizer) for name in names), lrs.StepLR(optimizer, 2, 0.9)]

        schedulers = make() if made == "before" else []
        model = resilin.AdaptiveDataParallel(net, optimizer, rule="constant")
        loader = resilin.AdaptiveDataLoader(data(), batch_size=8, max_local_bsz=2, shuffle=True)
        if made == "late":
            resilin.resume()
        schedulers = schedulers or make()
        for _ in resilin.remaining_epochs_until(1):
            for x, y in loader:
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                for scheduler in schedulers:
                    scheduler.step()
                optimizer.zero_grad()
                if model.clock.steps == steps:
                    break
            if model.clock.steps == steps < TOTAL:
                current_job().recovery.finish()
                break
        return rates(optimizer), [s.state_dict() for s in schedulers], net.weight.detach()

    whole = script(TOTAL)
    shutil.rmtree(tmp_path)
    for steps in (5, 9):
        script(steps)
    rate, states, weight = script(TOTAL)
    assert rate == whole[0]
    assert simple(states) == simple(whole[1])
    assert torch.equal(weight, whole[2])
