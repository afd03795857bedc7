"""The wrapped model: waiting, refusing, scheduling, and living with what loops do."""

import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import resilin
from resilin.core.rules import Factors, PowerRule, WeakEvidenceWarning
from tests.replicas import num_replicas, replica, worlds


def data(n=64, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 5, generator=generator, dtype=dtype)
    return TensorDataset(x, (x.sum(1) > 0).long())


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def make(optimizer=torch.optim.SGD, lr=0.1, dtype=torch.float32, **kwargs):
    plain = net(dtype)
    optimizer = optimizer(plain.parameters(), lr=lr)
    return resilin.AdaptiveDataParallel(plain, optimizer, **kwargs), optimizer


def train(model, optimizer, loader, steps=None):
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if steps is not None and model.clock.steps >= steps:
            return


def plain_losses(batch_size, epochs, scheduler=None, **kwargs):
    """The same loop without resilin, on the same order of samples."""
    model, dataset = net(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = scheduler(optimizer) if scheduler else None
    order = resilin.AdaptiveDataLoader(dataset, batch_size, shuffle=True, **kwargs)
    for _ in range(epochs):
        for x, y in order:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if steps:
                steps.step()
    return [p.detach().clone() for p in model.parameters()]


def test_at_the_reference_batch_nothing_changes():
    # 64 samples in batches of 10: the last one is short, and has its full learning rate.
    expected = plain_losses(10, 3)
    model, optimizer = make(stats_every=10**6)
    loader = resilin.AdaptiveDataLoader(data(), batch_size=10, shuffle=True)
    for _ in resilin.remaining_epochs_until(3):
        train(model, optimizer, loader)
    assert model.clock.steps == 21
    assert model.progress == 21
    for parameter, other in zip(model.module.parameters(), expected, strict=True):
        assert torch.allclose(parameter, other, atol=1e-7)


@pytest.mark.parametrize("order", ["step, zero", "zero, step"])
def test_step_and_zero_grad_wait_for_the_last_micro_batch(order):
    model, optimizer = make(rule="linear")
    loader = resilin.AdaptiveDataLoader(data(), batch_size=32, max_local_bsz=8)
    before, pattern = [p.detach().clone() for p in model.parameters()], []
    for x, y in loader:
        if order == "zero, step":
            optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if order == "step, zero":
            optimizer.zero_grad()
        changed = any((a != b).any() for a, b in zip(model.parameters(), before, strict=True))
        pattern.append(changed)
        before = [p.detach().clone() for p in model.parameters()]
    assert pattern == [False, False, False, True] * 2


def test_the_classic_accumulation_example():
    # Local batch 32, trace 64, 96: accumulate, update, accumulate, accumulate, update.
    model, optimizer = make(rule="linear")
    loader = resilin.AdaptiveDataLoader(data(160), batch_size=32, max_local_bsz=32)
    loader.set_batch_size(resilin.BatchTrace.from_sizes([64, 96]))
    updates = []
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        before = model.clock.steps
        optimizer.step()
        updates.append(model.clock.steps > before)
        optimizer.zero_grad()
    assert updates == [False, True, False, False, True]


def test_factors_are_applied_and_taken_back():
    seen = []

    class Spy(torch.optim.AdamW):
        def step(self, closure=None):
            group = self.param_groups[0]
            seen.append((float(group["lr"]), group["betas"], group["eps"], group["weight_decay"]))
            return super().step(closure)

    class Doubling:
        clock, adaptive = "samples", False

        def factors(self, scaling):
            return Factors(lr=scaling.scale, beta_power=2.0, eps=0.5, weight_decay=3.0)

    for lr in (0.01, torch.tensor(0.01)):
        seen.clear()
        resilin.reset_job()
        model, optimizer = make(Spy, lr=lr, rule=Doubling())
        group = optimizer.param_groups[0]
        loader = resilin.AdaptiveDataLoader(data(), batch_size=32)
        loader.set_batch_size(64)
        train(model, optimizer, loader)
        assert seen == [(pytest.approx(0.02), (0.9**2, 0.999**2), 0.5e-8, pytest.approx(0.03))]
        own = (float(group["lr"]), group["betas"], group["eps"], group["weight_decay"])
        assert own == (pytest.approx(0.01), (0.9, 0.999), 1e-8, 0.01)
        assert model.factors[0].lr == 2


def test_weight_decay_scales_only_where_it_acts_through_the_learning_rate():
    from resilin.training.gates.factors import applied

    for kind, scaled in (
        (torch.optim.SGD, True),
        (torch.optim.AdamW, True),
        (torch.optim.Adam, False),
    ):
        optimizer = kind(net().parameters(), lr=0.1, weight_decay=0.1)
        with applied(optimizer, [Factors(weight_decay=2.0)]):
            assert optimizer.param_groups[0]["weight_decay"] == (0.2 if scaled else 0.1)
        assert optimizer.param_groups[0]["weight_decay"] == 0.1


def test_an_optimizer_that_raises_keeps_its_own_values_and_commits_nothing():
    model, optimizer = make(rule="linear")
    loader = resilin.AdaptiveDataLoader(data(), batch_size=32)
    loader.set_batch_size(64)
    optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    batches = iter(loader)
    x, y = next(batches)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert model.clock.steps == 0
    assert loader.state_dict()["cursor"] == 0


def test_a_parameter_group_that_comes_too_late_is_refused():
    model, optimizer = make(rule="linear")
    late = {"params": [torch.nn.Parameter(torch.zeros(1))]}
    with pytest.raises(ValueError, match=r"came after the optimizer .* with 1 parameter gr"):
        optimizer.add_param_group(late)
    torch.optim.Optimizer.add_param_group(optimizer, late)
    batches = iter(resilin.AdaptiveDataLoader(data(), batch_size=32))
    x, y = next(batches)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(ValueError, match=r"has 2 parameter groups, and had 1 .* add groups before"):
        optimizer.step()


def test_the_gate_can_be_taken_off():
    plain = net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    scheduler = StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu")
    own = (optimizer.step, optimizer.zero_grad, scheduler.step, scaler.step)
    model = resilin.AdaptiveDataParallel(
        plain, optimizer, scheduler, schedule_by="rule", scaler=scaler
    )
    assert optimizer.step != own[0]
    with pytest.raises(ValueError, match="the job has an AdaptiveDataParallel already"):
        resilin.AdaptiveDataParallel(net(), torch.optim.SGD(net().parameters(), lr=0.1))
    model.release()
    assert (optimizer.step, optimizer.zero_grad, scheduler.step, scaler.step) == own
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        scheduler.step()


def test_schedulers_made_before_and_after_the_model_work():
    for first in (True, False):
        resilin.reset_job()
        plain = net()
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        scheduler = StepLR(optimizer, 1) if first else None
        model = resilin.AdaptiveDataParallel(plain, optimizer, scheduler)
        scheduler = scheduler or StepLR(optimizer, 1)
        loader = resilin.AdaptiveDataLoader(data(), batch_size=16, max_local_bsz=8)
        train(model, optimizer, loader)
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
        assert model.clock.steps == 4


@pytest.mark.parametrize("by", ["samples", "progress", "rule"])
@pytest.mark.parametrize("rule", ["sqrt", "adascale"])
def test_a_clock_steps_a_per_step_scheduler(by, rule):
    plain = net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-4)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model = resilin.AdaptiveDataParallel(
        plain, optimizer, scheduler, rule=rule, schedule_by=by, stats_every=1
    )
    loader = resilin.AdaptiveDataLoader(data(), batch_size=8, max_local_bsz=4, shuffle=True)
    loader.set_batch_size(lambda clock: (3, 24, 16)[clock.steps % 3])
    per_samples = by == "samples" or (by == "rule" and rule == "sqrt")
    end = len(loader)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        clock = model.clock
        reading = clock.sample_steps if per_samples else clock.progress
        # A step may overshoot the end of an epoch, and any epoch may be the last one here.
        assert scheduler.last_epoch == int(min(reading, end) + 1e-6)
        end = (int((reading + 1e-6) / len(loader)) + 1) * len(loader)
    assert scheduler.last_epoch >= 5
    with pytest.raises(RuntimeError, match=r"stepped by the \w+ clock"):
        scheduler.step()


