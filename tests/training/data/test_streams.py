import itertools
import json
import logging
import multiprocessing
import random

import numpy as np
import pytest
import torch

import resilin
from resilin.core.shard_order import ShardOrder
from resilin.training.data.shards.cursor import ShardCursor
from tests.replicas import gathered, replica, worlds
from tests.training.data.numbered import (
    Numbered,
    NumberedSeekable,
    NumberedStateful,
    numbers,
    plain,
    seen_around,
)

WORLDS = worlds(1, 2, 3, 4)


def cut(samples, sizes):
    """Batches of these sizes, the last one repeated, each sorted."""
    samples, batches = iter(samples), []
    sizes = itertools.chain(sizes, itertools.repeat(sizes[-1]))
    while batch := sorted(itertools.islice(samples, next(sizes))):
        batches.append(batch)
    return batches


def steps_of(loader, num=None):
    """The samples of each step of a pass, over all replicas; of the first `num` steps."""
    mine = {}
    for batch in loader:
        step = loader._passes.iteration.span.start
        mine.setdefault(step, []).extend(numbers(batch)[: loader.current_samples])
        if num is not None and loader._passes.iteration.micro_batch.last and len(mine) == num:
            loader.commit()
            break
    everyone = gathered([mine])
    steps = sorted({step for each in everyone for step in each})
    return [sorted(n for each in everyone for n in each.get(step, ())) for step in steps]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", WORLDS)
def test_steps_have_the_same_samples_at_every_world_size(world, workers):
    stream = Numbered(per_epoch=2)
    loader = resilin.AdaptiveDataLoader(stream, batch_size=5, shuffle=True, num_workers=workers)
    for epoch in range(2):
        expected = cut(plain(stream, epoch, shuffle=True), [5])
        assert steps_of(loader) == expected


@pytest.mark.parametrize("world", WORLDS)
def test_batch_sizes_change_and_nothing_is_lost(world):
    stream = Numbered()
    loader = resilin.AdaptiveDataLoader(stream, batch_size=4, num_workers=2, max_local_bsz=3)
    loader.set_batch_size(lambda clock: ([4, 9, 1] + [16] * 9)[clock.steps])
    assert steps_of(loader) == cut(plain(stream), [4, 9, 1, 16])


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.hidden = torch.nn.Linear(1, 7)
        self.out = torch.nn.Linear(7, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.hidden(x / 4000)))


def loss_of(net, batch):
    return ((net(batch) - torch.sin(batch / 900)) ** 2).mean()


def by_hand(stream, sizes, epochs):
    """Parameters after a plain loop over the plain order."""
    net = Net().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(epochs):
        for step in cut(plain(stream, epoch, shuffle=True), sizes):
            optimizer.zero_grad()
            loss_of(net, torch.tensor(step, dtype=torch.float64)[:, None]).backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", WORLDS)
def test_training_is_that_of_a_plain_loop_at_every_world_size(world, workers):
    stream = Numbered(per_epoch=1)
    net = Net().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="constant")
    loader = resilin.AdaptiveDataLoader(
        stream, batch_size=6, shuffle=True, max_local_bsz=2, num_workers=workers
    )
    for _ in resilin.remaining_epochs_until(3):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    found = torch.cat([p.detach().flatten() for p in net.parameters()])
    assert (found - by_hand(stream, [6], 3)).abs().max() < 1e-11
    assert resilin.current_job().clock.samples == sum(3 * n + 3 for n in stream.lengths)


@pytest.mark.parametrize("kind", [Numbered, NumberedSeekable, NumberedStateful])
@pytest.mark.parametrize("before", [0, 1, 4, 10])
@pytest.mark.parametrize("world", WORLDS)
def test_a_loader_resumes_anywhere_on_any_number_of_replicas(world, before, kind):
    # The state does not depend on who saved it, so one process can save for all.
    loader = resilin.AdaptiveDataLoader(kind(), batch_size=6, shuffle=True)
    used = steps_of(loader, before) if before else []
    state = json.loads(json.dumps(loader.state_dict()))
    resilin.reset_job()
    again = resilin.AdaptiveDataLoader(
        kind(), batch_size=5, shuffle=True, num_workers=2 * (before == 4)
    )
    again.load_state_dict(state)
    samples = plain(kind(), shuffle=True)
    assert used == cut(samples, [6])[:before]
    assert steps_of(again) == cut(samples[6 * before :], [5])


def state_at(num_replicas_then, num):
    """What a job of so many replicas would have saved, made by one process."""
    stream = Numbered()
    order = ShardOrder(stream.num_shards, shuffle=True, fingerprint=stream.fingerprint)
    cursor = ShardCursor("loader", order)
    turn = cursor.turn(0)
    while True:
        taken, _ = turn.take(num, cursor.lengths, num_replicas_then)
        pairs = zip(taken.shards.tolist(), taken.indices.tolist(), strict=True)
        met = [(v, stream.lengths[v]) for v, i in pairs if i >= stream.lengths[v]]
        if not cursor.learn(met):
            break
    cursor.position = num
    return cursor.state_dict()


