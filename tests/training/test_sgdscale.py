"""Jobs whose rule changes SGD's momentum, against the rule written out in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import resilin
from resilin.core.rules import PowerRule
from tests.training.gates.test_factors import Reference

SIZES = (24, 16, 8, 4, 12)
REFERENCE = 8
STATIC = PowerRule(1, momentum=True)
"""A step is worth its scale: no noise decides, so that it can be written out."""


def make_data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) > 0).long())


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def expected(settings, sizes=SIZES):
    """Parameters after each step of the rule, on whole batches in order."""
    net, (x, y) = make_net(), make_data().tensors
    made, cursor, results = [*net.parameters()], 0, []
    reference = Reference(made, **settings)
    for size in sizes:
        batch = slice(cursor, cursor + size)
        gradients = torch.autograd.grad(F.cross_entropy(net(x[batch]), y[batch]), made)
        for parameter, gradient in zip(made, gradients, strict=True):
            parameter.grad = gradient
        reference.step(made, size / REFERENCE)
        for parameter, value in zip(made, reference.values, strict=True):
            parameter.data = value
        results.append([value.clone() for value in reference.values])
        cursor += size
    return results


class Job:
    """A loop of a user, with everything that it may have around its optimizer."""

    def __init__(self, settings, rule=STATIC, scaler=None, compiler=None):
        self.net = make_net()
        settings = {"lr": 0.1, "momentum": 0.9, **settings}
        self.optimizer = torch.optim.SGD(self.net.parameters(), **settings)
        if compiler is not None:
            self.optimizer.step = torch.compile(self.optimizer.step, **compiler)
        self.scaler = scaler
        self.model = resilin.AdaptiveDataParallel(
            self.net, self.optimizer, rule=rule, scaler=scaler, stats_every=1
        )
        self.loader = resilin.AdaptiveDataLoader(make_data(), REFERENCE, max_local_bsz=5)
        self.loader.set_batch_size(lambda clock: SIZES[min(clock.steps, len(SIZES) - 1)])

    def train(self, until=None):
        """Parameters after each step."""
        results = []
        for x, y in self.loader:
            before, loss = self.model.clock.steps, F.cross_entropy(self.model(x), y)
            if self.scaler is None:
                loss.backward()
                self.optimizer.step()
            else:
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
            self.optimizer.zero_grad()
            if self.model.clock.steps > before:
                results.append([value.detach().clone() for value in self.net.parameters()])
            if self.model.clock.steps == (until or len(SIZES)):
                return results
        return results


def assert_same(results, wanted):
    assert len(results) == len(wanted)
    for made, values in zip(results, wanted, strict=True):
        for one, other in zip(made, values, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


LOOPS = {
    "plain": {},
    "nesterov": {"nesterov": True, "weight_decay": 0.1},
    "dampened": {"dampening": 0.3, "weight_decay": 0.1},
}


@pytest.mark.parametrize("settings", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.world_size(2))])
def test_a_job_steps_by_the_rule(world, settings):
    assert_same(Job(settings).train(), expected(settings))


@pytest.mark.parametrize("settings", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("form", [{"foreach": True}, {"fused": True}])
def test_a_loss_scale_changes_nothing(form, settings):
    # A fused step unscales the gradients by itself.
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    assert_same(Job({**settings, **form}, scaler=scaler).train(), expected(settings))
    assert scaler.get_scale() == 4096.0


# torch imports it when it first traces an optimizer.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("settings", LOOPS.values(), ids=LOOPS)
def test_a_compiled_step_follows_and_is_soon_not_compiled_again(settings):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    rate = torch.tensor(0.1, dtype=torch.float64)
    job = Job({**settings, "lr": rate}, compiler={"backend": backend})
    results, counts = [], []
    for step in range(len(SIZES)):
        results += job.train(until=step + 1)
        counts.append(len(graphs))
    assert_same(results, expected(settings))
    # Without and with buffers, and once more when the numbers have turned out to change.
    assert 1 <= counts[-1] == counts[2] <= 3
    torch.compiler.reset()


@pytest.mark.parametrize("settings", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("stop", [2, 4])
def test_a_job_that_resumes_ends_as_one_that_was_never_interrupted(tmp_path, settings, stop):
    resilin.checkpoint_to(tmp_path, every=1, memory_every=None)
    Job(settings).train(until=stop)
    resilin.reset_job()
    resilin.checkpoint_to(tmp_path, every=1, memory_every=None)
    job, version = Job(settings), resilin.resume()
    # Checkpoints are written while training goes on, so the last step may not be in one.
    assert 1 <= version.step <= stop
    assert_same(job.train(), expected(settings)[version.step :])
