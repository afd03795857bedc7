"""Streams: samples per second, size of the state, time to resume, and the order itself.

    python benchmarks/streams.py [--quick] [--check]

- Samples per second of an `AdaptiveDataLoader` over a stream, over those of the stock DataLoader
  over the same source as an `IterableDataset`: without workers and with two, of small samples
  (a line of JSON, about 25 us each) and of large ones (2048 tokens of a memory-mapped file, as
  int64). The loaders take turns in one process; the first batches of a turn, which workers had
  ready, do not count. Without workers the time is that of the processor, with workers it is that of
  the clock. The ratio is that of the median turn, with its interval; the control is a second stock
  loader. The quick form prints the ratios and does not judge them.
- Bytes of the state in a checkpoint per shard: all shards in step, all ended at lengths of their
  own, and in the middle of shards that have a state of their own (a number).
- Seconds from a new loader to its first batch, in the middle of 10^3 and 10^6 samples, where shards
  have a state, can skip, and have to be read again; and of 10^9 samples in 10^6 files that an index
  knows, which are not there.
- Random histories (lengths, batch sizes, replicas, restarts) of `resilin.core.shard_order` against
  a simulation that moves one sample at a time.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from harness import finish, parse_args
from ratios import Ratio, median_ratio
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import resilin
from resilin.core.shard_order import ShardOrder, pack_lengths, unpack_lengths

BATCH = 32
NUM_SHARDS = 64
LEAST_RATIO = 0.95
"""Samples per second over those of the stock loader, at least."""
UNTIMED = 12
"""Batches of each turn that do not count: workers had them ready."""
VOCABULARY, TOKENS, NUM_ROWS = 50_000, 2048, 4096


# Sources ---------------------------------------------------------------------------------------


class Source:
    """An endless stream of samples that are made from its place alone."""

    num_shards = NUM_SHARDS
    fingerprint = "source"

    def __init__(self, *, large: bool) -> None:
        rng = np.random.default_rng(0)
        tokens = rng.integers(VOCABULARY, size=NUM_ROWS * TOKENS).astype(np.uint16)
        with tempfile.TemporaryFile() as file:
            tokens.tofile(file)
            self._tokens = np.memmap(file, dtype=np.uint16, mode="r")
        self._text = json.dumps({"text": "x" * 200, "tokens": rng.integers(999, size=160).tolist()})
        self._large = large

    def open(self, shard: int, num_shards: int, epoch: int) -> Iterator[np.ndarray]:
        number = shard
        while True:
            yield self._sample(number)
            number += num_shards

    def _sample(self, number: int) -> np.ndarray:
        if self._large:
            start = number * 577 % ((NUM_ROWS - 1) * TOKENS)
            return self._tokens[start : start + TOKENS].astype(np.int64)
        return np.asarray(json.loads(self._text)["tokens"])


class Stock(IterableDataset[np.ndarray]):
    """The same source as people give it to a stock DataLoader: a worker has some of the shards."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __iter__(self) -> Iterator[np.ndarray]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        num = self._source.num_shards
        shards = [self._source.open(shard, num, 0) for shard in range(first, num, step)]
        while True:
            for shard in shards:
                yield next(shard)


def sample_microseconds(source: Source) -> float:
    """Time in which the source makes a sample."""
    shard = source.open(0, NUM_SHARDS, 0)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(1000):
            next(shard)
        times.append((time.perf_counter() - began) * 1e3)
    return min(times)


# Samples per second ----------------------------------------------------------------------------


def adaptive_batches(source: Source, workers: int) -> Iterator[Any]:
    loader = resilin.AdaptiveDataLoader(source, batch_size=BATCH, num_workers=workers)
    for batch in loader:
        loader.commit()
        yield batch


def compare(*, large: bool, workers: int, turns: int, batches: int) -> tuple[Ratio, Ratio]:
    """Samples per second over the stock loader's, and those of a second stock loader."""
    source = Source(large=large)

    def stock() -> Iterator[Any]:
        return iter(DataLoader(Stock(source), batch_size=BATCH, num_workers=workers))

    contenders = {
        "stock": stock(),
        "control": stock(),
        "resilin": adaptive_batches(source, workers),
    }
    clock = time.perf_counter if workers else time.process_time
    dice = random.Random(0)
    ratios: dict[str, list[float]] = {"resilin": [], "control": []}
    for turn in range(turns + 1):
        spent = {}
        for name in dice.sample(sorted(contenders), len(contenders)):
            its = contenders[name]
            for _ in range(UNTIMED):
                next(its)
            began = clock()
            for _ in range(batches):
                batch = next(its)
            spent[name] = clock() - began
            assert len(batch) == BATCH
        if turn:  # the first one starts the workers
            for name, values in ratios.items():
                values.append(spent["stock"] / spent[name])
    del contenders
    return median_ratio(ratios["resilin"]), median_ratio(ratios["control"])


