"""Branches: short runs from one checkpoint that differ in nothing but the batch size.

This measures the critical batch as Merrill et al. do (arXiv:2505.23971): from one checkpoint, train
at several batch sizes for the same number of samples, and look for the largest whose loss is still
within a tolerance of that of the smallest. No model of the noise is involved, only the script and
its rule.

The loss of a branch is the mean over its last samples, as the script records it within steps. All
sizes of one repeat train on the same samples in the same order, so that their losses are paired.
Repeats begin at different places in the data after the checkpoint, each where the one before it
ends. A larger batch computes the loss of a sample with parameters that are older by half a batch:
that counts against it, and is small where the window has many batches.
"""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from resilin.core import _validate
from resilin.core.events import StartEvent, StepEvent
from resilin.core.trace import BatchTrace
from resilin.engine import environment
from resilin.lab import launch
from resilin.lab.branch_table import Branch, Measurement, Outcome, tabulate
from resilin.lab.grid import LOG, run_cells, write_json
from resilin.lab.replay import check_taken_up, write_trace
from resilin.lab.results import ConcernsAllRuns, UnclearMetric
from resilin.telemetry.read import read_events

WINDOW = 0.25
"""Part of the samples of a branch, at its end, whose loss counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The checkpoint that all branches begin from."""

    copy: Callable[[Path, int], None] = field(repr=False)
    """Writes a copy of it that is so many samples further on in the data."""
    step: int
    """Optimizer steps made before it."""
    samples: int
    """Samples used before it."""
    reference: int
    """The reference batch."""
    room: int | None = None
    """Samples left in the pass over the data; None has no limit."""
    seed: int | None = None
    """Seed of the order of samples, unless the script sets it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branches:
    """The inputs of a measurement."""

    script: Path
    """The script that saved the checkpoint."""
    arguments: tuple[str, ...] = ()
    """Arguments of the script."""
    origin: Origin
    """The checkpoint."""
    sizes: tuple[int, ...]
    """Batch sizes over the reference batch."""
    samples: int
    """Samples of each branch."""
    window: int | None = None
    """Samples at the end of a branch whose loss counts; None takes about a quarter."""
    repeats: int = 3
    """Number of repeats."""
    tolerance: float = 0.01
    """Largest difference in the loss that counts as none."""
    rule: str | None = None
    """Scaling rule, overriding the script's."""
    one_thread: bool = False
    """Whether each run has one thread, as for several runs at a time."""
    out: Path
    """An empty directory."""

    def __post_init__(self) -> None:
        launch.check_script(self.script)
        if self.rule is not None:
            launch.check_rule(self.rule)
        for size in self.sizes:
            _validate.whole("size", size, at_least=1)
        if len(self.sizes) < 2 or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(
                f"sizes ({', '.join(map(str, self.sizes))}) must be at least two, ascending: the "
                "smallest is what the others are compared with"
            )
        _validate.whole("repeats", self.repeats, at_least=2)
        _validate.real("tolerance", self.tolerance, above=0)
        _validate.whole("samples", self.samples, at_least=1)
        batches = ", ".join(str(size * self.origin.reference) for size in self.sizes)
        for name, num in (("samples", self.samples), ("window", self.counted)):
            if num % self.unit:
                raise ValueError(
                    f"{name} ({num}) must be a multiple of {self.unit}, which all batches "
                    f"({batches}) divide: try {-(-num // self.unit) * self.unit}"
                )
        if not 0 < self.counted <= self.samples:
            raise ValueError(
                f"window ({self.counted}) must be above 0 and at most samples ({self.samples})"
            )
        needed = self.repeats * self.samples
        if self.origin.room is not None and needed > self.origin.room:
            raise ValueError(
                f"{self.repeats} repeats of {self.samples} samples need {needed} samples after the "
                "checkpoint, each its own, and its pass over the data has "
                f"{self.origin.room} left: take fewer samples, or an earlier checkpoint"
            )

    @property
    def unit(self) -> int:
        """The smallest number of samples that every batch size divides."""
        return self.origin.reference * math.lcm(*self.sizes)

    @property
    def counted(self) -> int:
        """The window."""
        if self.window is not None:
            return self.window
        return self.unit * max(1, round(WINDOW * self.samples / self.unit))

    def cells(self) -> list[Branch]:
        """All branches, repeat by repeat."""
        return [Branch(size, repeat) for repeat in range(self.repeats) for size in self.sizes]

    def start(self, cell: Branch) -> subprocess.Popen[bytes]:
        """Start one branch, from a copy of the checkpoint."""
        directory = self.out / cell.place
        directory.mkdir(parents=True)
        self.origin.copy(directory / "checkpoints", cell.repeat * self.samples)
        env = launch.environment_of(
            directory,
            trace=write_trace(BatchTrace((0,), (cell.size * self.origin.reference,)), directory),
            rule=self.rule,
            seed=self.origin.seed,
            stop_at=self.origin.samples + self.samples,
        )
        # Where the lab sends what the script keeps; a script that names no directory has this one.
        env[environment.CHECKPOINT_DIR] = str((directory / "checkpoints").absolute())
        if self.one_thread:
            env["OMP_NUM_THREADS"] = "1"
        line = launch.command(self.script, self.arguments, seeded=self.origin.seed is not None)
        with (directory / LOG).open("wb") as output:
            return launch.begin(line, env, output)

    def outcome(self, directory: Path) -> Outcome:
        """Read what a branch has come to.

        Raises:
            ConcernsAllRuns: It did not train, or from another state, or records no loss.
            ValueError: It ended early.
        """
        found = list(read_events(directory)) if any(directory.glob("events-*")) else []
        steps = [event for event in found if isinstance(event, StepEvent)]
        if not steps:
            raise ConcernsAllRuns(
                f"the script ended without a step after the checkpoint at step {self.origin.step}: "
                "nothing is left to train there. Give the script more epochs, or name an earlier "
                "checkpoint"
            )
        check_taken_up(directory, traced=True)
        start = next(event for event in found if isinstance(event, StartEvent))
        began = steps[0].samples - steps[0].batch_size
        if not start.resumed or began != self.origin.samples:
            raise ConcernsAllRuns(
                f"the script began at sample {began}, and not at that of the checkpoint "
                f"({self.origin.samples}): its state has to be kept by resilin, with "
                "resilin.checkpoint_to(DIRECTORY) or without a call of it; branches have a "
                "directory of their own then"
            )
        if start.reference != self.origin.reference:
            raise ConcernsAllRuns(
                f"the reference batch of the script ({start.reference}) is not that of the "
                f"branches ({self.origin.reference}): pass the arguments that the checkpoint was "
                f"trained with, or --batch-size {start.reference}"
            )
        if (used := steps[-1].samples - self.origin.samples) < self.samples:
            raise ValueError(f"training was over after {used} of {self.samples} samples")
        if all(step.loss is None for step in steps):
            raise UnclearMetric(
                "the script records no loss: call resilin.record(loss=loss) after "
                "optimizer.step(), in the loop over batches"
            )
        return self._window(steps, start.rule)

    def _window(self, steps: Sequence[StepEvent], rule: str) -> Outcome:
        stop = self.origin.samples + self.samples
        first = stop - self.counted
        weights, losses, factors = [], [], []
        for step in steps:
            shared = min(step.samples, stop) - max(step.samples - step.batch_size, first)
            if shared > 0 and step.loss is not None:
                weights.append(shared)
                losses.append(shared * step.loss)
                factors.append(shared * step.lr_factor)
        total = sum(weights)
        if not total:
            raise ValueError(f"no step of the last {self.counted} samples was reported with a loss")
        points = [(s.samples - self.origin.samples, s.loss) for s in steps if s.loss is not None]
        return Outcome(
            loss=math.fsum(losses) / total,
            steps=steps[-1].step - self.origin.step,
            samples=steps[-1].samples - self.origin.samples,
            lr_factor=math.fsum(factors) / total,
            reported=total / self.counted,
            rule=rule,
            curve=(tuple(float(x) for x, _ in points), tuple(y for _, y in points)),
        )


