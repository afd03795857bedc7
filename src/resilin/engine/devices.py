"""Differences between kinds of devices: the only module that names CUDA and XLA.

Training calls `of(tensor.device)` for the kind of device of a tensor, and `here()` for the kind
that this process would train on. A kind without its own class that is torch's accelerator has what
`torch.accelerator` gives: events, streams and pinned memory. Any other kind is treated like the
CPU: nothing is queued or pinned, and time is that of the host. So an unknown kind of device works,
if torch can train on it; it only misses optimisations.

The XLA class follows the sources of torch_xla 2.9, and has never run: that build cannot be loaded
into the PyTorch of the tests, which use a mock device.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A marker in the queue of a device; the device reaches it after it was recorded."""

    def query(self) -> bool:
        """Whether the device has passed it."""
        ...

    def synchronize(self) -> object:
        """Wait until the device has passed it."""
        ...

    def elapsed_time(self, later: Any) -> float:
        """Milliseconds from this one to a later one, on the device."""
        ...


class Pending(Protocol):
    """An operation that was started, such as a reduction."""

    def wait(self) -> object:
        """Make what follows wait for it: the queue of the device, or the host."""
        ...


class Fetched:
    """Numbers on their way from a device to the host.

    Nothing waits until `read` is called. Where a device queues its work, they are copied into
    pinned memory, after the work that computes them; elsewhere they are there already, or a
    reduction over the network still fills them.

    Args:
        tensor: The numbers, in one dimension. Nobody may change it afterwards.
        work: The operation that fills the tensor, if it is still under way.
    """

    def __init__(self, tensor: Tensor, work: Pending | None = None) -> None:
        kind = of(tensor.device)
        self._work, self._event = work, None
        self._numbers: list[float] | None = None
        if kind.queues:
            if work is not None:
                work.wait()  # the queue of the device waits, not the host
            self._work = None
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=kind.pins)
            self._host.copy_(tensor, non_blocking=True)
            self._event = kind.event(tensor.device)
        else:
            self._host = tensor

    def arrived(self) -> bool:
        """Whether the device has come this far, and no reduction is under way."""
        return self._work is None and (self._event is None or self._event.query())

    def read(self) -> list[float]:
        """The numbers, once the device has come this far."""
        if self._numbers is None:
            if self._work is not None:
                self._work.wait()
            if self._event is not None and not self._event.query():
                self._event.synchronize()
            self._numbers = self._host.tolist()
        return self._numbers


class Device:
    """The CPU, and any kind of device without its own class."""

    kind: str = "cpu"
    """`torch.device.type`."""
    backend: str = "gloo"
    """Default backend of torch.distributed."""
    batches_kernels: bool = False
    """Whether one call for many tensors is faster than a call for each."""
    queues: bool = False
    """Whether a copy to the host may still be running when the call returns."""
    pins: bool = False
    """Whether such a copy is faster into pinned memory."""

    def is_here(self) -> bool:
        """Whether this process can train on it."""
        return True

    def choose(self, local_process: int) -> None:
        """Choose one device of this host for this process."""

    def current(self) -> torch.device:
        """The device of this process."""
        return torch.device(self.kind)

    def event(self, device: torch.device) -> Event | None:
        """Record an event; None if nothing is queued, or the device has no events."""
        return None

    def wait(self, device: torch.device) -> None:
        """Wait until the device has finished all its work."""

    def end_micro_batch(self) -> None:
        """Called after each micro-batch; a lazy device starts executing it now."""

    def model(self) -> str:
        """Name of the device as its maker has it; its kind where there is none."""
        return self.kind

    def total_memory(self) -> int | None:
        """Memory of the device in bytes; None if unknown."""
        return None

    def peak_memory(self) -> int | None:
        """Peak memory in bytes since the last call; None if unknown."""
        return None

    def release_memory(self) -> None:
        """Free cached memory, after memory ran out."""

    def random_state(self) -> Tensor | None:
        """State of its random generator, on the host; None if it uses that of the host."""
        return None

    def set_random_state(self, state: Tensor) -> None:
        """Restore the state returned by `random_state`."""

    def seed(self, seed: int) -> None:
        """Seed its random generator, if it has its own."""


