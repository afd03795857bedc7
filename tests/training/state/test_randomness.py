"""Random numbers: kept with the job, and those of samples the same whatever happens to it."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

import resilin
from resilin.core.clock import Clock
from resilin.core.membership import Membership
from resilin.training.state.randomness import RandomStates, preserved, remembered
from resilin.training.timeline import Timeline
from tests.replicas import gathered, replica

ROWS, BATCH = 24, 6


class Lost(Exception):
    """The process is gone."""


def draw():
    """A number of each global generator."""
    return random.random(), float(np.random.randn()), float(torch.rand(()))


class Augmented:
    """Samples that are drawn: from the global generators, or from those of the sample."""

    def __init__(self, helper=False):
        self.helper = helper

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        if self.helper:
            torch_draw = torch.rand((), generator=resilin.sample_generator())
            # The same generator goes on within a sample.
            torch_draw = torch_draw + 10 * torch.rand((), generator=resilin.sample_generator())
            values = float(torch_draw), float(resilin.sample_rng().random())
        else:
            values = draw()
        return torch.tensor([float(index), *values], dtype=torch.float64)


def samples(loader):
    """What an iteration over a loader fetches, on all replicas, by sample."""
    rows = [tuple(row) for batch in loader for row in batch.tolist()]
    return {row[0]: row[1:] for row in gathered(rows)}


# The state of the job ------------------------------------------------------------------------


def train(record, lost, *, workers=0, reseeds=False):
    """A job that draws in its data, its body and its evaluation; lost at a moment."""
    resilin.reset_job()
    random.seed(replica())
    np.random.seed(replica())
    torch.manual_seed(replica())
    net = torch.nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="linear")
    loader = resilin.AdaptiveDataLoader(
        Augmented(), batch_size=BATCH, shuffle=True, num_workers=workers
    )
    resilin.checkpoint_to(None, memory_every=1)
    moments = 0
    for epoch in resilin.remaining_epochs_until(2):
        if reseeds:
            torch.manual_seed(epoch)
        draw()
        for batch in loader:
            moments += 1
            if moments == lost:
                raise Lost
            dropped = torch.nn.functional.dropout(batch[:, 1:], 0.5)
            model(dropped).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            record[model.clock.steps] = (batch.tolist(), dropped.tolist(), draw())
        for part in range(2):
            moments += 1
            if moments == lost:
                raise Lost
            record["evaluation", epoch, part] = draw()
    return moments, torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()


def lives(directory, lost, **settings):
    record = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RESILIN_MEMORY_DIR", str(directory))
        for at in (*lost, None):
            try:
                moments, parameters = train(record, at, **settings)
            except Lost:
                continue
            resilin.reset_job()
            return record, moments, parameters
    raise AssertionError("lost in all of its lives")


@pytest.mark.parametrize("settings", [{}, {"reseeds": True}, {"workers": 1}], ids=str)
def test_a_job_lost_at_any_moment_draws_the_same_numbers(tmp_path, settings):
    whole, moments, parameters = lives(tmp_path / "whole", [], **settings)
    assert moments == 2 * (ROWS // BATCH + 2)
    step = 7 if settings.get("workers") else 3
    for lost in range(2, moments + 1, step):
        found, _, ends = lives(tmp_path / f"lost{lost}", [lost, 2], **settings)
        assert found == whole, lost
        assert ends == parameters, lost


@pytest.mark.world_size(2)
def test_each_replica_gets_its_own_generators_back(shared_path):
    whole, _, parameters = lives(shared_path / "whole", [])
    found, _, ends = lives(shared_path / "lost", [4, 3])
    assert (found, ends) == (whole, parameters)
    assert len(set(gathered([str(whole[1])]))) == 2


def where(replicas=2, replica=0, steps=7):
    """The timeline of a job that was resumed, and its engine."""
    clock = Clock(steps=steps)
    membership = Membership(num_replicas=replicas, replica=replica)
    engine = type("Engine", (), {"membership": membership})
    return Timeline(clock=clock, replicas_before=2), engine


def test_generators_that_have_not_moved_are_no_state():
    states = RandomStates(*where())
    assert states.state_dict() == {}
    with preserved():
        draw()
    assert states.state_dict() == {}
    np.random.randn()
    assert set(states.state_dict()["generators"]) == {"numpy"}
    again = RandomStates(*where())
    again.load_state_dict(states.state_dict())
    # What was restored stays a part of the state, moved or not.
    assert set(again.state_dict()["generators"]) == {"numpy"}


def test_the_second_of_a_pair_of_gaussian_numbers_is_restored():
    for gaussian in (lambda: random.gauss(0, 1), np.random.randn):
        gaussian()
        put_back = remembered()
        drawn = [gaussian() for _ in range(3)]
        put_back()
        assert [gaussian() for _ in range(3)] == drawn


def test_at_another_number_of_replicas_they_are_seeded_by_step_and_replica():
    def drawn(**facts):
        torch.manual_seed(5)
        timeline, engine = where(**facts)
        states = RandomStates(timeline, engine)
        states.load_state_dict(None)
        torch.manual_seed(9)  # the script seeds again before its first step
        states.begin_step()
        assert timeline.seeded_at == timeline.clock.steps
        return draw()

    first = drawn(replicas=3, replica=1)
    assert first == drawn(replicas=3, replica=1)
    others = [drawn(replicas=3, replica=2), drawn(replicas=3, replica=1, steps=8)]
    for other in others:
        assert all(a != b for a, b in zip(first, other, strict=True))


# Nothing of the user's is used up ------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_draws_nothing_from_the_global_generators(workers):
    data = TensorDataset(torch.arange(float(ROWS)))
    loader = resilin.AdaptiveDataLoader(data, batch_size=4, shuffle=True, num_workers=workers)
    before = draw_after(lambda: None)
    assert draw_after(lambda: list(loader)) == before
    assert draw_after(loader.example) == before
    drawing = resilin.AdaptiveDataLoader(Augmented(), batch_size=4)
    assert draw_after(drawing.example) == before


def draw_after(act):
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    act()
    return draw()


def test_without_workers_the_global_generators_are_drawn_from_in_order():
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    plain = [draw() for _ in range(ROWS)]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    loader = resilin.AdaptiveDataLoader(Augmented(), batch_size=5)
    assert list(samples(loader).values()) == plain


# Samples -------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.world_size(2)), 1])
@pytest.mark.parametrize(("helper", "workers"), [(True, 0), (True, 2), (False, 2)])
def test_random_numbers_of_samples_depend_on_their_positions_alone(world, helper, workers):
    for batch_size in (4, 7):
        loader = resilin.AdaptiveDataLoader(
            Subset(Augmented(helper), range(ROWS)),
            batch_size=batch_size,
            shuffle=True,
            seed=3,
            num_workers=workers,
            max_local_bsz=3,
        )
        epochs = [samples(loader) for _ in range(2)]
        assert epochs == [by_position(loader._batches.stream, epoch, helper) for epoch in range(2)]
        # Another number in each sample, and in each epoch.
        assert len({*epochs[0].values(), *epochs[1].values()}) == 2 * ROWS


def by_position(stream, epoch, helper):
    """What the samples of an epoch have to be, from their positions alone."""
    positions, found = range(epoch * ROWS, (epoch + 1) * ROWS), {}
    for index, key in zip(stream.indices(positions), stream.keys(positions), strict=True):
        if helper:
            first, second = torch.rand(2, generator=torch.Generator().manual_seed(int(key)))
            generator = np.random.Generator(np.random.PCG64(int(key)))
            found[float(index)] = float(first + 10 * second), generator.random()
        else:
            random.seed(int(key))
            np.random.seed(int(key) % 2**32)
            torch.manual_seed(int(key))
            found[float(index)] = draw()
    return found


def test_positions_and_seeds_choose_the_numbers():
    stream = resilin.AdaptiveDataLoader(Augmented(), seed=3)._batches.stream
    other = resilin.AdaptiveDataLoader(Augmented(), seed=4)._batches.stream
    keys = stream.keys(range(0, 100))
    assert keys[3:50:2].tolist() == stream.keys(range(3, 50, 2)).tolist()
    assert len({*keys.tolist(), *other.keys(range(100)).tolist()}) == 200


class Many(Augmented):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def test_what_has_no_current_sample_is_refused():
    with pytest.raises(RuntimeError, match=r"sample_generator\(\) was called outside of an Adapt"):
        resilin.sample_generator()
    with pytest.raises(RuntimeError, match=r"sample_rng\(\) was called outside of an Adaptive"):
        resilin.sample_rng()
    default = torch.Generator()
    assert resilin.sample_generator(default) is default
    with pytest.raises(RuntimeError, match="fetches several samples at once"):
        list(resilin.AdaptiveDataLoader(Many(helper=True), batch_size=4))


def init_worker(worker):
    random.seed(0)


def test_the_users_function_for_workers_still_runs():
    loader = resilin.AdaptiveDataLoader(
        Augmented(), batch_size=4, num_workers=1, worker_init_fn=init_worker
    )
    assert len(samples(loader)) == ROWS
