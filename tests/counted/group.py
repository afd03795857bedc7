"""A process group for tensors of the counting device: like NCCL, it takes no others.

What is reduced goes through the host, unseen, and over a real gloo group. As with NCCL, nobody may
look at the result before `wait()`: until then the tensor holds NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from tests.counted import device
from tests.world import COLLECTIVE_TIMEOUT

NAME = "staged"


def each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The value, with its tensors changed, however deep they are in lists."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return [each(item, change) for item in value]
    return value


class Arriving(dist.Work):
    """A reduction whose result is in its tensors when it has been waited for."""

    def __init__(self, arrive: Callable[[], None], result: Any) -> None:
        super().__init__()
        self._arrive: Callable[[], None] | None = arrive
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        arrive, self._arrive = self._arrive, None
        if arrive is not None:
            arrive()
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def get_future(self) -> torch.futures.Future[Any]:
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._result)
        return future


class Staged(dist.ProcessGroup):
    """The group of all processes, over gloo."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(PrefixStore(NAME, store), rank, size, timeout)
        self._counted = device.load()

    def _run(self, name: str, *args: Any) -> dist.Work:
        copies: list[tuple[Tensor, Tensor]] = []

        def stage(tensor: Tensor) -> Tensor:
            if tensor.device.type != device.NAME:
                raise RuntimeError(f"{name}: no backend for a tensor on {tensor.device}")
            copy = tensor.detach().cpu()
            copies.append((tensor, copy))
            return copy

        with self._counted.unseen(), torch.no_grad():
            getattr(self._gloo, name)(*each(args, stage)).wait()
            for tensor, _ in copies:
                if tensor.is_floating_point() and name == "allreduce":
                    tensor.detach().fill_(float("nan"))

        def arrive() -> None:
            with self._counted.unseen(), torch.no_grad():
                for tensor, copy in copies:
                    tensor.detach().copy_(copy)

        work = Arriving(arrive, args[0])
        if name != "allreduce":
            work.wait()
        return work

    def getBackendName(self) -> str:
        return NAME

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        opts = dist.AllreduceOptions() if opts is None else opts
        return self._run("allreduce", tensors, opts)

    def broadcast(self, tensors: Any, opts: Any) -> dist.Work:
        return self._run("broadcast", tensors, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        opts = dist.AllgatherOptions() if opts is None else opts
        return self._run("allgather", outputs, inputs, opts)

    def barrier(self, opts: Any = None) -> dist.Work:
        self._gloo.barrier().wait()
        return Arriving(lambda: None, [])


def join() -> None:
    """Join the group of all processes, by the environment of the rank."""
    dist.Backend.register_backend(NAME, Staged, devices=[device.NAME])
    dist.init_process_group(NAME, timeout=COLLECTIVE_TIMEOUT)
