"""Loops over streams as people write them: whatever they do, each sample of an epoch comes once."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

import resilin
from tests.replicas import gathered, num_replicas, worlds

LENGTHS = ((9, 4, 0, 13, 7, 1), (5,), (1, 1, 1), (0, 0, 3), (30, 1), (2,) * 11)
WORLDS = worlds(1, 2, 3)


class Stream:
    """Samples are 100 times their shard plus their number, and 10,000 more in each epoch."""

    def __init__(self, lengths=LENGTHS[0]):
        self.lengths, self.num_shards = lengths, len(lengths)
        self.fingerprint = f"{lengths}"

    def open(self, shard, num_shards, epoch):
        assert num_shards == self.num_shards
        for number in range(self.lengths[shard]):
            yield torch.tensor([10_000.0 * epoch + 100 * shard + number], dtype=torch.float64)

    def all(self, epoch=0):
        return sorted(
            10_000 * epoch + 100 * shard + number
            for shard, length in enumerate(self.lengths)
            for number in range(length)
        )


def own(loader, batch):
    """The samples of a micro-batch that count."""
    return [int(value) for value in batch.flatten()] if loader.current_samples else []


def trained(stream=None, **options):
    """A model, its optimizer and a loader."""
    torch.manual_seed(0)
    net = torch.nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-9)
    loader = resilin.AdaptiveDataLoader(stream or Stream(), **{"batch_size": 4, **options})
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="linear")
    return model, optimizer, loader


def step(model, optimizer, batch):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


# All of it ---------------------------------------------------------------------------------------


# More workers than this machine may have processors.
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    ("lengths", "workers"),
    [*itertools.product(LENGTHS, [0]), (LENGTHS[0], 1), (LENGTHS[0], 3), (LENGTHS[4], 3)],
    ids=str,
)
@pytest.mark.parametrize("world", WORLDS)
def test_each_sample_comes_once_in_each_epoch(world, lengths, workers):
    stream = Stream(lengths)
    model, optimizer, loader = trained(stream, num_workers=workers, max_local_bsz=3)
    for epoch in resilin.remaining_epochs_until(2):
        mine = []
        for batch in loader:
            mine += own(loader, batch)
            step(model, optimizer, batch)
        assert sorted(gathered(mine)) == stream.all(epoch)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_global_batches_are_the_same_at_every_number_of_replicas(world, lengths):
    stream = Stream(lengths)
    model, optimizer, loader = trained(stream, batch_size=5)
    steps = []
    for _ in resilin.remaining_epochs_until(1):
        for batch in loader:
            steps.append(sorted(gathered(own(loader, batch))))
            step(model, optimizer, batch)
    seats, order = list(range(len(lengths))), []
    number = 0
    while seats:
        seat = 0
        while seat < len(seats):
            if lengths[seats[seat]] > number:
                order.append(100 * seats[seat] + number)
                seat += 1
            else:
                last = seats.pop()
                if seat < len(seats):
                    seats[seat] = last
        number += 1
    assert steps == [sorted(order[i : i + 5]) for i in range(0, len(order), 5)]


@pytest.mark.parametrize("world", WORLDS)
def test_drop_last_drops_one_remainder_of_the_epoch(world):
    stream = Stream()
    model, optimizer, loader = trained(stream, batch_size=8, drop_last=True)
    for epoch in resilin.remaining_epochs_until(2):
        mine = []
        for batch in loader:
            mine += own(loader, batch)
            step(model, optimizer, batch)
        everything = gathered(mine)
        assert len(set(everything)) == len(everything) == 34 // 8 * 8
        assert set(everything) < set(stream.all(epoch))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", WORLDS)
def test_batch_sizes_may_change_in_every_step(world, workers):
    stream = Stream((40, 3, 25, 0, 31))
    model, optimizer, loader = trained(stream, num_workers=workers, max_local_bsz=4)
    sizes = itertools.cycle([16, 1, 5, 40, 2, 23])
    for epoch in resilin.remaining_epochs_until(2):
        mine = []
        for batch in loader:
            mine += own(loader, batch)
            before = model.clock.steps
            step(model, optimizer, batch)
            if model.clock.steps > before:
                loader.set_batch_size(next(sizes))
        assert sorted(gathered(mine)) == stream.all(epoch)


# Leaving and coming back -------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", WORLDS)
def test_a_loop_that_is_left_goes_on_where_it_was(world, workers):
    stream = Stream()
    model, optimizer, loader = trained(stream, num_workers=workers)
    mine = []
    for epoch in resilin.remaining_epochs_until(3):
        for batch in loader:
            mine += own(loader, batch)
            step(model, optimizer, batch)
            if epoch == 0 and model.clock.steps == 3:
                break
    everything = gathered(mine)
    # As with an index: an epoch of the loop that is left does not end that of the data.
    assert len(everything) == len(set(everything))
    assert sorted(number for number in everything if number < 10_000) == stream.all(0)
    assert sorted(number for number in everything if 10_000 <= number < 20_000) == stream.all(1)


@pytest.mark.parametrize("world", WORLDS)
def test_a_loop_that_is_left_behind_the_last_sample_begins_the_next_pass(world):
    stream = Stream((4, 4))
    model, optimizer, loader = trained(stream)
    for epoch in resilin.remaining_epochs_until(3):
        mine = []
        for batch in loader:
            mine += own(loader, batch)
            step(model, optimizer, batch)
            if model.clock.steps == 2 * (epoch + 1):
                break
        assert sorted(gathered(mine)) == stream.all(epoch)


@pytest.mark.parametrize("world", WORLDS)
def test_an_exception_in_the_loop_leaves_a_step_to_be_made_again(world):
    stream = Stream()
    model, optimizer, loader = trained(stream)
    mine = []

    def train(fails_at=None):
        for batch in loader:
            if model.clock.steps == fails_at:
                raise KeyError
            mine.extend(own(loader, batch))
            step(model, optimizer, batch)

    for _ in resilin.remaining_epochs_until(1):
        with pytest.raises(KeyError):
            train(fails_at=2)
        train()
    assert sorted(gathered(mine)) == stream.all()


@pytest.mark.parametrize("world", WORLDS)
def test_an_evaluation_sees_each_sample_once_and_moves_nothing(world):
    stream, tests = Stream(), Stream((5, 1, 0, 2))
    model, optimizer, loader = trained(stream)
    test_loader = resilin.AdaptiveDataLoader(tests, batch_size=3)
    for epoch in resilin.remaining_epochs_until(2):
        mine = []
        for batch in loader:
            mine += own(loader, batch)
            step(model, optimizer, batch)
            if model.clock.steps == 3:
                model.eval()
                with torch.no_grad():
                    seen = [own(test_loader, b) for b in test_loader]
                    half = next(iter(test_loader), None)
                model.train()
                everything = sorted(gathered(itertools.chain(*seen)))
                assert [number % 10_000 for number in everything] == tests.all()
                assert half is None or len(half)
        assert sorted(gathered(mine)) == stream.all(epoch)


@pytest.mark.parametrize("world", WORLDS)
def test_the_stream_that_trains_can_be_evaluated_on(world):
    stream = Stream()
    model, optimizer, loader = trained(stream)
    for epoch in resilin.remaining_epochs_until(2):
        mine = []
        for batch in loader:
            mine += own(loader, batch)
            step(model, optimizer, batch)
        model.eval()
        with torch.no_grad():
            seen = [number for batch in loader for number in own(loader, batch)]
        model.train()
        assert len(gathered(seen)) == len(stream.all())
        assert sorted(gathered(mine)) == stream.all(epoch)


# Two of them -------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
def test_two_streams_one_after_the_other(world):
    first, second = Stream(), Stream((3, 8))
    model, optimizer, loader = trained(first)
    other = resilin.AdaptiveDataLoader(second, batch_size=4)
    for epoch in resilin.remaining_epochs_until(2):
        for its, stream in ((loader, first), (other, second)):
            mine = []
            for batch in its:
                mine += own(its, batch)
                step(model, optimizer, batch)
            assert sorted(gathered(mine)) == stream.all(epoch)


def test_two_streams_zipped_without_a_model():
    one = resilin.AdaptiveDataLoader(Stream((4, 4)), batch_size=2)
    two = resilin.AdaptiveDataLoader(Stream((3, 2, 3)), batch_size=2)
    pairs = list(zip(one, two, strict=True))
    assert sorted(int(v) for batch, _ in pairs for v in batch.flatten()) == Stream((4, 4)).all()
    assert sorted(int(v) for _, batch in pairs for v in batch.flatten()) == Stream((3, 2, 3)).all()


def test_a_stream_and_a_dataset_are_loaded_side_by_side():
    model, optimizer, loader = trained(Stream((6, 6)))
    indexed = resilin.AdaptiveDataLoader(torch.arange(12.0).double()[:, None], batch_size=4)
    for _ in resilin.remaining_epochs_until(2):
        for batch, _other in zip(loader, indexed, strict=True):
            step(model, optimizer, batch)
    assert model.clock.samples == 24


# State -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_a_state_at_any_step_resumes_with_the_next_sample(lengths, workers):
    stream = Stream(lengths)
    whole = [[int(v) for v in b.flatten()] for b in resilin.AdaptiveDataLoader(stream, 3)]
    for stop in range(1, len(whole) + 1):
        loader = resilin.AdaptiveDataLoader(stream, 3, num_workers=workers)
        used = []
        for batch in itertools.islice(loader, stop):
            used += own(loader, batch)
            loader.commit()
        state = json.loads(json.dumps(loader.state_dict()))
        again = resilin.AdaptiveDataLoader(stream, 2)
        again.load_state_dict(state)
        rest = [number for batch in again for number in own(again, batch)]
        assert used + rest == [number for batch in whole for number in batch], stop
        assert [int(v) % 10_000 for b in again for v in b.flatten()] == [
            number for batch in whole for number in batch
        ], "the epoch after"


def test_a_state_of_other_data_is_refused():
    state = resilin.AdaptiveDataLoader(Stream((4, 4)), 2).state_dict()
    with pytest.raises(ValueError, match="num_shards was 2 and is 1"):
        resilin.AdaptiveDataLoader(Stream((8,)), 2).load_state_dict(state)
    indexed = resilin.AdaptiveDataLoader(list(range(8)), 2)
    with pytest.raises(ValueError, match="state"):
        indexed.load_state_dict(state)
    with pytest.raises(ValueError, match="state"):
        resilin.AdaptiveDataLoader(Stream((4, 4)), 2).load_state_dict(indexed.state_dict())


def test_an_empty_stream_is_an_error_and_no_endless_loop():
    for lengths in ((0,), (0, 0, 0)):
        model, optimizer, loader = trained(Stream(lengths))
        with pytest.raises(ValueError, match="empty"):
            loader.example()
        for _ in resilin.remaining_epochs_until(2):
            for batch in loader:
                step(model, optimizer, batch)
        assert model.clock.steps == 0
        resilin.reset_job()


def test_a_shard_that_raises_tells_its_error():
    class Broken(Stream):
        def open(self, shard, num_shards, epoch):
            yield from itertools.islice(super().open(shard, num_shards, epoch), 2)
            raise OSError("the disk is gone")

    for workers in (0, 2):
        loader = resilin.AdaptiveDataLoader(Broken(), 4, num_workers=workers)
        with pytest.raises(OSError, match="the disk is gone"):
            list(loader)


@pytest.mark.parametrize("world", WORLDS)
def test_no_replica_waits_while_shards_are_plenty(world):
    stream = Stream((12,) * 12)
    model, optimizer, loader = trained(stream, batch_size=12)
    for _ in resilin.remaining_epochs_until(1):
        for batch in loader:
            assert loader.current_samples == 12 // num_replicas()
            step(model, optimizer, batch)
