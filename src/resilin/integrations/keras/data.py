"""The data of `fit`, as an `AdaptiveDataLoader`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras  # type: ignore[import-untyped]
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from resilin.training.bridge.home import refuse_stream
from resilin.training.loader import AdaptiveDataLoader


class Arrays(Dataset[Any]):
    """Arrays, or any nesting of them, whose first axis is that of the samples."""

    def __init__(self, arrays: Any) -> None:
        self._arrays = keras.tree.map_structure(_tensor, arrays)
        lengths = {len(array) for array in keras.tree.flatten(self._arrays)}
        if len(lengths) != 1:
            raise ValueError(f"the arrays must have equally many samples, and have {lengths}")
        (self._length,) = lengths

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        return keras.tree.map_structure(lambda array: array[index], self._arrays)

    def __getitems__(self, indices: list[int]) -> Any:
        """Fetch all samples at once; `whole` expects that."""
        return self[torch.tensor(indices)]


def whole(batch: Any) -> Any:
    """The collate function of `Arrays`, whose samples are fetched as one batch."""
    return batch


def _tensor(array: Any) -> torch.Tensor:
    return array if isinstance(array, torch.Tensor) else torch.from_numpy(np.array(array))


def is_array(x: Any) -> bool:
    """Whether Keras treats it as arrays: of numpy, torch, pandas, or a nesting of them."""
    leaves = keras.tree.flatten(x)
    return bool(leaves) and all(hasattr(leaf, "shape") and len(leaf.shape) > 0 for leaf in leaves)


def sample_weights(y: Any, class_weight: dict[int, float]) -> np.ndarray[Any, Any]:
    """The weight of each sample by its class, for labels and for one-hot rows.

    Labels that are not whole numbers are rounded, as Keras does.

    Raises:
        ValueError: There is more than one target, or a label is not finite.
    """
    if keras.tree.is_nested(y):
        raise ValueError(
            f"class_weight needs one array of labels, and y is a {type(y).__name__} of "
            f"{len(keras.tree.flatten(y))}"
        )
    labels = np.asarray(y)
    if labels.ndim > 1:
        labels = labels.argmax(axis=-1) if labels.shape[-1] > 1 else labels[..., 0]
    if not np.isfinite(labels).all():
        raise ValueError("class_weight needs labels, and y has values that are not finite")
    labels = np.round(labels).astype(np.int64)
    unique, inverse = np.unique(labels, return_inverse=True)
    by_class = [class_weight.get(int(label), 1.0) for label in unique]
    return np.asarray(by_class, dtype=keras.config.floatx())[inverse].reshape(labels.shape)


def make_loader(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    class_weight: dict[int, float] | None = None,
    *,
    shuffle: bool,
    make: Callable[..., AdaptiveDataLoader],
) -> AdaptiveDataLoader:
    """Make a loader over the data of `fit`.

    Args:
        x: Arrays, a torch Dataset, or an AdaptiveDataLoader.
        y: Targets, with arrays.
        sample_weight: Weights of samples, with arrays.
        class_weight: Weights of classes, with arrays.
        shuffle: Whether each epoch has an order of its own.
        make: Makes a loader from a dataset.

    Raises:
        ValueError: Data that cannot follow a changing batch size, or arguments that do not go
            with them.
    """
    if is_array(x):
        if class_weight is not None:
            if sample_weight is not None:
                raise ValueError("class_weight and sample_weight cannot be given both")
            sample_weight = sample_weights(y, class_weight)
        given = tuple(part for part in (x, y, sample_weight) if part is not None)
        return make(Arrays(given), shuffle=shuffle, collate_fn=whole)
    beside = {"y": y, "sample_weight": sample_weight, "class_weight": class_weight}
    for name, value in beside.items():
        if value is not None:
            raise ValueError(
                f"{name} must be None: a {type(x).__name__} brings it with its samples"
            )
    if isinstance(x, AdaptiveDataLoader):
        refuse_stream(x, "Keras")
        return x
    if isinstance(x, DataLoader):
        raise ValueError(
            "x is a DataLoader, whose batches are cut already: pass its dataset, or an "
            "AdaptiveDataLoader"
        )
    if isinstance(x, keras.utils.PyDataset) or not (
        hasattr(x, "__getitem__") and hasattr(x, "__len__")
    ):
        raise ValueError(
            f"x is a {type(x).__name__}, whose samples cannot be had one by one: pass arrays, a "
            "torch Dataset with __len__ and __getitem__, or an AdaptiveDataLoader"
        )
    return make(x, shuffle=shuffle)


def hold_out(arrays: Any, part: float) -> tuple[Any, Any]:
    """Hold out the last samples of arrays for validation, as Keras does.

    Args:
        arrays: Inputs, targets and weights; None where there are none.
        part: Fraction to hold out.

    Returns:
        The rest, and the part that is held out.

    Raises:
        ValueError: They are not arrays, or nothing would be left.
    """
    if not is_array(arrays[0]):
        raise ValueError(
            f"validation_split ({part}) needs arrays, and x is a {type(arrays[0]).__name__}"
        )
    num = len(keras.tree.flatten(arrays[0])[0])
    at = math.floor(num * (1 - part))
    if not 0 < at < num:
        raise ValueError(f"validation_split ({part}) of {num} samples leaves {at} to train on")

    def cut(rows: slice) -> Any:
        return tuple(
            None if array is None else keras.tree.map_structure(lambda leaf: leaf[rows], array)
            for array in arrays
        )

    return cut(slice(0, at)), cut(slice(at, None))
