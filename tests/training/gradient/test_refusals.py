"""What loops do to a gradient that is not theirs yet: it waits, or it is refused by name."""

import copy
import pickle
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import resilin
from tests.replicas import gathered, worlds

D = torch.float64


def data(n=48):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(n, 5, generator=generator, dtype=D),
        torch.randn(n, 1, generator=generator, dtype=D),
    )


def make(net=None, lr=0.0, **kwargs):
    torch.manual_seed(0)
    net = nn.Linear(5, 1, dtype=D) if net is None else net
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    kwargs = {"rule": "linear", **kwargs}
    return net, optimizer, resilin.AdaptiveDataParallel(net, optimizer, **kwargs)


def loader(n=48, **kwargs):
    return resilin.AdaptiveDataLoader(data(n), **{"batch_size": 12, "max_local_bsz": 4, **kwargs})


def assert_exact(net, seen):
    inputs, labels = (torch.cat(parts) for parts in zip(*seen, strict=True))
    exact = torch.autograd.grad(F.mse_loss(net(inputs), labels), list(net.parameters()))
    for parameter, grad in zip(net.parameters(), exact, strict=True):
        assert torch.allclose(parameter.grad, grad, rtol=1e-12, atol=1e-15)


# zero_grad ---------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["before backward", "after step"])
@pytest.mark.parametrize("which", ["model", "module", "optimizer"])
def test_zero_grad_of_anything_waits(which, place):
    net, optimizer, model = make()
    zero_grad = {"model": model, "module": net, "optimizer": optimizer}[which].zero_grad
    seen, steps = [], 0
    for x, y in loader():
        seen.append((x, y))
        loss = F.mse_loss(model(x), y)
        if place == "before backward":
            zero_grad()
        loss.backward()
        optimizer.step()
        if model.clock.steps > steps:
            assert_exact(net, seen)
            seen, steps = [], model.clock.steps
        if place == "after step":
            zero_grad()
    assert model.clock.steps == 4


def test_a_gated_module_can_be_copied_saved_and_released():
    net, _, model = make()
    F.mse_loss(model(torch.ones(4, 5, dtype=D)), torch.ones(4, 1, dtype=D)).backward()
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        other.weight.grad = torch.ones_like(other.weight)
        other.zero_grad()
        assert other.weight.grad is None
    model.release()
    assert "zero_grad" not in vars(net)
    net.zero_grad()
    assert net.weight.grad is None


def test_zero_grad_of_a_compiled_module_waits_too():
    plain = nn.Linear(5, 1, dtype=D)
    compiled = torch.compile(plain, backend="eager")
    _, optimizer, model = make(compiled)
    seen = []
    for x, y in loader(12):
        seen.append((x, y))
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        if model.clock.steps:
            assert_exact(plain, seen)
        plain.zero_grad()
        compiled.zero_grad()


def test_a_step_can_be_left_by_zero_grad():
    net, optimizer, model = make(lr=0.1)
    before = net.weight.detach().clone()
    for index, (x, y) in enumerate(loader()):
        F.mse_loss(model(x), y).backward()
        if index == 2:
            # As loops do that find a bad norm: nothing is stepped, and nothing counts.
            optimizer.zero_grad()
            assert net.weight.grad is None
            assert torch.equal(net.weight, before)
            continue
        optimizer.step()
        optimizer.zero_grad()
    assert (model.clock.steps, model.clock.samples) == (3, 36)


# Changes of the gradient -------------------------------------------------------------------


def clip(net):
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1e3)


def clip_value(net):
    torch.nn.utils.clip_grad_value_(net.parameters(), 1e-3)


def write_data(net):
    net.weight.grad.data.mul_(0.5)


def replace_it(net):
    net.weight.grad = net.weight.grad.clone()


def take_it(net):
    net.weight.grad = None


