"""Loops that read ahead, leave batches out, or call the model with batches of several loaders.

The oracle is the same loop over the same batches in plain PyTorch.
"""

import collections
import itertools
import queue
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import resilin

ROWS, BATCH, EPOCHS = 61, 16, 2
SEEDED = torch.Generator().manual_seed(1)
X = torch.randn(ROWS, 6, generator=SEEDED, dtype=torch.float64)
Y = torch.randn(ROWS, 2, generator=SEEDED, dtype=torch.float64)


def net():
    torch.manual_seed(0)
    return torch.nn.Linear(6, 2).double()


def ahead(batches, num=1):
    read = collections.deque()
    for batch in batches:
        read.append(batch)
        if len(read) > num:
            yield read.popleft()
    yield from read


def as_preloaded(batches):
    """As of apex: the next batch is on its way to the device when one is used."""
    batches = iter(batches)

    def preload():
        batch = next(batches, None)
        return None if batch is None else tuple(part.clone() for part in batch)

    coming = preload()
    while coming is not None:
        batch, coming = coming, preload()
        yield batch


def on_a_thread(batches):
    read = queue.Queue(maxsize=2)

    def fill():
        for batch in batches:
            read.put(batch)
        read.put(None)

    thread = threading.Thread(target=fill)
    thread.start()
    while (batch := read.get()) is not None:
        yield batch
    thread.join()


def chained(batches):
    """Looks at the first batch, and trains it with the others."""
    batches = iter(batches)
    return itertools.chain([next(batches)], batches)


def normalised(batches):
    """As of apex and timm: the next batch is normalised on the device."""
    for x, y in ahead(batches):
        yield x.float().double() / 2 + 1, y


READERS = {
    "one ahead": ahead,
    "three ahead": lambda b: ahead(b, 3),
    "preloaded": as_preloaded,
    "thread": on_a_thread,
    "list": list,
    "of a list": lambda b: ahead(list(b)),
    "zip": lambda b: (batch for _, batch in zip(itertools.count(), ahead(b), strict=False)),
    "chain": chained,
    "prefetch": lambda b: b.prefetch("cpu"),
    "prefetch, three ahead": lambda b: ahead(b.prefetch("cpu", ahead=2), 3),
}


class Run:
    """A training job; `reference` is the same loop over the same batches in plain PyTorch."""

    def __init__(self, most=None, rule="auto", **settings):
        resilin.reset_job()
        self.net = net()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.5)
        self.model = resilin.AdaptiveDataParallel(self.net, self.optimizer, rule=rule)
        data = TensorDataset(X, Y)
        settings = {"batch_size": BATCH, "max_local_bsz": most, **settings}
        self.loader = resilin.AdaptiveDataLoader(data, **settings)

    def step(self, x, y):
        loss = mse_loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def check(self, batches):
        plain = net()
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.5)
        batches = list(batches)
        for x, y in batches:
            optimizer.zero_grad()
            mse_loss(plain(x), y).backward()
            optimizer.step()
        assert self.model.clock.steps == len(batches)
        assert self.model.clock.samples == sum(len(x) for x, _ in batches)
        torch.testing.assert_close(
            [*self.net.parameters()], [*plain.parameters()], rtol=0, atol=1e-14
        )


def epochs(num=EPOCHS, rows=ROWS, size=BATCH):
    return [
        (X[i : i + size][: rows - i], Y[i : i + size][: rows - i])
        for _ in range(num)
        for i in range(0, rows, size)
    ]


@pytest.mark.parametrize("most", [None, 6])
@pytest.mark.parametrize("rule", ["auto", "linear"])
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_loop_that_reads_ahead_trains_each_batch_as_its_own(read, rule, most):
    run = Run(most, rule)
    for _ in resilin.remaining_epochs_until(EPOCHS):
        for x, y in read(run.loader):
            run.step(x, y)
    run.check(epochs())