@pytest.mark.world_size(2)
def test_a_per_step_schedule_means_what_it_meant_at_the_reference_batch():
    expected = plain_losses(8, 3, lambda o: LambdaLR(o, lambda step: 0.9**step), seed=4)
    plain = net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 0.9**step)
    model = resilin.AdaptiveDataParallel(plain, optimizer, scheduler, schedule_by="rule")
    loader = resilin.AdaptiveDataLoader(data(), batch_size=8, shuffle=True, seed=4)
    for _ in resilin.remaining_epochs_until(3):
        train(model, optimizer, loader)
    # The peer order was dealt to two replicas as well; compare with one process on all of it.
    assert scheduler.last_epoch == 24 == model.clock.steps
    assert len(expected) == 4


def test_schedulers_that_no_clock_can_step():
    plain = net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plateau = ReduceLROnPlateau(optimizer)
    with pytest.raises(ValueError, match="follows a metric and not a clock"):
        resilin.AdaptiveDataParallel(plain, optimizer, plateau, schedule_by="rule")
    with pytest.raises(ValueError, match="needs an lr_scheduler"):
        resilin.AdaptiveDataParallel(plain, optimizer, schedule_by="samples")
    with pytest.raises(ValueError, match="must be one of user, rule"):
        resilin.AdaptiveDataParallel(plain, optimizer, plateau, schedule_by="steps")