def test_the_state_does_not_depend_on_the_number_of_replicas():
    assert state_at(1, 30) == state_at(3, 30)


@pytest.mark.world_size(3)
@pytest.mark.parametrize("workers", [0, 2])
def test_an_evaluation_has_each_sample_once_and_leaves_the_cursor_alone(workers):
    stream = Numbered()
    net = Net().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="constant")
    loader = resilin.AdaptiveDataLoader(stream, batch_size=6, num_workers=workers)
    held_out = resilin.AdaptiveDataLoader(stream, batch_size=9, num_workers=workers, drop_last=True)
    trained = []
    for epoch in resilin.remaining_epochs_until(2):
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            trained += numbers(batch)[: loader.current_samples]
            if resilin.current_job().clock.steps == 3:
                # In the middle of an epoch, and over the loader that trains.
                model.eval()
                for data in (loader, held_out):
                    seen = [n for batch in data for n in numbers(batch)]
                    assert sorted(gathered(seen)) == sorted(plain(stream))
                model.train()
        everyone = sorted(gathered(trained))
        assert everyone == sorted(plain(stream) * (epoch + 1))


def test_an_evaluation_that_is_left_leaves_no_worker():
    net = Net().double()
    model = resilin.AdaptiveDataParallel(net, torch.optim.SGD(net.parameters(), lr=0.1))
    model.eval()
    loader = resilin.AdaptiveDataLoader(Numbered(), batch_size=4, num_workers=2)
    # Loaders of other tests in this process may not be collected yet.
    before = set(multiprocessing.active_children())
    for _ in loader:
        assert len(set(multiprocessing.active_children()) - before) == 2
        break
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.world_size(2)
def test_one_replica_evaluates_alone():
    net = Net().double()
    model = resilin.AdaptiveDataParallel(net, torch.optim.SGD(net.parameters(), lr=0.1))
    loader = resilin.AdaptiveDataLoader(Numbered(), batch_size=4)
    model.eval()
    if replica() == 0:
        assert sum(len(batch) for batch in loader)


@pytest.mark.parametrize("world", WORLDS)
def test_a_dropped_tail_is_dropped_once_for_all(world):
    stream = Numbered()
    loader = resilin.AdaptiveDataLoader(stream, batch_size=10, drop_last=True)
    for _ in range(2):
        assert steps_of(loader) == cut(plain(stream), [10])[:-1]


@pytest.mark.parametrize("lengths", [(), (0,), (1,), (0, 0, 5), (30,), (1, 1, 1, 1, 1)])
@pytest.mark.parametrize("world", WORLDS)
def test_few_and_empty_shards(world, lengths):
    if not lengths:
        with pytest.raises(ValueError, match=r"num_shards \(0\)"):
            resilin.AdaptiveDataLoader(Numbered(lengths))
        return
    stream = Numbered(lengths)
    loader = resilin.AdaptiveDataLoader(stream, batch_size=3)
    for _ in range(2):
        assert steps_of(loader) == cut(plain(stream), [3])


def test_a_break_and_a_second_loop_continue_the_pass():
    stream = Numbered()
    loader = resilin.AdaptiveDataLoader(stream, batch_size=10, num_workers=2)
    first = steps_of(loader, 3)
    assert first + steps_of(loader) == cut(plain(stream), [10])


def test_an_example_uses_nothing_up():
    loader = resilin.AdaptiveDataLoader(Numbered(), batch_size=10)
    assert numbers(loader.example()) == [0]
    assert steps_of(loader) == cut(plain(Numbered()), [10])
    with pytest.raises(ValueError, match="none of its 2 shards has a sample"):
        resilin.AdaptiveDataLoader(Numbered((0, 0))).example()


def test_resuming_costs_what_the_source_costs_and_it_is_told(caplog):
    caplog.set_level(logging.INFO, logger="resilin")
    samples = 3000
    for kind, expected in ((NumberedStateful, "load"), (NumberedSeekable, "skip")):
        loader = resilin.AdaptiveDataLoader(kind((samples,) * 2), batch_size=40)
        steps_of(loader, 140)
        state = loader.state_dict()
        resilin.reset_job()
        stream = kind((samples,) * 2)
        again = resilin.AdaptiveDataLoader(stream, batch_size=40)
        again.load_state_dict(state)
        steps_of(again, 1)
        assert stream.log[0][0] == expected
        # At most what was read since the last exchange of saved places.
        assert len(stream.log) <= 40 + 2 * (256 + 32 * 20)
        resilin.reset_job()
    assert "2 open shards continue from their saved states, and 992 samples" in caplog.text
    assert "2 open shards skip what was used, and 0 samples are read again" in caplog.text


