"""Random generators as part of the job's state.

Each replica has its own: Python's `random`, numpy's global one, torch's for the CPU and for the
accelerator of this process. They are saved with the rest of the state. When a job resumes with the
same number of replicas, each replica gets its own back, so that dropout and augmentation draw the
same numbers as without the restart. With another number they are seeded by (seed, step, replica).
"""

from __future__ import annotations

import ctypes
import random
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from resilin.core.stream import SampleStream
from resilin.engine import devices
from resilin.engine.base import Engine
from resilin.training.timeline import Timeline

NAME = "random"
"""Name of the generators in the state of the job."""


class _Generator(NamedTuple):
    get: Callable[[], Tensor | None]
    put: Callable[[Tensor], None]
    seed: Callable[[int], None]


_HEAD = struct.Struct("<qqd")
"""Two whole numbers, and the second of a pair of Gaussian numbers."""


def _pack(first: int, has_gauss: int, gauss: float, words: bytes) -> Tensor:
    return torch.frombuffer(
        bytearray(_HEAD.pack(first, has_gauss, gauss) + words), dtype=torch.uint8
    )


def _unpack(state: Tensor) -> tuple[int, int, float, tuple[int, ...]]:
    raw = state.numpy().tobytes()
    words = raw[_HEAD.size :]
    return *_HEAD.unpack_from(raw), struct.unpack(f"<{len(words) // 4}I", words)


class _Python:
    """Python's `random`."""

    def __init__(self) -> None:
        self._last: tuple[Any, Tensor] | None = None

    def get(self) -> Tensor:
        state = random.getstate()
        if self._last is None or self._last[0] != state:
            version, words, gauss = state
            packed = struct.pack(f"<{len(words)}I", *words)
            self._last = state, _pack(version, int(gauss is not None), gauss or 0.0, packed)
        return self._last[1]

    def put(self, state: Tensor) -> None:
        version, has_gauss, gauss, words = _unpack(state)
        random.setstate((version, words, gauss if has_gauss else None))


class _Numpy:
    """numpy's global generator, a Mersenne Twister.

    Reading its state takes as long as a small step, so its memory is compared first. Only a number
    that it buffers for the next call does not show there.
    """

    def __init__(self) -> None:
        self._last: tuple[bytes, Tensor] | None = None

    def get(self) -> Tensor:
        raw = _raw_numpy_state()
        if self._last is None or self._last[0] != raw:
            state = np.random.get_state(legacy=False)
            words = state["state"]["key"].astype("<u4").tobytes()
            whole = _pack(state["state"]["pos"], state["has_gauss"], state["gauss"], words)
            if state["has_gauss"] or not raw.startswith(words):
                return whole
            self._last = raw, whole
        return self._last[1]

    def put(self, state: Tensor) -> None:
        place, has_gauss, gauss, words = _unpack(state)
        np.random.set_state(("MT19937", np.array(words, np.uint32), place, has_gauss, gauss))


def _raw_numpy_state() -> bytes:
    """The words and the position of numpy's global generator, as they are in memory."""
    address = np.random.get_bit_generator().ctypes.state_address  # type: ignore[attr-defined]
    return ctypes.string_at(address, 624 * 4 + 4)


def _seed_torch(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


_PYTHON, _NUMPY = _Python(), _Numpy()
_GENERATORS = {
    "python": _Generator(_PYTHON.get, _PYTHON.put, random.seed),
    "numpy": _Generator(_NUMPY.get, _NUMPY.put, lambda seed: np.random.seed(seed % 2**32)),
    "torch": _Generator(torch.get_rng_state, torch.set_rng_state, _seed_torch),
    "device": _Generator(
        lambda: devices.here().random_state(),
        lambda state: devices.here().set_random_state(state),
        lambda seed: devices.here().seed(seed),
    ),
}


def _states() -> dict[str, Tensor]:
    states = {name: generator.get() for name, generator in _GENERATORS.items()}
    return {name: state for name, state in states.items() if state is not None}


def _put(states: Mapping[str, Tensor]) -> None:
    for name, state in states.items():
        _GENERATORS[name].put(state)


@contextmanager
def preserved() -> Iterator[None]:
    """Restore the global generators at the end of the block, whatever is drawn within."""
    before = _states()
    try:
        yield
    finally:
        _put(before)


class Moved:
    """Whether a global generator of the CPU has been drawn from since this was made."""

    def __init__(self) -> None:
        self._before = self._now()

    @staticmethod
    def _now() -> tuple[object, bytes, bytes]:
        return random.getstate(), _raw_numpy_state(), torch.get_rng_state().numpy().tobytes()

    def __bool__(self) -> bool:
        return self._before != self._now()


def remembered() -> Callable[[], None]:
    """A function that puts the global generators back to what they are now."""
    now = {name: state.clone() for name, state in _states().items()}
    return lambda: _put(now)


class RandomStates:
    """The generators of this replica, for the registry.

    Args:
        timeline: The clock and the epochs of the job.
        engine: Who is in the job.
    """

    def __init__(self, timeline: Timeline, engine: Engine) -> None:
        self._timeline = timeline
        self._engine = engine
        self._seed = torch.initial_seed() % 2**64
        self._first = _states()
        self._moved: set[str] = set()
        self._epoch: int | None = None
        self._pending: tuple[int, Callable[[], None]] | None = None

    # Points of restoration -----------------------------------------------------------------

    def begin_step(self) -> None:
        """A step begins: the point at which the state of the last one was captured.

        A resumed script runs the beginning of its epoch again, and may draw and seed there. From
        here on it draws the same numbers as without the restart.
        """
        self.leave_out_pass()
        self._pending = None
        self._epoch = self._timeline.epoch

    def leave_out_pass(self) -> None:
        """A pass that was complete before a restart is skipped: its end is such a point, too."""
        if self._pending is not None and self._pending[0] == self._timeline.epoch:
            self._pending[1]()

    # State ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """States of the generators that were used since this process started; empty if none was."""
        now = _states()
        for name, state in now.items():
            first = self._first.get(name)
            if first is None or not torch.equal(first, state):
                self._moved.add(name)
        if not self._moved:
            return {}
        moved = {name: state for name, state in now.items() if name in self._moved}
        return {"generators": moved, "in_epoch": self._epoch == self._timeline.epoch}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore the states; None seeds all generators by (seed, step, replica)."""
        now, engine = self._timeline, self._engine
        if state is None and now.replicas_before != engine.membership.num_replicas:
            now.seeded_at = now.clock.steps
        if state:
            states = {name: each.clone() for name, each in state["generators"].items()}
            self._moved |= set(states)
            self._resume(lambda: _put(states), now.epoch if state["in_epoch"] else None)
        elif state is None or now.seeded_at is not None:
            step = now.clock.steps if now.seeded_at is None else now.seeded_at
            place = step * 2**20 + engine.membership.replica
            key = SampleStream(1, seed=self._seed).keys(range(place, place + 1))
            self._resume(lambda: self._seed_all(int(key[0])), now.epoch)

    def _resume(self, put: Callable[[], None], epoch: int | None) -> None:
        put()
        self._pending = None if epoch is None else (epoch, put)

    def _seed_all(self, seed: int) -> None:
        for generator in _GENERATORS.values():
            generator.seed(seed)
        self._first = _states()