CHANGES = (clip, clip_value, write_data, replace_it, take_it)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("limit", [12, 4])
def test_a_change_before_the_step_is_refused_with_and_without_accumulation(change, limit):
    net, optimizer, model = make()
    batches = iter(loader(max_local_bsz=limit))
    x, y = next(batches)
    F.mse_loss(model(x), y).backward()
    change(net)
    with pytest.raises(
        RuntimeError, match=r"gradient was changed .*call model.clip_grad_norm_\(\)"
    ):
        optimizer.step()
    assert model.clock.steps == 0


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("before", ["forward", "backward"])
def test_a_change_after_a_step_that_waited_is_refused(change, before):
    net, optimizer, model = make()
    batches = iter(loader())
    x, y = next(batches)
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    if before == "forward":
        change(net)
    x, y = next(batches)

    def train():
        loss = F.mse_loss(model(x), y)
        if before == "backward":
            change(net)
        loss.backward()

    with pytest.raises(RuntimeError, match="changed in the middle of an accumulation"):
        train()


def test_changes_that_wait_for_the_whole_gradient_are_allowed():
    net, optimizer, model = make(lr=0.1)
    told, plain = [], nn.Linear(5, 1, dtype=D)
    plain.load_state_dict(net.state_dict())
    for x, y in loader():
        F.mse_loss(model(x), y).backward()
        with model.change_gradient() as complete:
            told.append(complete)
            if complete:
                clip_value(net)
                write_data(net)
        optimizer.step()
        optimizer.zero_grad()
    assert told == [False, False, True] * 4
    own = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x, y in DataLoader(data(), batch_size=12):
        F.mse_loss(plain(x), y).backward()
        clip_value(plain)
        write_data(plain)
        own.step()
        own.zero_grad()
    assert torch.allclose(net.weight, plain.weight, rtol=1e-12)


def test_a_gradient_that_nobody_zeroes_is_refused():
    _, optimizer, model = make()
    batches = iter(loader(max_local_bsz=12))
    x, y = next(batches)
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    x, y = next(batches)
    with pytest.raises(RuntimeError, match=r"optimizer.zero_grad\(\) has not removed"):
        F.mse_loss(model(x), y).backward()


# Steps -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stock", [False, True])
def test_accumulation_by_hand_is_refused_before_the_first_step(stock):
    _, optimizer, model = make(batch_size=4)
    batches = DataLoader(data(), 4) if stock else loader(batch_size=4)

    def train():
        for index, (x, y) in enumerate(batches):
            (F.mse_loss(model(x), y) / 4).backward()
            if index % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(
        RuntimeError, match=r"accumulation by hand\?.*call optimizer.step\(\) after"
    ):
        train()
    assert model.clock.steps == 0


def test_accumulation_by_hand_of_just_as_many_micro_batches_is_a_warning():
    _, optimizer, model = make()

    def train():
        for index, (x, y) in enumerate(loader(batch_size=16, max_local_bsz=4)):
            (F.mse_loss(model(x), y) / 4).backward()
            if index % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()

    with pytest.warns(UserWarning, match="a loss that the loop divides, too, is divided twice"):
        train()


def test_a_backward_pass_that_failed_in_the_middle_is_not_trained_on():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ArithmeticError

    _, _, model = make(nn.Sequential(nn.Linear(5, 5, dtype=D), nn.Linear(5, 1, dtype=D)))
    batches = iter(loader())
    x, y = next(batches)
    hidden = model.module[0].register_forward_hook(lambda m, i, output: Broken.apply(output))
    with pytest.raises(ArithmeticError):
        F.mse_loss(model(x), y).backward()
    hidden.remove()
    x, y = next(batches)
    with pytest.raises(RuntimeError, match="backward pass in the middle of a step failed"):
        model(x)


def test_an_optimizer_that_failed_may_step_again():
    _, optimizer, model = make(lr=0.1)
    failing = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    batches = iter(loader(max_local_bsz=12))
    x, y = next(batches)
    F.mse_loss(model(x), y).backward()
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    failing.remove()
    optimizer.step()
    optimizer.zero_grad()
    x, y = next(batches)
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    assert (model.clock.steps, model.clock.samples) == (2, 24)


def test_static_graph_is_refused():
    with pytest.raises(ValueError, match=r"static_graph \(True\) must be False"):
        make(static_graph=True)