def hooks():
    """What a model changes outside of itself: hooks of all modules and all optimizers."""
    kinds = vars(sys.modules["torch.nn.modules.module"]), vars(sys.modules[Optimizer.__module__])
    return [len(v) for kind in kinds for n, v in kind.items() if n.startswith("_global_") and v]


@pytest.mark.world_size(1)  # models of other tests may still have their hooks
def test_a_model_that_is_refused_leaves_nothing_behind():
    plain = net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    gated = resilin.accumulate(torch.optim.SGD(plain.parameters(), lr=0.1), 2)
    before = hooks()
    refused = [
        ("needs an lr_scheduler", {"schedule_by": "samples"}),
        ("stats_every", {"stats_every": 0}),
        ("is gated already", {"optimizer": gated}),
    ]
    for complaint, arguments in refused:
        with pytest.raises(ValueError, match=complaint):
            resilin.AdaptiveDataParallel(**{"model": plain, "optimizer": optimizer} | arguments)
        assert hooks() == before
    job = resilin.current_job()
    job.registry.add("scaler", optimizer)
    with pytest.raises(ValueError, match="'scaler' is registered already"):
        resilin.AdaptiveDataParallel(plain, optimizer, scaler=torch.amp.GradScaler("cpu"))
    assert hooks() == before
    # A second attempt works.
    job.registry.release("scaler")
    model = resilin.AdaptiveDataParallel(plain, optimizer)
    assert len(hooks()) > len(before)
    model.release()
    assert hooks() == before


@pytest.mark.parametrize("world", worlds(1, 2))
def test_clipping_in_the_middle_of_an_accumulation_is_refused(world):
    model, optimizer = make(rule="linear")
    loader = resilin.AdaptiveDataLoader(data(), batch_size=32, max_local_bsz=4)
    batches = iter(loader)
    x, y = next(batches)
    F.cross_entropy(model(x), y).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(RuntimeError, match="changed in the middle of an accumulation"):
        optimizer.step()


def test_a_scaler_that_nobody_mentioned_is_refused():
    model, optimizer = make(rule="linear")
    scaler = torch.amp.GradScaler("cpu")
    loader = resilin.AdaptiveDataLoader(data(), batch_size=32, max_local_bsz=8)
    batches = iter(loader)
    x, y = next(batches)
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    with pytest.raises(RuntimeError, match="pass it as scaler="):
        scaler.step(optimizer)


def test_a_disabled_scaler_is_no_matter():
    model, optimizer = make(rule="linear")
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for x, y in resilin.AdaptiveDataLoader(data(), batch_size=32, max_local_bsz=8):
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert model.clock.steps == 2


def test_clip_grad_norm_waits_and_follows_its_policy():
    model, optimizer = make(rule="adascale", stats_every=1)
    loader = resilin.AdaptiveDataLoader(data(), batch_size=8, max_local_bsz=8)
    loader.set_batch_size(32)
    norms = []
    with pytest.raises(RuntimeError, match="before the backward pass"):
        model.clip_grad_norm_(1.0)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        norms.append(model.clip_grad_norm_(1e-3, policy="invariant"))
        if norms[-1] is not None:
            total = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        optimizer.step()
        if norms[-1] is not None:
            # By the gain of this very step.
            assert float(total) == pytest.approx(1e-3 / model.gain**0.5, rel=1e-3)
        optimizer.zero_grad()
    assert [norm is None for norm in norms[:8]] == [True, True, True, False] * 2


