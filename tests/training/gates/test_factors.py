"""The momentum of SGD in steps of changing worth, against the rule written out in float64."""

import copy
import itertools

import pytest
import torch
from torch import nn

from resilin.core.rules import Factors
from resilin.training.gates.factors import applied

WORTHS = [1.0, 8.0, 3.7, 1.0, 0.4, 16.0, 1.0, 2.5]
FORMS = {
    "single": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
SETTINGS = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "nesterov": {"nesterov": True},
    "nesterov, decay": {"nesterov": True, "weight_decay": 0.1},
    "dampened": {"dampening": 0.3, "weight_decay": 0.1},
    "maximized": {"maximize": True, "weight_decay": 0.1},
    "nesterov, maximized": {"nesterov": True, "maximize": True, "weight_decay": 0.1},
}


def parameters(dtype=torch.float64):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in ((3, 4), (5,), ())]


def gradients(step, made, *, missing=()):
    generator = torch.Generator().manual_seed(step)
    for number, parameter in enumerate(made):
        gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = None if (step, number) in missing else gradient.to(parameter.dtype)


class Reference:
    """The rule as it is derived: all in one formula, with buffers of its own."""

    def __init__(self, made, lr=0.1, momentum=0.9, dampening=0.0, weight_decay=0.0, **flags):
        self.values = [parameter.detach().clone() for parameter in made]
        self.buffers = [None] * len(made)
        self.settings = lr, momentum, dampening, weight_decay
        self.nesterov = flags.pop("nesterov", False)
        self.sign = -1 if flags.pop("maximize", False) else 1
        assert not flags

    def step(self, made, worth):
        lr, mu, d, decay = self.settings
        power, share = mu**worth, sum_of_powers(mu, worth)
        for number, parameter in enumerate(made):
            if parameter.grad is None:
                continue
            value, buffer = self.values[number], self.buffers[number]
            impulse = share * (self.sign * parameter.grad + decay * value)
            # SGD does not dampen the first one.
            buffer = impulse if buffer is None else power * buffer + (1 - d) * impulse
            along = impulse + power * buffer if self.nesterov else buffer
            self.buffers[number] = buffer
            self.values[number] = value - lr * worth * along


def sum_of_powers(mu, worth):
    return worth if mu == 1 else (1 - mu**worth) / (1 - mu)


def factors(worth, groups=1):
    return [Factors(lr=worth, momentum_power=worth)] * groups


def step(optimizer, worth):
    with applied(optimizer, factors(worth, len(optimizer.param_groups))):
        optimizer.step()


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("first", [8.0, 0.25, 1.0])
def test_any_sequence_of_worths_is_the_rule_written_out(form, settings, first):
    made = parameters()
    reference = Reference(made, **settings)
    optimizer = torch.optim.SGD(made, lr=0.1, momentum=0.9, **settings, **form)
    own = copy.deepcopy(optimizer.state_dict()["param_groups"])
    for number, worth in enumerate([first, *WORTHS]):
        gradients(number, made)
        before = [parameter.grad for parameter in made]
        kept = [gradient.clone() for gradient in before]
        reference.step(made, worth)
        step(optimizer, worth)
        for parameter, expected in zip(made, reference.values, strict=True):
            torch.testing.assert_close(parameter.detach(), expected, rtol=1e-12, atol=1e-12)
        buffers = [optimizer.state[parameter]["momentum_buffer"] for parameter in made]
        for buffer, expected in zip(buffers, reference.buffers, strict=True):
            torch.testing.assert_close(buffer, expected, rtol=1e-12, atol=1e-12)
        # Everything is given back: the groups, and the very tensors of the gradients.
        assert optimizer.state_dict()["param_groups"] == own
        assert all(p.grad is gradient for p, gradient in zip(made, before, strict=True))
        if worth != 1:
            assert all(torch.equal(a, b) for a, b in zip(before, kept, strict=True))


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_at_the_reference_batch_every_bit_is_that_of_torch(form, settings):
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    optimizers = [
        torch.optim.SGD(made, lr=0.1, momentum=0.9, **settings, **form) for made in (ours, theirs)
    ]
    for number in range(4):
        gradients(number, ours)
        gradients(number, theirs)
        step(optimizers[0], 1.0)
        optimizers[1].step()
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)
            assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("form", ["single", "foreach"])