def measure(
    branches: Branches, *, jobs: int = 1, say: Callable[[str], None] = lambda message: None
) -> Measurement:
    """Run all branches, and tabulate what they have come to.

    Args:
        branches: The runs and their directory.
        jobs: Number of parallel runs.
        say: Called with a description of each run that ended.

    Returns:
        The table, also written as `table.md` and `table.json`. It includes failed runs.

    Raises:
        ValueError: No branch can have a result, or none of the smallest size has one.
    """
    found: dict[Branch, Outcome] = {}

    def finish(branch: Branch, directory: Path) -> None:
        found[branch] = branches.outcome(directory)
        # As large as the model and its optimizer, for each branch.
        shutil.rmtree(directory / "checkpoints")

    failures = run_cells(branches, branches.cells(), finish, jobs=jobs, say=say)
    measurement = tabulate(
        found,
        failures,
        sizes=branches.sizes,
        reference=branches.origin.reference,
        tolerance=branches.tolerance,
        step=branches.origin.step,
        samples=branches.samples,
        window=branches.counted,
    )
    write_json(branches.out / "table.json", measurement.to_dict())
    text = f"{measurement.markdown()}\nrule {measurement.rule}; {measurement.critical()}\n"
    (branches.out / "table.md").write_text(text, encoding="utf-8")
    return measurement
