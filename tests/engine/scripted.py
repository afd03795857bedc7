"""A job of several replicas in one process, whose members change between any two steps.

Each replica has a job, an engine, a model and a loader of its own, and they take turns: one runs to
the end of its part of a step, then the next; then each makes the step, in the same order. Nothing
is reduced, so parameters differ, and each replica must have a sample in each step. Everything else
is what runs in a real job: what is proven is who trains on which samples, and what becomes of a
step in which a replica is lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

import resilin
from resilin.core.membership import Member, Membership, Roster, change
from resilin.core.recovery import Version
from resilin.engine.base import Engine
from resilin.training import job as job_module
from resilin.training.job import Job


class ScriptedEngine(Engine):
    """An engine that takes its membership from a world, when a step begins. It has no group."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__()
        self._of, self._name = world, name
        self._now = world.roster.membership(name)
        self.begun = 0
        self.lost = False

    @property
    def membership(self) -> Membership:
        return self._now

    def begin_step(self) -> Membership:
        self._now, self.lost = self._of.roster.membership(self._name), False
        self.begun += 1
        return self._now

    def all_committed(self) -> bool:
        return not self.lost

    def gradient_group(self) -> None:
        return None

    def group(self, purpose: str) -> None:
        return None


class Replica:
    """One virtual process: a job of its own, and a script that is being run in it.

    The script yields what it has trained on when its part of a step is complete, and anything when
    it has made the step.
    """

    def __init__(self, world: World, name: str, state: Any = None) -> None:
        self.name, self.job = name, Job()
        self.engine = ScriptedEngine(world, name)
        self.job._engine = self.engine
        self.loader: Any = None
        with self.current():
            if state is not None:
                self.job.registry.restore(state, first_replica=False)
            self._turns: Any = world.script(self)

    @contextmanager
    def current(self) -> Iterator[Job]:
        before, job_module._current = job_module._current, self.job
        try:
            yield self.job
        finally:
            job_module._current = before

    def set_batch_size(self, batch_size: int) -> None:
        """Sets the batch size where the script has come to."""
        with self.current():
            self.loader.set_batch_size(batch_size)

    def turn(self) -> Any:
        """Runs up to the next yield; None at the end of the script."""
        with self.current():
            return next(self._turns, None)

    def end(self) -> None:
        """Leaves the script, and its loader: a world is a cycle, and workers are to end now."""
        with self.current():
            self._turns.close()
        self._turns, self.loader = iter(()), None


class Event(NamedTuple):
    """What happens before, or in, one step."""

    leaving: Collection[int] = ()
    """Replicas that leave before it, by number."""
    joining: int = 0
    """How many join before it."""
    batch_size: int | None = None
    """The batch size from now on: set in the loop body of the step before, or before the loop."""
    lost: Collection[int] = ()
    """Replicas that die in the middle of it; at least one survives."""


class World:
    """Replicas that train together."""

    def __init__(self, script: Callable[[Replica], Iterator[Any]], size: int) -> None:
        self.script = script
        self._numbers = 0
        self._initial_size: int | None = None
        names = [self._name() for _ in range(size)]
        self.roster = Roster(members=tuple(Member(name=name) for name in names))
        self.replicas = [Replica(self, name) for name in names]
        self.used: list[list[list[int]]] = []
        """Of each step that was made, what each replica trained on."""
        self.failed = 0
        """Steps that were begun and not made."""

    def _name(self) -> str:
        self._numbers += 1
        return f"r{self._numbers}"

    def run(self, events: Iterator[Event]) -> None:
        """Runs all replicas to the end of their scripts."""
        for event in events:
            if event.batch_size is not None:
                self._choose(event.batch_size)
            self._change(event.leaving, event.joining)
            if not self._step(event.lost):
                return
        raise AssertionError("the script did not end")

    def _choose(self, batch_size: int) -> None:
        """All scripts set the batch size.

        Members change when the next step begins, which is after the loop body has set it: a joiner
        has it from the state. What a script sets before its loop is no part of the state, and a
        joiner, which runs the same script, sets it again.
        """
        if not any(replica.engine.begun for replica in self.replicas):
            self._initial_size = batch_size
        for replica in self.replicas:
            replica.set_batch_size(batch_size)

    def _change(self, leaving: Collection[int], joining: int = 0) -> None:
        if not leaving and not joining:
            return
        gone = [self.roster.names[number] for number in leaving]
        new = [Member(name=self._name()) for _ in range(joining)]
        self.roster = change(self.roster, leaving=gone, joining=new)
        for replica in [each for each in self.replicas if each.name in gone]:
            self.replicas.remove(replica)
            replica.end()
        for member in new:
            with self.replicas[0].current() as job:
                version = Version(self.roster.generation, job.clock.steps, job.epoch)
                state = job.registry.take(version)
            replica = Replica(self, member.name, state)
            if self._initial_size is not None:
                replica.set_batch_size(self._initial_size)
            self.replicas.append(replica)

    def _step(self, lost: Collection[int]) -> bool:
        parts = [replica.turn() for replica in self.replicas]
        if None in parts:
            assert parts == [None] * len(parts), "all replicas end at the same step"
            return False
        if lost:
            self._change(lost)
            self.failed += 1
            for replica in self.replicas:
                replica.engine.lost = True
        else:
            self.used.append(parts)
        for replica in self.replicas:
            assert replica.turn() is not None
        return True

    def end(self) -> None:
        for replica in self.replicas:
            replica.end()


class Numbers(torch.utils.data.Dataset[Any]):
    """Samples that say their own number."""

    def __init__(self, num: int) -> None:
        self._num = num

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.full((1,), float(index))


def training(
    num_samples: int, batch_size: int, epochs: int, **options: Any
) -> Callable[[Replica], Iterator[Any]]:
    """A script as users write it, with two points at which others take their turn."""

    def script(replica: Replica) -> Iterator[Any]:
        net = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
        model = resilin.AdaptiveDataParallel(net, optimizer, rule="constant", cross_check="off")
        loader = resilin.AdaptiveDataLoader(Numbers(num_samples), batch_size, **options)
        replica.loader = loader

        def loop() -> Iterator[Any]:
            for _ in resilin.remaining_epochs_until(epochs):
                part: list[int] = []
                for index, x in loader:
                    model(x).mean().backward()
                    part += index.tolist() if loader.current_samples else []
                    micro_batch = replica.job.micro_batch
                    assert micro_batch is not None
                    if micro_batch.last:
                        yield part
                        part = []
                    optimizer.step()
                    optimizer.zero_grad()
                    if micro_batch.last:
                        yield "made"

        return loop()

    return script


def times_used(world: World) -> Counter[int]:
    """How often each sample was in a step that was made."""
    return Counter(sample for parts in world.used for part in parts for sample in part)


def times_due(world: World) -> Counter[int]:
    """How often each sample should have been, by how far all replicas say that they have come."""
    (end,) = {replica.loader.state_dict()["cursor"] for replica in world.replicas}
    stream = world.replicas[0].loader._batches.stream
    return Counter(stream.indices(range(end)).tolist())