class Cuda(Device):
    """NVIDIA's, and AMD's under the same name."""

    kind = "cuda"
    # NCCL takes tensors on the GPU alone; gloo is beside it, for numbers of the host.
    backend = "cpu:gloo,cuda:nccl"
    batches_kernels = True
    queues = True
    pins = True

    def is_here(self) -> bool:
        """Whether torch was built for it and finds one."""
        return torch.cuda.is_available()

    def choose(self, local_process: int) -> None:
        """The device of that number."""
        torch.cuda.set_device(local_process)

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

    def model(self) -> str:
        """Name of the device as its maker has it."""
        return torch.cuda.get_device_name()

    def total_memory(self) -> int | None:
        """Of the current device."""
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)

    def peak_memory(self) -> int | None:
        """Peak of the allocator, which is reset; reading it does not wait for the device."""
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak

    def release_memory(self) -> None:
        """Free the cached blocks of the allocator."""
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
    """TPUs and others, through PyTorch/XLA: operations are collected in a graph, then executed."""

    kind = "xla"
    backend = "xla"
    batches_kernels = True

    def is_here(self) -> bool:
        """Whether the script has imported torch_xla; resilin never imports it itself."""
        return "torch_xla" in sys.modules

    @property
    def _xla(self) -> Any:
        return sys.modules["torch_xla"]

    @property
    def _memory(self) -> dict[str, int]:
        return dict(self._xla.core.xla_model.get_memory_info())

    def current(self) -> torch.device:
        """The device that the runtime has assigned to this process."""
        return torch.device(self._xla.device())

    def wait(self, device: torch.device) -> None:
        """Execute the collected operations, and wait for them."""
        self._xla.sync(wait=True)

    def end_micro_batch(self) -> None:
        """End the graph, which would otherwise grow with each micro-batch of the step."""
        self._xla.sync()

    def total_memory(self) -> int | None:
        """Of the current device."""
        return self._memory["bytes_limit"]

    def peak_memory(self) -> int | None:
        """Peak since the start of the process: the runtime cannot reset it."""
        return self._memory["peak_bytes_used"]


class Accelerator(Device):
    """Any other accelerator of torch: Intel's, or one that a package has registered.

    Args:
        kind: `torch.device.type`.
    """

    batches_kernels = True
    queues = True
    pins = True

    def __init__(self, kind: str) -> None:
        self.kind = kind

    @property
    def backend(self) -> str:  # type: ignore[override]
        """The one that was registered for it, with gloo for the host; gloo alone if none was."""
        known = torch.distributed.Backend.default_device_backend_map.get(self.kind)
        return "gloo" if known is None else f"cpu:gloo,{self.kind}:{known}"

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.kind)

    def is_here(self) -> bool:
        """Whether torch finds one."""
        return torch.accelerator.is_available()

    def choose(self, local_process: int) -> None:
        """The device of that number."""
        torch.accelerator.set_device_index(local_process)

    def current(self) -> torch.device:
        """The device that was chosen."""
        return torch.device(self.kind, torch.accelerator.current_device_index())

    def event(self, device: torch.device) -> Event | None:
        """In the current stream: read later, it never makes the host wait."""
        event = torch.Event(device, enable_timing=True)
        event.record(torch.accelerator.current_stream(device))
        return event

    def wait(self, device: torch.device) -> None:
        """For the current stream."""
        torch.accelerator.current_stream(device).synchronize()

    def random_state(self) -> Tensor | None:
        """Of the current device, if its package tells it."""
        get = getattr(self._module, "get_rng_state", None)
        return None if get is None else get()

    def set_random_state(self, state: Tensor) -> None:
        """For the current device."""
        self._module.set_rng_state(state)

    def seed(self, seed: int) -> None:
        """For all devices of this kind that this process sees."""
        self._module.manual_seed_all(seed)


CPU = Device()
_KINDS: tuple[Device, ...] = (Xla(), Cuda())
_LIKE_THE_CPU = ("mps",)
"""Accelerators whose memory is that of the host."""


def of(device: torch.device) -> Device:
    """The kind of this device."""
    wanted = device.type
    for kind in _KINDS:
        if kind.kind == wanted:
            return kind
    if wanted == "cpu":
        return CPU  # without asking further: each step comes by here several times
    found = torch.accelerator.current_accelerator()
    return CPU if found is None or found.type != wanted else _other(found.type)


def here() -> Device:
    """The kind that this process would train on: the first available one, else the CPU."""
    named = next((kind for kind in _KINDS if kind.is_here()), None)
    if named is not None:
        return named
    found = torch.accelerator.current_accelerator(check_available=True)
    return CPU if found is None else _other(found.type)


@functools.cache
def _other(kind: str) -> Device:
    """The accelerator of this kind."""
    return CPU if kind in _LIKE_THE_CPU else Accelerator(kind)


def begin_to_host(copies: Iterable[tuple[Tensor, Tensor]]) -> Callable[[], None]:
    """Begin to copy tensors into others on the host.

    When it returns, the tensors may be changed: what is queued on their device from then on runs
    after the copies. They must not be freed before the copies are complete.

    Args:
        copies: Pairs of a tensor on the host and the tensor to be copied into it. Where the device
            queues, memory that is not pinned makes this call wait for the device.

    Returns:
        A function that waits until all copies are complete; any thread may call it.
    """
    queues: dict[torch.device, bool] = {}
    for target, source in copies:
        device = source.device
        if device not in queues:
            queues[device] = of(device).queues
        target.copy_(source, non_blocking=queues[device])
    # In the stream of this thread: whoever waits may have another one.
    events = {device: of(device).event(device) for device, queued in queues.items() if queued}

    def wait() -> None:
        for device, event in events.items():
            if event is None:
                of(device).wait(device)
            else:
                event.synchronize()

    return wait
