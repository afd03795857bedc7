"""The cross-check: replicas periodically compare a hash of state that must be the same on all.

After each step all replicas must have the same parameters, learning rates and clock, bit for bit;
otherwise they train different models without any sign of it. Once per generation the state of the
optimizers is compared as well: some divide it among processes, and a job keeps that of replica 0.
A hash of these is part of the ballot of some steps. Sums of its pieces and of their squares show
whether all replicas have the same hash; if not, the replicas exchange details, and all of them fail
with the names of those that differ.

Buffers are left out: each replica has its own BatchNorm statistics until DDP sends those of replica
0, and other buffers of a module may differ as well. So are parameters that DDP ignores, and those
that are not trained.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import struct
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from resilin.compat.torch_names import ignored_by_ddp
from resilin.core import _validate, time_share
from resilin.core.agreement import all_same, pieces, squares
from resilin.core.rules import Factors
from resilin.engine import devices, environment
from resilin.engine.base import Engine
from resilin.engine.devices import Fetched
from resilin.training.timeline import Timeline

CrossCheck = int | Literal["auto", "off"]
"""Interval of the comparison: a number of steps, as a share of time allows, or never."""

SHARE = 0.005
"""Part of the training time that the cross-check may take under `auto`."""
LONGEST = 10_000
"""Steps after which it is due under `auto`, whatever it costs."""
_COLUMNS = 512
"""Width of the table that the numbers of a parameter are added up in, by columns and by rows."""


def _setting(setting: CrossCheck) -> CrossCheck:
    """The effective setting: the launcher's overrides the script's.

    Raises:
        ValueError: The setting is neither a number of steps nor `auto` nor `off`.
    """
    told: CrossCheck | str = os.environ.get(environment.CROSS_CHECK) or setting
    if isinstance(told, str):
        if told in ("auto", "off"):
            return told  # type: ignore[return-value]
        if not told.isdigit():
            raise ValueError(
                f"cross_check ({told!r}) must be a number of steps, 'auto' or 'off'; it may come "
                f"from the variable {environment.CROSS_CHECK}"
            )
        told = int(told)
    return _validate.whole("cross_check", told, at_least=1)


class _Taken:
    """The compared values of one step, by name; as hex, which is small and exact.

    Args:
        step: Steps made so far.
        began: When it was begun to take them, by `time.perf_counter()`.
        said: Those of the host.
        tensors: Tensors, whose sums may still be under way when this returns.
    """

    def __init__(
        self, step: int, began: float, said: dict[str, str], tensors: Mapping[str, Tensor]
    ) -> None:
        self.step = step
        self._said = said
        self._names = list(tensors)
        places = {tensor.device for tensor in tensors.values()}
        self.queued = any(devices.of(place).queues for place in places)
        """Whether to read them means to wait, unless that is done a step later."""
        before = _marks(places)
        self._sums = _fetch_sums(list(tensors.values()))
        self._marks = list(zip(before, _marks(places), strict=True))
        self.time = time.perf_counter()
        self._seconds = self.time - began

    def read(self) -> dict[str, str]:
        """All of them; waits if a device has not come this far."""
        for name, (columns, rows) in zip(self._names, _read_sums(self._sums), strict=True):
            self._said[name] = f"{columns % 2**64:016x}{rows % 2**64:016x}"
        return self._said

    @property
    def seconds(self) -> float:
        """Time that taking them has cost: that of the host, or of a device if it took longer."""
        return max([self._seconds, *(a.elapsed_time(b) / 1000 for a, b in self._marks)])


class DivergenceCheck:
    """Compares the replicas of a job in the ballot of a step; a voter.

    All that decides when it is due are numbers that all replicas have: the clock, and times that
    went through a ballot.

    Args:
        engine: Who is in the job.
        timeline: Its clock.
        module: The model whose trained parameters must be the same on all replicas.
        every: Steps between two checks; `auto` keeps to `SHARE` of the time, `off` never checks.
            A hash of a device that queues its work is compared a step later, so that nobody waits
            for it, and the next one is taken after that.
        decided: Returns other numbers that must be the same, by name, as in `decided_by`.
        optimizers: The optimizers of the model.

    Raises:
        ValueError: `every`, or what the launcher says in its place, is none of these.
    """

    def __init__(
        self,
        engine: Engine,
        timeline: Timeline,
        module: nn.Module,
        every: CrossCheck,
        decided: Callable[[], Mapping[str, Sequence[float]]],
        optimizers: Sequence[Optimizer] = (),
    ) -> None:
        self._engine = engine
        self._timeline = timeline
        self._module = module
        self._decided = decided
        self._optimizers = optimizers
        self._states_due = True
        self._every = _setting(every)
        self._members: tuple[int, int] | None = None
        self._due = 0
        self._checked: tuple[int, float] | None = None
        self._taken: _Taken | None = None
        self._said: Mapping[str, str] = {}

    def votes(self) -> tuple[float, ...]:
        """Pieces of the hash, their squares, and its cost; empty if it is not due.

        Where the device queues its work, the hash is of the step before: nobody waits for it.
        """
        engine, step = self._engine, self._timeline.clock.steps
        self._said = {}
        if self._every == "off" or engine.membership.num_replicas == 1:
            return ()
        members = (engine.membership.generation, engine.membership.num_replicas)
        if members != self._members:
            # A replica that joined has to start with the state of the others.
            self._members, self._due, self._checked, self._taken = members, step, None, None
            self._states_due = True
        if self._taken is None:
            if step < self._due:
                return ()
            self._taken = self._take(step)
            if self._taken.queued:
                return ()
        taken, self._taken = self._taken, None
        began = time.perf_counter()
        self._said = taken.read()
        parts = pieces(_digest(self._said))
        seconds = taken.seconds + time.perf_counter() - began
        per_step = 0.0
        if self._checked is not None and taken.step > self._checked[0]:
            per_step = (taken.time - self._checked[1]) / (taken.step - self._checked[0])
        self._checked = (taken.step, taken.time)
        return (*parts, *squares(parts), seconds, per_step)

    def check(self, votes: tuple[float, ...]) -> None:
        """Compare the hashes of all replicas, before the step changes anything.

        Raises:
            RuntimeError: Replicas differ; on all of them.
        """
        sums, half = votes[:-2], (len(votes) - 2) // 2
        if votes and not all_same(sums[:half], sums[half:], self._engine.membership.num_replicas):
            raise RuntimeError(self._who())

    def counted(self, votes: tuple[float, ...]) -> None:
        """Compare them in a step that is not made, and decide when the next check is due."""
        if not votes:
            return
        *_, seconds, per_step = votes
        # The clock may not have moved: a GradScaler can skip the step.
        self._due = max(self._due, self._checked[0] if self._checked else 0) + self._interval(
            seconds, per_step
        )
        self.check(votes)

    def _interval(self, seconds: float, per_step: float) -> int:
        if self._every != "auto":
            return int(self._every)
        if not per_step:
            return 1  # the first check of a generation: the next one measures the time of steps
        return time_share.interval(seconds / per_step, SHARE, longest=LONGEST)

    # What is compared ----------------------------------------------------------------------

    def _take(self, step: int) -> _Taken:
        """The compared values as they are now."""
        began = time.perf_counter()
        said = {"clock": _hex(*self._timeline.clock.state().values())}
        said |= {name: _hex(*numbers) for name, numbers in self._decided().items()}
        ignored = ignored_by_ddp(self._module)
        tensors: dict[str, Tensor] = {
            f"parameter {name}": parameter
            for name, parameter in self._module.named_parameters()
            if parameter.requires_grad
            and name not in ignored
            # Each process has another shard.
            and not hasattr(parameter, "device_mesh")
        }
        if self._states_due and step > 0:
            self._states_due = False
            states = _states_of(self._optimizers, set(tensors.values()))
            said[_DIVIDED] = "\n".join(f"{key} {tuple(t.shape)}" for key, t in states.items())
            tensors |= states
        return _Taken(step, began, said, tensors)

    def _who(self) -> str:
        """Description of the differences by replica. Collective: all replicas have seen them."""
        everyone: list[Mapping[str, str]] = self._engine.gather(dict(self._said))
        digests = [_digest(said) for said in everyone]
        usual, number = Counter(digests).most_common(1)[0]
        several = 2 * number > len(digests)
        right = digests.index(usual) if several else 0
        odd = [r for r, digest in enumerate(digests) if digest != digests[right]]
        others_said = [list(everyone[replica].values()) for replica in odd]
        names = [
            name
            for place, (name, value) in enumerate(everyone[right].items())
            if any(said[place : place + 1] != [value] for said in others_said)
        ]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        others = f"the other {number}" if several else f"replica {right}"
        if names and names[0].startswith(_DIVIDED):
            kinds = " or ".join(type(optimizer).__name__ for optimizer in self._optimizers)
            return (
                f"replicas have different states of the optimizer after step "
                f"{self._checked[0] if self._checked else 0} ({kinds}), as if it divided them "
                "among processes. A job keeps the state of one replica, and a restart would give "
                "that to all: use the form of the optimizer for one process, since gradients are "
                "reduced already, or shard the model with fully_shard"
            )
        return (
            f"replicas have diverged by step {self._checked[0] if self._checked else 0}: of "
            f"{len(digests)} replicas, {_list(odd)} differ{'s' if len(odd) == 1 else ''} from "
            f"{others} in {names[0] if names else 'what they train'}{more}. All replicas must have "
            "the same bits after each step; cross_check='off' switches this comparison off"
        )


def decided_by(
    groups: Sequence[Mapping[str, Any]], scale: float, gain: float, factors: Sequence[Factors]
) -> dict[str, tuple[float, ...]]:
    """The numbers by which the optimizers of a model made its last step, by name."""
    rates = {
        f"learning rate of group {number}": (float(group["lr"]),)
        for number, group in enumerate(groups)
    }
    each = ((f.lr, f.beta_power, f.eps, f.weight_decay, f.momentum_power) for f in factors)
    return rates | {"scale, gain and factors": (scale, gain, *itertools.chain(*each))}


_DIVIDED = "state of the optimizers"
"""What the names of compared values of optimizers begin with."""


def _states_of(optimizers: Sequence[Optimizer], compared: Collection[Tensor]) -> dict[str, Tensor]:
    """The tensors that optimizers keep for parameters that are compared themselves."""
    every = [
        (optimizer, parameter)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    return {
        f"{_DIVIDED} {number}.{key}": value
        for number, (optimizer, parameter) in enumerate(every)
        if parameter in compared
        # Not by indexing, which would add an entry.
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor) and value.numel()
    }


def sums_of(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Two sums of the bits of each tensor, which change with any of its bits or their places.

    The bytes are read as whole numbers in a table. The sums of its columns and those of its rows
    are weighted by their places; all sums wrap around, so that their order does not matter.
    """
    return _read_sums(_fetch_sums(tensors))


