"""What rules change in optimizers of other classes than SGD and Adam."""

import warnings

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import resilin
from resilin.core.rules import Factors, WeakEvidenceWarning, get_rule, rule_name
from resilin.training.gates.describe import description_of
from resilin.training.gates.factors import applied
from resilin.training.scaling.choice import choose_rule

MUONSCALE = get_rule("muonscale")
POWER = Factors(lr=2.0, beta_power=4.0, weight_decay=2.0, momentum_power=4.0)


def matrix():
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(4, 3, dtype=torch.float64))


class Own(Optimizer):
    """Takes whatever a group says, and steps by `lr * gradient`."""

    def __init__(self, groups, **defaults):
        super().__init__(groups, {"lr": 0.1, **defaults})
        self.seen = []

    def step(self, closure=None):
        self.seen = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]


def within(optimizer, *factors):
    """The settings of all groups within a step."""
    with applied(optimizer, factors):
        return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


def test_muon_of_torch_remembers_as_long_and_decays_as_much():
    muon = torch.optim.Muon([matrix()], lr=0.02, momentum=0.95, weight_decay=0.1)
    before = [dict(group) for group in muon.param_groups]
    (seen,) = within(muon, POWER)
    assert seen["lr"] == pytest.approx(0.04)
    assert seen["momentum"] == pytest.approx(0.95**4)
    assert seen["weight_decay"] == pytest.approx(0.2)
    assert [dict(group) for group in muon.param_groups] == before


def test_one_step_at_four_times_the_batch_keeps_the_buffer_of_four():
    """With the same gradient in each step, the buffer is that of the reference run."""
    one, four = matrix(), matrix()
    gradient = torch.randn(4, 3, dtype=torch.float64)
    small = torch.optim.Muon([four], lr=0.01, weight_decay=0.0)
    large = torch.optim.Muon([one], lr=0.01, weight_decay=0.0)
    for _ in range(4):
        four.grad = gradient.clone()
        small.step()
    one.grad = gradient.clone()
    with applied(large, [Factors(momentum_power=4.0)]):
        large.step()
    buffers = [o.state[p]["momentum_buffer"] for o, p in ((small, four), (large, one))]
    torch.testing.assert_close(buffers[0], buffers[1], rtol=1e-14, atol=0)


