"""`UnitScatter`: the reduce-scatter of one FSDP unit, weighed and measured on its way.

FSDP copies the gradients of a unit into one flat tensor, a row per shard, and hands it to an object
like this one. It is multiplied by the weight of the micro-batch there, and its norms are taken, one
per parameter group of the optimizer. The rest of FSDP is left to add up, with a divide factor of 1.

FSDP asks for the memory of the input first, fills it, and asks for that of the output then. That
second call is where the input is complete, also in a group of one process, in which FSDP reduces
nothing and calls nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from resilin.training.gradient.norms import GroupNorms
from resilin.training.gradient.sharding import Sharding, Unit

_HALF = (torch.float16, torch.bfloat16)
_reduce_scatter: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


@dataclass(frozen=True, slots=True)
class Columns:
    """Neighbouring columns of a flat gradient that are measured together."""

    start: int
    """The first column."""
    stop: int
    """The column after the last one."""
    group: int
    """Parameter group of the optimizer; one past the last group if it has none."""
    copies: int
    """Processes of a replica that have the same columns."""


def layout(
    unit: Unit, parameters: Sequence[Tensor], norms: GroupNorms, sharding: Sharding
) -> tuple[Columns, ...]:
    """The columns of a unit's flat gradient.

    Args:
        unit: The unit.
        parameters: Its parameters that are trained.
        norms: Knows the parameter groups.
        sharding: The sharding of the model.
    """
    found: list[Columns] = []
    at = 0
    for parameter in parameters:
        end = at + unit.width(parameter)
        group = norms.group_of(parameter)
        copies = sharding.processes_per_replica // unit.num_tensor_shards(parameter)
        last = found[-1] if found else None
        if last is not None and (last.group, last.copies) == (group, copies):
            found[-1] = Columns(last.start, end, group, copies)
        else:
            found.append(Columns(at, end, group, copies))
        at = end
    return tuple(found)


class UnitScatter:
    """The communication of one unit, for `FSDPModule.set_custom_reduce_scatter`.

    Args:
        unit: The unit.
        parameters: Its parameters that are trained now.
        columns: Columns of its flat gradient.
        num_groups: Parameter groups of the optimizer.
        weigh: Called with this object and the complete flat input, which it changes in place.
    """

    def __init__(
        self,
        unit: Unit,
        parameters: Sequence[Tensor],
        columns: tuple[Columns, ...],
        num_groups: int,
        weigh: Callable[[UnitScatter, Tensor], None],
    ) -> None:
        self.unit = unit
        self.parameters = parameters
        self.checked = len(columns) < 2
        """Whether the order of its parameters is known to be FSDP's."""
        self.reductions = 0
        """Reductions in the micro-batch at hand."""
        self.held_back = False
        """Whether a sum is waiting for the reduction over copies, under HSDP."""
        self._columns = columns
        self._num_groups = num_groups
        self._weigh: Callable[[UnitScatter, Tensor], None] | None = weigh
        self._input: Tensor | None = None

    # For FSDP ------------------------------------------------------------------------------

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the input, and on the second call for the output of a reduction."""
        made = torch.empty(*size, dtype=dtype, device=device)
        if self._weigh is None:
            return made
        if self._input is None:
            self._input = made
            return made
        flat, self._input = self._input, None
        if flat.numel() != self.unit.num_shards * made.numel():
            raise RuntimeError(
                f"FSDP divides a gradient of {flat.numel()} numbers into shards of "
                f"{made.numel()}, and the mesh has {self.unit.num_shards} shards"
            )
        self.reductions += 1
        self._weigh(self, flat)
        return made

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Reduces and scatters: a sum, whatever FSDP would divide by."""
        if self._weigh is not None:
            op = dist.ReduceOp.SUM
        return _reduce_scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)

    # For the reducer -----------------------------------------------------------------------

    def reset(self) -> None:
        """Forgets a reduction that was not completed."""
        self._input = None
        self.reductions = 0
        self.held_back = False

    def release(self) -> None:
        """Weighs nothing from now on."""
        self.reset()
        self._weigh = None

    def norms(self, flat: Tensor) -> Tensor | None:
        """Squared norms per parameter group of a flat gradient, this process's part of them.

        Returns:
            The norms, in float64; None if parameters have no gradient, so that it is not known
            which column is whose.
        """
        columns = self._columns
        if len(columns) > 1 and flat.numel() != self.unit.num_shards * columns[-1].stop:
            return None
        sums = torch.zeros(self._num_groups + 1, dtype=torch.float64, device=flat.device)
        table = flat.view(self.unit.num_shards, -1)
        for each in columns:
            part = table if len(columns) == 1 else table[:, each.start : each.stop]
            kind = torch.float32 if part.dtype in _HALF else None
            norm = torch.linalg.vector_norm(part, dtype=kind).double()
            sums[each.group] += norm.square() / each.copies
        return sums[:-1]

    def check_order(self) -> None:
        """Compares the order of columns with that of FSDP, once gradients of a step are there.

        Each new gradient is a view of the reduced columns, so its offset is its place.

        Raises:
            RuntimeError: They differ: this version of torch has another order.
        """
        grads: list[Any] = [parameter.grad for parameter in self.parameters]
        if self.checked or any(grad is None for grad in grads):
            return
        self.checked, at = True, 0
        with torch.no_grad():
            places = [grad.to_local().storage_offset() for grad in grads]
        for parameter, place in zip(self.parameters, places, strict=True):
            if place != at:
                raise RuntimeError(
                    f"FSDP has put a gradient at {place} that was expected at {at}: the parameters "
                    "of a unit are in another order, and norms per parameter group would be wrong"
                )
            at += self.unit.width(parameter)