def _fetch_sums(tensors: Sequence[Tensor]) -> list[Fetched]:
    """The sums of all tensors, under way to the host: one transfer if they are on one device."""
    with torch.no_grad():
        found = [_weighted(tensor) for tensor in tensors]
        if len({tensor.device for tensor in found}) > 1:
            return [Fetched(tensor) for tensor in found]
        return [Fetched(torch.cat(found))] if found else []


def _read_sums(fetched: Sequence[Fetched]) -> list[tuple[int, int]]:
    numbers = [int(number) for each in fetched for number in each.read()]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _marks(places: Iterable[torch.device]) -> list[devices.Event]:
    """Events in the queues of these devices, if they have any."""
    marks = [devices.of(place).event(place) for place in places]
    return [mark for mark in marks if mark is not None]


def _weighted(tensor: Tensor) -> Tensor:
    numbers = _as_numbers(tensor)
    whole = numbers.numel() // _COLUMNS * _COLUMNS
    table, rest = numbers[:whole].view(whole // _COLUMNS, _COLUMNS), numbers[whole:].long()
    columns = table.sum(0, dtype=torch.int64)
    columns[: rest.numel()] += rest
    rows = torch.cat([table.sum(1, dtype=torch.int64), rest.sum().reshape(1)])
    return torch.stack([(columns * _places(columns)).sum(), (rows * _places(rows)).sum()])


def _places(numbers: Tensor) -> Tensor:
    """An odd weight for each place, so that no change of one number is lost in a product."""
    place = torch.arange(numbers.numel(), dtype=torch.int64, device=numbers.device)
    return place * 0x9E3779B97F4A7C1 * 2 + 1


def _as_numbers(tensor: Tensor) -> Tensor:
    """All bits of a tensor as whole numbers in one dimension; not copied where it can be."""
    flat = tensor.detach()
    flat = (torch.view_as_real(flat) if flat.is_complex() else flat).reshape(-1)
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return flat.view(kinds[flat.element_size()])


def _hex(*numbers: float) -> str:
    return struct.pack(f"<{len(numbers)}d", *numbers).hex()


def _digest(said: Mapping[str, str]) -> int:
    # By place: names may differ, as those that Keras counts up in a process that made more models.
    text = "\n".join(said.values())
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _list(replicas: Sequence[int]) -> str:
    numbers = [str(replica) for replica in replicas]
    if len(numbers) == 1:
        return f"replica {numbers[0]}"
    return f"replicas {', '.join(numbers[:-1])} and {numbers[-1]}"
