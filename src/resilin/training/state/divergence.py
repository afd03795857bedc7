"""The cross-check: replicas periodically compare a hash of state that must be the same on all.

After each step all replicas must have the same parameters, learning rates and clock, bit for bit;
otherwise they train different models without any sign of it. A hash of these is part of the ballot
of some steps. Sums of its pieces and of their squares show whether all replicas have the same hash;
if not, the replicas exchange details, and all of them fail with the names of those that differ.

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
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from resilin.compat.torch_names import ignored_by_ddp
from resilin.core import _validate, time_share
from resilin.core.agreement import all_same, pieces, squares
from resilin.core.rules import Factors
from resilin.engine import environment
from resilin.engine.base import Engine
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


class DivergenceCheck:
    """Compares the replicas of a job in the ballot of a step; a voter.

    All that decides when it is due are numbers that all replicas have: the clock, and times that
    went through a ballot.

    Args:
        engine: Who is in the job.
        timeline: Its clock.
        module: The model whose trained parameters must be the same on all replicas.
        every: Steps between two checks; `auto` keeps to `SHARE` of the time, `off` never checks.
        decided: Returns other numbers that must be the same, by name, as in `decided_by`.

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
    ) -> None:
        self._engine = engine
        self._timeline = timeline
        self._module = module
        self._decided = decided
        self._every = _setting(every)
        self._members: tuple[int, int] | None = None
        self._due = 0
        self._checked: tuple[int, float] | None = None
        self._said: Mapping[str, str] = {}

    def votes(self) -> tuple[float, ...]:
        """Pieces of the hash, their squares, and its cost; empty if it is not due."""
        engine, step = self._engine, self._timeline.clock.steps
        self._said = {}
        if self._every == "off" or engine.membership.num_replicas == 1:
            return ()
        members = (engine.membership.generation, engine.membership.num_replicas)
        if members != self._members:
            # A replica that joined has to start with the state of the others.
            self._members, self._due, self._checked = members, step, None
        if step < self._due:
            return ()
        began = time.perf_counter()
        self._said = self._state()
        parts = pieces(_digest(self._said))
        now = time.perf_counter()
        per_step = 0.0
        if self._checked is not None and step > self._checked[0]:
            per_step = (now - self._checked[1]) / (step - self._checked[0])
        self._checked = (step, now)
        return (*parts, *squares(parts), now - began, per_step)

    def counted(self, votes: tuple[float, ...]) -> None:
        """Compare the hashes of all replicas.

        Raises:
            RuntimeError: Replicas differ; on all of them.
        """
        if not votes:
            return
        *sums, seconds, per_step = votes
        half = len(sums) // 2
        # The clock may not have moved: a GradScaler can skip the step.
        self._due = max(self._due, self._checked[0] if self._checked else 0) + self._interval(
            seconds, per_step
        )
        if not all_same(sums[:half], sums[half:], self._engine.membership.num_replicas):
            raise RuntimeError(self._who())

    def _interval(self, seconds: float, per_step: float) -> int:
        if self._every != "auto":
            return int(self._every)
        if not per_step:
            return 1  # the first check of a generation: the next one measures the time of steps
        return time_share.interval(seconds / per_step, SHARE, longest=LONGEST)

    # What is compared ----------------------------------------------------------------------

    def _state(self) -> dict[str, str]:
        """The compared values by name; as hex, which is small and exact."""
        told = {"clock": _hex(*self._timeline.clock.state().values())}
        told |= {name: _hex(*numbers) for name, numbers in self._decided().items()}
        ignored = ignored_by_ddp(self._module)
        trained = {
            name: parameter
            for name, parameter in self._module.named_parameters()
            if parameter.requires_grad and name not in ignored
        }
        for name, (columns, rows) in zip(trained, sums_of(list(trained.values())), strict=True):
            told[f"parameter {name}"] = f"{columns % 2**64:016x}{rows % 2**64:016x}"
        return told

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
        return (
            f"replicas have diverged by step {self._checked[0] if self._checked else 0}: of "
            f"{len(digests)} replicas, {_list(odd)} differ{'s' if len(odd) == 1 else ''} from "
            f"{others} in {names[0] if names else 'what they train'}{more}. All replicas must have "
            "the same bits after each step; cross_check='off' switches this comparison off"
        )


def decided_by(
    optimizer: Optimizer, scale: float, gain: float, factors: Sequence[Factors]
) -> dict[str, tuple[float, ...]]:
    """The numbers by which the optimizer of a model made its last step, by name."""
    rates = {
        f"learning rate of group {number}": (float(group["lr"]),)
        for number, group in enumerate(optimizer.param_groups)
    }
    each = ((f.lr, f.beta_power, f.eps, f.weight_decay) for f in factors)
    return rates | {"scale, gain and factors": (scale, gain, *itertools.chain(*each))}


def sums_of(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Two sums of the bits of each tensor, which change with any of its bits or their places.

    The bytes are read as whole numbers in a table. The sums of its columns and those of its rows
    are weighted by their places; all sums wrap around, so that their order does not matter.
    """
    if not tensors:
        return []
    with torch.no_grad():
        found = [_weighted(tensor) for tensor in tensors]
        devices = {tensor.device for tensor in found}
        if len(devices) > 1:
            found = [tensor.cpu() for tensor in found]
        # One transfer for all of them.
        return [(columns, rows) for columns, rows in torch.stack(found).tolist()]


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
