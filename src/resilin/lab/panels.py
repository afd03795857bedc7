"""Panels: the quantities of a run that are drawn, each with its unit.

A panel is one quantity. A single run is drawn with all curves of a panel, several runs with the
first curve each. Curves over time are interrupted while nothing was trained. Curves over progress
leave out steps that were repeated later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from resilin.lab.curves import Array, drawable
from resilin.lab.style import plain
from resilin.lab.summary import whole_batches
from resilin.telemetry.run import Run

MOST_METRICS = 6
"""Largest number of metrics with a panel; the summary lists all."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One quantity of a run."""

    label: str
    """Its name, if a panel has several curves."""
    x: Array
    """Unix time, or reference steps."""
    y: Array
    """The values."""
    stairs: bool = False
    """Whether it holds its value until the next point."""
    noisy: bool = False
    """Whether to draw an average in place of the points, if there are many."""
    weights: Array | None = None
    """Weights of the points in that average."""
    ends: Array | None = None
    """Positions at which it is interrupted."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart, of one run or several."""

    name: str
    """Its file name, without the suffix."""
    title: str
    """Its title."""
    unit: str
    """Label of its y axis."""
    curves: Callable[[Run], list[Curve]]
    """Curves of a run; if there are several runs, only the first curve is shown."""
    floor: float | None = None
    """Fixed lower end of its y axis, if there is one."""
    whole: bool = False
    """Whether values are integers."""
    by_time: bool = True
    """Whether its x axis is time; otherwise it is progress."""


def origin(run: Run) -> float:
    """Start of the run, as Unix time."""
    times = [run.steps.time[:1], run.steps.time[-1:]]
    times += [np.array([start.time for start in run.starts[:1]])]
    known = np.concatenate(times)
    known = known[np.isfinite(known)]
    return float(known.min()) if len(known) else 0.0


def time_panels(runs: Sequence[Run]) -> list[Panel]:
    """The panels over time that have data in these runs."""
    panels = [
        Panel("batch-size", "Global batch", "batch size (samples)", _batch),
        Panel("replicas", "Replicas", "replicas (number)", _replicas, floor=0, whole=True),
        Panel("gain", "Gain", "gain (reference steps per step)", _gain),
        Panel("efficiency", "Statistical efficiency", "efficiency (%)", _efficiency, floor=0),
        Panel("learning-rate", "Learning rate", "learning rate (no unit)", _learning_rate),
        Panel("noise-scale", "Noise scale", "noise scale (samples)", _noise),
        Panel("goodput", "Goodput", "goodput (reference samples/s)", _goodput, floor=0),
        Panel("loss", "Loss", "loss (as recorded)", _loss),
    ]
    panels += [
        Panel(f"metric-{number}", plain(name), f"{plain(name, 20)} (as recorded)", make)
        for number, (name, make) in enumerate(_metrics(runs, by_time=True))
    ]
    return [panel for panel in panels if _shows(panel, runs)]


def progress_panels(runs: Sequence[Run]) -> list[Panel]:
    """The panels over progress: loss and metrics, comparable at any batch size."""
    panels = [
        Panel("loss-by-progress", "Loss over progress", "loss (as recorded)", _loss_by_progress)
    ]
    panels += [
        Panel(
            f"metric-{number}-by-progress",
            f"{plain(name)} over progress",
            f"{plain(name, 20)} (as recorded)",
            make,
        )
        for number, (name, make) in enumerate(_metrics(runs, by_time=False))
    ]
    # Repeated steps are determined once per panel and run.
    panels = [replace(panel, curves=_remembered(panel.curves, runs)) for panel in panels]
    return [replace(panel, by_time=False) for panel in panels if _shows(panel, runs)]


def _remembered(
    curves: Callable[[Run], list[Curve]], runs: Sequence[Run]
) -> Callable[[Run], list[Curve]]:
    known = {id(run): curves(run) for run in runs}
    return lambda run: known[id(run)]


