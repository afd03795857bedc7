"""`Application`: recorded step times and gradient statistics of one model.

The form is that of the Pollux artifact (Qiao et al., OSDI 2021): a directory for each model, with
`placements.csv` and `scalability.csv` (measured step and wait times by placement and micro-batch)
and `validation-B.csv` (gradient statistics along training at global batch B). What was not
measured is interpolated as there, so that published results can be compared to the second.
"""

from __future__ import annotations

import csv
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from resilin.core.plan import BatchBounds

MAX_LOCAL_BSZ = {"yolov3": 8}
"""Largest micro-batch of models whose recorded range is not the one they were run with."""
MOST_HOSTS = 16
"""Most hosts that were measured; a job on more is as fast as on these."""
MOST_REPLICAS = 64
"""Most replicas that were measured."""
EXTRA = "pip install 'resilin[cluster]'"
"""Command that installs what interpolation needs."""

Measured = tuple[float, float]
"""Seconds of a step with one micro-batch, and those of them that waited for the reduction."""


class Epochs(NamedTuple):
    """Records at one global batch, one entry for each epoch."""

    progress: tuple[float, ...]
    """Progress in reference steps at the end of the epoch."""
    iteration: tuple[int, ...]
    """Steps at the end of the epoch."""
    sqr_norm: tuple[float, ...]
    """Squared norm of the gradient."""
    variance: tuple[float, ...]
    """Variance of the gradient of a reference batch."""


class Application:
    """One model, as it was measured.

    Args:
        folder: Directory with the records; its name is the name of the model.

    Raises:
        ValueError: A record is missing, or has columns or numbers that it should not have.
    """

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        paths = {int(path.stem.partition("-")[2]): path for path in folder.glob("validation-*.csv")}
        if not paths:
            raise ValueError(f"{folder}: must have at least one validation-B.csv")
        self._epochs = {size: _epochs(paths[size]) for size in sorted(paths)}
        self._sizes = tuple(self._epochs)
        self._placements = _curves(folder / "placements.csv")
        self._rows = _means(self._placements)
        self._rows += _columns(folder / "scalability.csv", _HOSTS + _TIMES)
        local = sorted({size for curve in self._placements.values() for size in curve})
        self.reference = self._sizes[0]
        self.max_epochs = min(len(each.progress) for each in self._epochs.values())
        self.bounds = BatchBounds(
            max_batch_size=self._sizes[-1],
            local_bsz_bounds=(local[0], MAX_LOCAL_BSZ.get(self.name, local[-1])),
        )
        self._interpolator: Any = None
        self._seconds: dict[tuple[tuple[int, ...], int], Measured] = {}
        self._statistics: dict[tuple[int, int], tuple[float, float]] = {}

    @property
    def local_bsz_bounds(self) -> tuple[int, int]:
        """Smallest and largest micro-batch."""
        assert self.bounds.local_bsz_bounds is not None
        return self.bounds.local_bsz_bounds

    @property
    def max_batch_size(self) -> int:
        """Largest global batch."""
        return self._sizes[-1]

    @property
    def most_per_host(self) -> int:
        """Most replicas on one host that were measured."""
        return max(max(placement) for placement in self._placements)

    def step_seconds(self, placement: tuple[int, ...], local_bsz: int) -> Measured:
        """Seconds of a step with one micro-batch, and those of them that waited for the reduction.

        Args:
            placement: Replicas on each host, in the order of the ring: a ring may be entered at
                any host, but its order matters.
            local_bsz: Samples of the micro-batch.

        Raises:
            ValueError: Nothing like it was measured.
        """
        key = placement, local_bsz
        if key not in self._seconds:
            self._seconds[key] = self._interpolate(placement, local_bsz)
        return self._seconds[key]

    def progress(self, epoch: int) -> float:
        """Progress in reference steps after this many epochs."""
        return min(each.progress[epoch - 1] for each in self._epochs.values()) if epoch else 0.0

    def iteration(self, batch_size: int, epoch: int) -> float:
        """Steps at this global batch at the end of the epoch of this number, from 0."""
        return self._between(batch_size, lambda each: each.iteration[epoch])

    def statistics(self, batch_size: int, epoch: int) -> tuple[float, float]:
        """Squared norm of the gradient, and variance at the reference batch, during an epoch."""
        key = batch_size, epoch
        if key not in self._statistics:
            self._statistics[key] = (
                self._between(batch_size, lambda each: each.sqr_norm[epoch]),
                self._between(batch_size, lambda each: each.variance[epoch]),
            )
        return self._statistics[key]

    def _between(self, batch_size: int, read: Any) -> float:
        """A recorded number, interpolated between the two nearest batch sizes."""
        sizes = self._sizes
        if not sizes[0] <= batch_size <= sizes[-1]:
            raise ValueError(
                f"{self.name}: global batch {batch_size} must be from {sizes[0]} to {sizes[-1]}, "
                "the sizes that were recorded"
            )
        index = bisect_left(sizes, batch_size)
        upper = sizes[index]
        if upper == batch_size:
            return read(self._epochs[upper])  # type: ignore[no-any-return]
        lower = sizes[index - 1]
        above, below = read(self._epochs[upper]), read(self._epochs[lower])
        return (  # type: ignore[no-any-return]
            (batch_size - lower) * above + (upper - batch_size) * below
        ) / (upper - lower)

    def _interpolate(self, placement: tuple[int, ...], local_bsz: int) -> Measured:
        ring = min(placement[i:] + placement[:i] for i in range(len(placement)))
        if ring in self._placements:
            return _line(self._placements[ring], local_bsz)
        hosts, replicas = min(len(ring), MOST_HOSTS), sum(ring)
        if max(ring) <= self.most_per_host and replicas <= MOST_REPLICAS:
            found = self._nearby(hosts, replicas, local_bsz)
            if found is None:
                # The largest micro-batches were not measured everywhere: extend the line.
                sizes = sorted({int(row[2]) for row in self._rows if row[2] < local_bsz})
                inside = {size: self._nearby(hosts, replicas, size) for size in sizes}
                curve = {size: value for size, value in inside.items() if value is not None}
                found = _line(curve, local_bsz) if len(curve) > 1 else None
            if found is not None:
                return found
        raise ValueError(
            f"{self.name}: no step like {local_bsz} samples on each of {replicas} replicas "
            f"({'+'.join(map(str, placement))} on {len(placement)} hosts) was measured: at most "
            f"{self.most_per_host} were on a host, and {MOST_REPLICAS} in all"
        )

    def _nearby(self, hosts: int, replicas: int, local_bsz: int) -> Measured | None:
        """Interpolated between measured hosts, replicas and micro-batches; None outside."""
        if self._interpolator is None:
            try:
                from scipy.interpolate import LinearNDInterpolator  # type: ignore[import-untyped]
            except ImportError as error:
                raise ImportError(
                    f"step times between measured placements need scipy: {EXTRA}"
                ) from error
            # The triangulation of a grid is not unique: the order of the points decides.
            table = np.array(self._rows, np.float64)
            self._interpolator = LinearNDInterpolator(table[:, :3], table[:, 3:])
        step, sync = self._interpolator([hosts, replicas, local_bsz])[0].tolist()
        return None if math.isnan(step) else (step, sync)


