"""Which rule a job has, and what it says if that is not the one it was saved with."""

import json
import logging
import re
import zlib

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import resilin
from resilin.core.rules import Factors, PowerRule, get_rule, rule_name
from resilin.training.scaling.choice import (
    choose_rule,
    compare_settings,
    compare_with_saved,
    settings_of,
)


def parameters():
    return [nn.Parameter(torch.ones(2))]


def foreign_sgd(momentum):
    """An SGD of another package, which has the learning rate within its buffer."""

    class SGD(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1, "momentum": momentum})

    return SGD(parameters())


class MySGD(torch.optim.SGD):
    """The same steps under another name."""


class Overridden(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


def test_the_momentum_is_changed_where_that_is_asked_for(caplog):
    caplog.set_level(logging.INFO, logger="resilin")
    for optimizer in (torch.optim.SGD(parameters(), momentum=0.9), foreign_sgd(0.9)):
        assert choose_rule("auto", optimizer) == get_rule("adascale")
    for momentum in (0.0, 0.9):
        optimizer = torch.optim.SGD(parameters(), lr=0.1, momentum=momentum)
        assert choose_rule("sgdscale", optimizer) == get_rule("sgdscale")
    assert choose_rule("sgdscale", MySGD(parameters())) == get_rule("sgdscale")
    assert choose_rule("sgdscale", foreign_sgd(0.0)) == get_rule("sgdscale")
    assert not caplog.records


@pytest.mark.parametrize(
    "optimizer",
    [
        foreign_sgd(0.9),
        torch.optim.RMSprop(parameters(), momentum=0.9),
        torch.optim.Adam(parameters()),
        torch.optim.AdamW(parameters()),
        torch.optim.Adafactor(parameters()),
    ],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_a_momentum_of_another_form_is_refused(optimizer):
    for rule in ("sgdscale", PowerRule(1, momentum=True)):
        with pytest.raises(ValueError, match=r"the momentum, and how \S+ of \S+ keeps it is not"):
            choose_rule(rule, optimizer)
    choose_rule("adascale", optimizer)


def test_a_rule_for_both_kinds_of_memory_fits_both():
    both = PowerRule(1, 1, betas=True, momentum=True)
    for optimizer in (torch.optim.Adam(parameters()), torch.optim.SGD(parameters(), momentum=0.9)):
        assert choose_rule(both, optimizer) is both
    with pytest.raises(ValueError, match="RMSprop"):
        choose_rule(both, torch.optim.RMSprop(parameters(), momentum=0.9))


def test_a_step_of_its_own_is_pointed_out(caplog):
    choose_rule("adascale", Overridden(parameters(), momentum=0.9))
    assert not caplog.records
    choose_rule("sgdscale", Overridden(parameters(), momentum=0.9))
    assert "Overridden has a step of its own: rule sgdscale takes its momentum" in caplog.text


class Own:
    """A rule of a user, without a text form of its own."""

    clock, adaptive = "samples", False

    def factors(self, scaling):
        return Factors()


@pytest.mark.parametrize(
    ("rule", "saved", "said"),
    [
        (get_rule("sgdscale"), "sgdscale", None),
        (get_rule("adascale"), None, None),
        (get_rule("adamscale"), None, None),
        (Own(), "Own", None),
        (get_rule("sgdscale"), "adascale", "with rule adascale, and this run continues with sgdsc"),
        (get_rule("linear"), "sqrt", "was trained with rule sqrt, and this run continues with lin"),
        (get_rule("sgdscale"), None, None),
    ],
)
def test_another_rule_than_the_saved_one_is_named(caplog, rule, saved, said):
    compare_with_saved(rule_name(rule), saved)
    if said is None:
        assert not caplog.records
    else:
        assert re.search(said, caplog.text)


def sgd(lr=0.1, weight_decay=0.0):
    return settings_of([torch.optim.SGD(parameters(), lr=lr, weight_decay=weight_decay)])


def scheduled():
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.01)
    return settings_of([optimizer])


@pytest.mark.parametrize(
    ("now", "saved", "said"),
    [
        (sgd(), None, None),
        (sgd(), sgd(), None),
        (scheduled(), sgd(), None),
        (
            sgd(lr=0.05),
            sgd(),
            r"run that it resumes: lr 0\.05 \(0\.1 in the state\)\. Those of the",
        ),
        (sgd(0.05, 0.01), sgd(), r"lr 0\.05 .*, weight_decay 0\.01 \(0 in the state\)"),
        (
            settings_of([torch.optim.AdamW(parameters(), betas=(0.8, 0.99))]),
            settings_of([torch.optim.Adam(parameters(), weight_decay=0.01)]),
            r"AdamW \(Adam in the state\), betas 0\.8, 0\.99 \(0\.9, 0\.999 in the state\)",
        ),
    ],
)
def test_settings_that_the_script_has_changed_are_named(caplog, now, saved, said):
    compare_settings(now, saved)
    if said is None:
        assert not caplog.records
    else:
        assert re.search(said, caplog.text)


def make_job(folder, rule, lr=0.1, kind=torch.optim.SGD):
    resilin.reset_job()
    resilin.checkpoint_to(folder, every=1, memory_every=None)
    torch.manual_seed(0)
    net, data = nn.Linear(3, 2), TensorDataset(torch.randn(64, 3))
    optimizer = kind(net.parameters(), lr=lr, momentum=0.9)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule=rule, stats_every=1)
    return model, optimizer, resilin.AdaptiveDataLoader(data, 8, max_local_bsz=4)


def forget_rule(folder):
    """Makes checkpoints as they were before they had the name of the rule."""
    for path in folder.glob("step-*/COMMIT.json"):
        whole = json.loads(path.read_bytes())
        assert whole["commit"]["tree"]["noise"].pop("rule") == "adascale"
        assert whole["commit"]["tree"]["noise"].pop("settings")["class"] == "SGD"
        body = json.dumps(whole["commit"]).encode()
        path.write_bytes(b'{"crc32": "%08x", "commit": %s}\n' % (zlib.crc32(body), body))


@pytest.mark.parametrize("kept", [True, False])
def test_a_job_that_resumes_with_another_rule_says_so(tmp_path, caplog, kept):
    model, optimizer, loader = make_job(tmp_path, "adascale")
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if not kept:
        resilin.reset_job()
        forget_rule(tmp_path)
    model, optimizer, _ = make_job(tmp_path, "sgdscale", lr=0.3)
    assert resilin.resume().step >= 1
    assert model.noise is not None
    # A state from before the name was kept cannot say it.
    said = "was trained with rule adascale, and this run continues with sgdscale"
    assert (said in caplog.text) == kept
    assert ("lr 0.3 (0.1 in the state)" in caplog.text) == kept
    assert optimizer.param_groups[0]["lr"] == 0.1
    make_job(tmp_path, "linear", kind=torch.optim.RMSprop)
    if kept:
        with pytest.raises(
            ValueError, match=r"was SGD and is RMSprop, which needs alpha, eps; res"
        ):
            resilin.resume()