# State -----------------------------------------------------------------------------------------


def state_bytes(num_shards: int) -> dict[str, float]:
    """Bytes of JSON per shard."""
    order = ShardOrder(num_shards)
    rng = np.random.default_rng(0)
    ended = rng.integers(10**3, 10**6, size=num_shards)
    found = {}
    for name, lengths in (("in_step", order.unknown()), ("ended", ended)):
        text = pack_lengths(lengths)
        assert (unpack_lengths(text, num_shards) == lengths).all()
        state = {**order.state(10**9), "lengths": text}
        found[f"state_bytes_per_shard_{name}"] = round(len(json.dumps(state)) / num_shards, 3)
    return found


# Resuming --------------------------------------------------------------------------------------


class Counted:
    """Shards of numbers, which are as good at being resumed as `how` says."""

    num_shards = NUM_SHARDS

    def __init__(self, how: str, per_shard: int) -> None:
        self.how, self.per_shard = how, per_shard
        self.fingerprint = how

    def open(self, shard: int, num_shards: int, epoch: int) -> Iterator[int]:
        kinds = {"state": WithState, "skip": WithSkip, "read": Reading}
        return kinds[self.how](shard, num_shards, self.per_shard)


class Reading:
    """One shard, which can only be read."""

    def __init__(self, shard: int, num_shards: int, length: int) -> None:
        self.shard, self.num_shards, self.length, self.number = shard, num_shards, length, 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.number == self.length:
            raise StopIteration
        self.number += 1
        return (self.number - 1) * self.num_shards + self.shard


class WithSkip(Reading):
    """One shard, which can skip."""

    def skip(self, num: int) -> None:
        self.number += num


class WithState(Reading):
    """One shard, which has a state."""

    def state_dict(self) -> int:
        return self.number

    def load_state_dict(self, state: int) -> None:
        self.number = state


FILES, PER_FILE = 10**6, 10**3


class Indexed:
    """10^9 samples in 10^6 files of unequal length that are not there, and their index."""

    num_shards = 1024
    fingerprint = "indexed"

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self._sizes = rng.integers(PER_FILE - 100, PER_FILE + 101, size=FILES)

    def open(self, shard: int, num_shards: int, epoch: int) -> Iterator[int]:
        return _IndexedShard(np.cumsum(self._sizes[shard::num_shards]))


class _IndexedShard:
    def __init__(self, ends: np.ndarray) -> None:
        self._ends, self._number = ends, 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self._number == self._ends[-1]:
            raise StopIteration
        file = int(np.searchsorted(self._ends, self._number, side="right"))
        self._number += 1
        return file

    def skip(self, num: int) -> None:
        self._number += num


def resume_seconds(stream: Any, state: dict[str, Any], batch_size: int) -> float:
    """Time until a new loader has its first batch."""
    text = json.dumps(state)
    loader = resilin.AdaptiveDataLoader(stream, batch_size=batch_size)
    began = time.perf_counter()
    loader.load_state_dict(json.loads(text))
    batch = next(iter(loader))
    spent = time.perf_counter() - began
    assert len(batch) == batch_size
    return spent


def state_after(stream: Any, num: int) -> dict[str, Any]:
    """The state of a loader that has used so many samples."""
    loader = resilin.AdaptiveDataLoader(stream, batch_size=min(num, 1000))
    used = 0
    for batch in loader:
        loader.commit()
        used += len(batch)
        if used >= num:
            break
    return loader.state_dict()


# The order -------------------------------------------------------------------------------------


def plain_order(seats: list[int], lengths: list[int]) -> list[tuple[int, int]]:
    """The order of an epoch, one sample at a time."""
    order, number, seats = [], 0, list(seats)
    while seats:
        seat = 0
        while seat < len(seats):
            if lengths[seats[seat]] > number:
                order.append((seats[seat], number))
                seat += 1
                continue
            last = seats.pop()
            if seat < len(seats):
                seats[seat] = last
        number += 1
    return order