def test_a_batch_that_was_normalised_is_recognised():
    run = Run(rule="linear")
    for _ in resilin.remaining_epochs_until(EPOCHS):
        for number, (x, y) in enumerate(normalised(run.loader)):
            if number:  # left out: the first batch of each epoch
                run.step(x, y)
    run.check((x.float().double() / 2 + 1, y) for n, (x, y) in enumerate(epochs()) if n % 4)


@pytest.mark.parametrize("kind", ["object", "array", "mapping"])
def test_batches_of_other_kinds_are_recognised(kind):
    def collate(samples):
        x, y = torch.utils.data.default_collate(samples)
        return {
            "object": SimpleNamespace(inside=SimpleNamespace(x=x), y=y),
            "array": (x.numpy(), y.numpy()),
            "mapping": collections.UserDict(x=x, y=y),
        }[kind]

    run = Run(collate_fn=collate)
    for _ in resilin.remaining_epochs_until(EPOCHS):
        for batch in ahead(run.loader.prefetch("cpu")):
            if kind == "object":
                run.step(batch.inside.x.clone(), batch.y)
            elif kind == "array":
                run.step(*map(torch.from_numpy, batch))
            else:
                run.step(batch["x"].clone(), batch["y"])
    run.check(epochs())


@pytest.mark.parametrize("most", [None, 6])
def test_a_batch_may_be_asked_for_between_forward_and_backward(most):
    run = Run(most)
    for _ in resilin.remaining_epochs_until(EPOCHS):
        batches = iter(run.loader)
        batch = next(batches, None)
        while batch is not None:
            loss = mse_loss(run.model(batch[0]), batch[1])
            batch = next(batches, None)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
    run.check(epochs())


def test_a_reader_may_outlive_an_epoch_loop_that_is_a_range():
    run = Run()
    for _ in range(EPOCHS):
        for x, y in ahead(run.loader):
            run.step(x, y)
    run.check(epochs())


@pytest.mark.parametrize("read", [iter, ahead, as_preloaded])
def test_batches_that_are_left_out_are_told_from_those_that_were_read_ahead(read):
    run = Run(rule="linear")
    left = {0, 3, 6}  # the first and the last one of an epoch, too
    for epoch in resilin.remaining_epochs_until(EPOCHS):
        for number, (x, y) in enumerate(read(run.loader)):
            if 4 * epoch + number not in left:
                run.step(x, y)
    run.check(batch for number, batch in enumerate(epochs()) if number not in left)


def test_a_loop_that_trains_one_by_one_may_leave_out_batches_that_it_has_changed():
    run = Run(rule="linear")
    for _ in range(EPOCHS):
        for number, (x, y) in enumerate(run.loader):
            changed = x / 2
            if number not in {1, 3}:
                run.step(changed, y)
    run.check((x / 2, y) for n, (x, y) in enumerate(epochs()) if n % 4 not in {1, 3})


def test_the_batch_size_of_a_step_is_decided_when_it_is_read():
    run = Run()
    sizes = []
    run.loader.set_batch_size(lambda clock: 8 + clock.steps)
    for _ in resilin.remaining_epochs_until(1):
        for x, y in ahead(run.loader):
            sizes.append(len(x))
            run.step(x, y)
    assert sizes[:3] == [8, 9, 10]
    assert sum(sizes) >= ROWS


@pytest.mark.parametrize("read", [list, iter, lambda b: b.prefetch("cpu")])
def test_a_remainder_is_dropped_by_the_size_of_its_step(read):
    run, sizes = Run(rule="linear", drop_last=True), []
    run.loader.set_batch_size(lambda clock: (20, 41)[clock.steps])
    for x, y in read(run.loader):
        sizes.append(len(x))
        run.step(x, y)
    assert sizes == [20, 41]
    run.loader.set_batch_size(lambda clock: (20, 42)[clock.steps - 2])
    sizes = [len(x) for x, y in read(run.loader) if run.step(x, y) is None]
    assert sizes == [20]  # 41 are left


def test_a_batch_whose_forward_pass_fails_may_be_left_out_of_its_step():
    run = Run(most=6)
    for number, (x, y) in enumerate(list(run.loader)):
        if number == 1:
            run.model(x)
            run.optimizer.step()  # waits
            continue
        run.step(x, y)
    assert run.model.clock.samples == ROWS - 5


