"""Random numbers of single samples: keyed by their position in the sample stream.

Position and seed do not depend on the number of replicas, the batch size or the number of workers.
So random numbers that are drawn from what is here are the same whatever happens to the job.
"""

from __future__ import annotations

import random
import threading
from typing import TypeVar

import numpy as np
import torch

from resilin.core.shard_order import sample_key

T = TypeVar("T")
_SEED_OF_NUMPY = 2**32


class _Sample(threading.local):
    """The sample that this thread is fetching."""

    key: int | tuple[int, int] | None = None
    """Its seed, or the seed of its shard and its number there; None outside of a fetch."""
    many: bool = False
    """Whether several samples are fetched at once, so that none is the current one."""
    torch: torch.Generator | None = None
    numpy: np.random.Generator | None = None


_current = _Sample()


class Reading:
    """Surrounds the reading of samples, one after another.

    Args:
        many: The seed of the first one, where they are read at once and none is the current one.
    """

    def __init__(self, many: int | None = None) -> None:
        self._many = many

    def __enter__(self) -> Reading:
        self._before = (_current.key, _current.many, _current.torch, _current.numpy)
        _current.many = self._many is not None
        self.begin(self._many)
        return self

    def __exit__(self, *error: object) -> None:
        _current.key, _current.many, _current.torch, _current.numpy = self._before

    def begin(self, key: int | tuple[int, int] | None) -> None:
        """The next sample is read.

        Args:
            key: Its seed, from `SampleStream.keys`; or that of its shard and its number there, from
                which its seed is computed where it is asked for: most samples draw nothing.
        """
        _current.key, _current.torch, _current.numpy = key, None, None


def seed_globals(key: int) -> None:
    """Seeds the global generators of Python, numpy and torch (CPU), as for one sample.

    For worker processes, where nothing else draws from them.
    """
    random.seed(key)
    np.random.seed(key % _SEED_OF_NUMPY)
    # Not torch.manual_seed, which takes a hundred times as long.
    torch.default_generator.manual_seed(key)


def _key(name: str) -> int | None:
    if _current.many:
        raise RuntimeError(
            f"{name}() was called while a dataset fetches several samples at once, in "
            "__getitems__(), where no sample is the current one: draw in __getitem__(), and leave "
            "__getitems__() out"
        )
    key = _current.key
    return sample_key(*key) if isinstance(key, tuple) else key


def sample_generator(default: torch.Generator | None = None) -> torch.Generator:
    """The random generator of the sample that is being fetched, for datasets and transforms.

    It is seeded by the seed of the loader and the position of the sample in its order, and nothing
    else: what is drawn from it is the same for any number of replicas and workers, at any batch
    size, and after a restart; and another one in each epoch. Within one sample each call returns
    the same generator.

    Args:
        default: What to return outside of an `AdaptiveDataLoader`, such as in a stock DataLoader.

    Raises:
        RuntimeError: It is called outside of an `AdaptiveDataLoader`, and there is no default; or
            in the `__getitems__` of a dataset.
    """
    key = _key("sample_generator")
    if key is None:
        return _default("sample_generator", default)
    if _current.torch is None:
        _current.torch = torch.Generator().manual_seed(key)
    return _current.torch


def sample_rng(default: np.random.Generator | None = None) -> np.random.Generator:
    """The same as `sample_generator`, for numpy.

    Args:
        default: What to return outside of an `AdaptiveDataLoader`.

    Raises:
        RuntimeError: As in `sample_generator`.
    """
    key = _key("sample_rng")
    if key is None:
        return _default("sample_rng", default)
    if _current.numpy is None:
        _current.numpy = np.random.Generator(np.random.PCG64(key))
    return _current.numpy


def _default(name: str, default: T | None) -> T:
    if default is None:
        raise RuntimeError(
            f"{name}() was called outside of an AdaptiveDataLoader, so there is no sample whose "
            "random numbers it could give: call it in the dataset's __getitem__() or in a "
            "transform, or pass default="
        )
    return default
