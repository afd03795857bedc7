"""Loops that people write over loaders, lost at any of their steps: nothing twice, or missing.

Each program runs undisturbed, and then once for each moment at which it may be lost. What it has
trained on, step by step, must be the same.
"""

import itertools
from contextlib import nullcontext

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import resilin
from tests.replicas import gathered
from tests.training.data.test_reading import ahead

ROWS, BATCH = 20, 4


class Lost(Exception):
    """The process is gone."""


def rows(num=ROWS, first=0):
    return TensorDataset(torch.arange(first, first + num).double()[:, None])


def loader(data=None, **settings):
    settings = {"batch_size": BATCH, "shuffle": True, **settings}
    return resilin.AdaptiveDataLoader(rows() if data is None else data, **settings)


class Life:
    """One process of a program; `lost` is the number of the moment at which it ends."""

    def __init__(self, record, lost, **settings):
        self.record, self._lost, self._moment = record, lost, 0
        resilin.reset_job()
        net = torch.nn.Linear(1, 1).double()
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        settings = {"rule": "linear", **settings}
        self.model = resilin.AdaptiveDataParallel(net, self.optimizer, **settings)
        resilin.checkpoint_to(None, memory_every=1)

    def moment(self):
        """A place where the process may be lost."""
        if self._moment == self._lost:
            raise Lost
        self._moment += 1

    def train(self, *batches):
        self.moment()
        sum(self.model(x).mean() for (x,) in batches).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        samples = tuple(tuple(x[:, 0].int().tolist()) for (x,) in batches)
        self.record[self.model.clock.steps - 1] = (resilin.current_job().epoch, samples)
        self.moment()

    def evaluate(self, data):
        self.model.eval()
        with torch.no_grad():
            for (x,) in data:
                self.moment()
                self.model(x)
        self.model.train()


def train_all(life, data, fails=False):
    for batch in data:
        life.train(batch)
        if fails:
            raise KeyError


def kept(life):
    data = loader()
    for _ in resilin.remaining_epochs_until(2):
        for batch in data:
            life.train(batch)
        life.moment()


def made_anew(life):
    for _ in resilin.remaining_epochs_until(2):
        for batch in loader():
            life.train(batch)
        life.evaluate(loader(shuffle=False))


def made_in_a_function_with_its_evaluation_first(life):
    def train_epoch(epoch):
        if epoch == 0:
            life.evaluate(loader(rows(8)))
        data = loader(rows(12))
        for batch in data:
            life.train(batch)
        life.evaluate(loader(rows(12)))

    for epoch in resilin.remaining_epochs_until(3):
        train_epoch(epoch)


def another_seed_in_each_epoch(life):
    for epoch in resilin.remaining_epochs_until(3):
        for batch in loader(rows(12), seed=epoch):
            life.train(batch)
        life.moment()


def several_passes_in_an_epoch(life):
    data = loader(rows(12))
    for _ in resilin.remaining_epochs_until(2):
        for _ in range(3):
            for batch in data:
                life.train(batch)
            life.moment()


def several_loaders_made_in_an_epoch(life):
    for _ in resilin.remaining_epochs_until(2):
        for first in (0, 100):
            for batch in loader(rows(8, first)):
                life.train(batch)
        life.moment()


def two_in_turn(life):
    a, b = loader(rows(12), fingerprint="a"), loader(rows(16, 100), fingerprint="b")
    for _ in resilin.remaining_epochs_until(2):
        for batch in a:
            life.train(batch)
        for batch in b:
            life.train(batch)
        life.evaluate(a)


def nested(life):
    a, b = loader(rows(8)), loader(rows(12, 100))
    for _ in resilin.remaining_epochs_until(2):
        for outer in a:
            for inner in b:
                life.train(outer, inner)
            life.moment()


def zipped(life):
    a, b, c = (loader(rows(12 + 4 * i, 100 * i)) for i in range(3))
    for _ in resilin.remaining_epochs_until(2):
        for batches in zip(a, b, c, strict=False):
            life.train(*batches)
        life.moment()


def zipped_with_the_shortest_last(life):
    a, b = loader(rows(20)), loader(rows(12, 100))
    for _ in resilin.remaining_epochs_until(2):
        for batches in zip(a, b, strict=False):
            life.train(*batches)
        life.moment()


