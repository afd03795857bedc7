"""What differs between kinds of devices: the one place that names CUDA, or XLA.

Training asks `of(tensor.device)` for the kind of device that a tensor is on, and `here()` for the
one that this process would train on. Whatever has no class of its own is treated as the CPU is:
nothing is queued, nothing pinned, and time is that of the host. So a kind of device that is not
known works, if torch can train on it; it only misses what could be quicker.

XLA is written after the sources of torch_xla 2.9, and has not run: that build cannot be loaded into
the PyTorch that the tests have. They run the seam with a kind of device made up.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A moment in what a device has to do; it passes later than it was recorded."""

    def query(self) -> bool:
        """Whether the device has passed it."""
        ...

    def elapsed_time(self, later: Any) -> float:
        """Milliseconds from this one to a later one, on the device."""
        ...


class Device:
    """The CPU, and any kind of device that has no class of its own."""

    kind: str = "cpu"
    """`torch.device.type`."""
    backend: str = "gloo"
    """Of torch.distributed, where the user names none."""
    batches_kernels: bool = False
    """Whether one call for many tensors is quicker than a call for each."""
    queues: bool = False
    """Whether a copy to the host may be under way when the call returns."""
    pins: bool = False
    """Whether such a copy is quicker into pinned memory."""

    def is_here(self) -> bool:
        """Whether this process can train on it."""
        return True

    def choose(self, local_replica: int) -> None:
        """Takes one device of this host for this process."""

    def current(self) -> torch.device:
        """The device of this process."""
        return torch.device(self.kind)

    def event(self, device: torch.device) -> Event | None:
        """Records an event; None where nothing is queued, or the device has none."""
        return None

    def wait(self, device: torch.device) -> None:
        """Returns when the device has done all that it was given."""

    def end_micro_batch(self) -> None:
        """A micro-batch was given to the device; a lazy one begins with it now."""

    def total_memory(self) -> int | None:
        """Bytes of the device; None where it does not say."""
        return None

    def peak_memory(self) -> int | None:
        """The most bytes in use since the last call, which begins anew; None if unknown."""
        return None

    def release_memory(self) -> None:
        """Gives back what is kept for later, after memory ran out."""

    def random_state(self) -> Tensor | None:
        """State of its random generator, on the host; None if it has none apart from the host's."""
        return None

    def set_random_state(self, state: Tensor) -> None:
        """Takes over what `random_state` returned."""

    def seed(self, seed: int) -> None:
        """Seeds its random generator, if it has one of its own."""


class Cuda(Device):
    """NVIDIA's, and AMD's under the same name."""

    kind = "cuda"
    backend = "nccl"
    batches_kernels = True
    queues = True
    pins = True

    def is_here(self) -> bool:
        """Whether torch was built for it and finds one."""
        return torch.cuda.is_available()

    def choose(self, local_replica: int) -> None:
        """The device of that number."""
        torch.cuda.set_device(local_replica)

    def current(self) -> torch.device:
        """The device that was chosen."""
        return torch.device("cuda", torch.cuda.current_device())

    def event(self, device: torch.device) -> Event | None:
        """In the current stream: read later, it never makes the host wait."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    def wait(self, device: torch.device) -> None:
        """For the current stream."""
        torch.cuda.current_stream(device).synchronize()

    def total_memory(self) -> int | None:
        """Of the current device."""
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)

    def peak_memory(self) -> int | None:
        """What the allocator has given out at most; reading it waits for nothing."""
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak

    def release_memory(self) -> None:
        """The blocks that the allocator keeps."""
        torch.cuda.empty_cache()

    def random_state(self) -> Tensor | None:
        """Of the current device: seed and offset, which the host knows without waiting."""
        known = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return torch.cuda.get_rng_state() if known else None

    def set_random_state(self, state: Tensor) -> None:
        """For the current device."""
        torch.cuda.set_rng_state(state)

    def seed(self, seed: int) -> None:
        """For the current device."""
        torch.cuda.manual_seed(seed)


class Xla(Device):
    """TPUs and others, through PyTorch/XLA: operations are collected, and run when cut off."""

    kind = "xla"
    backend = "xla"
    batches_kernels = True

    def is_here(self) -> bool:
        """Whether the script has imported torch_xla; resilin does not import it for anybody."""
        return "torch_xla" in sys.modules

    @property
    def _xla(self) -> Any:
        return sys.modules["torch_xla"]

    @property
    def _memory(self) -> dict[str, int]:
        return dict(self._xla.core.xla_model.get_memory_info())

    def current(self) -> torch.device:
        """The device that the runtime has given to this process."""
        return torch.device(self._xla.device())

    def wait(self, device: torch.device) -> None:
        """Runs what was collected, to its end."""
        self._xla.sync(wait=True)

    def end_micro_batch(self) -> None:
        """Cuts the graph off, or it would grow with each micro-batch of the step."""
        self._xla.sync()

    def total_memory(self) -> int | None:
        """Of the current device."""
        return self._memory["bytes_limit"]

    def peak_memory(self) -> int | None:
        """Since the process began: the runtime cannot begin anew."""
        return self._memory["peak_bytes_used"]


CPU = Device()
_KINDS: tuple[Device, ...] = (Xla(), Cuda())


def of(device: torch.device) -> Device:
    """The kind of this device."""
    return next((kind for kind in _KINDS if kind.kind == device.type), CPU)


def here() -> Device:
    """The kind that this process would train on: the first that is here, else the CPU."""
    return next((kind for kind in _KINDS if kind.is_here()), CPU)


def to_host(copies: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copies tensors into others on the host, and returns when all of that is done.

    Args:
        copies: Pairs of a tensor on the host and the one to be copied into it.
    """
    waiting: set[torch.device] = set()
    for target, source in copies:
        queues = of(source.device).queues
        target.copy_(source, non_blocking=queues)
        if queues:
            waiting.add(source.device)
    for device in waiting:
        of(device).wait(device)
