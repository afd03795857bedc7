import itertools

import pytest

import resilin
from tests.replicas import gathered
from tests.training.data.numbered import (
    Numbered,
    numbers,
    plain,
)

WORLDS = [pytest.param(n, marks=pytest.mark.world_size(n)) for n in (1, 2, 3, 4)]


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