_HOSTS = ("num_nodes", "num_replicas")
_TIMES = ("local_bsz", "step_time", "sync_time")
_EPOCH = ("progress", "iteration", "grad_sqr", "grad_var")
Curve = dict[int, Measured]
"""Measured times of one placement, by micro-batch, ascending."""


def _columns(path: Path, names: tuple[str, ...]) -> list[tuple[float, ...]]:
    """The numbers of these columns, line by line."""
    if not path.is_file():
        raise ValueError(f"{path}: must be a file, as traces of the Pollux artifact have it")
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in names if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{path}: must have the column {missing[0]}")
        try:
            rows = [tuple(float(row[name]) for name in names) for row in reader]
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}:{reader.line_num}: {error}") from None
    if not rows:
        raise ValueError(f"{path}: must have at least one line after the header")
    return rows


def _epochs(path: Path) -> Epochs:
    progress, iteration, sqr_norm, variance = zip(*_columns(path, _EPOCH), strict=True)
    return Epochs(progress, tuple(map(int, iteration)), sqr_norm, variance)


def _curves(path: Path) -> dict[tuple[int, ...], Curve]:
    """Measured times by placement, which is written as one digit for each host."""
    found: dict[tuple[int, ...], Curve] = {}
    for placement, local_bsz, step, sync in _columns(path, ("placement", *_TIMES)):
        ring = tuple(int(digit) for digit in str(int(placement)))
        found.setdefault(ring, {})[int(local_bsz)] = (step, sync)
    return {ring: dict(sorted(curve.items())) for ring, curve in found.items()}


def _means(placements: Mapping[tuple[int, ...], Curve]) -> list[tuple[float, ...]]:
    """Mean times of all placements of equal hosts and replicas, sorted by these."""
    groups: dict[tuple[int, int, int], list[Measured]] = {}
    for ring, curve in placements.items():
        for local_bsz, times in curve.items():
            groups.setdefault((len(ring), sum(ring), local_bsz), []).append(times)
    return [
        (*key, *(math.fsum(column) / len(column) for column in zip(*groups[key], strict=True)))
        for key in sorted(groups)
    ]


def _line(curve: Curve, local_bsz: int) -> Measured:
    """Between the two nearest micro-batches; beyond the last, the line through the last two."""
    sizes = tuple(curve)
    if len(sizes) == 1:
        return curve[sizes[0]]
    index = min(max(bisect_left(sizes, local_bsz), 1), len(sizes) - 1)
    low, high = sizes[index - 1], sizes[index]
    step, sync = (
        (above - below) / (high - low) * (local_bsz - low) + below
        for below, above in zip(curve[low], curve[high], strict=True)
    )
    return step, sync


@cache
def load(folder: str) -> Application:
    """The application in a directory; each is read once in a process."""
    return Application(Path(folder))


def names(traces: Path) -> Iterable[str]:
    """Names of the applications in a directory of traces."""
    return sorted(path.parent.name for path in traces.glob("*/placements.csv"))