def whole(net):
    return torch.compile(net, backend="eager")


def in_place(net):
    net.compile(backend="eager")
    return net


def in_part(net):
    return nn.Sequential(nn.Identity(), whole(net))


@pytest.mark.parametrize("compiled", [whole, in_place, in_part])
def test_buckets_that_torch_cannot_compile_for_are_refused_at_any_number_of_replicas(compiled):
    # With one replica there is no DDP: torch itself would fail once the job grows.
    net = compiled(nn.Linear(5, 1, dtype=D))
    with pytest.raises(ValueError, match=r"bucket_cap_mb \(0\.5\) must be at least 1 for a comp"):
        make(net, bucket_cap_mb=0.5)
    make(net, bucket_cap_mb=1)


def test_small_buckets_are_fine_where_torch_does_not_split_a_compiled_graph_by_them():
    make(bucket_cap_mb=0.5)
    resilin.reset_job()
    net = whole(nn.Linear(5, 1, dtype=D))
    with torch._dynamo.config.patch(optimize_ddp=False):
        make(net, bucket_cap_mb=0.5)


@pytest.mark.world_size(2)
def test_torch_compiles_for_the_smallest_buckets_that_are_not_refused():
    _, optimizer, model = make(whole(nn.Linear(5, 1, dtype=D)), lr=0.1, bucket_cap_mb=1)
    for x, y in loader():
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.clock.samples == 48
    # Once this passes, there is no reason to refuse smaller ones.
    plain = DistributedDataParallel(whole(nn.Linear(5, 1, dtype=D)), bucket_cap_mb=0.5)
    with pytest.raises(AssertionError, match="First bucket should be smaller"):
        plain(torch.zeros(2, 5, dtype=D))


# Sizes and outputs -------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["whole first", "whole last"])
def test_with_a_stock_loader_the_largest_call_is_the_batch(order):
    _, optimizer, model = make(lr=0.1, batch_size=24)
    for x, y in DataLoader(data(), batch_size=24):
        if order == "whole first":
            whole, some = model(x), model(x[:4])
        else:
            some, whole = model(x[:4]), model(x)
        (F.mse_loss(whole, y) + some.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (model.scale, model.factors[0].lr, model.clock.samples) == (1, 1, 48)


def test_with_a_stock_loader_calls_without_a_backward_pass_do_not_count():
    _, optimizer, model = make(lr=0.1, batch_size=12)
    for x, y in DataLoader(data(), batch_size=12):
        model(torch.ones(99, 5, dtype=D))  # an evaluation that forgot eval() and no_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (model.scale, model.clock.samples) == (1, 48)
    kept = model(torch.ones(99, 5, dtype=D))
    loss = F.mse_loss(model(x), y)
    with pytest.raises(RuntimeError, match=r"batches of 99 and 12.*model.weight\(n\)"):
        loss.backward()
    del kept


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weights", [(4000, 4000, 4000, 1), (1, 4000, 30, 4000), (1, 0, 9000, 1)])
def test_weights_of_any_size_do_not_overflow(weights, dtype):
    net = nn.Linear(1, 1, bias=False).to(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="linear")
    tokens = torch.tensor(weights, dtype=torch.float32)
    inputs = torch.tensor([[20.0], [24.0], [16.0], [20.0]], dtype=dtype)
    batches = resilin.AdaptiveDataLoader(
        TensorDataset(inputs, tokens), 4, max_local_bsz=1, batch_weight=lambda batch: batch[1].sum()
    )
    for x, _ in batches:
        model(x).mean().backward()
        optimizer.step()
    expected = float((inputs.double()[:, 0] * tokens).sum() / tokens.sum())
    assert net.weight.grad.item() == pytest.approx(expected, rel=0.02)


@dataclass
class Prediction:
    values: torch.Tensor
    extra: object = None


class Pair(NamedTuple):
    first: object
    second: object


class Opaque:
    def __init__(self, values):
        self.values = values


class Returning(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.layer, self.wrap = nn.Linear(5, 1, dtype=D), wrap

    def forward(self, x):
        return self.wrap(self.layer(x))


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (Prediction, lambda output: output.values),
        (lambda values: [{"a": Prediction(None, (values,))}], lambda o: o[0]["a"].extra[0]),
        (lambda values: Pair(1, Prediction(values)), lambda output: output.second.values),
    ],
)
def test_outputs_may_be_dataclasses_in_containers(wrap, unwrap):
    _, optimizer, model = make(Returning(wrap))
    for x, y in loader():
        F.mse_loss(unwrap(model(x)), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.clock.steps == 4


def test_outputs_of_transformers():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    net = Returning(lambda values: outputs.SequenceClassifierOutput(logits=values))
    _, optimizer, model = make(net)
    for x, y in loader():
        F.mse_loss(model(x).logits, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.clock.steps == 4


def test_outputs_that_cannot_be_searched_are_named():
    _, optimizer, model = make(Returning(Opaque))
    batches = iter(loader())
    x, y = next(batches)
    F.mse_loss(model(x).values, y).backward()
    with pytest.raises(RuntimeError, match="returned an object of type Opaque"):
        optimizer.step()


# Freezing ----------------------------------------------------------------------------------


def deep():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6, dtype=D), nn.Tanh(), nn.Linear(6, 1, dtype=D))


