"""The table of branches: the loss of each batch size, and where the critical batch is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from resilin.lab.compare import in_words
from resilin.lab.grid import Failure
from resilin.lab.intervals import Interval, mean_interval, paired_interval
from resilin.lab.results import Curve, without_nan

LEAST_REPORTED = 0.9
"""Part of these samples that has to be reported; less is worth a warning."""
Verdict = Literal["smallest", "within", "undecided", "beyond"]
"""Place of a size: with its whole interval within the tolerance, or beyond it, or neither."""


@dataclass(frozen=True, slots=True)
class Branch:
    """One run from the checkpoint."""

    size: int
    """Batch size over the reference batch."""
    repeat: int
    """Number of the repeat, from 0."""

    @property
    def place(self) -> str:
        """Its directory, relative to that of all branches."""
        return f"{self.size}x/repeat-{self.repeat}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one branch."""

    loss: float
    """Mean loss of the window."""
    steps: int
    """Optimizer steps."""
    samples: int
    """Samples used."""
    lr_factor: float
    """Factor of the rule on the learning rate, mean over the window."""
    reported: float
    """Part of the window that was reported."""
    rule: str
    """The scaling rule."""
    curve: Curve
    """The loss of each reported step, by the samples used since the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One batch size, over all repeats."""

    size: int
    """Batch size over the reference batch."""
    batch_size: int
    """Samples in a step."""
    steps: float
    """Optimizer steps, mean over the repeats."""
    samples: float
    """Samples used, mean over the repeats."""
    lr_factor: float
    """Factor of the rule on the learning rate, mean over window and repeats."""
    loss: Interval
    """The loss."""
    difference: Interval | None
    """The loss minus that of the smallest size in the same repeat; None for that one."""
    verdict: Verdict
    """Place of the difference."""
    losses: tuple[float, ...]
    """The loss of each repeat."""
    curves: tuple[Curve, ...] = field(repr=False)
    """The loss of each reported step, for each repeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The branches of one checkpoint."""

    step: int
    """Step of the checkpoint."""
    rule: str
    """The scaling rule of all branches."""
    tolerance: float
    """Largest difference that counts as none."""
    samples: int
    """Samples of each branch."""
    window: int
    """Samples at the end of a branch whose loss counts."""
    rows: tuple[Row, ...]
    """The sizes, ascending."""
    failures: tuple[Failure[Branch], ...] = ()
    """Branches without a result."""
    warnings: tuple[str, ...] = ()
    """Reasons to distrust the rows."""

    @property
    def at_least(self) -> Row:
        """The largest size that is within the tolerance, as are all smaller ones."""
        good = self.rows[0]
        for row in self.rows[1:]:
            if row.verdict != "within":
                break
            good = row
        return good

    @property
    def below(self) -> Row | None:
        """The smallest size that is beyond the tolerance; None if none is."""
        return next((row for row in self.rows if row.verdict == "beyond"), None)

    def critical(self) -> str:
        """The critical batch in words."""
        low, high = self.at_least, self.below
        found = f"critical batch: at least {low.size}x ({low.batch_size} samples)"
        if high is None:
            found += ", and no size was surely beyond the tolerance"
        else:
            found += f", below {high.size}x ({high.batch_size})"
        unsure = [f"{row.size}x" for row in self.rows if row.verdict == "undecided"]
        return f"{found}; undecided: {', '.join(unsure)}" if unsure else found

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with one entry per size."""
        rows = []
        for row in self.rows:
            plain = asdict(row)
            del plain["curves"]
            rows.append(plain)
        high = self.below
        result: dict[str, Any] = without_nan(
            {
                "step": self.step,
                "rule": self.rule,
                "tolerance": self.tolerance,
                "samples": self.samples,
                "window": self.window,
                "critical": {
                    "at_least": self.at_least.batch_size,
                    "below": None if high is None else high.batch_size,
                },
                "rows": rows,
                "failures": [failure.cell.place for failure in self.failures],
                "warnings": list(self.warnings),
            }
        )
        return result

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """The table as text: its header, and the cells of each row."""
        header = ["size", "batch", "steps", "samples", "lr", "repeats", "loss"]
        header += [f"minus {self.rows[0].size}x", f"tolerance {self.tolerance:g}"]
        body = [
            [
                f"{row.size}x",
                str(row.batch_size),
                f"{row.steps:.0f}",
                f"{row.samples:.0f}",
                f"x{row.lr_factor:.3g}",
                str(row.loss.num),
                in_words(row.loss),
                "-" if row.difference is None else in_words(row.difference, sign="+"),
                row.verdict,
            ]
            for row in self.rows
        ]
        return header, body

    def markdown(self) -> str:
        """The table as Markdown."""
        header, body = self.cells()
        rule = ["---:"] * (len(header) - 1) + ["---"]
        return "".join(f"| {' | '.join(line)} |\n" for line in [header, rule, *body])


def tabulate(
    found: Mapping[Branch, Outcome],
    failures: Sequence[Failure[Branch]] = (),
    *,
    sizes: Sequence[int],
    reference: int,
    tolerance: float,
    **inputs: int,
) -> Measurement:
    """Tabulate outcomes.

    Args:
        found: What each branch has come to.
        failures: Branches without an outcome.
        sizes: Batch sizes over the reference batch, ascending.
        reference: The reference batch.
        tolerance: Largest difference that counts as none.
        **inputs: Other fields of the measurement.

    Raises:
        ValueError: No branch of the smallest size has an outcome, or one has diverged.
    """
    by_size = {
        size: {branch.repeat: each for branch, each in found.items() if branch.size == size}
        for size in sizes
    }
    smallest = by_size[sizes[0]]
    if not smallest:
        first = failures[0]
        raise ValueError(
            f"no branch of {sizes[0]}x has a result: {first.cell.place} {first.reason}\n{first.log}"
        )
    if diverged := [repeat for repeat, each in smallest.items() if not math.isfinite(each.loss)]:
        raise ValueError(
            f"the loss of {sizes[0]}x, with which others are compared, is not finite in repeat "
            f"{', '.join(map(str, diverged))}"
        )
    rows = []
    for size, outcomes in by_size.items():
        if not outcomes:
            continue
        losses = {repeat: each.loss for repeat, each in outcomes.items()}
        both = [repeat for repeat in outcomes if repeat in smallest]
        difference = paired_interval(
            [losses[repeat] for repeat in both], [smallest[repeat].loss for repeat in both]
        )
        is_smallest = size == sizes[0]
        rows.append(
            Row(
                size=size,
                batch_size=size * reference,
                steps=mean_interval([each.steps for each in outcomes.values()]).mean,
                samples=mean_interval([each.samples for each in outcomes.values()]).mean,
                lr_factor=mean_interval([each.lr_factor for each in outcomes.values()]).mean,
                loss=mean_interval(list(losses.values())),
                difference=None if is_smallest else difference,
                verdict="smallest" if is_smallest else judge(difference, tolerance),
                losses=tuple(losses.values()),
                curves=tuple(each.curve for each in outcomes.values()),
            )
        )
    rules = sorted({each.rule for each in found.values()})
    warnings = [
        f"{branch.place}: only {each.reported:.0%} of the window was reported"
        for branch, each in found.items()
        if each.reported < LEAST_REPORTED
    ]
    return Measurement(
        rule=", ".join(rules),
        rows=tuple(rows),
        failures=tuple(failures),
        warnings=tuple(warnings),
        tolerance=tolerance,
        **inputs,
    )


def judge(difference: Interval, tolerance: float) -> Verdict:
    """Place of a difference; one that is not finite has diverged.

    Args:
        difference: The loss minus that of the smallest size, with its interval.
        tolerance: Largest difference that counts as none.
    """
    if difference.num and not math.isfinite(difference.mean):
        return "beyond"
    if not math.isfinite(difference.half):
        return "undecided"
    if difference.mean + difference.half <= tolerance:
        return "within"
    return "beyond" if difference.mean - difference.half > tolerance else "undecided"