def evaluated_within_a_step(life):
    data = loader(rows(12))
    for _ in resilin.remaining_epochs_until(2):
        for batch in data:
            life.evaluate(data)
            life.train(batch)
            life.evaluate(data)


def left_by_the_clock(life):
    data = loader()
    for epoch in resilin.remaining_epochs_until(3):
        for batch in data:
            life.train(batch)
            if life.model.clock.steps >= 3 * (epoch + 1):
                break
        life.moment()


def bad_batches_left_out(life):
    data = loader()
    for _ in resilin.remaining_epochs_until(2):
        for batch in data:
            if 3 in batch[0]:
                continue
            life.train(batch)
        life.moment()


def read_ahead(life):
    data = loader()
    for _ in resilin.remaining_epochs_until(2):
        for batch in ahead(data, 2):
            life.train(batch)
        life.moment()


class Growing:
    """A dataset with another length in each epoch."""

    num = 12

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        return (torch.tensor([float(index)]).double(),)


def growing(life):
    pool = Growing()
    data = loader(pool, num_workers=0)
    for epoch in resilin.remaining_epochs_until(4):
        pool.num = (12, 18, 10, 16)[epoch]
        train_all(life, data)
        life.moment()


def made_anew_and_growing(life):
    pool = Growing()
    for epoch in resilin.remaining_epochs_until(3):
        pool.num = (12, 18, 10)[epoch]
        train_all(life, loader(pool, fingerprint="pool"))
        life.moment()


def prefetched(life):
    data = loader()
    for _ in resilin.remaining_epochs_until(2):
        train_all(life, data.prefetch("cpu"))
        life.moment()


def in_turn(life):
    a, b = loader(rows(12)), loader(rows(16, 100))
    for _ in resilin.remaining_epochs_until(2):
        for batches in zip(a, b, strict=False):
            for batch in batches:
                life.train(batch)
        life.moment()


def one_phase_after_the_other(life):
    first = loader(rows(12))
    for _ in resilin.remaining_epochs_until(1):
        for batch in first:
            life.train(batch)
            if life.model.clock.steps == 2:
                break
    second = loader(rows(12, 100))
    for _ in resilin.remaining_epochs_until(3):
        for batch in second:
            life.train(batch)
        life.moment()


PROGRAMS = [
    kept,
    made_anew,
    made_in_a_function_with_its_evaluation_first,
    another_seed_in_each_epoch,
    several_passes_in_an_epoch,
    several_loaders_made_in_an_epoch,
    two_in_turn,
    nested,
    zipped,
    zipped_with_the_shortest_last,
    evaluated_within_a_step,
    left_by_the_clock,
    bad_batches_left_out,
    read_ahead,
    growing,
    made_anew_and_growing,
    prefetched,
    in_turn,
    one_phase_after_the_other,
]


def run(program, directory, lives, **settings):
    """The steps that a program makes in several lives, each lost at a moment; None is not lost."""
    record = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RESILIN_MEMORY_DIR", str(directory))
        for lost in lives:
            life = Life(record, lost, **settings)
            try:
                program(life)
            except Lost:
                continue
            resilin.reset_job()
            return [record[step] for step in sorted(record)], life._moment
    raise AssertionError("lost in all of its lives")


