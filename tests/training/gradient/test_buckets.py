"""Buckets of our own: which are reduced when, what is lost with a replica, and where it is raised.

That the gradient is exact is tested with that of DDP, in `test_replicas` and `test_exactness`.
"""

import gc
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from resilin.core.step import Part, Step
from resilin.engine.lost import PeerLost
from resilin.training.gradient.buckets import BucketReducer
from resilin.training.gradient.packs import assign
from resilin.training.gradient.reducer_choice import choose
from tests.replicas import assert_identical, num_replicas, on_replicas, replica
from tests.training.gradient.driven import Driven, model_of

D = torch.float64
SMALL = {"bucket_cap_mb": 0.0005}
MEASURED = Step(measure=True, seconds=1.0, steps=0)
OTHER = Step(measure=False, seconds=1.0, steps=0)


class Live:
    """As much of a live engine as the gradient asks for; a test says when a replica is lost."""

    live = True

    def __init__(self):
        self.waits = []
        self.lost_at = None
        self.allowed = True

    def gradient_group(self):
        return dist.group.WORLD

    host_group = gradient_group

    def all_took_part(self, here):
        return here

    def refused(self, error):
        return PeerLost("a replica is lost") if self.lost_at == 0 else error

    def wait(self, work):
        assert self.allowed, "nothing may wait here"
        self.waits.append(work)
        if self.lost_at is not None and len(self.waits) > self.lost_at:
            raise PeerLost("a replica is lost")
        work.wait()


def deep(layers=4, dtype=D):
    torch.manual_seed(0)
    inner = [part for _ in range(layers) for part in (nn.Linear(9, 9), nn.Tanh())]
    return nn.Sequential(nn.Linear(5, 9), *inner, nn.Linear(9, 1)).to(dtype)


def gradient_of(net, engine=None, **options):
    engine = Live() if engine is None else engine
    options = {**SMALL, **options}
    return Driven(net, engine, options)


def part(weight=2.0, *, last=True, total=None):
    return Part(weight=weight, samples=round(weight), last=last, total=total)


def batch(step=0, size=2, dtype=D):
    generator = torch.Generator().manual_seed(100 * step + replica())
    return torch.randn(size, 5, generator=generator, dtype=D).to(dtype)


def train(gradient, net, steps, *, start=OTHER, loss=None):
    """Makes steps of one micro-batch, with the same weights on all replicas."""
    for step in range(steps):
        gradient.begin(part(total=2.0 * num_replicas()), start)
        output = gradient.call(batch(step))
        (output.square().mean() if loss is None else loss(output)).backward()
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
        gradient.end()
        net.zero_grad()


def flat(net):
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


# Buckets -----------------------------------------------------------------------------------


def test_buckets_are_full_in_the_order_of_the_backward_pass():
    sizes = [10, 20, 30, 40]
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    assert [len(b.parameters) for b in assign(parameters, 4 * 40, 4 * 50)] == [1, 2, 1]
    assert [len(b.parameters) for b in assign(parameters, 10**6, 10**6)] == [4]
    assert [len(b.parameters) for b in assign(parameters, 10**6, 0)] == [1, 1, 1, 1]
    (whole,) = assign(parameters, 10**6, 10**6)
    assert [p.numel() for p in whole.parameters] == sizes[::-1]


def test_each_type_has_buckets_of_its_own():
    types = (torch.float64, torch.float16, torch.float64, torch.bfloat16, torch.complex64)
    parameters = [nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in types]
    found = [{p.dtype for p in b.parameters} for b in assign(parameters, 10**6, 10**6)]
    assert all(len(dtypes) == 1 for dtypes in found)
    assert len(found) == 4


def test_gradients_lie_in_memory_as_their_parameters_do():
    parameters = [
        nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.zeros(4, 6).t()),
        nn.Parameter(torch.zeros(6, 4)[:, ::2]),  # with gaps
        nn.Parameter(torch.zeros(())),
    ]
    grads = []
    for parameter in parameters:
        parameter.square().sum().backward()
        grads.append(torch.randn_like(parameter.grad))
        parameter.grad.copy_(grads[-1])
    expected = [parameter.grad.stride() for parameter in parameters]
    (bucket,) = assign(parameters, 10**6, 10**6)
    bucket.pack(3.0, 1.0, None)
    for parameter, grad, strides in zip(parameters, grads, expected, strict=True):
        assert parameter.grad.stride() == strides
        assert torch.equal(parameter.grad, 3 * grad)
    assert bucket.flat.tolist()[-4:] == [1, 1, 1, 1]


