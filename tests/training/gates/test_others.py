"""Optimizers that the job does not know."""

import gc
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import resilin


def parts(**kwargs):
    torch.manual_seed(0)
    module = nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Linear(4, 2)})

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = module

        def forward(self, x):
            return self.parts["second"](torch.tanh(self.parts["first"](x)))

    both = Both()
    optimizer = torch.optim.SGD(module["first"].parameters(), lr=0.1)
    return resilin.AdaptiveDataParallel(both, optimizer, **kwargs), optimizer, module


def loader(**kwargs):
    x = torch.randn(32, 4)
    return resilin.AdaptiveDataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 8, **kwargs)


def train(model, optimizer, *others, max_local_bsz=None, epochs=1):
    for _ in resilin.remaining_epochs_until(epochs):
        for x, y in loader(max_local_bsz=max_local_bsz):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            for other in others:
                other.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("max_local_bsz", [None, 3])
def test_a_second_optimizer_of_the_model_is_refused_before_it_steps(max_local_bsz):
    model, optimizer, module = parts()
    second = torch.optim.Adam(module["second"].parameters())
    before = module["second"].weight.detach().clone()
    with pytest.raises(
        RuntimeError, match=r"another optimizer \(Adam\) .* with SGD: .*as a list.*Muon and AdamW"
    ):
        train(model, optimizer, second, max_local_bsz=max_local_bsz)
    assert torch.equal(module["second"].weight, before)


def test_a_second_model_is_refused_and_the_recipe_named():
    parts()
    with pytest.raises(ValueError, match=r"one is all it can train.*two-optimizers\.md"):
        parts()


def test_an_optimizer_of_something_else_is_warned_of_once_if_state_is_kept(tmp_path):
    resilin.checkpoint_to(tmp_path, every=None)
    model, optimizer, _ = parts()
    scale = nn.Parameter(torch.ones(()))
    scale.grad = torch.ones(())
    other = torch.optim.SGD([scale], lr=0.1)
    with pytest.warns(UserWarning, match=r"another optimizer \(SGD\) steps in the loop") as told:
        train(model, optimizer, other)
    assert [each.filename for each in told] == [__file__]


def test_one_whose_state_is_kept_is_not_warned_of(tmp_path):
    resilin.checkpoint_to(tmp_path, every=None)
    model, optimizer, _ = parts()
    scale = nn.Parameter(torch.ones(()))
    scale.grad = torch.ones(())
    other = torch.optim.SGD([scale], lr=0.1)
    resilin.register("scale", other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, other)


def test_without_state_and_outside_the_loop_nothing_is_said():
    model, optimizer, _ = parts()
    scale = nn.Parameter(torch.ones(()))
    scale.grad = torch.ones(())
    other = torch.optim.SGD([scale], lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, other)
        other.step()


class Wrapper(torch.optim.Optimizer):
    """Steps by another optimizer of the same parameters, as SAM and Lookahead do."""

    def __init__(self, base):
        super().__init__(base.param_groups, {})
        self.base = base
        self.param_groups = base.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        return self.base.step()


def test_the_base_of_a_wrapper_is_a_part_of_its_step():
    torch.manual_seed(0)
    module = nn.Linear(4, 2)
    optimizer = Wrapper(torch.optim.SGD(module.parameters(), lr=0.1))
    model = resilin.AdaptiveDataParallel(module, optimizer, rule="linear")
    before = module.weight.detach().clone()
    train(model, optimizer)
    assert not torch.equal(module.weight, before)
    with pytest.raises(RuntimeError, match="another optimizer"):
        optimizer.base.step()


def test_a_released_model_has_any_optimizer():
    model, _, module = parts()
    model.release()
    second = torch.optim.Adam(module["second"].parameters())
    second.step()
    del model
    gc.collect()