def test_a_loop_that_is_left_loses_no_batch_that_was_read():
    run = Run(rule="linear")
    used = []
    for x, y in ahead(run.loader, 2):
        used.append(x)
        run.step(x, y)
        if len(used) == 2:
            break
    for x, y in run.loader:
        used.append(x)
        run.step(x, y)
    torch.testing.assert_close(torch.cat(used), X)


def test_other_tensors_than_those_of_the_batch_have_to_be_told():
    run = Run()
    changed = ((x.flip(0), y) for x, y in ahead(run.loader))
    x, _ = next(changed)
    with pytest.raises(RuntimeError, match=r"positions 0 to 16 .* positions 16 to 32.*\.using"):
        run.model(x)


def test_the_batch_of_other_tensors_may_be_told():
    run = Run()
    for _ in resilin.remaining_epochs_until(EPOCHS):
        for batch in ahead(run.loader):
            with run.model.using(batch):
                run.step(batch[0].flip(0), batch[1])
    run.check((x.flip(0), y) for x, y in epochs())


def test_a_micro_batch_that_is_trained_twice_is_refused():
    run = Run(most=6)
    batches = iter(run.loader)
    x, y = next(batches)
    run.step(x, y)
    with pytest.raises(RuntimeError, match="trained a second time"):
        run.step(x, y)


@pytest.mark.parametrize("rule", ["auto", "linear"])
def test_several_steps_on_one_batch_count_once_for_the_epoch(rule):
    run = Run(rule=rule)
    for _ in resilin.remaining_epochs_until(EPOCHS):
        for x, y in run.loader:
            for part in range(3):
                run.step(x + part, y)
    run.check((x + part, y) for x, y in epochs() for part in range(3))


def test_a_step_on_a_batch_whose_pass_was_closed_is_refused():
    run = Run()
    x, y = next(iter(run.loader))
    with pytest.raises(RuntimeError, match=r"next\(iter\(loader\)\)"):
        run.step(x, y)


def test_two_batches_in_one_loss_are_refused():
    run = Run()
    batches = iter(run.loader)
    (x, y), (more, others) = next(batches), next(batches)
    loss = mse_loss(run.model(x), y)
    with pytest.raises(RuntimeError, match="trained with one loss"):
        loss = loss + mse_loss(run.model(more), others)
    assert run.model.clock.steps == 0


def test_two_batches_in_one_forward_pass_are_refused():
    run = Run()
    batches = iter(run.loader)
    (x, _), (more, _) = next(batches), next(batches)
    with pytest.raises(RuntimeError, match="nothing tells whose"):
        run.model(torch.cat([x, more]))


def sizes_of(batches, run):
    for x, y in batches:
        run.step(x, y)
        yield len(x)


