"""Hugging Face datasets: the steps of an `IterableDataset`, its iteration, and its state.

Loads no `datasets`: the user has, where there is such a dataset.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from resilin.compat.names import Package

DATASETS = Package("datasets", tested=("5.2.0",))
"""Hugging Face datasets, and the names of it that resilin uses."""

_DATASET = "datasets:IterableDataset"
_STEPS = DATASETS.name(
    f"{_DATASET}._ex_iterable", "knows of what steps a dataset consists", instance=True
)
_SPLIT = DATASETS.name(
    f"{_DATASET}._distributed", "refuses a dataset that is split by node already", instance=True
)
_FORMAT = DATASETS.name(
    f"{_DATASET}._formatting", "gives samples in the format of the dataset", instance=True
)
_PREPARE = DATASETS.name(
    f"{_DATASET}._prepare_ex_iterable_for_iteration",
    "reads a shard in a worker of a DataLoader, which would divide it once more",
)
_FORMATTER = DATASETS.name(
    "datasets.formatting:get_formatter", "gives samples in the format of the dataset"
)
_EXACT = (
    "ArrowExamplesIterable",
    "CyclingMultiSourcesExamplesIterable",
    "ExamplesIterable",
    "FilteredExamplesIterable",
    "FormattedExamplesIterable",
    "MappedExamplesIterable",
    "RandomlyCyclingMultiSourcesExamplesIterable",
    "RebatchedArrowExamplesIterable",
    "RepeatExamplesIterable",
    "SelectColumnsIterable",
    "SkipExamplesIterable",
    "TakeExamplesIterable",
    "VerticallyConcatenatedMultiSourcesExamplesIterable",
)
"""Steps whose state is exact; the tests restore each of them after each sample."""
_ITERABLES = {
    name: DATASETS.name(f"datasets.iterable_dataset:{name}", "knows whether its state is exact")
    for name in _EXACT
}
_SEED_BITS = 64


def is_iterable_dataset(data: object) -> bool:
    """Whether an object is an `IterableDataset` of Hugging Face."""
    module = sys.modules.get("datasets")
    return module is not None and isinstance(data, module.IterableDataset)


def is_dict_of_splits(data: object) -> bool:
    """Whether an object is a dict of splits, which are datasets."""
    module = sys.modules.get("datasets")
    return module is not None and isinstance(data, module.IterableDatasetDict | module.DatasetDict)


def check() -> None:
    """Check that the installed version has all names.

    Raises:
        MissingNameError: One is gone.
    """
    for name in DATASETS.names:
        name.find()


def is_split_by_node(dataset: Any) -> bool:
    """Whether `split_dataset_by_node` was called for a dataset."""
    return _SPLIT.of(dataset) is not None


def steps(dataset: Any) -> list[Any]:
    """The steps of a dataset, from the last one to the sources."""
    found, queue = [], [_STEPS.of(dataset)]
    while queue:
        step = queue.pop(0)
        found.append(step)
        queue.extend(_inputs(step))
    return found


def _inputs(step: Any) -> list[Any]:
    if hasattr(step, "ex_iterable"):
        return [step.ex_iterable]
    return list(getattr(step, "ex_iterables", []))


def refusal(step: Any, num_shards: int) -> str | None:
    """The reason why a step cannot be read exactly in so many shards; None if it can.

    Args:
        step: One of `steps`.
        num_shards: Number of shards of the stream.
    """
    kind = type(step).__name__
    if kind in ("SkipExamplesIterable", "TakeExamplesIterable") and num_shards > 1:
        method = kind.removesuffix("ExamplesIterable").lower()
        return (
            f"`{method}({step.n})` is divided among {num_shards} shards, whatever their lengths; "
            "give `num_shards=1`, or select files instead"
        )
    if getattr(step, "with_indices", False) and num_shards > 1:
        return (
            f"`with_indices=True` counts from 0 in each of {num_shards} shards; give "
            "`num_shards=1`, or store an index with the samples"
        )
    generator = getattr(step, "generator", None)
    if generator is not None and _is_unseeded(generator):
        return (
            "it has a shuffle or an interleave without a seed, which has another order in each "
            f"process; give it a `seed` below 2**{_SEED_BITS}"
        )
    return None


def _is_unseeded(generator: Any) -> bool:
    # Without a seed, numpy draws 128 bits.
    entropy = getattr(generator.bit_generator.seed_seq, "entropy", 0)
    return isinstance(entropy, int) and entropy.bit_length() > _SEED_BITS


def has_exact_state(dataset: Any) -> bool:
    """Whether a dataset continues exactly where its state was taken.

    Not so with a shuffle buffer, whose content is lost; with an asynchronous function; with a
    function of whole tables; and with steps that were not tested.
    """
    return all(
        type(step).__name__ in _ITERABLES and not _is_inexact_map(step) for step in steps(dataset)
    )


def _is_inexact_map(step: Any) -> bool:
    function: Callable[..., Any] | None = getattr(step, "mask_function", None)
    function = function or getattr(step, "function", None)
    formatting = getattr(step, "formatting", None)
    return function is not None and (
        inspect.iscoroutinefunction(function) or (formatting is not None and formatting.is_table)
    )


def samples(dataset: Any) -> Iterator[Any]:
    """All samples of a dataset, in any process.

    Its own `__iter__` would divide them among the workers of a DataLoader.
    """
    prepared = _PREPARE.of(dataset)()
    formatting = _FORMAT.of(dataset)
    if formatting and (prepared.iter_arrow or formatting.is_table):
        formatter = _FORMATTER.find()(formatting.format_type, features=dataset.features)
        for _, table in prepared.iter_arrow():
            yield formatter.format_row(table)
        return
    for _, sample in prepared:
        yield sample


def description(step: Any) -> dict[str, Any]:
    """The settings of a step that can be described by a JSON value.

    Functions count by their name, and objects by their class: a job that is resumed with another
    function of the same name is not recognised.
    """
    return {"step": type(step).__name__} | {
        key: _described(value)
        for key, value in sorted(vars(step).items())
        if not key.startswith("_") and key not in ("ex_iterable", "ex_iterables", "decoding_pool")
    }


def _described(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_described(each) for each in value]
    if isinstance(value, dict):
        return {str(key): _described(each) for key, each in value.items()}
    if hasattr(value, "bit_generator"):
        return str(value.bit_generator.state)
    name = getattr(value, "__qualname__", None)
    return f"{type(value).__module__}.{type(value).__qualname__}" if name is None else str(name)
