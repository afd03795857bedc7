"""Samples that a collate function leaves out: its batch has fewer rows than it was asked for.

The gradient of a micro-batch is weighed by its samples. A loss that is the mean over fewer of them
would have too large a weight where others have a part of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

from resilin.core._warn import warn


def collated(
    collate: Callable[[list[Any]], Any], samples: list[Any], names: Sequence[object]
) -> tuple[Any, int | None]:
    """A batch of these samples, and its rows where it has fewer; None where it has all.

    Args:
        collate: The collate function.
        samples: Samples.
        names: Their indices, for an error.

    Raises:
        ValueError: The dataset has given None for each of them, and the function fails on that.
    """
    if collate is default_collate:
        return collate(samples), None
    missing = sum(sample is None for sample in samples)
    try:
        batch = collate(samples)
    except Exception as error:
        if missing < len(samples):
            raise
        raise ValueError(
            f"the dataset gives None for each of the {missing} samples of a micro-batch "
            f"({', '.join(map(str, names[:8]))}), and collate_fn fails if none is left: a replica "
            "cannot leave its micro-batch out; let the dataset give another sample in place of one "
            "that it cannot read"
        ) from error
    return batch, _rows(batch, len(samples), missing)


def _rows(batch: Any, asked: int, missing: int) -> int | None:
    """Rows of a batch if they are fewer than the samples, as far as the batch tells."""
    if batch is None:
        return 0
    lengths = set(_lengths(batch))
    samples = len(batch) if isinstance(batch, list | tuple) else None
    if missing and (asked - missing in lengths or asked - missing == samples):
        return asked - missing
    if len(lengths) != 1 or asked in lengths or asked == samples or _second(batch, asked):
        return None
    (rows,) = lengths
    return rows if rows < asked else None


def _lengths(batch: Any) -> Iterator[int]:
    """Lengths of the parts of a batch along their first dimension."""
    parts = batch.values() if isinstance(batch, dict) else batch
    for part in [batch] if isinstance(batch, Tensor) else parts if _is_container(batch) else ():
        if isinstance(part, dict):
            yield from _lengths(part)
        elif isinstance(part, Tensor):
            yield from part.shape[:1]
        elif _is_container(part):
            yield len(part)


def _second(batch: Any, asked: int) -> bool:
    """Whether samples may be along the second dimension: each part has so many there."""
    parts = batch.values() if isinstance(batch, dict) else batch
    parts = [batch] if isinstance(batch, Tensor) else list(parts) if _is_container(batch) else []
    return all(isinstance(each, Tensor) and tuple(each.shape[1:2]) == (asked,) for each in parts)


def _is_container(value: Any) -> bool:
    return isinstance(value, dict | list | tuple)


class Rows:
    """Rows of the micro-batch that was taken last, if its collate function has left samples out."""

    def __init__(self) -> None:
        self.left: int | None = None
        """Their number; None if it has a row for each sample."""
        self._warned = False

    def check(self, asked: int, *, alone: bool) -> None:
        """Refuses a micro-batch that would be weighed by samples that it does not have.

        Args:
            asked: Samples that it was made of.
            alone: Whether it is a step of its own, whose weight changes nothing.

        Raises:
            ValueError: Others have a part of its step.
        """
        if self.left is None:
            return
        made = f"collate_fn has made {self.left} rows of {asked} samples"
        way = "give the loader batch_weight=, such as `lambda batch: len(batch[0])`"
        if not alone:
            raise ValueError(
                f"{made}, and the step has other micro-batches or replicas: the gradient would be "
                f"weighed as the mean over {asked} samples, and its loss is a mean over "
                f"{self.left}; {way}, or leave no sample out"
            )
        if not self._warned:
            self._warned = True
            warn(
                f"{made}: that is an error as soon as a step has several micro-batches or "
                f"replicas, which are weighed by their samples; {way}"
            )
