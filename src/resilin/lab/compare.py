"""Compare scaling rules under traces: run the same script many times, and tabulate the results.

Every rule is run on every trace with every seed, against reference runs that follow no trace. A row
of the table is the mean over the seeds and its difference from the reference, paired by seed, so
that effects of a seed on both of them cancel out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from resilin.lab.grid import REFERENCE, RESULT, Cell, Failure, Grid, run_cells, write_json
from resilin.lab.intervals import Interval, mean_interval, paired_interval
from resilin.lab.replay import check_taken_up
from resilin.lab.results import Curve, Result, UnclearMetric, choose_metric, without_nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rule on one trace, over all seeds."""

    trace: str
    """Name of the trace; empty for the reference."""
    rule: str
    """The rule, or `reference`."""
    value: Interval
    """The metric."""
    difference: Interval | None
    """The metric minus that of the reference with the same seed; None for the reference."""
    steps: float
    """Optimizer steps, mean over the seeds."""
    samples: float
    """Samples used, mean over the seeds."""
    progress: float
    """Reference steps of progress, mean over the seeds."""
    values: tuple[float, ...]
    """The metric of each seed."""
    curves: tuple[Curve, ...] = field(repr=False)
    """The metric along the run, for each seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The results of a grid."""

    metric: str
    """Name of the compared metric."""
    rows: tuple[Row, ...]
    """The reference, and each rule on each trace that has a result."""
    failures: tuple[Failure[Cell], ...] = ()
    """Runs without a result."""
    warnings: tuple[str, ...] = ()
    """Reasons to distrust the rows."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with one entry per row."""
        rows = []
        for row in self.rows:
            plain = asdict(row)
            del plain["curves"]
            rows.append({**plain, "trace": row.trace or None})
        result: dict[str, Any] = without_nan(
            {
                "metric": self.metric,
                "rows": rows,
                "failures": [failure.cell.place for failure in self.failures],
                "warnings": list(self.warnings),
            }
        )
        return result

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """The table as text: its header, and the cells of each row."""
        header = ["trace", "rule", "seeds", self.metric, "minus reference"]
        header += ["steps", "samples", "progress"]
        body = [
            [
                row.trace or "-",
                row.rule,
                str(row.value.num),
                in_words(row.value),
                "-" if row.difference is None else in_words(row.difference, sign="+"),
                f"{row.steps:.0f}",
                f"{row.samples:.0f}",
                f"{row.progress:.0f}",
            ]
            for row in self.rows
        ]
        return header, body

    def markdown(self) -> str:
        """The table as Markdown."""
        header, body = self.cells()
        rule = ["---"] * 2 + ["---:"] * (len(header) - 2)
        return "".join(f"| {' | '.join(line)} |\n" for line in [header, rule, *body])


def in_words(interval: Interval, sign: str = "-") -> str:
    """A mean and its interval as text, with as many digits as the interval justifies.

    Args:
        interval: The interval.
        sign: `+` also writes the sign of positive numbers.
    """
    mean, half = interval.mean, interval.half
    if not math.isfinite(mean):
        return "not finite" if interval.num else "-"
    if not math.isfinite(half):
        return f"{mean:{sign}.4g}"
    digits = 4 if half == 0 else min(8, max(0, 1 - math.floor(math.log10(half))))
    mean = round(mean, digits) + 0.0  # turns -0.0 into 0.0
    return f"{mean:{sign}.{digits}f} +- {half:.{digits}f}"