@pytest.mark.world_size(2)
def test_a_live_job_has_buckets():
    net = deep()
    model = model_of(net, live=True)
    assert isinstance(choose(model, dist.group.WORLD), BucketReducer)
    assert not BucketReducer.fits(model, None)


# Where it waits ----------------------------------------------------------------------------


@on_replicas(buckets=(2, 3))
@pytest.mark.parametrize("start", [OTHER, MEASURED], ids=["other", "measured"])
def test_nothing_waits_within_the_backward_pass(world, start, monkeypatch):
    engine, net = Live(), deep()
    gradient = gradient_of(net, engine)
    begun, reduce = [], dist.all_reduce

    def spied(*args, **kwargs):
        frames, frame = set(), sys._getframe(1)
        while frame is not None:
            frames.add(frame.f_code.co_name)
            frame = frame.f_back
        # What begins within a hook must not wait: torch itself does where it is not asynchronous.
        assert kwargs.get("async_op"), frames
        begun.append("arrive" in frames)
        return reduce(*args, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", spied)
    for step in range(3):
        gradient.begin(part(total=2.0 * world), start)
        output = gradient.call(batch(step))
        begun.clear()
        # A hook that waits fails: finish() is called behind the last hook, and may.
        first = net[0].weight
        monkeypatch.setattr(engine, "allowed", False)
        handle = first.register_post_accumulate_grad_hook(lambda _: None)
        original = BucketReducer.finish

        def finish(self, *, trained, original=original):
            engine.allowed = True
            original(self, trained=trained)

        monkeypatch.setattr(BucketReducer, "finish", finish)
        output.square().mean().backward()
        monkeypatch.setattr(BucketReducer, "finish", original)
        handle.remove()
        # From the second step on most buckets are begun in hooks; the ballot and the last are not.
        within = sum(begun)
        assert (within > 2) == (step > 0)
        assert begun[:within] == [True] * within
        assert not begun[-1]
        gradient.end()
        net.zero_grad()


@pytest.mark.world_size(2)
def test_buckets_are_reduced_in_one_order_whatever_the_graph():
    # Replica 1 leaves layers in the middle out, so that its gradients come in another order.
    net = deep(6)
    gradient = gradient_of(net)
    mine = list(net) if replica() == 0 else [net[0], *list(net)[5:]]

    for step in range(4):
        x = batch(step)
        gradient.begin(part(total=4.0), OTHER)
        gradient.call(x)  # the hooks of the module's own output
        output = gradient.call(x)
        other = x
        for layer in mine:
            other = layer(other)
        (output.sum() * 0 + other.square().mean()).backward()
        gradient.end()
        assert_identical(torch.cat([p.grad.reshape(-1) for p in net.parameters()]))
        net.zero_grad()


def three_times(parameter):
    parameter.grad.mul_(3)


@on_replicas(buckets=(2, 3))
def test_hooks_of_the_user_change_the_gradient_before_it_is_sent(world):
    # One that was registered behind ours is called behind ours.
    net, plain = deep(), deep()
    gradient = gradient_of(net)
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(three_times)
    for step in range(3):
        gradient.begin(part(total=2.0 * world), OTHER)
        gradient.call(batch(step)).square().mean().backward()
        gradient.end()
        # The mean over all replicas, from the samples of all of them.
        outputs = plain(everyones(step, world))
        (3 * outputs.square().mean()).backward()
        for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(ours.grad, theirs.grad, rtol=1e-11, atol=1e-14)
        net.zero_grad()
        plain.zero_grad()


def everyones(step, world):
    mine = batch(step)
    parts = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(parts, mine)
    return torch.cat(parts)


# Who has used what -------------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(5, 1) for _ in range(4))
        self.double()

    def forward(self, x, used):
        return sum(self.branches[index](x) for index in used)


@on_replicas(buckets=(2, 3))
@pytest.mark.parametrize("cap", [0.0, 25])
def test_what_nobody_used_has_no_gradient_and_what_some_used_has_the_mean(world, cap):
    net, plain = Branches(), Branches()
    gradient = gradient_of(net, bucket_cap_mb=cap)
    for step in range(3):
        gradient.begin(part(total=2.0 * world), OTHER)
        used = [0, 1 if replica() == 0 else 2]
        x = batch(step)
        gradient.call(x, used).square().mean().backward()
        everyone = everyones(step, world).split(2)
        losses = [plain(x, [0, 2 if r else 1]).square().mean() for r, x in enumerate(everyone)]
        (sum(losses) / world).backward()
        for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            if theirs.grad is None:
                assert ours.grad is None
            else:
                assert torch.allclose(ours.grad, theirs.grad, rtol=1e-11, atol=1e-14)
        assert sum(p.grad is None for p in net.parameters()) == 2
        gradient.end()
        net.zero_grad()
        plain.zero_grad()


class Repeated(nn.Module):
    """Layers that are gone through twice, and computed again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.layers = deep(6)
        self.reentrant = False

    def _body(self, x):
        for layer in list(self.layers)[1:-1]:
            x = layer(x)
        return x

    def forward(self, x):
        x = self.layers[0](x)
        for _ in range(2):
            x = checkpoint(self._body, x, use_reentrant=self.reentrant)
        return self.layers[-1](x)


@pytest.mark.world_size(2)
def test_a_parameter_of_several_reentrant_checkpoints_is_refused_and_of_others_is_not():
    net = Repeated()
    gradient = gradient_of(net)
    train(gradient, net, 2)
    assert_identical(flat(net))
    net.reentrant = True
    gradient.begin(part(total=4.0), OTHER)
    output = gradient.call(batch())
    with pytest.raises(RuntimeError, match="gradient twice in one backward pass"):
        output.sum().backward()


# Types -------------------------------------------------------------------------------------


def pair(dtype):
    return nn.Sequential(nn.Linear(5, 4, dtype=dtype), nn.Linear(4, 1, dtype=dtype))


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float16, 4e-3),
        (torch.bfloat16, 3e-2),
        (torch.float32, 1e-5),
        (torch.complex64, 1e-5),
        (torch.complex128, 1e-11),
    ],
)
@pytest.mark.parametrize("start", [OTHER, MEASURED], ids=["other", "measured"])
def test_types(dtype, tolerance, start):
    torch.manual_seed(0)
    net, plain = (pair(dtype) for _ in range(2))
    plain.load_state_dict(net.state_dict())
    gradient = gradient_of(net)
    for step in range(3):
        gradient.begin(part(total=4.0), start)
        gradient.call(batch(step, dtype=dtype)).abs().square().mean().backward()
        plain(everyones(step, 2).to(dtype)).abs().square().mean().backward()
        for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            assert ours.grad.dtype is dtype
            assert (ours.grad - theirs.grad).abs().max() <= tolerance * theirs.grad.abs().max()
        gradient.end()
        net.zero_grad()
        plain.zero_grad()


@pytest.mark.world_size(2)
def test_sparse_gradients_are_refused():
    net = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 1))
    gradient = gradient_of(net)
    gradient.begin(part(total=4.0), OTHER)
    output = gradient.call(torch.tensor([0, 1]))
    with pytest.raises(RuntimeError, match=r"shape \(4, 3\) has the layout torch.sparse_coo"):
        output.sum().backward()


# Buffers -----------------------------------------------------------------------------------


def normed():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).to(D)
    net.register_buffer("mask", torch.tensor([True, False]))
    return net


@on_replicas(buckets=(2, 3))
@pytest.mark.parametrize("option", ["broadcast_buffers", "forward_sync_buffers", None])
def test_buffers_are_those_of_replica_0_at_the_beginning_of_each_step(world, option):
    kept = {option: False} if option else {}
    net = normed()
    gradient = gradient_of(net, **kept)
    own, first = [], []
    for step in range(3):
        for index in range(2):
            last = index == 1
            start = None if index else OTHER
            gradient.begin(part(last=last, total=4.0 * world), start)
            expected = [net[1].running_mean.clone(), net.mask.clone()]
            parts = [[torch.empty_like(t) for _ in range(world)] for t in expected]
            for told, tensor in zip(parts, expected, strict=True):
                dist.all_gather(told, tensor)
            before = [told[0] if not option and not index else told[replica()] for told in parts]
            seen = []
            handle = net[0].register_forward_hook(
                lambda *_, seen=seen: seen.append((net[1].running_mean.clone(), net.mask.clone()))
            )
            gradient.call(batch(step)).square().mean().backward()
            handle.remove()
            assert torch.equal(seen[0][0], before[0])
            assert torch.equal(seen[0][1], before[1])
        own.append(net[1].running_mean.clone())
        first.append(parts)
        net.mask.fill_(replica() == 0)
        gradient.end()
        net.zero_grad()
    # Replicas see other samples, so that what they have at the end differs.
    parts = [torch.empty_like(own[-1]) for _ in range(world)]
    dist.all_gather(parts, own[-1])
    assert not torch.equal(parts[0], parts[1])


@pytest.mark.world_size(2)
def test_a_repeated_step_takes_the_buffers_that_were_sent_for_it():
    # Replica 1 gives its first try up alone, as when its memory runs out, and the other one waits.
    net, engine = normed(), Live()
    gradient = gradient_of(net, engine)
    for step in range(3):
        for again in (False, True) if replica() == 1 else (True,):
            gradient.begin(part(total=4.0), OTHER)
            output = gradient.call(batch(step))
            if not again:
                assert not gradient.shared
                gradient.drop()
        output.square().mean().backward()
        gradient.end()
        net.zero_grad()
    assert_identical(flat(net))


# Lost --------------------------------------------------------------------------------------


def lose(gradient, output):
    """Goes back through a lost step: the step says so, and the user's backward pass does not."""
    assert not gradient.step.lost
    output.square().mean().backward()
    assert gradient.step.lost
    assert not gradient.step.complete


@on_replicas(buckets=(2, 3))
@pytest.mark.parametrize("start", [OTHER, MEASURED], ids=["other", "measured"])
def test_whichever_wait_is_lost_the_step_is_lost_at_its_end(world, start):
    engine, net = Live(), normed()
    gradient = gradient_of(net, engine)
    train(gradient, net, 2, start=start)
    engine.waits.clear()
    train(gradient, net, 1, start=start)
    waits = len(engine.waits)
    assert waits > 3
    for lost_at in range(waits):
        # All replicas see it in the same step, at the same wait or at the others.
        engine.waits.clear()
        engine.lost_at = lost_at
        gradient.begin(part(total=2.0 * world), start)
        ended = []
        output = gradient.call(batch())
        net[0].weight.register_post_accumulate_grad_hook(lambda _, ended=ended: ended.append(1))
        lose(gradient, output)
        # The backward pass of the user was over by then.
        assert ended
        engine.lost_at = None
        dist.barrier()
        gradient.drop()
        assert all(p.grad is None for p in net.parameters())
        assert not gradient.shared
        train(gradient, net, 1, start=start)
        assert_identical(flat(net))


@pytest.mark.world_size(2)
def test_memory_that_a_lost_reduction_may_write_to_is_not_used_again():
    engine, net = Live(), deep()
    gradient = gradient_of(net, engine)
    train(gradient, net, 2)
    gradient.begin(part(total=4.0), OTHER)
    output = gradient.call(batch())
    engine.waits.clear()
    engine.lost_at = 0
    lose(gradient, output)
    before = [bucket.flat for bucket in gradient.gradient._reducer._buckets]
    engine.lost_at = None
    gradient.drop()
    for bucket, old in zip(gradient.gradient._reducer._buckets, before, strict=True):
        assert bucket.flat.data_ptr() != old.data_ptr()
    dist.barrier()
    train(gradient, net, 1)
    assert_identical(flat(net))


@pytest.mark.world_size(2)
def test_a_step_that_lost_its_buffers_begins_no_reduction(monkeypatch):
    engine, net = Live(), normed()
    gradient = gradient_of(net, engine)
    train(gradient, net, 2)
    gradient.begin(part(total=4.0), OTHER)
    engine.waits.clear()
    engine.lost_at = 0
    output = gradient.call(batch())
    begun = []
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: begun.append(1))
    lose(gradient, output)
    assert not begun


