import gc
import itertools
import json
import multiprocessing
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, TensorDataset

import resilin
from resilin.core import BatchTrace, Schedule
from resilin.core.membership import Membership
from resilin.core.stream import Ownership, SampleStream
from resilin.training.data.cursor import SampleCursor
from resilin.training.data.tickets import CannotResize, split
from tests.replicas import gathered, num_replicas, replica, worlds

N = 203


class Numbers:
    """A dataset of its own indices, in a structure that the default collate function makes."""

    def __init__(self, n=N):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return {"x": torch.tensor([float(index)]), "name": str(index), "pair": (index, -index)}


def indices(batch):
    numbers = [int(v) for v in batch["x"].flatten()]
    assert [int(name) for name in batch["name"]] == numbers
    assert batch["pair"][0].tolist() == [-int(v) for v in batch["pair"][1]] == numbers
    return numbers


def test_a_plain_pass_in_order():
    loader = resilin.AdaptiveDataLoader(Numbers(10), batch_size=4)
    assert [indices(b) for b in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(loader) == 3
    # The next pass is the next epoch.
    assert [indices(b) for b in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_example_builds_a_model_and_uses_nothing_up(workers):
    loader = resilin.AdaptiveDataLoader(Numbers(10), batch_size=4, num_workers=workers)
    net = torch.nn.LazyLinear(2)
    net(loader.example()["x"])
    assert net.in_features == 1
    passed = []
    for batch in loader:
        passed += indices(batch)
        assert indices(loader.example()) == [0]
    assert passed == list(range(10))


def test_drop_last_drops_the_remainder_of_the_epoch():
    loader = resilin.AdaptiveDataLoader(Numbers(10), batch_size=4, drop_last=True)
    assert [indices(b) for b in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [indices(b) for b in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(loader) == 2


def test_straddling_batches_are_all_whole():
    loader = resilin.AdaptiveDataLoader(Numbers(10), batch_size=4, tail="straddle")
    assert [indices(b) for b in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]
    assert [indices(b) for b in loader] == [[2, 3, 4, 5], [6, 7, 8, 9]]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", worlds(1, 3, gate=(3,)))
def test_each_sample_once_while_the_batch_size_changes(world, workers):
    loader = resilin.AdaptiveDataLoader(
        Numbers(), batch_size=16, shuffle=True, seed=3, max_local_bsz=6, num_workers=workers
    )
    sizes = itertools.cycle([16, 40, 5, 64, 23, 2, 31])
    for _ in range(3):
        seen = []
        for batch in loader:
            mine = indices(batch)
            assert 1 <= len(mine) == loader.current_samples <= 6
            seen += mine
            loader.set_batch_size(next(sizes))
        assert sorted(gathered(seen)) == list(range(N))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_collate_function_whose_batches_cannot_be_split(workers):
    # Two numbers that stand for the whole batch: nothing to cut.
    loader = resilin.AdaptiveDataLoader(
        list(range(N)), batch_size=16, collate_fn=summary, num_workers=workers, shuffle=True
    )
    sizes = itertools.cycle([16, 40, 5, 64, 23])
    for _ in range(2):
        total = count = 0
        for batch in loader:
            total, count = total + batch["sum"], count + batch["count"]
            assert batch["count"] == loader.current_samples
            loader.set_batch_size(next(sizes))
        assert (total, count) == (N * (N - 1) // 2, N)


def summary(samples):
    return {"sum": sum(samples), "count": len(samples)}


def test_a_step_that_was_left_is_handed_out_again():
    loader = resilin.AdaptiveDataLoader(Numbers(10), batch_size=4, num_workers=2)
    first = [indices(b) for b in itertools.islice(loader, 1)]
    assert [indices(b) for b in loader] == [*first, [4, 5, 6, 7], [8, 9]]


def join(attempt, world):
    """Forms a new group of the first `world` ranks; says whether this one is in it."""
    me, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    if me < world:
        # Names of its own in the store: ranks that were in fewer groups count them differently.
        store = dist.PrefixStore(f"group {attempt}", dist.TCPStore("127.0.0.1", port))
        dist.init_process_group("gloo", store=store, rank=me, world_size=world)
    return me < world


@pytest.mark.world_size(5, init=False)
@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_a_saved_pass_goes_on_at_another_world_size(after, shared_path):
    # 10 steps of 24 on 4 replicas, the rest of 1003 samples on another number of them, at batch 31.
    data, seen, state = Numbers(1003), [], shared_path / "state.json"
    if join(0, 4):
        loader = resilin.AdaptiveDataLoader(data, batch_size=24, shuffle=True, seed=1)
        for batch in itertools.islice(loader, 10):
            seen += indices(batch)
        loader.commit()
        if replica() == 0:
            state.write_text(json.dumps(loader.state_dict()))
        dist.barrier()
        dist.destroy_process_group()
    if join(1, after):
        loader = resilin.AdaptiveDataLoader(data, batch_size=24, shuffle=True, seed=1)
        while not state.exists():
            time.sleep(0.01)
        loader.load_state_dict(json.loads(state.read_text()))
        loader.set_batch_size(31)
        for batch in loader:
            seen += indices(batch)
        dist.barrier()
        dist.destroy_process_group()
    join(2, 5)
    assert sorted(gathered(seen)) == list(range(1003))


@pytest.mark.world_size(3, init=False)
def test_membership_changes_between_two_steps():
    """Two of three replicas leave the group in the middle of an epoch; one goes on alone."""
    resilin.init_process_group("gloo")
    loader = resilin.AdaptiveDataLoader(
        Numbers(), batch_size=20, shuffle=True, seed=3, num_workers=2
    )
    seen, me = [], replica()
    for step, batch in enumerate(loader):
        seen += indices(batch)
        if step < 4:
            continue
        if num_replicas() == 3:
            # The step is done on all replicas: commit it before they part.
            loader.commit()
            before = gathered(seen)
            dist.barrier()
            dist.destroy_process_group()
            seen = []
        if me != 0:
            return
    assert sorted(before + seen) == list(range(N))


def test_the_batch_size_follows_what_it_is_given():
    loader = resilin.AdaptiveDataLoader(Numbers(100), batch_size=10)
    for wanted, expected in [
        (20, [20] * 5),
        (BatchTrace.from_sizes([5, 30, 25], end="repeat"), [5, 30, 25, 5, 30, 5]),
        (lambda clock: 40 if clock.samples % 100 >= 50 else 50, [50, 40, 10]),
        (Schedule(lambda epoch: 25 if epoch % 1 < 0.5 else 50, unit="epochs"), [25, 25, 50]),
    ]:
        resilin.reset_job()
        loader = resilin.AdaptiveDataLoader(Numbers(100), batch_size=10)
        loader.set_batch_size(wanted)
        assert [len(indices(batch)) for batch in loader] == expected


def test_a_schedule_in_tokens_counts_those_that_the_model_was_told_of():
    data = torch.utils.data.TensorDataset(torch.randn(80, 3), torch.randn(80, 1))
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="constant", tokens_per_step=50)
    # Each sample has five tokens, so a reference step of ten samples has fifty.
    loader = resilin.AdaptiveDataLoader(data, batch_size=10, batch_weight=lambda b: 5 * len(b[0]))
    loader.set_batch_size(Schedule(lambda steps: 10 if steps < 3 else 25, clock="tokens"))
    sizes = []
    for x, y in loader:
        sizes.append(len(x))
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert sizes == [10, 10, 10, 25, 25]


def test_the_256_over_64_planner_needs_no_autoscaling():
    loader = resilin.AdaptiveDataLoader(Numbers(600), batch_size=256, max_local_bsz=64)
    assert (loader.current_batch_size, loader.current_local_bsz) == (256, 64)
    assert loader.accumulation_steps == 4
    sizes = [len(indices(batch)) for batch in loader]
    assert sizes == [64] * 8 + [44, 44]


@pytest.mark.world_size(2)
def test_autoscaling_stays_within_its_bounds():
    loader = resilin.AdaptiveDataLoader(Numbers(400), batch_size=32)
    loader.autoscale_batch_size(1024, local_bsz_bounds=(8, 20))
    # It begins at the reference batch; what comes then is the tuner's.
    assert loader.current_batch_size == 32
    assert (loader.current_local_bsz, loader.accumulation_steps) == (16, 1)
    assert all(len(indices(batch)) <= 20 for batch in loader)
    loader.autoscale_batch_size(1024, local_bsz_bounds=(20, 40))
    assert loader.current_batch_size == 40
    loader.autoscale_batch_size(1024, (4, 10), gradient_accumulation=False)
    assert (loader.current_batch_size, loader.accumulation_steps) == (20, 1)
    with pytest.raises(ValueError, match=r"max_batch_size \(16\) must be at least .* \(32\)"):
        loader.autoscale_batch_size(16)
    loader.autoscale_batch_size(40, local_bsz_bounds=(30, 40))
    with pytest.raises(ValueError, match="2 replicas cannot be scheduled"):
        loader.current_batch_size  # noqa: B018


def test_dataloader_arguments_pass_through():
    seen = []
    loader = resilin.AdaptiveDataLoader(
        TensorDataset(torch.arange(8.0)),
        batch_size=4,
        collate_fn=lambda samples: torch.cat([s[0].reshape(1) for s in samples]) * 10,
        worker_init_fn=seen.append,
        timeout=5,
        num_workers=1,
        prefetch_factor=3,
        generator=torch.Generator().manual_seed(77),
        shuffle=True,
    )
    assert sorted(torch.cat(list(loader)).tolist()) == [10.0 * i for i in range(8)]
    assert loader.state_dict()["seed"] == 77


def test_autoscaling_keeps_to_the_largest_micro_batch_of_the_loader():
    loader = resilin.AdaptiveDataLoader(Numbers(64), batch_size=16, max_local_bsz=4)
    loader.autoscale_batch_size(64)
    assert (loader.current_local_bsz, loader.accumulation_steps) == (4, 4)
    loader.autoscale_batch_size(64, local_bsz_bounds=(2, 8))
    assert loader.current_local_bsz == 4


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: resilin.AdaptiveDataLoader(Stream()), "can be read in order only"),
        (lambda: resilin.AdaptiveDataLoader([1], sampler=[0]), "sampler cannot be honoured"),
        (lambda: resilin.AdaptiveDataLoader([1], batch_sampler=[[0]]), "batch_sampler cannot"),
        (lambda: resilin.AdaptiveDataLoader([1], batch_size=0), r"batch_size \(0\)"),
        (lambda: resilin.AdaptiveDataLoader([]), "the dataset is empty"),
        (lambda: resilin.AdaptiveDataLoader([1], max_local_bsz="all"), r"max_local_bsz \('all'\)"),
        (
            lambda: resilin.AdaptiveDataLoader([1], drop_last=True, tail="short"),
            r"drop_last \(True\) and tail \('short'\) contradict each other",
        ),
        (
            lambda: resilin.AdaptiveDataLoader([1]).set_batch_size("big"),
            r"batch_size \('big'\) must be a whole number",
        ),
        (
            lambda: resilin.AdaptiveDataLoader([1], 1, max_local_bsz=4).autoscale_batch_size(
                64, local_bsz_bounds=(8, 16)
            ),
            r"local_bsz_bounds \(8\) must be at most max_local_bsz \(4\)",
        ),
        (lambda: resilin.AdaptiveDataLoader([1], 4, tail="keep"), "'keep'.*must be one of short"),
        (lambda: resilin.AdaptiveDataLoader([1]).set_batch_size(0), r"batch_size \(0\)"),
        (lambda: list(resilin.AdaptiveDataLoader([1], 4, drop_last=True)), "drop every sample"),
        (
            lambda: resilin.AdaptiveDataLoader([1, 2], seed=1).load_state_dict(
                resilin.AdaptiveDataLoader([1, 2, 3], seed=2).state_dict()
            ),
            "num_samples was 3 and is 2; seed was 2 and is 1",
        ),
    ],
)
def test_what_cannot_be_honoured_says_why(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_splitting():
    batch = {"a": torch.arange(6).reshape(3, 2), "b": [("x", "y", "z"), torch.arange(3)]}
    first, rest = split(batch, 2, 3)
    assert first["a"].tolist() == [[0, 1], [2, 3]]
    assert first["b"][0] == ("x", "y")
    assert rest["b"][1].tolist() == [2]
    for whole in (torch.tensor(3), torch.arange(4), {"n": 3}, ["a"], [], object()):
        with pytest.raises(CannotResize):
            split(whole, 2, 3)


def members(num_replicas, generation=0, **facts):
    return Membership(num_replicas=num_replicas, generation=generation, **facts)


@pytest.mark.parametrize(("replicas", "kept"), [(2, True), (3, False)])
def test_each_replica_keeps_its_positions_at_the_same_number_of_replicas(replicas, kept):
    stream = SampleStream(20, seed=1)
    before = SampleCursor("loader/0", stream)
    assert before.deal(members(2)) == Ownership(0, 2)
    before.position = 5
    after = SampleCursor("loader/0", stream)
    after.load_state_dict(before.state_dict())
    expected = Ownership(0, 2) if kept else Ownership(5, replicas)
    assert after.deal(members(replicas, 1)) == expected
    # As resilin 0.1.0 wrote it.
    old = SampleCursor("loader/0", stream)
    old.load_state_dict({**stream.state(5), "ended": None})
    assert old.deal(members(replicas, 1)) == Ownership(5, replicas)
    # As it was written before generations were noted.
    old = SampleCursor("loader/0", stream)
    old.load_state_dict({**before.state_dict(), "dealt": [0, 2]})
    assert old.deal(members(replicas, 1)) == expected


def test_survivors_and_joiners_of_a_generation_deal_alike():
    stream = SampleStream(20, seed=1)
    survivor = SampleCursor("loader/0", stream)
    assert survivor.deal(members(2)) == Ownership(0, 2)
    survivor.position = 5
    state = survivor.state_dict()
    # One has left and one has joined: the number is the same, and the generation is another one.
    now = members(2, 1, reformed=True)
    assert survivor.deal(now) == Ownership(5, 2)
    survivor.position = 9
    assert survivor.deal(now) == Ownership(5, 2)
    for taken in (state, {**survivor.state_dict(), "cursor": 5}):
        # Before the survivor has dealt, or after it.
        joiner = SampleCursor("loader/0", stream)
        joiner.load_state_dict(taken)
        assert joiner.deal(now) == Ownership(5, 2)
    # All are started anew, together, and resume what that generation has left.
    again = SampleCursor("loader/0", stream)
    again.load_state_dict(survivor.state_dict())
    assert again.deal(members(2, 2)) == Ownership(5, 2)
    assert again.deal(members(2, 3, reformed=True)) == Ownership(9, 2)


@pytest.mark.parametrize("ending", ["dropped", "reset", "reset within a pass"])
def test_workers_end_with_their_loader_or_job(ending):
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="linear")
    loader = resilin.AdaptiveDataLoader(torch.ones(32, 1), batch_size=4, num_workers=2)
    # The garbage collector would wait 5 s for each worker: it must not be needed.
    gc.disable()
    try:
        steps = iter(loader)
        for x in itertools.islice(steps, 3):
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert len(multiprocessing.active_children()) == 2
        if ending == "reset within a pass":
            resilin.reset_job()
            with pytest.raises(RuntimeError, match=r"a job that reset_job\(\) has ended"):
                next(steps)
        else:
            del steps
            if ending == "reset":
                resilin.reset_job()
            else:
                del loader
        assert multiprocessing.active_children() == []
    finally:
        gc.enable()


@pytest.mark.parametrize("world", worlds(1, 2))
def test_the_lab_ends_a_script_after_so_many_samples(world, monkeypatch):
    # Reached within the second epoch, with the third of the steps of 8 in it.
    monkeypatch.setenv("RESILIN_STOP_AT", "36")
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="linear")
    loader = resilin.AdaptiveDataLoader(Numbers(20), batch_size=8)
    heard = []
    resilin.listen(heard.append)

    def train():
        for _ in resilin.remaining_epochs_until(9):
            for batch in loader:
                loss = model(batch["x"]).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                resilin.record(loss=loss)

    with pytest.raises(SystemExit) as ended:
        train()
    assert ended.value.code == 0
    assert (model.clock.steps, model.clock.samples) == (5, 36)
    # The last step is reported when the process ends.
    resilin.current_job().recorder.close()
    steps = [event.step for event in heard if event.name == "step"]
    assert steps == ([1, 2, 3, 4, 5] if replica() == 0 else [])


def test_an_end_in_samples_is_a_whole_number(monkeypatch):
    monkeypatch.setenv("RESILIN_STOP_AT", "1k")
    with pytest.raises(ValueError, match=r"RESILIN_STOP_AT \('1k'\) must be a whole number"):
        resilin.AdaptiveDataLoader(Numbers(20), batch_size=8)