@pytest.mark.parametrize("clips", [False, True])
def test_an_overflow_is_skipped_and_not_counted(clips):
    plain = net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model = resilin.AdaptiveDataParallel(plain, optimizer, scaler=scaler, stats_every=1)
    loader = resilin.AdaptiveDataLoader(data(), batch_size=16, max_local_bsz=8)
    before = [p.detach().clone() for p in plain.parameters()]
    for step, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y) * (float("inf") if step == 1 else 1.0)
        scaler.scale(loss).backward()
        if clips:
            scaler.unscale_(optimizer)
            model.clip_grad_norm_(1e6)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step == 1:
            assert all((a == b).all() for a, b in zip(plain.parameters(), before, strict=True))
            assert (model.clock.steps, scaler.get_scale()) == (0, 4.0)
            assert model.noise is None
            # It was measured, and there is nothing to learn from it.
            known = model._scaling.estimates.state_dict()
            assert (known["schedule"]["measured"], known["unmeasured"]) == (0, 0)
    assert model.clock.steps >= 3
    assert model.noise is not None


def test_closures():
    losses = []
    for accumulate in (False, True):
        resilin.reset_job()
        model, optimizer = make(rule="linear")
        limit = 4 if accumulate else None
        loader = resilin.AdaptiveDataLoader(data(), batch_size=16, max_local_bsz=limit)
        for x, y in loader:

            def closure(model=model, optimizer=optimizer, x=x, y=y):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            assert optimizer.step(closure).item() > 0
        losses.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*losses, strict=True))
    resilin.reset_job()
    with pytest.raises(ValueError, match=r"LBFGS.step needs a closure"):
        make(torch.optim.LBFGS, rule="constant")


def test_evaluation_goes_straight_to_the_module():
    model, optimizer = make()
    loader = resilin.AdaptiveDataLoader(data(), batch_size=16)
    test_loader = resilin.AdaptiveDataLoader(data(20), batch_size=8)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        model.eval()
        with torch.no_grad():
            # In the middle of a step, as a careless loop does.
            assert sum(len(model(x)) for x, _ in test_loader) == 20
        model.train()
        optimizer.step()
        optimizer.zero_grad()
    assert model.clock.steps == 4
    assert model.clock.samples == 64


def test_stepping_without_a_backward_pass_is_refused():
    model, optimizer = make(rule="linear")
    with pytest.raises(RuntimeError, match="without a backward pass"):
        optimizer.step()
    loader = resilin.AdaptiveDataLoader(data(), batch_size=16)
    batches = iter(loader)
    x, y = next(batches)
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward pass"):
        loss.backward()


def test_a_step_left_in_the_middle_is_dropped_with_a_warning():
    model, optimizer = make(rule="linear")
    loader = resilin.AdaptiveDataLoader(data(), batch_size=16, max_local_bsz=8)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        break
    with pytest.warns(UserWarning, match="left without optimizer.step"):
        train(model, optimizer, loader)
    assert model.clock.samples == 64


def test_a_warning_is_shown_for_each_place_in_the_script():
    model, _ = make(rule="linear")
    loader = resilin.AdaptiveDataLoader(data(), batch_size=16, max_local_bsz=8)

    def leave(loader):
        x, y = next(loader)
        F.cross_entropy(model(x), y).backward()

    batches = [iter(loader) for _ in range(4)]
    leave(batches[0])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        leave(batches[1])
        leave(batches[2])
        next(batches[3])
    assert {each.filename for each in told} == {__file__}
    assert len({each.lineno for each in told}) == len(told) == 2


def test_an_epoch_of_progress_uses_more_samples_and_ends_by_itself():
    model, optimizer = make(stats_every=1)
    loader = resilin.AdaptiveDataLoader(data(), batch_size=8, max_local_bsz=8, shuffle=True)
    loader.set_batch_size(32)
    ends = []
    for _ in resilin.remaining_epochs_until(4):
        train(model, optimizer, loader)
        ends.append(model.progress)
    for epoch, progress in enumerate(ends, start=1):
        assert 8 * epoch <= progress < 8 * epoch + 4
    assert model.clock.samples > 4 * 64
    assert model.clock.steps < 32
    assert resilin.current_job().epoch == 4


def test_dropped_tails_do_not_empty_an_epoch():
    model, optimizer = make(stats_every=10**6)
    loader = resilin.AdaptiveDataLoader(data(), batch_size=10, shuffle=True, drop_last=True)
    steps = []
    for _ in resilin.remaining_epochs_until(4):
        train(model, optimizer, loader)
        steps.append(model.clock.steps)
    assert steps == [6, 12, 18, 24]


def test_a_look_at_the_data_before_training_does_not_move_the_clock():
    plain = net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    loader = resilin.AdaptiveDataLoader(data(), batch_size=8)
    assert sum(len(x) for x, _ in loader) == 64
    model = resilin.AdaptiveDataParallel(
        plain, optimizer, scheduler, rule="linear", schedule_by="rule"
    )
    train(model, optimizer, loader)
    assert scheduler.last_epoch == 8 == model.clock.sample_steps
    # Another loader of the same job goes on counting.
    train(model, optimizer, resilin.AdaptiveDataLoader(data(), batch_size=8, fingerprint="other"))
    assert scheduler.last_epoch == 16


