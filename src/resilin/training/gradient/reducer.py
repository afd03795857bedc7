"""`Reducer`: how the gradients of a step's micro-batches become the mean over all replicas.

A reducer owns what is between `.grad` and the other replicas: the wrapper around the module and its
hooks, the collectives, and the norms that it can measure on the way. The step (`step`) knows the
weights, the ballot and the noise, and none of that. `reducer_choice` chooses the class.

In one step, the calls of a replica are, in this order:

    begin_step()
    begin(); forward(call, last=False); end_micro_batch(trained=True)      per micro-batch
    begin(); forward(call, last=True); finish(trained=True)                the last one
    rescale(weight)                                                        all replicas agree

A micro-batch may have no forward pass, or several. Where the loop leaves one out,
`end_micro_batch` or `finish` come with `trained=False`: the collectives of the others have to be
matched even then. A reducer calls `exchange.send(share)` exactly once in each step that ends in
`finish`, at the moment that suits its own collectives, and at the latest there. None of its methods
reads a tensor on the device, which the host would wait for, with one exception: where this replica
has no gradient for a parameter, `finish` reads whether another one has, as DDP does.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from resilin.compat.torch_names import ignored_by_ddp
from resilin.engine.collectives import Wait, wait_for
from resilin.engine.devices import Fetched
from resilin.training.gradient.exchange import Exchange
from resilin.training.gradient.norms import GroupNorms
from resilin.training.gradient.parameters import Parameters
from resilin.training.gradient.sharding import Sharding


def _as_it_is(error: RuntimeError) -> RuntimeError:
    return error


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The module that is trained, as far as a reducer needs to know it."""

    module: nn.Module
    """The user's module."""
    parameters: Parameters
    """Its parameters, and which of them are trained now."""
    norms: GroupNorms
    """Squared norms per parameter group of the optimizer."""
    exchange: Exchange
    """The step under way, and the way to the other replicas."""
    options: Mapping[str, Any]
    """Arguments of the user for DistributedDataParallel, or for what stands in its place."""
    wait: Wait = wait_for
    """Waits for a collective of the replicas; raises `PeerLost` if one of them is gone."""
    refused: Callable[[RuntimeError], RuntimeError] = _as_it_is
    """Takes torch's error for a collective that its group did not begin, and returns the one to
    raise: `PeerLost` if a replica is gone."""
    sharding: Sharding | None = None
    """Division of its parameters among processes; None if each has all of them."""
    live: bool = False
    """Whether replicas may come and go: then nothing may wait where it cannot be given up."""


class Reducer(Protocol):
    """Makes `.grad` the mean gradient over all replicas that it is attached to."""

    group: dist.ProcessGroup | None
    """The replicas that it is attached to; None if there is only this one."""

    @classmethod
    def fits(cls, model: Model, group: dist.ProcessGroup | None) -> bool:
        """Whether this class can reduce the gradient of this model in this group."""
        ...

    def attach(self, group: dist.ProcessGroup | None, *, source: int | None) -> None:
        """Wraps the module for these replicas and the parameters that are trained now. Collective.

        Args:
            group: The replicas; None if there is only this one.
            source: Replica whose parameters and buffers all replicas take over; None if they have
                the same ones already.
        """
        ...

    def detach(self) -> None:
        """Takes the wrapper and its hooks off the module."""
        ...

    def begin_step(self) -> None:
        """Forgets the step before; `.grad` stays as it is."""
        ...

    def begin(self) -> None:
        """Prepares `.grad` for the micro-batch at hand."""
        ...

    def forward(self, call: Callable[[nn.Module], Any], *, last: bool) -> Any:
        """Runs a forward pass.

        Args:
            call: Calls the module that it is given, wrapped or not, with the user's arguments.
            last: Whether the replica's part of the step ends with this micro-batch.
        """
        ...

    def end_micro_batch(self, *, trained: bool) -> bool:
        """Takes in a micro-batch that is not the last one.

        Args:
            trained: Whether it had a backward pass.

        Returns:
            Whether `.grad` was changed.
        """
        ...

    def finish(self, *, trained: bool) -> None:
        """Ends this replica's part of the step: all collectives are under way or over.

        Args:
            trained: Whether the last micro-batch had a backward pass. If not, the replica takes
                part with the micro-batches before it, or with zeros if `step.empty`.
        """
        ...

    def rescale(self, weight: float) -> Fetched | None:
        """Makes `.grad` the mean, given the weight of all micro-batches of all replicas.

        Returns:
            Norms of the step, as `fetch_norms` returns them; None if it is not measured.
        """
        ...

    def abandon(self) -> None:
        """Undoes a step that was not finished, as far as the wrapper and its hooks know of it."""
        ...

    @property
    def shared(self) -> bool:
        """Whether other replicas have a part of the step from this one already."""
        ...