@pytest.mark.parametrize("limit", [12, 4])
def test_parameters_that_are_unfrozen_and_frozen_later_have_the_exact_gradient(limit):
    net = deep()
    net[0].requires_grad_(False)
    _, optimizer, model = make(net, lr=0.1)
    plain = deep()
    plain[0].requires_grad_(False)
    own = torch.optim.SGD(plain.parameters(), lr=0.1)
    whole = iter(DataLoader(data(), batch_size=12))
    changes = [(0, True), (2, False), (2, True), (0, False)]
    changing = iter(changes)
    for x, y in loader(max_local_bsz=limit):
        index = resilin.current_job().micro_batch.index
        if index == 0:
            layer, trained = next(changing)
            for part in (net, plain):
                part[layer].requires_grad_(trained)
            inputs, labels = next(whole)
            F.mse_loss(plain(inputs), labels).backward()
            own.step()
            own.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.clock.steps == len(changes)
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-10)


def test_freezing_in_the_middle_of_a_step_is_refused():
    net, optimizer, model = make(deep())
    batches = iter(loader())
    x, y = next(batches)
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    x, y = next(batches)
    net[2].bias.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"requires_grad of 2.bias was changed in the middle"):
        model(x)


def test_parameters_that_are_added_later_are_refused_by_name():
    net, _, model = make(deep())
    net[0] = nn.Linear(5, 6, dtype=D)
    batches = iter(loader())
    x, _ = next(batches)
    with pytest.raises(ValueError, match=r"added after the module was wrapped \(0.weight is the f"):
        model(x)


def test_losses_that_a_loop_keeps_alive_do_not_weigh_later_micro_batches():
    data = TensorDataset(torch.arange(1.0, 11.0, dtype=torch.float64)[:, None])
    module = nn.Linear(1, 1, bias=False).double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    model = resilin.AdaptiveDataParallel(module, optimizer, rule="constant")
    loader = resilin.AdaptiveDataLoader(data, batch_size=10, max_local_bsz=3)
    losses, sizes = [], []
    for (x,) in loader:
        loss = model(x).mean()
        # Without detach(): the graphs of all micro-batches stay.
        losses.append(loss)
        sizes.append(len(x))
        loss.backward()
        optimizer.step()
    assert len(set(sizes)) > 1
    assert module.weight.grad.item() == pytest.approx(5.5, rel=1e-12)
    assert resilin.current_job().clock.samples == 10


def test_batch_statistics_over_replicas_come_with_a_warning(caplog):
    make(nn.Sequential(nn.Linear(5, 4, dtype=D), nn.SyncBatchNorm(4, dtype=D)))
    (warning,) = [r.getMessage() for r in caplog.records if "SyncBatchNorm" in r.getMessage()]
    assert warning.startswith("1 is a SyncBatchNorm: with several replicas, its gradient is that")


