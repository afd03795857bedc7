"""torch.compile around the module, and around our model: the same training, nothing of ours traced.

Counters of the compiler tell what a step costs after the first ones: 0 graphs, 0 breaks, 0 frames.
"""

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.data import TensorDataset

import resilin
from tests.replicas import worlds

D = torch.float64
NUM, BATCH = 96, 12

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",  # of torch, when dynamo is loaded
    "ignore:The .grad attribute of a Tensor that is not a leaf",  # of dynamo, which hides it
)
worlds = pytest.mark.parametrize("world", worlds(1, 2))


class Net(nn.Module):
    """A module of the user's own: torch compiles none of its own containers by itself."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 9), nn.Linear(9, 9), nn.Linear(9, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def net():
    torch.manual_seed(0)
    return Net().to(D)


def data(n=NUM):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 5, generator=generator, dtype=D)
    return TensorDataset(x, torch.randn(n, 1, generator=generator, dtype=D))


def wrapped(plain, **options):
    optimizer = torch.optim.SGD([*plain.parameters()], lr=0.1, momentum=0.9)
    options = {"rule": "linear", "stats_every": 3, **options}
    return resilin.AdaptiveDataParallel(plain, optimizer, **options)


def inside(plain, **compiler):
    model = wrapped(torch.compile(plain, **compiler))
    return model, model


def inside_in_place(plain, **compiler):
    plain.compile(**compiler)
    model = wrapped(plain)
    return model, model


def outside(plain, **compiler):
    model = wrapped(plain)
    return model, torch.compile(model, **compiler)


def outside_in_place(plain, **compiler):
    model = wrapped(plain)
    model.compile(**compiler)
    return model, model


def loading(num=NUM, **options):
    return resilin.AdaptiveDataLoader(data(num), BATCH, shuffle=True, seed=5, **options)


def train(model, call, loader, epochs):
    """Trains, and gives the sizes that the model met."""
    sizes = set()
    for _ in resilin.remaining_epochs_until(epochs):
        for x, y in loader:
            sizes.add(len(x))
            F.mse_loss(call(x), y).backward()
            model.optimizer.step()
            model.optimizer.zero_grad()
    return sizes


def compiled_so_far():
    return {name: sum(counters[name].values()) for name in ("stats", "graph_break", "frames")}


@pytest.fixture(autouse=True)
def _compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


def flat(module):
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def uncompiled(epochs, **options):
    plain = net()
    model = wrapped(plain)
    train(model, model, loading(**options), epochs)
    result = flat(plain)
    model.release()
    resilin.reset_job()
    assert not counters["stats"]
    return result


@worlds
@pytest.mark.parametrize("how", [inside, inside_in_place, outside, outside_in_place])
def test_a_compiled_model_trains_as_an_uncompiled_one(world, how):
    expected = uncompiled(3)
    plain = net()
    (model, call), loader = how(plain, backend="eager"), loading()
    # Measured steps of one process come in two pieces: 12 and 6 samples.
    assert train(model, call, loader, 1) == ({12, 6} if world == 1 else {6})
    first = compiled_so_far()
    assert counters["stats"]["unique_graphs"] == (2 if world == 1 else 1)
    # The module is in one graph; around it, our forward pass is one break, and is never entered.
    # DDP is another one, as it is without us.
    breaks = list(counters["graph_break"])
    ours = [text for text in breaks if "AdaptiveDataParallel.forward" in text]
    ddp = [text for text in breaks if "DistributedDataParallel._inside_ddp_forward" in text]
    # torch 2.13 begins within our forward pass where it is compiled in place, 2.15 before it.
    assert len(ours) in {outside: {1}, outside_in_place: {0, 1}}.get(how, {0})
    assert len(breaks) == len(ours) + len(ddp), breaks
    assert not ddp or (world == 2 and "outside" in how.__name__)
    assert torch._dynamo.config.error_on_recompile is False
    with torch._dynamo.config.patch(error_on_recompile=True):
        train(model, call, loader, 3)
    assert model.clock.steps == 3 * NUM // BATCH
    assert compiled_so_far() == first
    assert model.noise is not None
    assert torch.equal(flat(plain), expected)


@pytest.mark.nightly(part="torch")
def test_the_default_compiler_trains_as_exactly_as_its_kernels_add():
    # One compilation is enough to pay for: 12 samples are two pieces of 6 in all steps.
    expected = uncompiled(2, max_local_bsz=6)
    plain = net()
    model, call = inside(plain)
    train(model, call, loading(max_local_bsz=6), 2)
    assert counters["stats"]["unique_graphs"] == 1
    assert torch.allclose(flat(plain), expected, rtol=1e-12, atol=1e-15)


def test_a_function_of_the_loop_is_cut_at_our_model_alone():
    expected = uncompiled(2)
    plain = net()
    model, loader = wrapped(plain), loading()

    @torch.compile(backend="eager")
    def loss(x, y):
        return F.mse_loss(model(2 * x / 2), y)

    for _ in resilin.remaining_epochs_until(2):
        for x, y in loader:
            loss(x, y).backward()
            model.optimizer.step()
            model.optimizer.zero_grad()
    assert [("AdaptiveDataParallel" in text) for text in counters["graph_break"]] == [True]
    assert torch.equal(flat(plain), expected)


def test_each_size_of_a_micro_batch_is_a_shape_unless_shapes_are_dynamic():
    for options, sizes in {
        # 100 = 8 x 12 + 4, and 12 = 4 + 4 + 4: equal pieces, and a remainder of the same size.
        (("max_local_bsz", 5),): {4},
        # 12 = 6 + 6, and the remainder is 4.
        (("max_local_bsz", 8),): {6, 4},
        (("max_local_bsz", 8), ("tail", "drop")): {6},
    }.items():
        plain = net()
        model, call = inside(plain, backend="eager", dynamic=False)
        assert train(model, call, loading(100, **dict(options)), 1) == sizes
        assert counters["stats"]["unique_graphs"] == len(sizes)
        model.release()
        resilin.reset_job()
        torch._dynamo.reset()
        counters.clear()
    plain = net()
    model, call = inside(plain, backend="eager", dynamic=True)
    assert train(model, call, loading(100, max_local_bsz=8), 2) == {6, 4}
    assert counters["stats"]["unique_graphs"] == 1
