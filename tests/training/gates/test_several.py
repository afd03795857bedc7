"""Several optimizers that step on one backward pass make one step."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

import resilin
from resilin.training.bridge.carried import CarriedState
from tests.replicas import assert_identical
from tests.training.test_lifecycle import Failing

ROWS, BATCH, EPOCHS = 50, 8, 3


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True).tanh())


class Parts:
    """A net, an optimizer for its matrices and one for the rest, and a scheduler for each."""

    def __init__(self):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
        matrices = [p for p in self.net.parameters() if p.dim() == 2]
        rest = [p for p in self.net.parameters() if p.dim() < 2]
        self.first = torch.optim.SGD(
            [{"params": matrices[:1]}, {"params": matrices[1:], "lr": 0.03}],
            lr=0.05,
            momentum=0.9,
            weight_decay=0.01,
        )
        self.second = torch.optim.AdamW(rest, lr=0.02, weight_decay=0.1)
        self.both = [self.first, self.second]
        self.schedulers = [
            LambdaLR(self.first, lambda step: 1 / (1 + step)),
            LambdaLR(self.second, lambda step: 0.9**step),
        ]

    def wrap(self, given=None, **kwargs):
        resilin.reset_job()
        kwargs = {"rule": "constant", **kwargs}
        optimizers = self.both if given is None else given
        self.model = resilin.AdaptiveDataParallel(self.net, optimizers, self.schedulers, **kwargs)
        return self.model

    def parameters(self):
        return [p.detach().clone() for p in self.net.parameters()]


def together(p):
    for optimizer in p.both:
        optimizer.step()
    for optimizer in p.both:
        optimizer.zero_grad()


def interleaved(p):
    for optimizer in reversed(p.both):
        optimizer.step()
        optimizer.zero_grad()


def by_model(p):
    p.second.step()
    p.first.step()
    p.model.zero_grad()


def zeroed_at_last(p):
    p.first.step()
    p.second.step()
    p.second.zero_grad(set_to_none=False)
    p.first.zero_grad(set_to_none=False)


ORDERS = [together, interleaved, by_model, zeroed_at_last]


def train(p, order=together, *, epochs=EPOCHS, before=lambda p: None, **settings):
    loader = resilin.AdaptiveDataLoader(data(), BATCH, shuffle=False, **settings)
    for _ in resilin.remaining_epochs_until(epochs):
        for x, y in loader:
            before(p)
            F.mse_loss(p.model(x), y).backward()
            order(p)
            for scheduler in p.schedulers:
                scheduler.step()


def plain(epochs=EPOCHS):
    p = Parts()
    for _ in range(epochs):
        for first in range(0, ROWS, BATCH):
            x, y = data()[first : first + BATCH]
            for optimizer in p.both:
                optimizer.zero_grad()
            F.mse_loss(p.net(x), y).backward()
            for optimizer in p.both:
                optimizer.step()
            for scheduler in p.schedulers:
                scheduler.step()
    return p


def same(p, other):
    pairs = zip(p.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(a, b, rtol=0, atol=1e-14) for a, b in pairs)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("max_local_bsz", [None, 3])
def test_the_run_is_that_of_plain_torch(order, max_local_bsz):
    p, steps = Parts(), EPOCHS * -(-ROWS // BATCH)
    model = p.wrap()
    train(p, order, max_local_bsz=max_local_bsz)
    assert same(p, plain())
    assert (model.clock.steps, model.clock.samples) == (steps, EPOCHS * ROWS)
    assert [scheduler.last_epoch for scheduler in p.schedulers] == [steps, steps]


@pytest.mark.world_size(3)
def test_so_it_is_with_replicas_of_which_some_have_no_samples():
    for order in ORDERS:
        p = Parts()
        p.wrap()
        train(p, order, max_local_bsz=2)
        assert same(p, plain())
        assert_identical(torch.cat([v.flatten() for v in p.parameters()]))


def test_zeroing_before_the_backward_pass_waits_too():
    p = Parts()
    p.wrap()

    def stepped(p):
        p.first.step()
        p.second.step()

    def zeroed(p):
        p.second.zero_grad()
        p.first.zero_grad()

    train(p, stepped, before=zeroed, max_local_bsz=3)
    assert same(p, plain())


def test_a_scheduler_by_the_clock_follows_its_own_optimizer():
    p = Parts()
    model = p.wrap(schedule_by="samples")
    loader = resilin.AdaptiveDataLoader(data(), BATCH, shuffle=False)
    loader.set_batch_size(2 * BATCH)
    for _ in resilin.remaining_epochs_until(1):
        for x, y in loader:
            F.mse_loss(model(x), y).backward()
            together(p)
    assert [scheduler.last_epoch for scheduler in p.schedulers] == [7, 7]
    assert p.first.param_groups[1]["lr"] == pytest.approx(0.03 / 8)
    assert p.second.param_groups[0]["lr"] == pytest.approx(0.02 * 0.9**7)


def test_the_only_scheduler_may_belong_to_a_wrapper_of_the_optimizer():
    """As where a framework has prepared the optimizer before its scheduler was made."""

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner, self.param_groups = inner, inner.param_groups
            self.state, self.defaults = inner.state, inner.defaults

        def step(self, closure=None):
            return self.inner.step(closure)

    resilin.reset_job()
    net = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    prepared = Wrapper(optimizer)
    scheduler = LambdaLR(prepared, lambda step: 1 / (1 + step))
    model = resilin.AdaptiveDataParallel(
        net, optimizer, scheduler, rule="constant", schedule_by="samples"
    )
    for x, y in resilin.AdaptiveDataLoader(data(), BATCH, shuffle=False):
        F.mse_loss(model(x), y).backward()
        prepared.step()
        prepared.zero_grad()
    assert scheduler.last_epoch == model.clock.steps == 7
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 8)


def test_each_has_a_rule_and_each_group_its_factors():
    p = Parts()
    model = p.wrap(rule=["linear", "sqrt"])
    p.schedulers.clear()
    rates = []
    for optimizer in p.both:
        optimizer.register_step_pre_hook(
            lambda o, *_: rates.append([group["lr"] for group in o.param_groups])
        )
    loader = resilin.AdaptiveDataLoader(data(), BATCH, shuffle=False)
    loader.set_batch_size(4 * BATCH)
    for x, y in loader:
        F.mse_loss(model(x), y).backward()
        together(p)
        break
    assert rates[0] == pytest.approx([0.2, 0.12])
    assert rates[1] == pytest.approx([0.04])
    assert [factor.lr for factor in model.factors] == [4.0, 4.0, 2.0]
    assert [group["lr"] for o in p.both for group in o.param_groups] == [0.05, 0.03, 0.02]


# A step that fails, is skipped, or is made in part ------------------------------------------------


@pytest.mark.parametrize("order", [together, interleaved])
def test_a_step_that_fails_changes_neither_and_is_issued_again(order):
    p = Parts()
    p.wrap()
    with Failing(2, 3, 7) as engine:
        train(p, order, max_local_bsz=3)
    # The engine is asked once per step, before the first of them.
    assert engine.asked == EPOCHS * 7 + 3
    assert same(p, plain())


def test_an_optimizer_that_is_left_out_is_named_and_the_step_counts():
    p = Parts()
    model = p.wrap()
    p.schedulers.clear()
    first, second = (p.net[0].weight, p.net[0].bias)
    before = first.detach().clone(), second.detach().clone()

    def half(p):
        p.first.step()
        p.first.zero_grad()
        p.second.zero_grad()

    with pytest.warns(UserWarning, match="AdamW has not stepped in it.*model.turn"):
        train(p, half, epochs=1)
    assert model.clock.steps == 7
    assert not torch.equal(first, before[0])
    assert torch.equal(second, before[1])


def test_so_it_is_where_the_loop_zeroes_at_the_top():
    p = Parts()
    model = p.wrap()
    p.schedulers.clear()

    def zeroed(p):
        p.model.zero_grad()

    with pytest.warns(UserWarning, match="AdamW has not stepped in it"):
        train(p, lambda p: p.first.step(), before=zeroed, epochs=1)
    assert (model.clock.steps, model.clock.samples) == (7, ROWS)


def test_the_same_optimizer_twice_is_an_error():
    p = Parts()
    p.wrap()

    def twice(p):
        p.first.step()
        p.first.step()

    with pytest.raises(RuntimeError, match="steps a second time with the gradient of one step"):
        train(p, twice)


def test_clipping_after_the_first_is_an_error():
    p = Parts()
    p.wrap()

    def late(p):
        p.first.step()
        p.model.clip_grad_norm_(1.0)

    with pytest.raises(RuntimeError, match="clip before the first of them"):
        train(p, late)


def test_an_error_in_the_second_does_not_pass_for_a_step():
    p = Parts()
    model = p.wrap()
    p.second.register_step_pre_hook(lambda *_: 1 / 0)

    def caught(p):
        p.first.step()
        with pytest.raises(ZeroDivisionError):
            p.second.step()

    with pytest.raises(RuntimeError, match=r"begins without optimizer\.step"):
        train(p, caught)
    assert model.clock.steps == 0
    assert resilin.current_job().torn


@pytest.mark.parametrize("zeroed", [False, True])
@pytest.mark.parametrize("bad", [(), (0,), (1,), (0, 1)])
def test_a_scaler_skips_each_by_its_own_gradient(bad, zeroed):
    """As in plain torch: the step counts if any of them was made."""
    p, expected = Parts(), Parts()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model = p.wrap(scaler=scaler)
    p.schedulers.clear()
    x, y = data()[:BATCH]
    spoiled = [p.net[0].weight, p.net[0].bias]
    plain_scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def spoil(parts):
        with torch.no_grad():
            for number in bad:
                parts[number].grad.fill_(torch.inf)

    loader = resilin.AdaptiveDataLoader(data(), BATCH, shuffle=False, max_local_bsz=3)
    for a, b in loader:
        scaler.scale(F.mse_loss(model(a), b)).backward()
        with model.change_gradient() as complete:
            if complete:
                spoil(spoiled)
        for optimizer in p.both:
            scaler.step(optimizer)
            if zeroed:
                optimizer.zero_grad()
        scaler.update()
        if complete:
            break
    plain_scaler.scale(F.mse_loss(expected.net(x), y)).backward()
    spoil([expected.net[0].weight, expected.net[0].bias])
    for optimizer in expected.both:
        plain_scaler.step(optimizer)
    plain_scaler.update()
    assert same(p, expected)
    assert model.clock.steps == (len(bad) < 2)
    assert scaler.get_scale() == plain_scaler.get_scale() == (4.0 if bad else 8.0)


# Players that take turns -------------------------------------------------------------------------


def test_players_take_turns_without_a_warning():
    p = Parts()
    model = p.wrap()
    p.schedulers.clear()
    made = {0: [], 1: []}
    for number, optimizer in enumerate(p.both):
        optimizer.register_step_pre_hook(
            lambda *_, number=number: made[number].append(model.clock.steps)
        )

    def turn(p):
        mine, rest = p.both if model.clock.steps % 3 else p.both[::-1]
        model.turn(mine)
        rest.zero_grad()
        mine.step()
        mine.zero_grad()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(p, turn, epochs=1, max_local_bsz=3)
    assert made == {0: [1, 2, 4, 5], 1: [0, 3, 6]}
    assert model.clock.steps == 7


def test_one_whose_turn_it_is_not_is_refused():
    p = Parts()
    model = p.wrap()

    def wrong(p):
        model.turn(p.first)
        p.second.step()

    with pytest.raises(RuntimeError, match=r"AdamW steps in a step that model\.turn\(\) has given"):
        train(p, wrong)
    with pytest.raises(ValueError, match=r"turn\(SGD\) must name one or more of the 2"):
        model.turn(torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    with pytest.raises(ValueError, match="must name one or more"):
        model.turn()


# What they may be --------------------------------------------------------------------------------


class Container(torch.optim.Optimizer):
    """Holds others, as some training codes have it: its own groups have no settings."""

    def __init__(self, optimizers):
        self.optimizers = optimizers
        every = [p for o in optimizers for g in o.param_groups for p in g["params"]]
        super().__init__(every, {})

    def step(self, closure=None):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none=True):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)


def test_a_container_is_taken_apart():
    p = Parts()
    container = Container(p.both)
    model = p.wrap(container, rule=["linear", "sqrt"])
    assert model.optimizers == (p.first, p.second)

    def step(p):
        container.step()
        container.zero_grad()

    train(p, step, max_local_bsz=3)
    assert same(p, plain())


class Combined(Container):
    """Has the groups of the others as its own, settings and all."""

    def __init__(self, optimizers):
        super().__init__(optimizers)
        self.param_groups = [group for o in optimizers for group in o.param_groups]


class Complete(Combined):
    """Keeps their state, too."""

    def state_dict(self):
        return {str(n): o.state_dict() for n, o in enumerate(self.optimizers)}

    def load_state_dict(self, state):
        for n, optimizer in enumerate(self.optimizers):
            optimizer.load_state_dict(state[str(n)])


def test_one_that_steps_others_has_to_keep_their_state(tmp_path):
    def run(kind, epochs):
        p = Parts()
        p.schedulers.clear()
        combined = kind(p.both)
        model = p.wrap(combined)
        resilin.checkpoint_to(tmp_path, memory_every=None)

        def step(p):
            combined.step()
            combined.zero_grad()

        try:
            train(p, step, epochs=epochs)
        except RuntimeError as error:
            assert model.clock.steps == 1
            return str(error)
        return p.parameters()

    assert run(Combined, 1).startswith("Combined steps SGD, whose state is not in the state_dict()")
    run(Complete, 1)
    resumed = run(Complete, EPOCHS)
    p = Parts()
    for _ in range(EPOCHS):
        for first in range(0, ROWS, BATCH):
            x, y = data()[first : first + BATCH]
            F.mse_loss(p.net(x), y).backward()
            together(p)
    assert all(map(torch.equal, resumed, p.parameters()))


def test_a_job_that_resumes_has_the_state_of_all_of_them(tmp_path):
    def run(epochs):
        p = Parts()
        p.wrap()
        # Nobody hands this one over.
        p.schedulers.append(LambdaLR(p.second, lambda step: 0.95**step))
        resilin.checkpoint_to(tmp_path, memory_every=None)
        train(p, epochs=epochs, max_local_bsz=3)
        return p

    run(1)
    p = run(EPOCHS)
    whole = Parts()
    whole.wrap()
    whole.schedulers.append(LambdaLR(whole.second, lambda step: 0.95**step))
    train(whole, max_local_bsz=3)
    assert same(p, whole)
    states = zip(p.schedulers, whole.schedulers, strict=True)
    assert all(a.last_epoch == b.last_epoch for a, b in states)


def test_a_framework_that_saves_all_of_them_is_not_given_them_again():
    resilin.reset_job()
    net = nn.Sequential(*(nn.Linear(1, 1) for _ in range(3)))
    each = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in net]
    schedulers = [LambdaLR(optimizer, lambda n: 1.0) for optimizer in each]
    model = resilin.AdaptiveDataParallel(net, each, schedulers, batch_size=1)
    model(torch.ones(1, 1)).sum().backward()
    for optimizer in each:
        optimizer.step()
    saved = {"model", "optimizer", "scheduler", "scaler"}
    assert saved.isdisjoint(name.rstrip("012") for name in CarriedState().state_dict()["tree"])


def test_release_gives_each_its_own_methods_back():
    p = Parts()
    own = [optimizer.step for optimizer in p.both]
    p.wrap().release()
    assert [optimizer.step for optimizer in p.both] == own
    assert all(type(scheduler) is LambdaLR for scheduler in p.schedulers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.both.clear(), "must be an optimizer, or a list of at least one"),
        (
            lambda p: p.both.append(torch.optim.Adam([p.net[0].weight])),
            r"SGD and Adam have the same parameter, of shape \(6, 4\)",
        ),
        (
            lambda p: p.schedulers.append(LambdaLR(p.first, lambda step: 1.0)),
            "LambdaLR and LambdaLR belong to the same SGD",
        ),
        (
            lambda p: p.schedulers.append(
                LambdaLR(torch.optim.Adam([nn.Parameter(torch.ones(1))]), lambda step: 1.0)
            ),
            "LambdaLR belongs to Adam, which is none of the optimizers",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused_before_anything_is_changed(change, message):
    p = Parts()
    change(p)
    with pytest.raises(ValueError, match=message):
        p.wrap()
    assert all("step" not in vars(o) or "resilin" not in repr(o.step) for o in p.both)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (["linear"], "rule has 1 entries and there are 2 optimizers"),
        (["linear", "adamscale"], "linear of SGD .* samples clock, and adamscale of AdamW"),
    ],
)
def test_rules_that_do_not_fit_are_refused(rule, message):
    with pytest.raises(ValueError, match=message):
        Parts().wrap(rule=rule)