def history_differs(dice: random.Random) -> bool:
    """Whether a random history uses other samples than the simulation, or in another order."""
    num_shards = dice.choice((1, 2, 3, dice.randint(4, 24)))
    longest = dice.choice((1, 3, 20))
    true = np.array(
        [dice.choice((0, longest, dice.randint(0, longest))) for _ in range(num_shards)]
    )
    order = ShardOrder(num_shards, seed=dice.randrange(99), shuffle=dice.random() < 0.5)
    epoch = dice.randrange(4)
    expected = plain_order(order.begin(epoch).seats.tolist(), true.tolist())
    known, turn = order.unknown(), order.begin(epoch)
    used: list[tuple[int, int]] = []
    while True:
        if dice.random() < 0.3:
            # A restart: all that is left is the position and the lengths that were met.
            known = unpack_lengths(pack_lengths(known), num_shards)
            turn = order.begin(epoch).skip(turn.position, known)
        replicas, size = dice.randint(1, 7), dice.choice((1, 4, 32, dice.randint(1, 100)))
        while True:
            taken, after = turn.take(size, known, replicas)
            beyond = taken.indices >= true[taken.shards]
            if not beyond.any():
                break
            met = np.unique(taken.shards[beyond])
            known[met] = true[met]
        if not len(taken):
            return used != expected or not turn.is_end(known)
        parts = [taken.of(replica) for replica in range(replicas)]
        pairs = list(zip(taken.shards.tolist(), taken.indices.tolist(), strict=True))
        if sorted(pair for part in parts for pair in part) != sorted(pairs):
            return True
        used += pairs
        turn = after


class Figures(NamedTuple):
    """What is printed, and what is too unsure to be judged."""

    figures: dict[str, Any]
    limits: dict[str, float]
    undecided: list[str]


def throughput(*, quick: bool) -> Figures:
    found = Figures({}, {}, [])
    turns, batches = (8, 40) if quick else (41, 150)
    for large in (False, True):
        size = "large" if large else "small"
        microseconds = sample_microseconds(Source(large=large))
        found.figures[f"{size}_sample_us"] = round(microseconds, 1)
        for workers in (0, 2):
            ratio, control = compare(large=large, workers=workers, turns=turns, batches=batches)
            name = f"{size}_{workers}_workers"
            found.figures[f"{name}_ratio"] = round(ratio.median, 4)
            found.figures[f"{name}_interval"] = ratio.rounded
            found.figures[f"{name}_control"] = [round(control.median, 4), control.rounded]
            if quick:
                continue
            # Limits are upper ones, so what is judged is the part that is lacking.
            key = f"{name}_lacking"
            found.figures[key] = round(1 - ratio.median, 4)
            found.limits[key] = round(1 - LEAST_RATIO, 4)
            if ratio.low <= LEAST_RATIO <= ratio.high:
                found.undecided.append(key)
    return found


def resuming() -> dict[str, float]:
    found: dict[str, float] = {}
    for name, total in (("1e3", 10**3), ("1e6", 10**6)):
        for how in ("state", "skip", "read"):
            stream = Counted(how, -(-total // NUM_SHARDS))
            state = state_after(stream, total // 2)
            times = [resume_seconds(stream, state, NUM_SHARDS) for _ in range(3)]
            found[f"resume_{name}_{how}_s"] = round(statistics.median(times), 4)
            if how == "state":
                size = len(json.dumps(state)) / NUM_SHARDS
                found[f"state_bytes_per_shard_own_{name}"] = round(size, 1)
    indexed = Indexed()
    state = {**resilin.AdaptiveDataLoader(indexed).state_dict(), "cursor": FILES * PER_FILE // 2}
    # A batch that needs all shards.
    found["resume_1e9_index_s"] = round(resume_seconds(indexed, state, indexed.num_shards), 4)
    return found


def main() -> None:
    args = parse_args(__doc__ or "")
    torch.set_num_threads(1)
    num_histories = 1_000 if args.quick else 10_000
    dice = random.Random(0)
    different = sum(history_differs(dice) for _ in range(num_histories))
    figures: dict[str, Any] = {"histories": num_histories, "different_histories": different}
    figures |= state_bytes(10_000)
    figures |= resuming()
    speed = throughput(quick=args.quick)
    limits = {
        "different_histories": 0,
        "state_bytes_per_shard_in_step": 1.0,
        "state_bytes_per_shard_ended": 8.0,
        "resume_1e6_state_s": 1.0,
        "resume_1e9_index_s": 5.0,
        **speed.limits,
    }
    finish("streams", figures | speed.figures, limits, check=args.check, undecided=speed.undecided)


if __name__ == "__main__":
    main()
