"""Data that change between epochs, or are collated by the user, or come in another order."""

import itertools
import random
from pathlib import Path

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate

import resilin
from resilin.streams import Stream
from resilin.training.bridge.placed_loader import PlacedLoader
from resilin.training.data.sampled import reordered, sampled
from tests.replicas import replica


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


# Samples that are left out ---------------------------------------------------------------------


X, Y = torch.arange(64.0).reshape(32, 2), torch.arange(32.0)[:, None]


class Broken:
    """Some samples cannot be read."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return None if index % 5 == 0 or 12 <= index < 16 else (X[index], Y[index])


def readable(samples):
    return default_collate([sample for sample in samples if sample is not None])


def shorter(samples):
    """Leaves out by content."""
    return default_collate([sample for sample in samples if sample[1] % 3])


class Whole:
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return X[index], Y[index]


def pairs_first(samples):
    return torch.stack([x for x, _ in samples], dim=1), torch.stack([y for _, y in samples], dim=1)


def fit(data, **settings):
    torch.manual_seed(0)
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-5)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="linear")
    for x, y in resilin.AdaptiveDataLoader(data, batch_size=16, **settings):
        mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.weight.detach().clone()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_micro_batch_with_fewer_rows_than_samples_is_refused(workers):
    with pytest.raises(
        ValueError, match=r"made 4 rows of 6 samples.*give the loader batch_weight="
    ):
        fit(Broken(), max_local_bsz=6, collate_fn=readable, num_workers=workers)
    resilin.reset_job()
    with pytest.raises(ValueError, match=r"made \d rows of 6 samples"):
        fit(Whole(), max_local_bsz=6, collate_fn=shorter, num_workers=workers)
    resilin.reset_job()
    with pytest.raises(ValueError, match=r"None for each of the 4 samples .*\(12, 13, 14, 15\)"):
        fit(Broken(), max_local_bsz=4, collate_fn=readable, batch_weight=lambda b: len(b[0]))


def test_a_step_of_its_own_may_have_fewer_rows_and_batch_weight_allows_more():
    with pytest.warns(UserWarning, match="made 9 rows of 16 samples: that is an error as soon as"):
        whole = fit(Broken(), collate_fn=readable)
    resilin.reset_job()
    parts = fit(
        Broken(), max_local_bsz=6, collate_fn=readable, batch_weight=lambda batch: len(batch[0])
    )
    assert torch.allclose(parts, whole, rtol=1e-6, atol=0)
    resilin.reset_job()
    # The samples are along the second dimension.
    loader = resilin.AdaptiveDataLoader(Whole(), 16, max_local_bsz=6, collate_fn=pairs_first)
    assert sum(x.shape[1] for x, _ in loader) == 32


@pytest.mark.world_size(2)
def test_replicas_refuse_a_micro_batch_with_fewer_rows():
    with pytest.raises(ValueError, match="rows of 8 samples, and the step has other"):
        fit(Broken(), collate_fn=readable)


# Another order ---------------------------------------------------------------------------------


class Files:
    def __init__(self, order, root="/data", labels=10):
        order = list(order)
        self.files = [f"{root}/{k:03}.png" for k in order]
        self.labels = [k % labels for k in order]
        self.cache = [None] * len(order)
        self.weights = torch.ones(len(order))

    def __len__(self):
        return len(self.files)


def shuffled(seed, num=64):
    order = list(range(num))
    random.Random(seed).shuffle(order)
    return order


def datasets(seed):
    """Datasets in an order that a seed chooses."""
    order = shuffled(seed)
    yield Files(order)
    yield order
    yield torch.tensor(order)
    yield TensorDataset(torch.tensor(order), torch.zeros(64))
    yield Subset(TensorDataset(torch.arange(128)), order)
    yield ConcatDataset([TensorDataset(torch.tensor(order)), TensorDataset(torch.arange(9))])
    paths = Files(order)
    paths.files = [(Path(file), 0) for file in paths.files]
    yield paths


def test_another_order_is_noticed_in_what_a_dataset_holds():
    kinds = zip(datasets(1), datasets(2), datasets(1), strict=True)
    for one, other, same in kinds:
        assert reordered(sampled(one), sampled(other)), one
        assert not reordered(sampled(one), sampled(same)), one


def test_other_contents_or_places_are_no_other_order():
    one, moved = Files(range(64)), Files(range(64), root="/scratch/job-17/data")
    assert not reordered(sampled(one), sampled(moved))
    filled, scored = Files(range(64)), Files(range(64))
    filled.cache = [torch.rand(3) for _ in range(64)]
    scored.weights = torch.rand(64)
    assert not reordered(sampled(filled), sampled(scored))
    # Positives, and negatives that are drawn again.
    drawn = [
        [(k, k) if k < 16 else (k, random.Random(seed).random()) for k in range(64)]
        for seed in (1, 2)
    ]
    assert not reordered(sampled(drawn[0]), sampled(drawn[1]))
    assert not reordered(sampled(Files(range(64))), sampled(Files(range(80))))
    assert not sampled(Pool(1))


class Lost(Exception):
    """The process is gone."""


def life(order, where, lost=None):
    resilin.reset_job()
    resilin.checkpoint_to(where, every=1)
    data = TensorDataset(torch.tensor(order))
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    model = resilin.AdaptiveDataParallel(net, optimizer)
    loader = resilin.AdaptiveDataLoader(data, batch_size=16, shuffle=True)
    for _ in resilin.remaining_epochs_until(1):
        for (x,) in loader:
            if model.clock.steps == lost:
                raise Lost
            model(x.float()[:, None]).mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_second_life_with_another_order_warns_in_the_middle_of_a_pass(tmp_path):
    with pytest.raises(Lost):
        life(shuffled(1), tmp_path, 2)
    with pytest.warns(
        UserWarning, match=r"than when this pass began, as the entries of dataset.te"
    ):
        life(shuffled(2), tmp_path)


def test_a_dataset_may_be_put_in_another_order_between_two_passes():
    data = Pool(64)
    _, loader, once = trained(data)
    for seed in range(2):
        data.items = shuffled(seed)
        once()
    for _ in loader:
        loader.commit()
        break
    data.items = shuffled(3)
    with pytest.warns(UserWarning, match="another order than when this pass began"):
        once()


@pytest.mark.world_size(2)
def test_replicas_with_other_samples_are_told():
    _, _, once = trained(torch.tensor(shuffled(replica())))
    with pytest.warns(UserWarning, match=f"another order than in process {1 - replica()}"):
        once()
    resilin.reset_job()
    _, _, once = trained(Pool(12 + replica()))
    with pytest.raises(ValueError, match=r"has 1[23] samples here and 1[23] in process"):
        once()
