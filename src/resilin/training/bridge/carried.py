"""The state of the job as one object, for checkpoints that another framework writes.

Such a framework saves the model, its optimizer and the like. The rest is small:
clocks, the cursor of the data, noise, and objects that the user registered. It is made of numbers,
strings and tensors, so that it can be read back without executing anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch.optim import Optimizer

from resilin.training.bridge.home import Home
from resilin.training.gates.patch import Patch
from resilin.training.state.replica_parts import of_process
from resilin.training.state.snapshot import Snapshot, Version
from resilin.training.state.transfer import gather_parts


class CarriedState:
    """The part of the job's state for a checkpoint of another framework.

    Args:
        *without: Registered names that the other framework saves, besides model, optimizers,
            schedulers and scaler.
    """

    def __init__(self, *without: str) -> None:
        self._names = without

    @property
    def _without(self) -> frozenset[str]:
        trained = Home().job.trained
        numbers = range(1 if trained is None else len(trained.optimizers))
        parts = (f"{part}{n or ''}" for part in ("optimizer", "scheduler") for n in numbers)
        return frozenset({"model", "scaler", *parts, *self._names})

    def state_dict(self) -> dict[str, Any]:
        """The state between two steps. Collective: all replicas must ask.

        Returns:
            `version` (generation, step, epoch) and `tree`, which JSON can hold, and `tensors` by
            name: those of the user's own objects, if they have any.
        """
        job = Home().job
        snapshot = job.registry.take(
            Version(job.engine.membership.generation, job.clock.steps, job.epoch),
            without=self._without,
        )
        gather_parts(job.engine, job.registry, snapshot)
        version = snapshot.version
        return {
            "version": [version.generation, version.step, version.epoch],
            "tree": snapshot.tree,
            "tensors": snapshot.tensors,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Gives it to whoever is registered, and to whoever will be.

        Raises:
            ValueError: It belongs to another dataset, or to other things than the registered ones.
        """
        job = Home().job
        snapshot = Snapshot(Version(*state["version"]), dict(state["tree"]), dict(state["tensors"]))
        # What the job does from here on is newer than whatever it has left before.
        engine, version = job.engine, snapshot.version
        snapshot = of_process(snapshot, engine.membership.process, engine.membership.num_replicas)
        job.registry.restore(
            snapshot, first_replica=engine.membership.is_first, without=self._without
        )
        engine.raise_generation(version.generation + 1)
        job.timeline.carried_from = f"step {version.step} (a checkpoint of the framework)"


@contextmanager
def own_step(optimizer: Optimizer, *, loads: bool) -> Iterator[None]:
    """Let torch make the state of an optimizer that has none, which is no step of the job.

    torch does it before it saves or loads such a state, by a step of zeros. It counts that step, so
    that the bias correction of Adam would be another one from then on; here it does not count.

    Args:
        optimizer: The optimizer, which is gated.
        loads: Whether the state is kept, since it is loaded; else the optimizer has none again.
    """
    kind, is_new = type(optimizer), not optimizer.state

    def step(self: Optimizer, closure: Any = None) -> None:
        kind.step(self, closure)
        for state in self.state.values():
            if "step" in state:
                state["step"] = state["step"] * 0

    own = {"step": step, "zero_grad": kind.zero_grad}
    patch = Patch(optimizer, {name: MethodType(method, optimizer) for name, method in own.items()})
    try:
        yield
    finally:
        patch.remove()
        if is_new and not loads:
            optimizer.state.clear()