def test_a_combined_class_has_groups_of_several_kinds():
    class MuonAdamW(Own):
        pass

    optimizer = MuonAdamW(
        [
            {"params": [matrix()], "momentum": 0.9, "beta2": 0.95, "weight_decay": 0.1},
            {"params": [matrix()], "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.0},
        ]
    )
    first, second = within(optimizer, POWER, POWER)
    assert first["momentum"] == pytest.approx(0.9**4)
    assert first["beta2"] == pytest.approx(0.95**4)
    assert first["weight_decay"] == pytest.approx(0.2)
    assert second["betas"] == pytest.approx((0.8**4, 0.95**4))
    with pytest.warns(WeakEvidenceWarning, match="MuonAdamW, adamscale"):
        assert choose_rule("auto", optimizer) == get_rule("adamscale")
    plain = torch.optim.Muon([matrix()])
    with pytest.warns(WeakEvidenceWarning, match="Muon, muonscale"):
        assert choose_rule("auto", plain) == MUONSCALE


def test_the_loop_may_write_new_values_in_each_step():
    class MuonAdamW(Own):
        pass

    optimizer = MuonAdamW([matrix()], momentum=0.85, weight_decay=0.1)
    for momentum in (0.85, 0.9, 0.95):
        optimizer.param_groups[0]["momentum"] = momentum
        assert within(optimizer, POWER)[0]["momentum"] == pytest.approx(momentum**4)
        assert optimizer.param_groups[0]["momentum"] == momentum


def test_names_of_other_libraries_are_known():
    class Muon(Own):
        """As that of dion."""

    class SOAP(Own):
        pass

    dion = Muon([matrix()], mu=0.95, beta1=0.9, beta2=0.95, weight_decay=0.01)
    (seen,) = within(dion, POWER)
    assert seen["mu"] == pytest.approx(0.95**4)
    assert (seen["beta1"], seen["beta2"]) == pytest.approx((0.9**4, 0.95**4))
    soap = SOAP(
        [matrix()], betas=(0.95, 0.9), shampoo_beta=-1, precondition_frequency=10, weight_decay=0.1
    )
    (seen,) = within(soap, POWER)
    # A negative one stands for the second beta; a period is at least a step.
    assert (seen["shampoo_beta"], seen["precondition_frequency"]) == (-1, 2)
    assert within(soap, Factors(beta_power=100.0))[0]["precondition_frequency"] == 1
    assert soap.param_groups[0]["precondition_frequency"] == 10


def test_a_class_is_described_once_for_its_subclasses_too():
    class Mine(Own):
        pass

    class Fork(Mine):
        pass

    optimizer = Fork([matrix()], momentum=0.9, weight_decay=0.1, refresh=8)
    with pytest.raises(ValueError, match=r"how .*Fork.* is not known: .*resilin\.describe"):
        choose_rule("muonscale", optimizer)
    resilin.describe(Mine, momentum="mean", decay="decoupled", periods=("refresh",))
    assert choose_rule("muonscale", optimizer) == MUONSCALE
    (seen,) = within(optimizer, POWER)
    assert seen["momentum"] == pytest.approx(0.9**4)
    assert (seen["weight_decay"], seen["refresh"]) == (pytest.approx(0.2), 2)


def test_a_group_may_say_it_for_itself():
    optimizer = Own(
        [
            {"params": [matrix()], "resilin": {"momentum": "mean", "decay": "decoupled"}},
            {"params": [matrix()], "momentum": 0},
        ],
        momentum=0.9,
        weight_decay=0.1,
    )
    optimizer.param_groups[1]["weight_decay"] = 0.0
    assert choose_rule("muonscale", optimizer) == MUONSCALE
    first, second = within(optimizer, POWER, POWER)
    assert first["momentum"] == pytest.approx(0.9**4)
    assert (second["momentum"], second["weight_decay"]) == (0, 0.0)
    optimizer.param_groups[0]["resilin"] = {"momentun": "mean"}
    with pytest.raises(ValueError, match="must be a dict of some of momentum, decay, betas"):
        within(optimizer, POWER, POWER)


def test_a_decay_that_nobody_knows_is_warned_of_with_both_names():
    class Unheard(Own):
        pass

    optimizer = Unheard([matrix()], betas=(0.9, 0.95), weight_decay=0.1)
    with pytest.warns(UserWarning, match=r"rule adamscale scales .* in .*Unheard is not known"):
        choose_rule("adamscale", optimizer)
    assert within(optimizer, POWER)[0]["weight_decay"] == 0.1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # It has none, or it is known to have no factor.
        choose_rule("adamscale", Unheard([matrix()], betas=(0.9, 0.95), weight_decay=0.0))
        choose_rule("adamscale", torch.optim.Adam([matrix()], weight_decay=0.1))
        choose_rule("adascale", optimizer)


@pytest.mark.parametrize(
    ("kind", "flags", "decay"),
    [
        (torch.optim.AdamW, {}, "decoupled"),
        (torch.optim.Adam, {}, "gradient"),
        (torch.optim.Adam, {"decoupled_weight_decay": True}, "decoupled"),
        (torch.optim.NAdam, {}, "gradient"),
        (torch.optim.SGD, {"lr": 0.1}, "decoupled"),
        (torch.optim.Muon, {}, "decoupled"),
        (torch.optim.RMSprop, {}, None),
    ],
)
def test_what_classes_of_torch_do_with_weight_decay(kind, flags, decay):
    optimizer = kind([matrix()], weight_decay=0.1, **flags)
    assert description_of(optimizer, optimizer.param_groups[0]).decay == decay


def test_what_is_none_of_the_forms_is_refused():
    with pytest.raises(ValueError, match="momentum"):
        resilin.describe(Own, momentum="ema")
    with pytest.raises(ValueError, match="must be a class of optimizers"):
        resilin.describe(nn.Linear)
    assert rule_name(MUONSCALE) == "muonscale"