@pytest.mark.filterwarnings("ignore:a second loader trains in epoch")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("most", [5, pytest.param(24, marks=pytest.mark.nightly(part="torture"))])
def test_a_program_lost_at_any_moment_trains_on_the_same_batches(program, most, tmp_path):
    (tmp_path / "whole").mkdir()
    whole, moments = run(program, tmp_path / "whole", [None])
    assert whole
    for lost in range(0, moments, 1 + moments // most):
        (place := tmp_path / f"lost{lost}").mkdir()
        # Twice: the second life is lost after one more moment, if it gets there.
        assert run(program, place, [lost, 1, None])[0] == whole, lost


@pytest.mark.parametrize("rule", ["linear", "adascale"])
@pytest.mark.parametrize("program", [growing, made_anew_and_growing, "made anew by length"])
def test_each_epoch_uses_the_dataset_as_long_as_it_is(program, rule, tmp_path):
    def made_anew_by_length(life):
        for epoch in resilin.remaining_epochs_until(3):
            train_all(life, loader(rows((12, 18, 10)[epoch])))

    program = made_anew_by_length if isinstance(program, str) else program
    steps, _ = run(program, tmp_path, [None], rule=rule)
    for epoch, num in enumerate((12, 18, 10)):
        used = [i for e, (batch,) in steps if e == epoch for i in batch]
        assert sorted(used) == list(range(num))


def test_a_dataset_whose_length_changes_within_a_pass_is_refused():
    life, pool = Life({}, None), Growing()
    data = loader(pool)
    for batch in data:
        life.train(batch)
        break
    pool.num = 16
    with pytest.raises(ValueError, match="had 12 samples and has 16, and 4 of the 12 were used"):
        train_all(life, data)
    pool.num = 12
    train_all(life, data)
    pool.num = 0
    with pytest.raises(ValueError, match="dataset is empty"):
        train_all(life, data)
    resilin.reset_job()
    kept_workers = loader(pool := Growing(), num_workers=1, persistent_workers=True)
    pool.num = 16
    with pytest.raises(ValueError, match=r"has 16, and persistent_workers \(True\) keeps"):
        next(iter(kept_workers))


def test_a_loader_made_in_each_epoch_has_new_orders(tmp_path):
    steps, _ = run(made_anew, tmp_path, [None])
    orders = [[i for e, batch in steps if e == epoch for i in batch[0]] for epoch in range(2)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(ROWS))
    assert orders[0] != orders[1]


def test_a_loader_made_anew_keeps_what_its_autoscaler_has_learned():
    life = Life({}, None)
    for epoch in resilin.remaining_epochs_until(2):
        data = loader()
        data.autoscale_batch_size(2 * BATCH)
        assert data.autoscaler is not None
        if epoch == 0:
            chosen = data.autoscaler.state_dict()
            data.autoscaler.load_state_dict({**chosen, "batch_size": 2 * BATCH})
        for batch in data:
            life.train(batch)
        voters = resilin.current_job().voters
        assert voters.count(data._sizes) == 1
        assert sum(type(voter) is type(data._sizes) for voter in voters) == 1
    assert data.current_batch_size == 2 * BATCH


def test_a_second_loader_over_data_of_one_name_gets_a_warning():
    life = Life({}, None)
    train_all(life, loader())
    with pytest.warns(
        UserWarning, match=r"a second loader trains in epoch 0 over data called 'Te"
    ) as told:
        train_all(life, loader())
    assert told[0].filename == __file__


@pytest.mark.filterwarnings("ignore:a second loader trains in epoch")
def test_a_loader_kept_and_one_made_anew_under_one_name_are_refused():
    def program(life):
        first = None
        for _ in resilin.remaining_epochs_until(2):
            first = first or loader()
            train_all(life, first)
            train_all(life, loader())

    with pytest.raises(
        ValueError, match=r"two loaders over 'TensorDataset\[20\]' train in epoch 1"
    ):
        program(Life({}, None))


def test_a_changed_dataset_is_refused_in_the_middle_of_an_epoch(tmp_path, monkeypatch):
    monkeypatch.setenv("RESILIN_MEMORY_DIR", str(tmp_path))
    life = Life({}, 4)
    with pytest.raises(Lost):
        kept(life)
    life = Life({}, None)
    resilin.resume()
    with pytest.raises(ValueError, match=r"until epoch 0.*num_samples was 20 and is 24"):
        train_all(life, loader(rows(24)))


def test_a_state_of_the_first_release_is_resumed():
    life = Life({}, None)
    for _ in range(2):
        loader(rows(8))  # they never trained, and took numbers all the same
    data = loader()
    registry = resilin.current_job().registry
    old = {**data._batches.stream.state(8), "ended": None}
    from resilin.training.state.snapshot import Snapshot, Version

    snapshot = registry.take(Version(1, 2))
    snapshot.tree["loader/2"] = old
    registry.restore(
        Snapshot(snapshot.version, snapshot.tree, snapshot.tensors), first_replica=True
    )
    seen = []
    for (x,) in data:
        seen += x[:, 0].int().tolist()
        life.train((x,))
    assert len(seen) == len(set(seen)) == ROWS - 8


# Whose batch it is ---------------------------------------------------------------------------


def test_after_zipped_loaders_a_stock_loader_counts_by_itself_if_the_model_knows_its_reference():
    life = Life({}, None, batch_size=4)
    a, b = loader(rows(40)), loader(rows(80), batch_size=4)
    for (x,), (y,) in zip(a, b, strict=False):
        life.train((x,), (y,))
    job = resilin.current_job()
    assert job.loader is job.micro_batch is job.iterations.current is None
    before = life.model.clock.samples
    for (x,) in DataLoader(rows(12), batch_size=4):
        life.train((x,))
    assert life.model.clock.samples - before == 12


@pytest.mark.parametrize(
    "again", [itertools.cycle, lambda data: itertools.chain(data, DataLoader(rows(8)))]
)
def test_a_step_on_a_batch_of_no_pass_is_refused(again):
    life, batches = Life({}, None), again(loader())
    for _ in range(ROWS // BATCH):
        life.train(next(batches))
    batch = next(batches)
    with pytest.raises(RuntimeError, match="not that of a pass over an AdaptiveDataLoader"):
        life.train(batch)
    assert life.model.clock.samples == ROWS


def test_an_iteration_that_is_closed_late_takes_nothing_back():
    life = Life({}, None)
    a, b = loader(), loader(rows(12))
    left = iter(a)
    next(left)
    for index, batch in enumerate(b):
        if index == 1:
            left.close()
        assert resilin.current_job().loader is b
        life.train(batch)
    assert resilin.current_job().loader is None
    assert life.model.clock.samples == 12


def test_an_exception_that_is_kept_does_not_hold_the_loader_up():
    life, kept_errors = Life({}, None), []
    data = loader()
    for _ in resilin.remaining_epochs_until(1):
        for attempt in range(3):
            with pytest.raises(KeyError) if attempt < 2 else nullcontext() as error:
                train_all(life, data, fails=attempt < 2)
            kept_errors.append(error)
    samples = [i for _, (batch,) in life.record.values() for i in batch]
    assert sorted(samples) == list(range(ROWS))
    assert not resilin.current_job().iterations.training


def test_two_iterations_over_one_loader_cannot_both_train():
    life, data = Life({}, None), loader()
    first, second = iter(data), iter(data)
    life.train(next(first), next(second))
    with pytest.raises(RuntimeError, match="asked for a batch after a later one"):
        next(first)


# Evaluation ----------------------------------------------------------------------------------


@pytest.mark.world_size(3)
def test_evaluation_without_eval_mode_counts_each_sample_once():
    life = Life({}, None)
    data, test = loader(rows(24)), loader(rows(25), batch_size=12)
    for batch in data:
        life.train(batch)
        with torch.no_grad():
            seen = [i for (x,) in test for i in x[:, 0].int().tolist()]
        assert sorted(gathered(seen)) == list(range(25))
    assert life.model.clock.samples == 24
    assert "25" not in str(list(resilin.current_job().registry._shared))


def test_evaluation_on_the_training_loader_moves_nothing():
    life, data = Life({}, None), loader()
    seen = []
    for batch in data:
        seen += batch[0][:, 0].int().tolist()
        with torch.no_grad():
            assert sorted(int(i) for (x,) in data for i in x) == list(range(ROWS))
            assert len(list(itertools.islice(data, 2))) == 2
        assert data.current_samples == BATCH
        life.train(batch)
    assert sorted(seen) == list(range(ROWS))


def test_evaluations_may_be_nested():
    life, data = Life({}, None), loader(rows(8), num_workers=1)
    life.model.eval()
    pairs = [(int(a), int(b)) for (x,) in data for (y,) in data for a in x for b in y]
    assert sorted(pairs) == [(a, b) for a in range(8) for b in range(8)]


def test_a_loop_that_becomes_training_in_its_body_is_refused():
    life, data = Life({}, None), loader()
    life.model.eval()
    batch = next(batches := iter(data))
    life.model.train()
    with pytest.raises(RuntimeError, match="trains on a batch of an evaluation"):
        life.train(batch)
    batches.close()