def test_evaluation_is_whole_and_begins_again_when_it_was_left():
    model, _ = make()
    model.eval()
    loader = resilin.AdaptiveDataLoader(data(40), batch_size=16)
    for x, _ in loader:
        assert len(x) == 16
        break
    assert [len(x) for x, _ in loader] == [16, 16, 8]


def test_settings_that_clash_are_errors():
    model, optimizer = make(batch_size=99)
    loader = resilin.AdaptiveDataLoader(data(), batch_size=16)
    with pytest.raises(ValueError, match=r"batch_size \(99\) .* \(16\), or left out"):
        train(model, optimizer, loader)
    resilin.reset_job()
    with pytest.raises(TypeError, match="unknown argument shedule_by"):
        make(shedule_by="rule")


def test_torch_compile():
    plain = net()
    compiled = torch.compile(plain, backend="eager")
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = resilin.AdaptiveDataParallel(compiled, optimizer, stats_every=1)
    loader = resilin.AdaptiveDataLoader(data(), batch_size=16, max_local_bsz=8)
    train(model, optimizer, loader)
    assert model.clock.steps == 4
    assert model.noise is not None


@pytest.mark.world_size(2)
def test_autocast_bf16():
    model, optimizer = make(stats_every=1)
    loader = resilin.AdaptiveDataLoader(data(), batch_size=16, max_local_bsz=4)
    for x, y in loader:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.clock.steps == 4
    assert model.noise.trace > 0


def test_sync_batch_norm_on_one_replica():
    plain = nn.SyncBatchNorm.convert_sync_batchnorm(
        nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = resilin.AdaptiveDataParallel(plain, optimizer)
    loader = resilin.AdaptiveDataLoader(data(), batch_size=16)
    train(model, optimizer, loader)
    assert model.clock.steps == 4


@pytest.mark.world_size(2)
def test_an_existing_ddp_script_with_a_stock_loader():
    dataset = data(62, torch.float64)
    sampler = DistributedSampler(dataset, num_replicas(), replica(), shuffle=False)
    # 31 samples each: batches of 4, and a last one of 3.
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    model, optimizer = make(batch_size=4, dtype=torch.float64, stats_every=1)
    train(model, optimizer, loader)
    assert model.clock.steps == 8
    assert model.clock.samples == 62
    assert model.scale == 6 / 4
    assert 1 <= model.gain <= 2
    model.predict_gain(4.0)


@pytest.mark.world_size(3)
def test_a_stock_loader_with_unequal_batches_is_weighted_exactly():
    dataset, sizes = data(21, torch.float64), (3, 7, 11)
    mine = slice(sum(sizes[: replica()]), sum(sizes[: replica() + 1]))
    x, y = dataset[mine]
    model, optimizer = make(batch_size=21, dtype=torch.float64)
    F.cross_entropy(model(x), y).backward()
    expected = net(torch.float64)
    F.cross_entropy(expected(dataset[:][0]), dataset[:][1]).backward()
    for a, b in zip(model.module.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-10)
    optimizer.step()
    assert model.scale == 1


def test_a_stock_loader_needs_the_reference_batch():
    model, optimizer = make()
    x, y = data()[:8]
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(ValueError, match="reference batch is not known: pass batch_size="):
        optimizer.step()
    resilin.reset_job()
    model, _ = make()
    with pytest.raises(ValueError, match="cannot be read from the model's inputs"):
        model(None)


def test_rules_by_default():
    assert make(torch.optim.SGD)[0].rule == PowerRule(1, 1)
    resilin.reset_job()
    assert make(torch.optim.AdamW)[0].rule == PowerRule(0.5, 0.5, betas=True, weight_decay=True)
    resilin.reset_job()
    with pytest.warns(WeakEvidenceWarning):
        make(torch.optim.NAdam)
    resilin.reset_job()
    with pytest.raises(ValueError, match="no default rule for optimizer 'Adadelta'"):
        make(torch.optim.Adadelta)
    make(torch.optim.Adadelta, rule="sqrt")


def test_the_state_dict_is_that_of_a_ddp_model_on_any_number_of_replicas():
    model, _ = make()
    assert list(model.state_dict()) == [f"module.{name}" for name in net().state_dict()]