def agree_on_source(model: Model, group: dist.ProcessGroup, *, joined: bool) -> int:
    """Decides whose parameters all replicas of a new group take over. Collective.

    A replica that was in the job before has the parameters of the job, one that has just come may
    have anything, also if it is the first one of the new group.

    Args:
        model: The model of this replica.
        group: The replicas.
        joined: Whether this replica was in the job before.

    Returns:
        The first replica that was, or 0 if none was, as when a job starts.

    Raises:
        ValueError: Replicas have different models.
    """
    replica, num_replicas = dist.get_rank(group), dist.get_world_size(group)
    shapes = [(tuple(p.shape), str(p.dtype)) for p in model.parameters.all]
    checksum = zlib.crc32(repr(shapes).encode())
    known = model.parameters.all
    device = known[0].device if known else torch.device("cpu")
    said = torch.tensor([replica if joined else num_replicas, checksum, -checksum], device=device)
    model.wait(dist.all_reduce(said, op=dist.ReduceOp.MIN, group=group, async_op=True))
    first, lowest, highest = said.tolist()
    if lowest != -highest:
        raise ValueError(
            f"replicas have different models: replica {replica} of {num_replicas} has "
            f"{len(shapes)} parameters with the checksum {checksum:08x} of shapes and types, and "
            f"checksums go from {lowest:08x} to {-highest:08x}; all replicas have to wrap the same "
            "model"
        )
    return 0 if first == num_replicas else int(first)


def copy_from(source: int, model: Model, group: dist.ProcessGroup) -> None:
    """Gives all replicas the parameters and buffers of one of them. Collective.

    Those that the user has told DDP to ignore stay as they are.
    """
    rank = dist.get_global_rank(group, source)
    named = [*model.module.named_parameters(), *model.module.named_buffers()]
    ignored = ignored_by_ddp(model.module)
    for tensor in (t.detach() for name, t in named if t.numel() and name not in ignored):
        dense = tensor.contiguous()
        raw = torch.view_as_real(dense) if dense.is_complex() else dense
        model.wait(dist.broadcast(raw, rank, group=group, async_op=True))
        if dense is not tensor:
            tensor.copy_(dense)


def fetch_norms(
    terms: Tensor, means: Tensor, group: dist.ProcessGroup | None, *, divided: bool = False
) -> Fetched:
    """Adds up norms over all replicas, and starts to bring them to the host. Collective.

    Args:
        terms: Weighted squared norms per parameter group of this replica's measured gradients.
        means: Squared norms per parameter group of the mean gradient, which all replicas have.
        group: The replicas, as the gradient is reduced in; None if there is only this one.
        divided: Whether means are divided among the processes, and not the same on all of them.

    Returns:
        The terms, and after them the means, the same bits on all replicas.
    """
    if group is None:
        return Fetched(torch.cat([terms, means]))
    if not divided and dist.get_rank(group) > 0:
        # Machines may add up the same squares in different orders: those of replica 0 count.
        means = torch.zeros_like(means)
    norms = torch.cat([terms, means])
    return Fetched(norms, dist.all_reduce(norms, group=group, async_op=True))