def compare(
    grid: Grid,
    *,
    metric: str | None = None,
    jobs: int = 1,
    again: bool = False,
    say: Callable[[str], None] = lambda message: None,
) -> Comparison:
    """Run the cells that have no result yet, and tabulate all results.

    Args:
        grid: The runs and their directory.
        metric: Name of the recorded metric to compare; None if there is only one. If `loss` is
            recorded only in steps, its value is the mean over the last tenth of them.
        jobs: Number of parallel runs, with one thread each.
        again: Whether to remove existing results first.
        say: Called with a description of each run that ended.

    Returns:
        The table, also written as `table.md` and `table.json`. It includes failed runs.

    Raises:
        ValueError: The directory holds something else, or the metric is ambiguous.
    """
    with grid.held(again=again):
        waiting = [cell for cell in grid.cells() if not (grid.out / cell.place / RESULT).exists()]
        there = len(grid.cells()) - len(waiting)
        if there:
            say(f"{there} of {len(grid.cells())} runs already have a result")
            # A missing metric must be reported now, not after the last run.
            choose_metric(_read(grid, set(grid.cells()) - set(waiting)), metric)

        known = there > 0

        def finish(cell: Cell, directory: Path) -> None:
            nonlocal known
            check_taken_up(directory, traced=cell.trace is not None)
            result = Result.from_run(directory)
            try:
                choose_metric([result], metric)
            except UnclearMetric as error:
                if known:  # other runs have it, so only this run has failed
                    raise ValueError(str(error)) from None
                write_json(directory / RESULT, result.to_dict())
                raise
            known = True
            write_json(directory / RESULT, result.to_dict())

        failures = run_cells(grid, waiting, finish, jobs=jobs, say=say)
        comparison = tabulate(grid, metric, failures)
        write_json(grid.out / "table.json", comparison.to_dict())
        (grid.out / "table.md").write_text(comparison.markdown(), encoding="utf-8")
    return comparison


def _read(grid: Grid, cells: set[Cell]) -> list[Result]:
    paths = [grid.out / cell.place / RESULT for cell in cells]
    return [Result.from_dict(json.loads(path.read_text(encoding="utf-8"))) for path in paths]


def tabulate(grid: Grid, metric: str | None, failures: Sequence[Failure[Cell]] = ()) -> Comparison:
    """Tabulate the existing results.

    Raises:
        ValueError: There are no results, or the metric is ambiguous.
    """
    failed = {failure.cell for failure in failures}
    by_row: dict[tuple[str, str], dict[int, Result]] = {}
    for cell in grid.cells():
        if cell not in failed:
            row = by_row.setdefault((cell.trace or "", cell.rule or REFERENCE), {})
            (row[cell.seed],) = _read(grid, {cell})
    if not by_row:
        raise ValueError(f"no run has a result: {failures[0].reason}\n{failures[0].log}")
    metric = choose_metric([r for row in by_row.values() for r in row.values()], metric)
    reference = by_row.get(("", REFERENCE), {})
    order = [("", REFERENCE), *((trace, rule) for trace in grid.traces for rule in grid.rules)]
    rows, warnings = [], []
    for trace, rule in order:
        results = by_row.get((trace, rule))
        if not results:
            continue
        if len(results) > 1 and len({_identity(result) for result in results.values()}) == 1:
            where = f"{rule} on {trace}" if trace else rule
            warnings.append(
                f"{where}: all {len(results)} seeds gave identical runs, so the script sets its "
                "own seed and the intervals are meaningless; let it take --seed {seed}"
            )
        both = [seed for seed in results if seed in reference]
        difference = paired_interval(
            [results[seed].value(metric) for seed in both],
            [reference[seed].value(metric) for seed in both],
        )
        values = tuple(result.value(metric) for result in results.values())
        rows.append(
            Row(
                trace=trace,
                rule=rule,
                value=mean_interval(values),
                difference=difference if trace else None,
                steps=_mean([result.steps for result in results.values()]),
                samples=_mean([result.samples for result in results.values()]),
                progress=_mean([result.progress for result in results.values()]),
                values=values,
                curves=tuple(result.curves.get(metric, ((), ())) for result in results.values()),
            )
        )
    return Comparison(
        metric=metric, rows=tuple(rows), failures=tuple(failures), warnings=tuple(warnings)
    )


def _identity(result: Result) -> str:
    """A result without its duration."""
    return json.dumps({**result.to_dict(), "seconds": None}, sort_keys=True)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
