"""The counting device: builds and loads ``device.cpp``, and keeps what it tells.

A process that has loaded it has an accelerator from then on, which torch cannot take back. So a
test that uses it has a process of its own, that of a rank: ``@pytest.mark.world_size(1)``.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import itertools
import os
import shutil
import subprocess
import sysconfig
import tempfile
import threading
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

NAME = "counted"
SOURCE = Path(__file__).with_name("device.cpp")
HERE = f"{Path(__file__).parents[2]}/"


class Told(NamedTuple):
    """Something that the device has noticed."""

    what: str
    """`read`, `upload`, `send`, `order`, `fetch`, `query` or `wait`."""
    how: str
    """Which tensor, and from where to where."""
    age: int
    """For an event: ticks since it was recorded."""
    thread: str
    stack: tuple[str, ...]
    """`file:line function: text`, innermost first, up to that of the test."""

    def __str__(self) -> str:
        return f"{self.what}: {self.how} (thread {self.thread})\n    " + "\n    ".join(self.stack)

    @property
    def place(self) -> str:
        """The innermost line, wherever it is."""
        return self.stack[0] if self.stack else ""


def compiler() -> str | None:
    """The compiler that builds the device; None if this machine has none."""
    return shutil.which(os.environ.get("CXX", "g++"))


@functools.cache
def build() -> Path:
    """Compile the device for this torch, once per machine; the path of the library."""
    from torch.utils import cpp_extension

    python = sysconfig.get_paths()["include"]
    flags = ["-std=c++20", "-O0", "-fPIC", "-shared", f"-DTORCH_EXTENSION_NAME={NAME}"]
    flags += [f"-I{path}" for path in (*cpp_extension.include_paths(), python)]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    libraries += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    stamp = "\n".join((SOURCE.read_text(), torch.__version__, *flags))
    name = hashlib.sha256(stamp.encode()).hexdigest()[:16]
    home = Path(tempfile.gettempdir()) / f"resilin-counted-{os.getuid()}"
    home.mkdir(mode=0o700, exist_ok=True)
    if home.stat().st_uid != os.getuid():
        raise PermissionError(f"{home} belongs to user {home.stat().st_uid}, not {os.getuid()}")
    library = home / f"{name}.so"
    with (home / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            part = library.with_suffix(".part")
            command = [compiler() or "g++", *flags, str(SOURCE), "-o", str(part), *libraries]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
            part.replace(library)
    return library


class Counted:
    """The device, and what it has told since the last `clear`."""

    def __init__(self, native: Any) -> None:
        self._native = native
        self._lock = threading.Lock()
        self._told: list[Told] = []
        self.device = torch.device(NAME, 0)
        native.listen(self._listen)

    def _listen(self, what: str, how: str, age: int) -> None:
        frames = itertools.takewhile(
            lambda frame: not frame.filename.endswith("_pytest/python.py"),
            reversed(traceback.extract_stack()[:-1]),
        )
        lines = tuple(
            f"{frame.filename.removeprefix(HERE)}:{frame.lineno} {frame.name}: {frame.line}"
            for frame in frames
        )
        told = Told(what, how, age, threading.current_thread().name, lines)
        with self._lock:
            self._told.append(told)

    def told(self, *whats: str) -> list[Told]:
        """What was noticed, of these kinds; of all if none is given."""
        with self._lock:
            return [told for told in self._told if not whats or told.what in whats]

    def clear(self) -> None:
        """Forget what was noticed."""
        with self._lock:
            self._told.clear()

    def tick(self) -> None:
        """A step is over: the age of an event is counted in these."""
        self._native.tick()

    def set_lag(self, queries: int) -> None:
        """How many queries an event answers with False before it has passed."""
        self._native.set_lag(queries)

    def set_delay(self, ticks: int) -> None:
        """How many ticks the device is behind: younger events have not been passed."""
        self._native.set_delay(ticks)

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """What this thread does in here is not noticed."""
        self._native.hide(1)
        try:
            yield
        finally:
            self._native.hide(-1)


def _module() -> types.ModuleType:
    """What generic code finds as `torch.counted`."""
    module = types.ModuleType(f"torch.{NAME}")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.synchronize = lambda device=None: torch.accelerator.synchronize(torch.device(NAME, 0))
    module.current_stream = torch.accelerator.current_stream
    module.Event, module.Stream = torch.Event, torch.Stream
    return module


@functools.cache
def load() -> Counted:
    """Load the device into this process."""
    spec = importlib.util.spec_from_file_location(NAME, build())
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    return Counted(native)
