"""All replicas run the same number of micro-batches: modules may communicate in forward."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import resilin
from resilin.training.data.tickets import CannotResize, join, split
from tests.replicas import gathered, num_replicas, replica, worlds

NUM = 61


class Meets(nn.Module):
    """A module whose forward pass waits for all replicas, as SyncBatchNorm does."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 2).double()
        self.calls = 0

    def forward(self, x):
        present = torch.ones(1)
        dist.all_reduce(present)
        assert present.item() == num_replicas()
        self.calls += 1
        return self.net(x)


def make_data():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(NUM, 3, dtype=torch.float64, generator=generator)
    return x, torch.randn(NUM, 2, dtype=torch.float64, generator=generator)


def make_net():
    torch.manual_seed(0)
    return Meets()


def plain(batch_sizes):
    """The same steps in one process, without resilin."""
    (x, y), net = make_data(), make_net().net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    at = 0
    for size in batch_sizes:
        optimizer.zero_grad()
        F.mse_loss(net(x[at : at + size]), y[at : at + size]).backward()
        optimizer.step()
        at += size
    return net.weight.detach()


def train(sizes, *, max_local_bsz, workers=0, zero_late=False, **options):
    """One epoch in which `sizes` are set one after another, each for one step."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="constant")
    loader = resilin.AdaptiveDataLoader(
        TensorDataset(*make_data()),
        batch_size=sizes[0],
        max_local_bsz=max_local_bsz,
        num_workers=workers,
        **options,
    )
    wanted, made, seen, calls, fillers = list(sizes), [], [], [], 0
    loader.set_batch_size(wanted.pop(0))
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        if zero_late:
            optimizer.zero_grad()
        loss.backward()
        count = loader.current_samples
        assert len(x) == max(count, 1)
        fillers += not count
        seen += x[:count, 0].tolist()
        before = model.clock.steps
        optimizer.step()
        if not zero_late:
            optimizer.zero_grad()
        if model.clock.steps > before:
            made.append(model.clock.samples - sum(made))
            calls.append(net.calls)
            assert net.calls == loader.accumulation_steps
            net.calls = 0
            if wanted:
                loader.set_batch_size(wanted.pop(0))
    # Each sample once, over all replicas.
    assert sorted(gathered(seen)) == sorted(make_data()[0][:, 0].tolist())
    expected = plain(made)
    assert torch.allclose(net.net.weight, expected, rtol=1e-12, atol=1e-14)
    everyone = gathered([calls])
    assert all(one == calls for one in everyone)
    return calls, sum(gathered([fillers]))


SIZES = (8, 8, 17, 5, 11, 1, 7)


@pytest.mark.world_size(3)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("max_local_bsz", [1, 2, 3])
def test_replicas_meet_in_every_forward_pass(max_local_bsz, workers):
    calls, fillers = train(SIZES, max_local_bsz=max_local_bsz, workers=workers)
    largest = [-(-size // 3) for size in (*SIZES, 4)]
    assert calls == [-(-share // max_local_bsz) for share in largest]
    # A step of one sample leaves two replicas without any; micro-batches of one sample leave more.
    expected = sum(
        3 * -(-share // max_local_bsz) - size
        for share, size in zip(largest, (*SIZES, 4), strict=True)
        if max_local_bsz == 1 or size < 3
    )
    assert fillers == expected


@pytest.mark.world_size(3)
def test_a_loop_may_zero_after_it_has_called_the_model():
    train(SIZES, max_local_bsz=1, zero_late=True)


@pytest.mark.world_size(3)
def test_replicas_meet_right_after_the_batch_size_was_raised():
    # Four tickets of the old size are on their way, on each replica.
    train((3, 3, 24, 24), max_local_bsz=8, workers=2)
    resilin.reset_job()
    train((24, 24, 3, 3), max_local_bsz=8, workers=2)


@pytest.mark.world_size(3)
def test_replicas_whose_memory_differs_split_steps_alike():
    # What a linear layer keeps for backward is about 24 bytes a sample.
    budget = [10_000, 100, 10_000][replica()]
    calls, _ = train((24,) * 5, max_local_bsz="auto", memory_budget=budget)
    # The first step finds out, and later ones would have one micro-batch of 8 if they could.
    assert calls[0] > 1
    assert calls[-1] > 1


OF_TWO_AND_FOUR = pytest.mark.parametrize("world", worlds(2, 4))


@OF_TWO_AND_FOUR
@pytest.mark.parametrize("max_local_bsz", [None, 1, 5])
def test_the_remainder_of_an_epoch_is_smaller_than_the_number_of_replicas(world, max_local_bsz):
    # 61 samples: 60 in steps of 12, 20 and 16, and a last one of a single sample.
    calls, fillers = train((12, 20, 12, 16), max_local_bsz=max_local_bsz)
    assert len(calls) == 5
    assert calls[-1] == 1
    assert fillers == world - 1


class TotalOverReplicas(torch.autograd.Function):
    """A sum over replicas whose backward pass is one, too, as in SyncBatchNorm."""

    @staticmethod
    def forward(ctx, mine):
        total = mine.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone()
        dist.all_reduce(total)
        return total


class Centred(nn.Module):
    """Subtracts the mean over the batch: that of all replicas, unless it is alone."""

    def __init__(self, alone):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()
        self.alone = alone

    def forward(self, x):
        hidden = self.first(x)
        if self.training:
            facts = torch.cat([hidden.sum(0), hidden.new_tensor([len(x)])])
            facts = facts if self.alone else TotalOverReplicas.apply(facts)
            hidden = hidden - facts[:-1] / facts[-1]
        return self.second(torch.tanh(hidden))


def pass_over(model, optimizer, batches):
    model.train()
    for x, y in batches:
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluated(model, batches):
    """The sum of the losses of the samples that this replica has, and their number."""
    model.eval()
    loss, num = 0.0, 0
    with torch.no_grad():
        for x, y in batches:
            loss += F.mse_loss(model(x), y, reduction="sum").item()
            num += len(x)
    return loss, num


@pytest.mark.parametrize("world", worlds(2, 3, 4, gate=(3,)))
@pytest.mark.parametrize("held_out", [1, 7, 30])
def test_statistics_over_replicas_are_those_of_one_process_where_shares_are_equal(world, held_out):
    x, y = (part[:60] for part in make_data())
    sizes = {0: 12, 1: 24}
    # An evaluation has no fillers: replicas have unequally many batches, or none at all.
    tested = TensorDataset(x[:held_out], y[:held_out])

    expected = Centred(alone=True)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    found = []
    for size in sizes.values():
        pass_over(expected, optimizer, zip(x.split(size), y.split(size), strict=True))
        found.append(evaluated(expected, [tested[:]]))

    net = Centred(alone=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="constant")
    loader = resilin.AdaptiveDataLoader(TensorDataset(x, y), batch_size=12)
    test_loader = resilin.AdaptiveDataLoader(tested, batch_size=9, max_local_bsz=2)
    for epoch in resilin.remaining_epochs_until(2):
        loader.set_batch_size(sizes[epoch])
        pass_over(model, optimizer, loader)
        losses, nums = zip(*gathered([evaluated(model, test_loader)]), strict=True)
        assert sum(nums) == found[epoch][1] == held_out
        assert sum(losses) == pytest.approx(found[epoch][0], rel=1e-10)
    assert model.clock.steps == 5 + 3
    for mine, right in zip(net.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(mine, right, rtol=1e-10, atol=1e-12)


def test_batches_are_joined_as_they_are_split():
    batch = {"x": torch.arange(12).view(6, 2), "name": list("abcdef"), "pair": (torch.ones(6),)}
    first, second = split(batch, 2, 6)
    joined = join(first, 2, second, 4)
    assert torch.equal(joined["x"], batch["x"])
    assert joined["name"] == batch["name"]
    assert torch.equal(joined["pair"][0], batch["pair"][0])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.ones(2, 3), torch.ones(2, 4)),
        (torch.ones(2, 3), torch.ones(2, 3).double()),
        (torch.ones(3), torch.ones(2)),
        (torch.ones(()), torch.ones(())),
        ({"x": torch.ones(2)}, {"y": torch.ones(2)}),
        ([torch.ones(2)], [torch.ones(2), torch.ones(2)]),
        ([torch.ones(2)], (torch.ones(2),)),
        (["a", "b"], ["c"]),
        (object(), object()),
    ],
)
def test_batches_that_are_not_alike_are_not_joined(first, second):
    with pytest.raises(CannotResize):
        join(first, 2, second, 2)


def test_padded_batches_are_fetched_again_at_the_right_size():
    def collate(samples):
        (longest,) = {max(int(n) for (n,) in samples)}
        return torch.stack(
            [F.pad(torch.full((int(n),), float(n)), (0, longest - int(n))) for (n,) in samples]
        )

    data = TensorDataset(torch.arange(1, 41))
    loader = resilin.AdaptiveDataLoader(data, batch_size=4, collate_fn=collate)
    seen = []
    for step, batch in enumerate(loader):
        assert batch.shape[1] == batch.max()
        seen.append(len(batch))
        loader.set_batch_size(3 + 5 * (step % 2))
    assert seen == [4, 3, 8, 3, 8, 3, 8, 3]