@pytest.mark.world_size(2)
def test_a_reduction_that_its_group_refuses_is_lost_only_with_a_replica(monkeypatch):
    engine, net = Live(), deep()
    gradient = gradient_of(net, engine)
    train(gradient, net, 2)

    def refuse(*_, **__):
        raise RuntimeError("of torch")

    for lost_at in (0, None):
        gradient.begin(part(total=4.0), OTHER)
        engine.lost_at = lost_at
        output = gradient.call(batch())
        with monkeypatch.context() as patched:
            patched.setattr(dist, "all_reduce", refuse)
            if lost_at == 0:
                lose(gradient, output)
                engine.lost_at = None
                gradient.drop()
            else:
                with pytest.raises(RuntimeError, match="of torch"):
                    output.square().mean().backward()
        dist.barrier()


@pytest.mark.world_size(2)
def test_detached_it_keeps_nothing_of_the_group():
    net = normed()
    gradient = gradient_of(net)
    train(gradient, net, 2)
    reducer = gradient.gradient._reducer
    gradient.let_go()
    assert reducer.group is None
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
    gc.collect()
    reached = [reducer]
    for _ in range(4):
        reached += [
            other
            for one in list(reached)
            for other in gc.get_referents(one)
            if not isinstance(other, type | nn.Module) and not hasattr(other, "__globals__")
        ]
    assert not any(isinstance(one, dist.ProcessGroup | dist.Work) for one in reached)
    # Without another hand on it, it goes at once; one that was never detached takes its hooks off.
    known = weakref.ref(reducer)
    gradient.gradient._reducer = None
    del reducer, reached
    assert known() is None