def test_a_parameter_may_get_its_first_gradient_later(form, settings):
    # torch's own fused step cannot do that.
    missing = {(0, 1), (1, 1), (3, 0)}
    made = parameters()
    reference = Reference(made, **settings)
    optimizer = torch.optim.SGD(made, lr=0.1, momentum=0.9, **settings, **FORMS[form])
    for number, worth in enumerate([8.0, *WORTHS]):
        gradients(number, made, missing=missing)
        reference.step(made, worth)
        step(optimizer, worth)
        assert [p.grad is None for p in made] == [(number, i) in missing for i in range(3)]
        for parameter, expected in zip(made, reference.values, strict=True):
            torch.testing.assert_close(parameter.detach(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_state_without_buffers_begins_anew(nesterov):
    made = parameters()
    optimizer = torch.optim.SGD(made, lr=0.1, momentum=0.9, nesterov=nesterov)
    gradients(0, made)
    step(optimizer, 4.0)
    optimizer.load_state_dict(torch.optim.SGD(made, momentum=0.9, nesterov=nesterov).state_dict())
    optimizer.param_groups[0]["lr"] = 0.1
    reference = Reference(made, nesterov=nesterov)
    for number in range(1, 4):
        gradients(number, made)
        reference.step(made, 8.0)
        step(optimizer, 8.0)
        for parameter, expected in zip(made, reference.values, strict=True):
            torch.testing.assert_close(parameter.detach(), expected, rtol=1e-12, atol=1e-12)


def test_a_restart_between_two_steps_changes_no_bit():
    results = []
    for stop in (None, *range(1, 8)):
        made = parameters(torch.float32)
        optimizer = torch.optim.SGD(made, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)
        for number, worth in enumerate(WORTHS):
            if number == stop:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = torch.optim.SGD(made, lr=7.0)
                optimizer.load_state_dict(saved)
            gradients(number, made)
            step(optimizer, worth)
        results.append(made)
    for one, other in itertools.pairwise(results):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_groups_have_their_own_momentum():
    made = parameters()
    momenta = (0.9, 0.5, 0.0)
    references = [
        Reference([parameter], momentum=mu, weight_decay=0.1)
        for parameter, mu in zip(made, momenta, strict=True)
    ]
    optimizer = torch.optim.SGD(
        [{"params": [p], "momentum": mu} for p, mu in zip(made, momenta, strict=True)],
        lr=torch.tensor(0.1, dtype=torch.float64),
        weight_decay=0.1,
    )
    for number, worth in enumerate(WORTHS):
        gradients(number, made)
        for parameter, reference in zip(made, references, strict=True):
            reference.step([parameter], worth)
        step(optimizer, worth)
        for parameter, reference in zip(made, references, strict=True):
            torch.testing.assert_close(
                parameter.detach(), reference.values[0], rtol=1e-12, atol=1e-12
            )
    assert "momentum_buffer" not in optimizer.state[made[2]]
    assert float(optimizer.param_groups[0]["lr"]) == 0.1


def test_under_a_constant_gradient_a_step_is_worth_its_reference_steps():
    # Far from its start, whatever the sizes were: r steps of lr / (1 - mu), weight decay included.
    for nesterov in (False, True):
        value = nn.Parameter(torch.tensor(5.0, dtype=torch.float64))
        optimizer = torch.optim.SGD([value], lr=1e-9, momentum=0.9, nesterov=nesterov)
        optimizer.param_groups[0]["weight_decay"] = 0.2
        for number, worth in enumerate([1.0] * 400 + WORTHS):
            value.grad = torch.tensor(3.0, dtype=torch.float64)
            before = value.item()
            step(optimizer, worth)
            if number >= 400:
                # 3 + 0.2 * 5 = 4 per reference step.
                assert (before - value.item()) / worth == pytest.approx(1e-9 * 4 / 0.1, rel=1e-5)


def test_a_momentum_that_underflows_still_steps_along_the_buffer():
    made = parameters()
    reference = Reference(made)
    optimizer = torch.optim.SGD(made, lr=0.1, momentum=0.9)
    for number, worth in enumerate((1.0, 1e5, 1.0)):
        gradients(number, made)
        reference.step(made, worth)
        step(optimizer, worth)
        for parameter, expected in zip(made, reference.values, strict=True):
            torch.testing.assert_close(parameter.detach(), expected, rtol=1e-12, atol=1e-12)


def test_what_a_failed_step_borrowed_is_given_back():
    seen = []

    def fail(optimizer, *_):
        group = optimizer.param_groups[1]
        seen.append((float(group["lr"]), group["momentum"]))
        raise ZeroDivisionError

    for settings in SETTINGS.values():
        made = parameters()
        optimizer = torch.optim.SGD(
            [{"params": made[:1]}, {"params": made[1:]}],
            lr=torch.tensor(0.1),
            momentum=0.9,
            **settings,
        )
        gradients(0, made)
        before = [parameter.grad for parameter in made]
        own = copy.deepcopy(optimizer.state_dict())

        seen.clear()
        optimizer.register_step_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            step(optimizer, 8.0)
        assert seen == [(pytest.approx(0.8), pytest.approx(0.9**8))]
        assert optimizer.state_dict() == own
        assert all(p.grad is gradient for p, gradient in zip(made, before, strict=True))


def test_the_momentum_of_another_optimizer_is_refused_and_nothing_is_changed():
    made = parameters()
    optimizer = torch.optim.RMSprop(
        [{"params": made[:1], "momentum": 0.0}, {"params": made[1:]}], lr=0.1, momentum=0.9
    )
    own = copy.deepcopy(optimizer.state_dict())
    gradients(0, made)
    message = r"the momentum, and how RMSprop of torch.optim.\w+ keeps it is not known"
    with pytest.raises(ValueError, match=message):
        step(optimizer, 8.0)
    assert optimizer.state_dict() == own


def test_groups_without_momentum_are_untouched():
    for kind in (torch.optim.Adam, torch.optim.RMSprop, torch.optim.SGD):
        ours, theirs = parameters(), parameters()
        optimizers = [kind(made, lr=0.1) for made in (ours, theirs)]
        gradients(0, ours)
        gradients(0, theirs)
        with applied(optimizers[0], [Factors(momentum_power=8.0)]):
            optimizers[0].step()
        optimizers[1].step()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_groups_that_share_a_learning_rate_get_their_own_factors():
    # torch gives all groups the one tensor that is their default.
    made, shared = parameters(), torch.tensor(0.1, dtype=torch.float64)
    optimizer = torch.optim.SGD([{"params": [parameter]} for parameter in made], lr=shared)
    groups = optimizer.param_groups
    for multiples in ((2.0, 2.0, 2.0), (1.0, 2.0, 3.0), (2.0, 1.0, 1.0), (1.0, 1.0, 1.0)):
        with applied(optimizer, [Factors(lr=multiple) for multiple in multiples]):
            rates = [float(group["lr"]) for group in groups]
        assert rates == pytest.approx([0.1 * multiple for multiple in multiples])
        assert all(group["lr"] is shared for group in groups)
        assert float(shared) == 0.1


@pytest.mark.parametrize("overflows", [False, True])
def test_gradients_that_a_fused_step_unscales_are_unscaled_when_they_come_back(overflows):
    made = parameters()
    optimizer = torch.optim.SGD(made, lr=0.1, momentum=0.9, nesterov=True, fused=True)
    gradients(0, made)
    step(optimizer, 1.0)
    before = [parameter.detach().clone() for parameter in made]
    gradients(1, made)
    kept = [parameter.grad.clone() for parameter in made]
    # As a GradScaler hands them over.
    optimizer.grad_scale = torch.tensor(4.0)
    optimizer.found_inf = torch.tensor(float(overflows))
    step(optimizer, 8.0)
    for parameter, old, gradient in zip(made, before, kept, strict=True):
        assert torch.equal(parameter, old) == overflows
        expected = gradient if overflows else gradient / 4
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-12, atol=0)


def test_sparse_gradients_have_their_share():
    made = [nn.Parameter(torch.ones(4, 2, dtype=torch.float64))]
    reference = Reference(made)
    optimizer = torch.optim.SGD(made, lr=0.1, momentum=0.9)
    for worth in (8.0, 1.0, 3.0):
        rows = torch.full((2, 2), 0.5, dtype=torch.float64)
        sparse = torch.sparse_coo_tensor(
            torch.tensor([[0, 3]]), rows, (4, 2), check_invariants=True
        )
        made[0].grad = sparse.to_dense()
        reference.step(made, worth)
        made[0].grad = sparse
        step(optimizer, worth)
        assert made[0].grad is sparse
        torch.testing.assert_close(made[0].detach(), reference.values[0], rtol=1e-12, atol=1e-12)
