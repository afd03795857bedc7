"""What frameworks ask of the job: numbers for their logs, and where a run goes on."""

import pytest
import torch
from torch.utils.data import TensorDataset

import resilin
from resilin.training.bridge.home import Home
from resilin.training.bridge.readout import read_out


def make(rule="constant", **kwargs):
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule=rule, stats_every=1)
    Home()  # a framework has the loop
    dataset = TensorDataset(torch.randn(50, 3))
    return model, optimizer, resilin.AdaptiveDataLoader(dataset, 8, **kwargs)


def train(model, optimizer, loader, steps=None):
    for (x,) in loader:
        model(x).square().mean().backward()
        if model.step_weight is None:
            continue
        assert model.step_weight == resilin.current_job().micro_batch.samples
        optimizer.step()
        optimizer.zero_grad()
        assert model.step_weight is None
        if model.clock.steps == steps:
            return read_out("")
    return None


def test_the_last_step_can_be_read_out():
    model, optimizer, loader = make(max_local_bsz=4)
    assert read_out() == {}
    loader.set_batch_size(16)
    read = train(model, optimizer, loader, steps=2)
    noise = read.pop("noise_scale", None)
    assert noise is None or noise > 0
    assert read == {
        "batch_size": 16,
        "replicas": 1,
        "accumulation_steps": 4,
        "samples": 32,
        "progress": pytest.approx(model.progress),
        "scale": 2,
        "gain": model.gain,
        "lr_factor": 1,
    }


def test_behind_an_epoch_the_sizes_are_those_of_its_last_step():
    model, optimizer, loader = make(max_local_bsz=2)
    train(model, optimizer, loader)
    read = read_out("")
    # 50 samples: the seventh step has the last 2, and not the 8 that the next epoch begins with.
    assert (read["samples"], read["batch_size"], read["accumulation_steps"]) == (50, 2, 1)


def test_while_a_step_accumulates_the_one_before_it_is_read_out():
    model, optimizer, loader = make(max_local_bsz=4)
    train(model, optimizer, loader, steps=2)
    loader.set_batch_size(16)
    model(next(iter(loader))[0]).square().mean().backward()
    assert (read_out("")["batch_size"], read_out("")["accumulation_steps"]) == (8, 2)


@pytest.mark.parametrize(("drop_last", "steps"), [(False, 7), (True, 6)])
def test_a_run_that_is_left_behind_the_last_step_of_an_epoch_goes_on_with_the_next(
    drop_last, steps
):
    model, optimizer, loader = make(drop_last=drop_last)
    train(model, optimizer, loader, steps=steps - 1)
    assert loader.epochs_done == 0
    train(model, optimizer, loader, steps=steps)
    assert loader.epochs_done == 1


def test_with_an_adaptive_rule_progress_says_how_many_epochs_are_done():
    model, optimizer, loader = make(rule="adascale")
    loader.set_batch_size(24)
    train(model, optimizer, loader)
    assert model.progress >= 7
    assert loader.epochs_done == model.progress // 7