@pytest.mark.world_size(2)
def test_without_a_hand_on_it_it_takes_its_hooks_off():
    net = deep()
    gradient = gradient_of(net)
    train(gradient, net, 2)
    assert all(p._post_accumulate_grad_hooks for p in net.parameters())
    gradient.gradient._reducer = None
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())


# Options -----------------------------------------------------------------------------------


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"process_group": "world"}, r"process_group \(.*\) must be None"),
        ({"mixed_precision": "half"}, r"mixed_precision \(half\) must be None"),
        ({"bucket_cap_mb_list": [1, 2]}, r"bucket_cap_mb_list \(\[1, 2\]\) must be None"),
        ({"dim": 1}, r"dim \(1\) must be 0"),
        ({"static_graph": True}, r"static_graph \(True\) must be False"),
        ({"device_ids": [3]}, r"device_ids \(3\) must be None"),
        ({"bucket_cap_mb": -1}, r"bucket_cap_mb \(-1\) must be at least 0"),
    ],
)
def test_options_that_it_cannot_follow_are_refused(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        gradient_of(deep(), **options)


@pytest.mark.world_size(2)
def test_options_without_meaning_here_are_accepted():
    net = deep()
    gradient = gradient_of(
        net,
        gradient_as_bucket_view=False,
        find_unused_parameters=True,
        check_reduction=True,
        static_graph=False,
        dim=0,
        device_ids=None,
        output_device="cpu",
    )
    train(gradient, net, 2)
    assert_identical(flat(net))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("init_sync", [True, False])
def test_init_sync(init_sync):
    net = deep()
    nn.init.constant_(net[0].weight, float(replica()))
    gradient_of(net, init_sync=init_sync)
    assert set(net[0].weight.reshape(-1).tolist()) == {0.0 if init_sync else float(replica())}


@pytest.mark.world_size(2)
def test_parameters_that_ddp_ignores_are_left_alone():
    net = deep()
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        net, ["0.weight"]
    )
    gradient = gradient_of(net)
    gradient.begin(part(total=4.0), OTHER)
    gradient.call(batch()).square().mean().backward()
    expected = deep()
    F.mse_loss(expected(batch()), torch.zeros(2, 1, dtype=D)).backward()
    assert torch.allclose(net[0].weight.grad, expected[0].weight.grad, rtol=1e-11)
    assert not torch.allclose(net[0].bias.grad, expected[0].bias.grad, rtol=1e-3)
