"""Data that change between epochs, or are collated by the user, or come in another order."""

import itertools

import pytest
import torch

import resilin
from resilin.streams import Stream
from resilin.training.bridge.placed_loader import PlacedLoader


class Pool:
    """Numbers of the present epoch."""

    def __init__(self, num=12):
        self.items = list(range(num))
        self.epoch = 0

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return torch.tensor(self.items[index] + 1000 * self.epoch)


class PoolStream(Stream):
    """The same in two shards."""

    num_shards = 2
    epoch = 0

    def open(self, shard, num_shards, epoch):
        return iter(torch.arange(6 * shard, 6 * shard + 6) + 1000 * self.epoch)


def seen(batches):
    return sorted(int(each) for batch in batches for each in batch.flatten())


def trained(data, rule="linear", **settings):
    """A function that trains on a loader once, and returns what it has used."""
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule=rule)
    loader = resilin.AdaptiveDataLoader(data, **{"batch_size": 4, **settings})

    def once():
        used = []
        for x in loader:
            model(x.float()[:, None]).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            used.append(x)
        return used

    return model, loader, once


@pytest.mark.parametrize("make", [Pool, PoolStream])
def test_workers_of_each_pass_use_the_dataset_as_it_is_then(make):
    data = make()
    _, loader, once = trained(data, num_workers=2)
    for epoch in range(2):
        data.epoch = epoch
        assert seen(once()) == [1000 * epoch + i for i in range(12)]
    with torch.no_grad():
        for data.epoch in range(2):
            assert seen(loader) == [1000 * data.epoch + i for i in range(12)]
    data.epoch = 5
    next(iter(loader))
    data.epoch = 6
    assert seen(once()) == [6000 + i for i in range(12)]


def test_workers_that_persist_have_the_dataset_as_it_was():
    data = Pool()
    _, _, once = trained(data, num_workers=1, persistent_workers=True)
    for data.epoch in range(2):
        assert seen(once()) == list(range(12))


@pytest.mark.parametrize("settings", [{}, {"tail": "straddle"}, {"drop_last": True}])
def test_workers_fetch_beyond_the_end_of_the_data_if_the_epoch_lasts_longer(settings):
    orders = []
    for workers in (0, 2):
        resilin.reset_job()
        model, loader, once = trained(
            Pool(10), "adascale", num_workers=workers, shuffle=True, **settings
        )
        loader.set_batch_size(8)
        assert model.rule.clock == "progress"
        orders.append([batch.tolist() for _ in range(2) for batch in once()])
    assert orders[0] == orders[1]
    assert sum(map(len, orders[0])) > 20


def series(samples):
    return torch.stack(samples, dim=1), torch.arange(len(samples))


class Series:
    def __len__(self):
        return 203

    def __getitem__(self, index):
        return torch.full((8, 2), index)


@pytest.mark.parametrize("most", [None, 6])
def test_what_a_collate_function_has_made_is_not_cut_or_joined(most):
    # [T, B, F], and labels within the batch: nothing that could be cut along the first dimension.
    loader = resilin.AdaptiveDataLoader(
        Series(), batch_size=8, num_workers=2, collate_fn=series, max_local_bsz=most
    )
    sizes, found = itertools.cycle([8, 8, 8, 12, 16, 16, 16, 16, 5, 4, 8]), []
    for x, labels in loader:
        assert x.shape == (8, loader.current_samples, 2)
        assert labels.tolist() == list(range(loader.current_samples))
        found += x[0, :, 0].tolist()
        loader.set_batch_size(next(sizes))
    assert found == list(range(203))


@pytest.mark.parametrize("place", [lambda loader: loader, lambda loader: PlacedLoader(loader, id)])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("batch_size", 6, r"from 4 to 6: loader.set_batch_size\(\) sets"),
        ("dataset", [1], "make another loader over it"),
        ("sampler", None, "the order is that of the sample stream"),
        ("drop_last", True, "from None to True: make another loader"),
        ("persistent_workers", True, "make another loader"),
        ("collate_fn", list, "make another loader"),
        ("max_local_bsz", 2, "make another loader"),
    ],
)
def test_what_has_no_effect_once_a_loader_is_made_cannot_be_set(place, name, value, message):
    loader = place(resilin.AdaptiveDataLoader(Pool(), batch_size=4))
    with pytest.raises(
        ValueError, match=rf"^{name} of an AdaptiveDataLoader cannot be .*{message}"
    ):
        setattr(loader, name, value)
    loader.note = "of the user"
    assert loader.batch_size == 4
