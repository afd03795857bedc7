"""Flat tensors: many tensors in a few, so that one call sends or reduces them.

`send` gives all replicas the tensors of one of them. A `Bucket` has the gradients of some
parameters, and after them one number per parameter: 1 if this replica has a gradient for it, else
0. Reduced with the gradients, they say which parameters nobody used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from resilin.compat.torch_names import copy_all, ignored_by_ddp
from resilin.engine.collectives import Wait

_Key = tuple[torch.dtype, torch.device]
LARGEST = 25 * 2**20
"""Size in bytes at which a pack is full."""
_SMALL = 2**15
"""Mean size up to which a call per tensor costs more than to go over all of them twice."""


def in_packs(tensors: Iterable[Tensor], first_bytes: int, most_bytes: int) -> list[list[Tensor]]:
    """Deals tensors out to packs, each of one type and on one device.

    Args:
        tensors: The tensors; they stay in this order within a pack.
        first_bytes: Size at which the first pack of each type is full.
        most_bytes: The same for the others.

    Returns:
        The packs, in the order in which they become full.
    """
    packs: list[list[Tensor]] = []
    filling: dict[_Key, list[Tensor]] = {}
    limits: dict[_Key, int] = {}
    sizes: dict[_Key, int] = {}
    for tensor in tensors:
        key = (tensor.dtype, tensor.device)
        filling.setdefault(key, []).append(tensor)
        sizes[key] = sizes.get(key, 0) + tensor.numel() * tensor.element_size()
        if sizes[key] >= limits.get(key, first_bytes):
            packs.append(filling.pop(key))
            sizes[key], limits[key] = 0, most_bytes
    return [*packs, *filling.values()]


def kept_alike(named: Iterable[tuple[str, Tensor]], module: nn.Module) -> list[Tensor]:
    """Those that replicas have in common: not what the user has told DDP to ignore."""
    ignored = ignored_by_ddp(module)
    return [t.detach() for name, t in named if t.numel() and name not in ignored]


def send(tensors: Iterable[Tensor], source: int, group: dist.ProcessGroup, wait: Wait) -> None:
    """Gives all replicas the tensors of one of them, in place. Collective.

    Args:
        tensors: As many as the others have, of the same shapes and types, in the same order.
        source: The replica whose tensors they are.
        group: The replicas.
        wait: Waits for a collective.

    Raises:
        PeerLost: A replica is gone; some tensors may have been written.
    """
    rank, own = dist.get_global_rank(group, source), dist.get_rank(group)
    under_way = []
    for members in in_packs(tensors, LARGEST, LARGEST):
        pack = torch.cat([tensor.reshape(-1) for tensor in members])
        # As bytes: backends do not know all types.
        work = dist.broadcast(pack.view(torch.uint8), rank, group=group, async_op=True)
        under_way.append((work, pack, members))
    for work, pack, members in under_way:
        wait(work)
        if own == source:
            continue
        start = 0
        for tensor in members:
            tensor.copy_(pack[start : start + tensor.numel()].view_as(tensor))
            start += tensor.numel()


SPARSE = (
    "a gradient of shape {} has the layout {}, and replicas that may come and go reduce "
    "torch.strided alone: take sparse=False for embeddings, or a job that restarts"
)


class Bucket:
    """The gradients of some parameters of one type on one device.

    Once packed, `.grad` of its parameters are views of its memory. Nobody may touch that while it
    is being reduced; a reduction that is given up may still write to it, so that `drop` is the only
    way to continue.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters
        self._length = sum(parameter.numel() for parameter in parameters)
        self._unused: list[int] = []
        self.drop()

    def drop(self) -> None:
        """Gives the memory up; the next step takes new one."""
        self._flat: Tensor | None = None
        self.views: list[Tensor] = []
        """The gradients in it, in the order of the parameters."""

    @property
    def flat(self) -> Tensor:
        """All numbers to reduce."""
        if self._flat is None:
            first = self.parameters[0]
            length = self._length + len(self.parameters)
            self._flat = torch.zeros(length, dtype=first.dtype, device=first.device)
            self.views = _views(self._flat, self.parameters)
        return self._flat

    @property
    def gradients(self) -> Tensor:
        """The gradients alone, in one dimension."""
        return self.flat[: self._length]

    def pack_nothing(self) -> None:
        """Fills it with zeros; `.grad` stays as it is."""
        self.flat.zero_()
        self._unused = list(range(len(self.parameters)))

    def pack(self, factor: float, share: float, held: Mapping[Tensor, Tensor] | None) -> None:
        """Takes in the gradients of this replica, which become views.

        Args:
            factor: What all of them are multiplied by.
            share: What `.grad` is multiplied by before, where others are put aside; 0 leaves it out
                even if it is not finite.
            held: Gradients that are put aside, and are added to it.
        """
        flat, self._unused = self.flat, []
        at_once = held is not None or self._length <= _SMALL * len(self.parameters)
        views, grads = [], []
        with torch.no_grad():
            for index, (parameter, view) in enumerate(
                zip(self.parameters, self.views, strict=True)
            ):
                grad = parameter.grad
                more = None if held is None else held.get(parameter)
                if grad is None and more is None:
                    self._unused.append(index)
                    view.zero_()
                    continue
                if grad is not None and grad.layout is not torch.strided:
                    raise RuntimeError(SPARSE.format(tuple(grad.shape), grad.layout))
                if held is not None:
                    _weigh(view, grad, share, more)
                elif not at_once:
                    torch.mul(grad, factor, out=view)  # type: ignore[arg-type]
                elif grad is not view:
                    views.append(view)
                    grads.append(grad)
                if grad is not view:
                    parameter.grad = view
            if views:
                copy_all(views, grads)  # type: ignore[arg-type]
            if at_once:
                self.gradients.mul_(factor)
            flat[self._length :] = 1
            for index in self._unused:
                flat[self._length + index] = 0

    def give(self) -> None:
        """Gives parameters that only other replicas used the reduced gradient.

        Where this replica has used all of them, nothing is read.
        """
        if not self._unused:
            return
        used = self.flat[self._length :].tolist()
        for index in self._unused:
            if used[index]:
                self.parameters[index].grad = self.views[index]


def _weigh(view: Tensor, grad: Tensor | None, share: float, held: Tensor | None) -> None:
    """Writes a share of a gradient, and what was put aside."""
    if grad is not None and share:
        torch.mul(grad, share, out=view)
    else:
        # Explicit zeros: a gradient that must not count may be infinite.
        view.zero_()
    if held is not None:
        view.add_(held)


def _views(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Pieces of a flat tensor, laid out as the parameters are."""
    views, start = [], 0
    for parameter in parameters:
        # This is how autograd lays a gradient out: dense, in the order of the parameter.
        strides = torch.empty_like(parameter, device="meta").stride()
        views.append(flat.as_strided(parameter.shape, strides, start))
        start += parameter.numel()
    return views


def assign(parameters: Sequence[Tensor], first_bytes: int, most_bytes: int) -> list[Bucket]:
    """Deals parameters out to buckets, in the order in which the buckets are to be reduced.

    Those that a backward pass reaches first are taken to be the last ones.

    Args:
        parameters: All parameters, in the order of the module.
        first_bytes: Size at which the first bucket of each type is full: a small one, so that the
            first reduction begins early.
        most_bytes: The same for the others.
    """
    packs = in_packs(reversed(parameters), min(first_bytes, most_bytes), most_bytes)
    return [Bucket(members) for members in packs]