def test_what_a_stream_cannot_honour_says_why():
    with pytest.raises(ValueError, match="straddle"):
        resilin.AdaptiveDataLoader(Numbered(), tail="straddle")
    with pytest.raises(ValueError, match="in_order"):
        resilin.AdaptiveDataLoader(Numbered(), num_workers=2, in_order=False)
    with pytest.raises(TypeError, match="has no len"):
        len(resilin.AdaptiveDataLoader(Numbered()))
    loader = resilin.AdaptiveDataLoader(Numbered(), 5)
    state = loader.state_dict()
    with pytest.raises(ValueError, match="fingerprint was"):
        resilin.AdaptiveDataLoader(Numbered((1, 2) * 4)).load_state_dict(state)
    with pytest.raises(ValueError, match="lacks num_samples"):
        resilin.AdaptiveDataLoader([1, 2, 3]).load_state_dict(state)
    with pytest.raises(ValueError, match="lacks num_shards"):
        loader.load_state_dict(resilin.AdaptiveDataLoader([1, 2, 3]).state_dict())


class Shrinking(Numbered):
    """A shard that has fewer samples when it is opened again."""

    opened = 0

    def open(self, shard, num_shards, epoch):
        type(self).opened += 1
        self.lengths = (3,) if self.opened > 1 else (20,)
        return super().open(shard, num_shards, epoch)


def test_a_shard_that_changes_is_an_error():
    Shrinking.opened = 0
    stream = Shrinking((20,))
    loader = resilin.AdaptiveDataLoader(stream, batch_size=4)
    steps_of(loader, 2)
    state = loader.state_dict()
    resilin.reset_job()
    again = resilin.AdaptiveDataLoader(stream, batch_size=4)
    again.load_state_dict(state)
    with pytest.raises(ValueError, match="ended after 3 samples, and 8 of it were used"):
        steps_of(again)


class Drawing(Numbered):
    """Draws from all generators, and leaves samples out by one of them."""

    def open(self, shard, num_shards, epoch):
        for sample in super().open(shard, num_shards, epoch):
            keeps, noise = random.random() < 0.7, torch.rand(1, dtype=torch.float64) / 4
            noise += (
                np.random.rand() / 8
                + float(torch.rand(1, generator=resilin.sample_generator())) / 8
            )
            if keeps:
                yield sample + noise


@pytest.mark.parametrize("world", WORLDS)
def test_random_numbers_of_workers_are_those_of_the_sample(world):
    def values(loader, num=None):
        mine = []
        for batch in loader:
            mine += batch.flatten().tolist()[: loader.current_samples]
            if num is not None and loader._passes.iteration.span.stop >= num:
                loader.commit()
                break
        return sorted(gathered(mine))

    whole = values(resilin.AdaptiveDataLoader(Drawing(), batch_size=6, num_workers=1))
    resilin.reset_job()
    loader = resilin.AdaptiveDataLoader(Drawing(), batch_size=4, num_workers=2)
    first = values(loader, 12)
    state = loader.state_dict()
    resilin.reset_job()
    again = resilin.AdaptiveDataLoader(Drawing(), batch_size=7, num_workers=2)
    again.load_state_dict(state)
    assert sorted(first + values(again)) == whole
    assert 30 < len(whole) < 63
    assert len({value % 1 for value in whole}) == len(whole)


def test_a_collate_function_may_empty_its_samples():
    class Dicts(Numbered):
        def open(self, shard, num_shards, epoch):
            for sample in super().open(shard, num_shards, epoch):
                yield {"x": sample}

    def collate(samples):
        return torch.stack([sample.pop("x") for sample in samples])

    loader = resilin.AdaptiveDataLoader(Dicts(), batch_size=10, collate_fn=collate)
    net = Net().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="constant")
    taken, fails = [], True
    for batch in loader:
        with loader.retry_smaller():
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            if fails:
                fails = False
                raise torch.OutOfMemoryError("too large")
            loss.backward()
            optimizer.step()
            taken += numbers(batch)
    assert sorted(taken) == sorted(plain(Numbered()))


def test_an_error_of_the_source_is_raised_and_the_pass_goes_on():
    class Failing(Numbered):
        fails = True

        def open(self, shard, num_shards, epoch):
            for number, sample in enumerate(super().open(shard, num_shards, epoch)):
                if shard == 3 and number == 2 and self.fails:
                    type(self).fails = False
                    raise OSError("the disk is gone")
                yield sample

    loader = resilin.AdaptiveDataLoader(Failing(), batch_size=10)
    seen = seen_around(loader, pytest.raises(OSError, match="the disk is gone"))
    assert sorted(seen) == sorted(plain(Numbered()))


@pytest.mark.parametrize("own_loop", [True, False])
@pytest.mark.world_size(2)
def test_a_loop_that_leaves_behind_the_last_sample_is_followed_by_a_whole_one(own_loop):
    stream = Numbered((6, 6))
    net = Net().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="constant")
    loader = resilin.AdaptiveDataLoader(stream, batch_size=4)
    epochs = range(3) if own_loop else resilin.remaining_epochs_until(3)
    for _ in epochs:
        seen = []
        for number, batch in enumerate(loader):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            seen += numbers(batch)
            if number == 2:
                break
        assert sorted(gathered(seen)) == sorted(plain(stream))


def test_an_epoch_that_has_no_step_is_told(caplog):
    loader = resilin.AdaptiveDataLoader(Numbered((3, 3)), batch_size=10, drop_last=True)
    assert steps_of(loader) == []
    assert "6 samples" in caplog.text
    assert "batch_size (10)" in caplog.text