def test_what_was_prefetched_is_dropped_where_the_loop_sets_another_size():
    trained = []
    for read in (iter, lambda b: b.prefetch("cpu", ahead=3)):
        run, sizes = Run(most=6, rule="linear"), []
        for _ in range(EPOCHS):
            for size in sizes_of(read(run.loader), run):
                sizes.append(size)
                run.loader.set_batch_size(8 + 5 * (run.model.clock.steps // 2 % 2))
        trained.append((sizes, [*run.net.parameters()]))
    assert trained[0][0] == trained[1][0]
    assert len(set(trained[0][0])) > 1
    torch.testing.assert_close(trained[0][1], trained[1][1], rtol=0, atol=0)


def test_what_was_prefetched_has_the_size_of_its_step():
    trained = []
    for read in (iter, lambda b: b.prefetch("cpu", ahead=3)):
        run = Run(most=6, rule="linear")
        run.loader.set_batch_size(lambda clock: 8 + 3 * (clock.steps % 3))
        sizes = [n for _ in range(EPOCHS) for n in sizes_of(read(run.loader), run)]
        trained.append((sizes, [*run.net.parameters()]))
    assert trained[0][0] == trained[1][0]
    torch.testing.assert_close(trained[0][1], trained[1][1], rtol=0, atol=0)


@pytest.mark.parametrize("prefetched", [True, False])
def test_a_step_that_needs_too_much_memory_is_repeated_unless_the_loop_has_later_batches(
    prefetched,
):
    run, fits = Run(), False
    with nullcontext() if prefetched else pytest.raises(torch.OutOfMemoryError):
        for x, y in run.loader.prefetch("cpu") if prefetched else ahead(run.loader):
            with run.loader.retry_smaller():
                if len(x) == BATCH and run.model.clock.steps == 1 and not fits:
                    fits = True
                    raise torch.OutOfMemoryError("of memory")
                run.step(x, y)
    run.check(epochs(1)[: 4 if prefetched else 1])


@pytest.mark.filterwarnings("ignore:a step was begun and left")
def test_reading_ahead_over_the_end_of_a_pass_is_refused():
    run = Run()

    def endless():
        while True:
            yield from run.loader

    batches = ahead(endless())
    for _ in range(3):
        run.step(*next(batches))
    x, _ = next(batches)
    with pytest.raises(RuntimeError, match="counted as left out"):
        run.model(x)
    assert run.model.clock.samples == 3 * BATCH


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["one ahead", "preloaded", "thread", "prefetch"])
def test_replicas_read_ahead(name):
    check_replicas(READERS[name])


@pytest.mark.world_size(3)
def test_three_replicas_read_ahead():
    check_replicas(READERS["prefetch, three ahead"])


def check_replicas(read):
    run = Run(most=5, rule="linear")
    for _ in resilin.remaining_epochs_until(EPOCHS):
        for x, y in read(run.loader):
            run.step(x, y)
    plain = net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.5)
    for x, y in epochs():
        optimizer.zero_grad()
        mse_loss(plain(x), y).backward()
        optimizer.step()
    torch.testing.assert_close([*run.net.parameters()], [*plain.parameters()], rtol=0, atol=1e-14)


@pytest.mark.world_size(2)
@pytest.mark.filterwarnings("ignore:replica .* left the last micro-batch")
@pytest.mark.filterwarnings("ignore:another replica left")
def test_a_replica_leaves_a_batch_out_and_none_makes_the_step():
    run = Run(rule="linear")
    replica = resilin.current_job().engine.membership.replica
    made = []
    for number, (x, y) in enumerate(run.loader):
        if number == 1 and replica == 0:
            continue
        before = run.model.clock.steps
        run.step(x, y)
        if run.model.clock.steps > before:
            made.append(number)
    assert made == [0, 2, 3]


# Several loaders ---------------------------------------------------------------------------------


def pair(a=(32, 16), b=(32, 16), **settings):
    """A run over the first rows, and a loader over as many of the last ones."""
    run = Run(**settings)
    most = settings.get("most")
    first = resilin.AdaptiveDataLoader(
        TensorDataset(X[: a[0]], Y[: a[0]]), a[1], max_local_bsz=most, fingerprint="a"
    )
    second = resilin.AdaptiveDataLoader(
        TensorDataset(X[-b[0] :], Y[-b[0] :]), b[1], max_local_bsz=most, fingerprint="b"
    )
    return run, first, second


@pytest.mark.parametrize("rule", ["auto", "linear"])
def test_a_step_on_each_of_two_loaders_counts_for_its_own(rule):
    run, a, b = pair(b=(16, 8), rule=rule)
    for _ in resilin.remaining_epochs_until(EPOCHS):
        for batches in zip(a, b, strict=True):
            for x, y in batches:
                run.step(x.clone(), y)
    one = [(X[i : i + 16], Y[i : i + 16]) for i in (0, 16)]
    other = [(X[i : i + 8], Y[i : i + 8]) for i in (45, 53)]
    run.check(EPOCHS * [one[0], other[0], one[1], other[1]])


def in_between(run, a, b):
    """Asks for the batch of each loader when the model is to be called with it."""
    a, b = iter(a), iter(b)
    for x, y in a:
        loss = mse_loss(run.model(x), y)
        x, y = next(b)
        ((loss + mse_loss(run.model(x), y)) / 2).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


