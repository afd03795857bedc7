"""Replicas that diverge are named, on all replicas; those that do not are left alone."""

import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import resilin
from resilin.training.job import current_job
from resilin.training.state import divergence
from resilin.training.state.divergence import DivergenceCheck, sums_of
from tests.counted import group
from tests.replicas import num_replicas, replica, worlds

D = torch.float64


def make(device="cpu", **kwargs):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 6, generator=generator, dtype=D)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).to(device, D)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.5)
    kwargs = {"rule": "linear", **kwargs}
    model = resilin.AdaptiveDataParallel(net, optimizer, **kwargs)
    loader = resilin.AdaptiveDataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=12)
    return net, optimizer, model, loader


def train(net, optimizer, model, loader, epochs, on_step=lambda step: None):
    for _ in range(epochs):
        for x, y in loader:
            x, y = x.to(net[0].weight.device), y.to(net[0].weight.device)
            (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            on_step(model.clock.steps)


def one_ulp(parameter):
    with torch.no_grad():
        parameter.view(-1).view(torch.int64)[3] += 1


WORLDS = worlds(2, 3)


@pytest.mark.parametrize("world", WORLDS)
def test_one_ulp_of_one_parameter_is_noticed_and_named(world):
    parts = make(cross_check=4)

    left = {}

    def change(step):
        if step == 6 and replica() == world - 1:
            one_ulp(parts[0][2].weight)
        left[step] = [p.tolist() for p in parts[0].parameters()]

    with pytest.raises(RuntimeError, match=r"diverged by step 8") as error:
        train(*parts, 2, change)
    text = str(error.value)
    assert f"replica {world - 1} differs from" in text
    assert ("the other 2" if world == 3 else "replica 0") in text
    assert re.search(r"in parameter \d\.(weight|bias) and \d+ more|in parameter 2.weight", text)
    # The ballot of the ninth step compares what is left of 8, and that step changes nothing.
    assert parts[2].clock.steps == 8
    assert parts[3].state_dict()["cursor"] == 8 * 12
    after = [p.tolist() for p in parts[0].parameters()]
    assert after == left[8] != left[7]


@pytest.mark.world_size(2, init=False)
def test_a_device_that_queues_its_work_is_compared_a_step_later_and_nobody_waits(counted):
    group.join()
    parts = make(counted.device, cross_check=4)
    counted.set_delay(1)

    def change(step):
        counted.tick()
        if step == 6 and replica() == 1:
            one_ulp(parts[0][2].weight)

    with pytest.raises(RuntimeError, match=r"diverged by step 8.*replica 1 differs from replica 0"):
        train(*parts, 2, change)
    assert parts[2].clock.steps == 9  # a step later than where nothing is queued
    ours = [
        told
        for told in counted.told("read", "wait")
        if "resilin/training/state/divergence.py" in str(told)
    ]
    assert ours == []


@pytest.mark.world_size(3)
def test_other_deciding_values_are_named_too():
    parts = make(cross_check=1)
    rate = 0.02 if replica() == 1 else 0.01
    with pytest.raises(RuntimeError, match=r"replica 1 differs .*learning rate of group 0"):
        train(*parts, 1, lambda step: parts[1].param_groups[0].update(lr=rate))
    resilin.reset_job()
    parts = make(cross_check=1)

    def shift(step):
        job = current_job()
        if replica() == 0:
            now = job.timeline
            now.clock = replace(now.clock, progress=now.clock.progress + 1e-9)

    with pytest.raises(RuntimeError, match=r"replica 0 differs from the other 2 in clock"):
        train(*parts, 1, shift)


@pytest.mark.world_size(3)
def test_a_run_that_does_not_diverge_is_left_alone():
    # BatchNorm statistics are each replica's own, and unequal shares make them differ.
    checks = []
    for setting in ("auto", 1, "off"):
        resilin.reset_job()
        parts = make(cross_check=setting, rule="adascale", stats_every=1)
        seen = []
        check = parts[2]._check
        votes = check.votes
        check.votes = lambda votes=votes, seen=seen: (seen.append(votes()), seen[-1])[1]
        parts[3].set_batch_size(lambda clock: 12 + 7 * (clock.steps % 3))
        train(*parts, 2)
        checks.append([bool(said) for said in seen])
        if setting == "off":
            one_ulp(parts[0][2].weight) if replica() == 0 else None
            train(*parts, 1)
    assert checks[0][0] is True
    assert all(checks[1])
    assert not any(checks[2])


class Divided(torch.optim.Optimizer):
    """Steps each parameter on one rank, which alone has its momentum, and sends it to the others.

    Args:
        whole: Whether all ranks have a momentum of each parameter, most of which nobody uses.
    """

    def __init__(self, parameters, whole):
        super().__init__(parameters, {"lr": 0.01})
        self.whole = whole

    @torch.no_grad()
    def step(self, closure=None):
        world = dist.get_world_size()
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            owner = number % world
            if self.whole or dist.get_rank() == owner:
                buffer = self.state[parameter].setdefault("buffer", torch.zeros_like(parameter))
            if dist.get_rank() == owner:
                parameter.sub_(buffer.mul_(0.9).add_(parameter.grad), alpha=0.01)
            dist.broadcast(parameter, owner)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("cross_check", ["auto", 1])
def test_an_optimizer_that_divides_its_state_among_processes_is_refused(whole, cross_check):
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    optimizer = Divided(module.parameters(), whole)
    model = resilin.AdaptiveDataParallel(
        module, optimizer, rule="constant", cross_check=cross_check
    )
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    loader = resilin.AdaptiveDataLoader(TensorDataset(x), 4)
    message = r"different states of the optimizer after step 1 \(Divided\)"

    def train():
        for (batch,) in loader:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(RuntimeError, match=message):
        train()
    assert model.clock.steps <= 2


@pytest.mark.world_size(2)
def test_the_optimizer_may_have_other_states_for_what_ddp_ignores():
    module = nn.ModuleDict({"ours": nn.Linear(3, 1), "own": nn.Linear(3, 1)})
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        module, ["own.weight", "own.bias"]
    )
    module.forward = lambda x: module["ours"](x) + module["own"](x) * (1 + replica())
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    model = resilin.AdaptiveDataParallel(module, optimizer, rule="constant", cross_check=1)
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    for (batch,) in resilin.AdaptiveDataLoader(TensorDataset(x), 4):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.clock.steps == 10
    own = optimizer.state[module["own"].weight]["exp_avg"]
    everyone = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(everyone, own)
    assert not torch.equal(*everyone)


