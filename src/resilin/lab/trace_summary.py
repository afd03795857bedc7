"""Summary of a trace in a few numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from resilin.core.trace import BatchTrace, CapacityTrace


def summarise(trace: BatchTrace | CapacityTrace) -> dict[str, Any]:
    """The numbers of one trace, as plain values.

    Returns:
        `kind` (`batches` or `capacity`), `lines`, `length` in `unit` (`steps` or `s`), `min`,
        `mean` and `max` of the values, `changes` from one value to another, and `zero`: the
        fraction of time without replicas, None for batch sizes. The mean weighs a value by its
        duration; the last line of a capacity trace is its end, and has no duration.
    """
    if isinstance(trace, BatchTrace):
        kind, unit, length = "batches", "steps", float(trace.num_steps)
        starts, values = np.array(trace.starts, np.float64), np.array(trace.sizes)
    else:
        kind, unit, length = "capacity", "s", trace.duration
        starts, values = np.array(trace.times, np.float64), np.array(trace.replicas)
    weights = np.diff(starts, append=length)
    if not weights.any():  # a single moment
        weights = np.ones(1)
    return {
        "kind": kind,
        "lines": len(values),
        "length": length,
        "unit": unit,
        "min": int(values.min()),
        "mean": float(np.average(values, weights=weights)),
        "max": int(values.max()),
        "changes": int(np.count_nonzero(np.diff(values))),
        "zero": None if kind == "batches" else float(np.average(values == 0, weights=weights)),
    }