@pytest.mark.parametrize("calls", [1, 2, None])
@pytest.mark.parametrize("most", [None, 8])
def test_one_loss_over_two_loaders(calls, most):
    run, a, b = pair(most=most)
    for _ in resilin.remaining_epochs_until(EPOCHS):
        if calls is None:
            in_between(run, a, b)
            continue
        for (x, y), (more, others) in zip(a, b, strict=True):
            if calls == 1:
                run.step(torch.cat([x, more]), torch.cat([y, others]))
                continue
            loss = (mse_loss(run.model(x), y) + mse_loss(run.model(more), others)) / 2
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
    plain = net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.5)
    for _, i in itertools.product(range(EPOCHS), (0, 16)):
        optimizer.zero_grad()
        at = [*range(i, i + 16), *range(29 + i, 45 + i)]
        mse_loss(plain(X[at]), Y[at]).backward()
        optimizer.step()
    assert run.model.clock.steps == 2 * EPOCHS
    torch.testing.assert_close([*run.net.parameters()], [*plain.parameters()], rtol=0, atol=1e-14)


@pytest.mark.parametrize("strict", [True, False])
def test_labels_may_come_from_another_loader_that_is_read_ahead(strict):
    run = Run(most=6)
    labels = resilin.AdaptiveDataLoader(
        TensorDataset(Y), BATCH, max_local_bsz=6, fingerprint="labels"
    )
    for _ in resilin.remaining_epochs_until(EPOCHS):
        for (x, _), (y,) in ahead(zip(run.loader, labels, strict=strict)):
            run.step(x.clone(), y)
    run.check(epochs())


def test_of_two_loaders_of_unequal_length_each_batch_that_is_read_ahead_counts():
    run = Run(rule="linear")
    short = resilin.AdaptiveDataLoader(TensorDataset(X[:32]), BATCH, fingerprint="short")
    long = resilin.AdaptiveDataLoader(TensorDataset(X[:48]), BATCH, fingerprint="long")
    for _ in resilin.remaining_epochs_until(1):
        for (x,), _ in list(zip(short, long, strict=False)):
            run.step(x, torch.ones_like(Y[: len(x)]))
    assert long.state_dict()["cursor"] == 32


def test_a_step_may_come_after_its_pass_was_left():
    run = Run(rule="linear")
    for x, y in run.loader:
        mse_loss(run.model(x), y).backward()
        break
    run.optimizer.step()
    run.optimizer.zero_grad()
    assert (run.model.clock.steps, run.loader.state_dict()["cursor"]) == (1, BATCH)
    for x, y in run.loader:
        run.step(x, y)
    run.check(epochs(1))


def test_a_pass_of_forward_passes_alone_ends_with_its_data():
    run = Run()
    calls = [run.model(x) for x, _ in itertools.islice(run.loader, 100)]
    assert len(calls) == len(epochs(1))


def test_one_loss_over_unequal_parts_of_steps_is_refused():
    run, a, b = pair(a=(32, 16), b=(24, 12), most=7)
    batches = zip(a, b, strict=True)
    (x, _), (more, _) = next(batches)
    run.model(x)
    with pytest.raises(RuntimeError, match=r"is 6 of 16 samples .* is 6 of 12"):
        run.model(more)


def test_steps_in_turn_that_accumulate_are_refused():
    run, a, b = pair(most=8)
    batches = zip(a, b, strict=True)
    (x, y), (more, _) = next(batches)
    run.step(x, y)
    with pytest.raises(RuntimeError, match="in turn need one micro-batch per step"):
        run.model(more)
    assert run.model.clock.steps == 0


def test_a_loop_at_hand_pays_nothing_for_it(monkeypatch):
    from resilin.training.data import reading

    def never(*_args, **_kwargs):
        raise AssertionError("a batch was looked at")

    monkeypatch.setattr(reading.Handed, "of", never)
    run = Run(most=6)
    for _ in resilin.remaining_epochs_until(EPOCHS):
        for x, y in run.loader:
            run.step(x, y)
    run.check(epochs())