def test_a_model_that_is_converted_after_it_was_wrapped_is_refused():
    net, _, model = make()
    net.float()
    with pytest.raises(
        ValueError, match=r"weight was torch\.float64 when .* and is torch\.float32"
    ):
        model(torch.ones(4, 5))


def test_no_sync_does_nothing_and_says_so():
    _, optimizer, model = make(lr=0.1)
    for x, y in loader(12):
        with pytest.warns(UserWarning, match="Leave it out"), model.no_sync():
            F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.clock.steps == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_a_plain_model_with_the_names_of_the_original(copied):
    net, _, model = make()
    other = copied(model.eval())
    assert other.state_dict().keys() == model.state_dict().keys()
    assert not other.training
    net.weight.data.add_(1)
    assert torch.equal(other(torch.ones(2, 5, dtype=D)) + 5, model(torch.ones(2, 5, dtype=D)))
    model.load_state_dict(other.state_dict())
    assert torch.equal(other.module.weight, net.weight)


def test_an_average_of_the_wrapper_follows_and_is_evaluated():
    net, optimizer, model = make(lr=0.1)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    weights = []
    for x, y in loader():
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if model.stepped:
            averaged.update_parameters(model)
            weights.append(net.weight.detach().clone())
    x = torch.ones(3, 5, dtype=D)
    assert torch.equal(averaged(x), averaged.module.module(x))
    torch.testing.assert_close(averaged.module.module.weight, torch.stack(weights).mean(0))


class Tables(nn.Module):
    """A sparse embedding beside a dense layer."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 2, sparse=True, dtype=D)
        self.linear = nn.Linear(5, 2, dtype=D)

    def forward(self, x):
        return self.linear(x) + self.table(x[:, 0].abs().mul(4).long().clamp(max=8))


def test_sparse_gradients_may_be_accumulated_and_measured():
    found = []
    for settings in ({"max_local_bsz": 5}, {"max_local_bsz": 12}):
        resilin.reset_job()
        torch.manual_seed(0)
        net = Tables()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model = resilin.AdaptiveDataParallel(net, optimizer, rule="linear", stats_every=1)
        for x, _ in loader(**settings):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(list(net.parameters()))
    for split, whole in zip(*found, strict=True):
        torch.testing.assert_close(split, whole, rtol=0, atol=1e-14)


@pytest.mark.world_size(2)
def test_a_pass_that_ddp_does_not_reduce_is_refused_by_name():
    net, _, model = make(nn.ModuleDict({"used": nn.Linear(5, 1), "left": nn.Linear(5, 1)}).to(D))
    net.forward = lambda x: net["used"](x)
    x, _ = next(iter(loader(max_local_bsz=None)))
    with pytest.raises(
        RuntimeError, match=r"\(2 parameters \(left\.weight is the first\) .* find_un"
    ):
        model(x).sum().backward()


def with_penalty(x, output, other):
    """A loss with the squared slope of the other output in it."""
    (slope,) = torch.autograd.grad(other.sum(), x, create_graph=True)
    return output.square().mean() + slope.square().mean()


@pytest.mark.parametrize("world", worlds(1, 2))
def test_a_gradient_penalty(world):
    net, optimizer, model = make(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).to(D))
    for x, _ in loader(max_local_bsz=None):
        with_penalty(x, model(x.requires_grad_()), model.module(x)).backward()
        whole = torch.stack(gathered(list(x.detach()))).requires_grad_()
        loss = with_penalty(whole, output := net(whole), output)
        exact = torch.autograd.grad(loss, list(net.parameters()), allow_unused=True)
        for parameter, theirs in zip(net.parameters(), exact, strict=True):
            torch.testing.assert_close(parameter.grad, theirs, rtol=0, atol=1e-14)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("world", worlds(1, 2))
def test_a_gradient_penalty_through_the_model_is_refused(world):
    *_, model = make()
    x, _ = next(iter(loader(max_local_bsz=None)))
    output = model(x.requires_grad_())
    with pytest.raises(RuntimeError, match=r"compute a gradient penalty with model\.module"):
        with_penalty(x, output, output).backward()