def _shows(panel: Panel, runs: Sequence[Run]) -> bool:
    return any(
        bool(np.isfinite(drawable(curve.x) + drawable(curve.y)).any())
        for run in runs
        for curve in panel.curves(run)[:1]
    )


# Curves of a run ---------------------------------------------------------------------------------


def _batch(run: Run) -> list[Curve]:
    return [_of_steps(run, "batch size", run.steps.batch_size, stairs=True, whole=True)]


def _replicas(run: Run) -> list[Curve]:
    return [_of_steps(run, "replicas", run.steps.replicas, stairs=True)]


def _gain(run: Run) -> list[Curve]:
    return [
        _of_steps(run, "gain", run.steps.gain, whole=True),
        _of_steps(run, "scale", run.steps.scale, stairs=True, whole=True),
    ]


def _efficiency(run: Run) -> list[Curve]:
    with np.errstate(all="ignore"):
        percent = 100 * run.steps.gain / run.steps.scale
    return [_of_steps(run, "efficiency", percent, whole=True)]


def _learning_rate(run: Run) -> list[Curve]:
    return [
        _of_steps(run, "as applied", run.learning_rate, whole=True),
        _of_steps(run, "before the rule", run.steps.lr, stairs=True, whole=True),
    ]


def _noise(run: Run) -> list[Curve]:
    return [_of_steps(run, "noise scale", run.noise_scale)]


def _goodput(run: Run) -> list[Curve]:
    time, generation = run.steps.time, run.steps.generation
    seconds = np.diff(time, prepend=np.nan)
    return [_gapped("goodput", time, run.goodput, generation, noisy=True, weights=seconds)]


def _loss(run: Run) -> list[Curve]:
    series = run.metrics.get("loss")
    if series is not None and not np.isfinite(run.steps.loss).any():
        return [_gapped("loss", series.time, series.value, series.generation, noisy=True)]
    return [_of_steps(run, "loss", run.steps.loss, noisy=True)]


def _of_steps(
    run: Run,
    label: str,
    y: Array,
    *,
    stairs: bool = False,
    noisy: bool = False,
    whole: bool = False,
) -> Curve:
    """A curve over the steps; `whole` leaves out the short last batch of an epoch."""
    x, generation = run.steps.time, run.steps.generation
    if whole:
        kept = whole_batches(run)
        x, y, generation = x[kept], y[kept], generation[kept]
    return _gapped(label, x, y, generation, stairs=stairs, noisy=noisy)


def _gapped(
    label: str,
    x: Array,
    y: Array,
    generation: Array,
    *,
    stairs: bool = False,
    noisy: bool = False,
    weights: Array | None = None,
) -> Curve:
    """A curve that is interrupted where a generation ended: nothing was trained in between."""
    ends = np.flatnonzero(np.diff(generation) != 0) + 1
    return Curve(
        label,
        np.insert(x, ends, x[ends - 1]),
        np.insert(y, ends, np.nan),
        stairs,
        noisy,
        weights=None if weights is None else np.insert(weights, ends, np.nan),
        ends=x[ends - 1],
    )


def _loss_by_progress(run: Run) -> list[Curve]:
    kept = run.kept()
    return [Curve("loss", run.steps.progress[kept], run.steps.loss[kept], noisy=True)]


def _metrics(
    runs: Sequence[Run], *, by_time: bool
) -> list[tuple[str, Callable[[Run], list[Curve]]]]:
    names = list(dict.fromkeys(name for run in runs for name in run.metrics if name != "loss"))

    def curves_of(name: str) -> Callable[[Run], list[Curve]]:
        def curves(run: Run) -> list[Curve]:
            series = run.metrics.get(name)
            if series is None:
                return []
            if by_time:
                return [_gapped(name, series.time, series.value, series.generation, noisy=True)]
            kept = run.kept(series)
            return [Curve(name, series.progress[kept], series.value[kept], noisy=True)]

        return curves

    return [(name, curves_of(name)) for name in names[:MOST_METRICS]]
