"""The program of the family `streams`, with options."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import resilin
from resilin.training.data.shards import news, reading
from tests.fuzz import parts
from tests.fuzz.hooks import kill_point, save
from tests.fuzz.program import Program

TOO_FEW = "FUZZ_SKIP_TOO_FEW"
"""Environment variable by which a reader passes over one sample too few where it resumes: a fault
that the family has to find."""
TEST_LENGTHS = (3, 0, 1, 3)
"""Lengths of the shards that programs are evaluated on."""

Sample = tuple[Tensor, ...]


class Shard:
    """The samples of one shard; they begin elsewhere in each epoch."""

    def __init__(self, data: Any, numbers: range, epoch: int) -> None:
        self._data, self._numbers, self._epoch = data, numbers, epoch
        self._next = 0

    def __iter__(self) -> Iterator[Sample]:
        return self

    def __next__(self) -> Sample:
        if self._next >= len(self._numbers):
            raise StopIteration
        sample: Sample = self._data[self._numbers[(self._next + self._epoch) % len(self._numbers)]]
        self._next += 1
        return sample

    def _move_to(self, place: int) -> None:
        self._next = place - (place > 0 and TOO_FEW in os.environ)


class SkippingShard(Shard):
    """One that can skip."""

    def skip(self, num: int) -> None:
        self._move_to(self._next + num)


class StatefulShard(Shard):
    """One that has a state."""

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._move_to(state["next"])


KINDS = {"read": Shard, "skip": SkippingShard, "state": StatefulShard}


class Shards:
    """Samples of a dataset as a stream."""

    def __init__(self, data: Any, lengths: list[int], how: str) -> None:
        self.num_shards = len(lengths)
        self.fingerprint = f"{lengths}"
        self._data, self._kind = data, KINDS[how]
        ends = torch.tensor(lengths).cumsum(0).tolist()
        self._numbers = [range(end - num, end) for end, num in zip(ends, lengths, strict=True)]

    def open(self, shard: int, num_shards: int, epoch: int) -> Iterator[Sample]:
        return self._kind(self._data, self._numbers[shard], epoch)


def main(options: dict[str, Any]) -> None:
    """Trains, and saves the final state."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lengths, how = options.get("lengths", [7, 5, 3]), options.get("how", "read")
    p = Program(
        num_samples=sum(lengths),
        batch_size=options.get("batch_size", 4),
        epochs=options.get("epochs", 2),
        net="mlp",
        optimizer=options.get("optimizer", "momentum"),
        weights="batch_weight" if options.get("weights") else "samples",
    )
    # Programs are too short for places that are saved, and told, as rarely as in real ones.
    reading.BOOKMARK_EVERY = news._MARKS_EVERY = options.get("bookmark_every", 4)
    resilin.init_process_group()
    kill_point("setup")
    loader = resilin.AdaptiveDataLoader(
        Shards(parts.train_data(p), lengths, how),
        batch_size=p.batch_size,
        shuffle=options.get("shuffle", False),
        drop_last=options.get("drop_last", False),
        max_local_bsz=options.get("max_local_bsz"),
        num_workers=options.get("workers", 0),
        batch_weight=(lambda batch: batch[3].sum()) if options.get("weights") else None,
    )
    if sizes := options.get("trace"):
        loader.set_batch_size(lambda clock: sizes[min(clock.steps // 2, len(sizes) - 1)])
    net = parts.make_net(p)
    optimizer = parts.make_optimizer(p, net)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="linear")
    history = parts.History()
    resilin.register("history", history)
    resilin.checkpoint_to(None, memory_every=1)
    evaluated = _test_loader(p, options)
    kill_point("wrapped")
    leave_after = options.get("break_after")
    for epoch in resilin.remaining_epochs_until(p.epochs):
        stats = resilin.Accumulator()
        stats["samples"] += 0  # an epoch may have no step: all that there is may be a remainder
        kill_point("epoch")
        for x, y, idx, weight in loader:
            kill_point("batch")
            stats["samples"] += loader.current_samples
            before = model.clock.steps
            out, seen = model(x, idx)
            kill_point("forward")
            parts.sample_loss(p, out, y, seen, weight).backward()
            optimizer.step()
            kill_point("stepped")
            optimizer.zero_grad()
            committed = model.clock.steps > before
            if leave_after and committed and model.clock.steps >= (epoch + 1) * leave_after:
                break
        kill_point("epoch_end")
        with stats.synchronized():
            num_samples = int(stats["samples"])
        history.append(num_samples)
        if not leave_after and not options.get("drop_last") and num_samples != sum(lengths):
            # The undisturbed run, with which this one is compared, could have the same fault.
            raise RuntimeError(f"epoch {epoch} had {num_samples} samples of {sum(lengths)}")
        if evaluated is not None:
            history.append(_evaluate(model, evaluated))
    kill_point("trained")
    clock = model.clock
    save(parts.final_state(net, optimizer, None, None, None, history, clock.steps, clock.samples))


def _test_loader(p: Program, options: dict[str, Any]) -> Any:
    data: Any = parts.test_data(p)
    if "evaluate" not in options:
        return None
    if options["evaluate"] == "stream":
        data = Shards(data, list(TEST_LENGTHS), options.get("how", "read"))
    return resilin.AdaptiveDataLoader(data, batch_size=3)


def _evaluate(model: Any, loader: Any) -> float:
    stats = resilin.Accumulator()
    model.eval()
    with torch.no_grad():
        for x, y, idx, _ in loader:
            kill_point("evaluating")
            out, _ = model(x, idx)
            stats["loss"] += ((out - y) ** 2).sum()
    model.train()
    with stats.synchronized():
        loss = float(stats["loss"])
    kill_point("evaluated")
    return loss