@pytest.mark.world_size(2)
def test_the_launcher_decides_before_the_script(monkeypatch):
    monkeypatch.setenv("RESILIN_CROSS_CHECK", "2")
    parts = make(cross_check="off")

    def change(step):
        if step == 3 and replica() == 1:
            one_ulp(parts[0][0].bias)

    with pytest.raises(RuntimeError, match="diverged by step 4"):
        train(*parts, 1, change)


def test_settings_and_one_process(monkeypatch):
    for wrong in (0, -1, 1.5, "often"):
        resilin.reset_job()
        with pytest.raises((ValueError, TypeError), match="cross_check"):
            make(cross_check=wrong)
    monkeypatch.setenv("RESILIN_CROSS_CHECK", "sometimes")
    resilin.reset_job()
    with pytest.raises(ValueError, match="RESILIN_CROSS_CHECK"):
        make()
    monkeypatch.delenv("RESILIN_CROSS_CHECK")
    resilin.reset_job()
    parts = make(cross_check=1)
    assert num_replicas() == 1
    assert parts[2]._check.votes() == ()
    parts[2].release()
    assert parts[2]._check not in current_job().voters


def test_its_share_of_the_time_is_bounded():
    job = current_job()
    check = DivergenceCheck(job.engine, job.timeline, nn.Linear(2, 2), "auto", dict)
    assert check._interval(0.1, 0.0) == 1
    for seconds, per_step in ((0.001, 0.1), (0.05, 0.1), (3.0, 0.001)):
        interval = check._interval(seconds, per_step)
        assert 1 <= interval <= divergence.LONGEST
        share = seconds / (interval * per_step)
        assert share <= divergence.SHARE or interval in (1, divergence.LONGEST)
    assert check._interval(1e-6, 1.0) == 1


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
def test_any_bit_and_any_place_changes_the_sums(dtype):
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(3, 700, generator=generator).to(dtype)
    (before,) = sums_of([tensor])
    assert sums_of([tensor.clone()]) == [before]
    bits = tensor.view(torch.uint8).view(-1)
    for place in (0, 1, 511, 512, 1024, len(bits) - 1):
        for bit in (0, 7):
            bits[place] ^= 1 << bit
            assert sums_of([tensor]) != [before]
            bits[place] ^= 1 << bit
    swapped = tensor.clone()
    swapped[0, 0], swapped[2, 5] = tensor[2, 5], tensor[0, 0]
    assert sums_of([swapped]) != [before]
    shifted = tensor.roll(1, 1)
    assert sums_of([shifted]) != [before]
    assert sums_of([torch.empty(0, dtype=dtype), tensor.t()])[0] == (0, 0)
