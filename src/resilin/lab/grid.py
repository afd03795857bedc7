"""The runs of a comparison: rules by traces by seeds, each a process with its own directory.

A completed run leaves `result.json`, written atomically, and is not run again. So an interrupted
comparison resumes where it stopped, and one with more seeds, rules or traces adds only those. The
inputs of the results are recorded beside them; a directory whose inputs have changed is rejected.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from resilin.core import _validate
from resilin.core.trace import BatchTrace
from resilin.lab import launch
from resilin.lab.replay import write_trace
from resilin.lab.results import ConcernsAllRuns

REFERENCE = "reference"
"""Name of the runs without a trace, at the script's own batch size and rule."""
RESULT = "result.json"
"""File that a completed run leaves in its directory."""
LOG = "log.txt"
"""Output of a run."""
BASIS = "compare.json"
"""File with the inputs of the results in a directory."""
POLL = 0.05
"""Seconds between two checks of the running processes."""
LOG_END = 12
"""Number of log lines in the report of a failed run."""


class Placed(Protocol):
    """One of several runs."""

    @property
    def place(self) -> str:
        """Its directory, relative to that of all of them."""
        ...


AnyCell = TypeVar("AnyCell", bound=Placed)
_Started = TypeVar("_Started", bound=Placed, contravariant=True)


class Runs(Protocol[_Started]):
    """Several runs of one script."""

    @property
    def out(self) -> Path:
        """Directory of all of them."""
        ...

    def start(self, cell: _Started) -> subprocess.Popen[bytes]:
        """Start one run, in an empty directory."""
        ...


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of the grid."""

    trace: str | None
    """Name of the trace; None for a reference run."""
    rule: str | None
    """The scaling rule; None for a reference run."""
    seed: int
    """The seed."""

    @property
    def place(self) -> str:
        """Its directory, relative to that of the comparison."""
        if self.trace is None or self.rule is None:
            return f"{REFERENCE}/seed-{self.seed}"
        return f"{self.trace}/{directory_name(self.rule)}/seed-{self.seed}"


@dataclass(frozen=True, slots=True)
class Failure(Generic[AnyCell]):
    """A run without a result."""

    cell: AnyCell
    """The run."""
    reason: str
    """The reason."""
    log: str
    """The last lines of its output."""


def directory_name(rule: str) -> str:
    """Directory name of a rule."""
    return re.sub(r"[^\w.-]", "-", rule)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The inputs of a comparison."""

    script: Path
    """The script that is run in every cell."""
    arguments: tuple[str, ...] = ()
    """Arguments of the script; `{seed}` is replaced by the seed."""
    rules: tuple[str, ...]
    """Scaling rules: names, or `package.module:attribute`."""
    traces: Mapping[str, BatchTrace]
    """The traces by name."""
    num_seeds: int
    """Number of seeds: each rule and trace is run with seeds 0 to `num_seeds - 1`."""
    out: Path
    """Directory of the comparison."""

    def __post_init__(self) -> None:
        launch.check_script(self.script)
        _validate.whole("num_seeds", self.num_seeds, at_least=1)
        if not self.rules or not self.traces:
            raise ValueError("a comparison needs at least one rule and one trace")
        for rule in self.rules:
            launch.check_rule(rule)
        for what, names in (("rule", map(directory_name, self.rules)), ("trace", self.traces)):
            seen: set[str] = set()
            for name in names:
                if name in seen:
                    raise ValueError(f"{what} {name!r} is given twice")
                seen.add(name)
        for name in self.traces:
            if name == REFERENCE or not re.fullmatch(r"\w[\w.-]*", name):
                raise ValueError(
                    f"trace {name!r} names a directory: it may contain only letters, digits, and "
                    f". - _ and must not be {REFERENCE!r}"
                )

    def cells(self) -> list[Cell]:
        """All runs, seed by seed, so that an interrupted grid is a comparison of fewer seeds."""
        cells = []
        for seed in range(self.num_seeds):
            cells.append(Cell(None, None, seed))
            cells += [Cell(trace, rule, seed) for trace in self.traces for rule in self.rules]
        return cells

    def basis(self) -> dict[str, Any]:
        """The inputs that the results depend on, as plain values."""
        return {
            "script": self.script.name,
            "content of the script": _digest(self.script.read_bytes()),
            "arguments": list(self.arguments),
            "traces": {
                name: _digest(f"{trace.end}\n{trace.format()}".encode())
                for name, trace in self.traces.items()
            },
            "rules": {rule: self._rule_digest(rule) for rule in self.rules},
        }

    def _rule_digest(self, rule: str) -> str:
        """Digest of the module of a rule, if it is in the directory of the script."""
        module, colon, _ = rule.partition(":")
        path = self.script.parent / (module.replace(".", "/") + ".py")
        return _digest(path.read_bytes()) if colon and path.is_file() else ""

    @contextmanager
    def held(self, *, again: bool = False) -> Iterator[None]:
        """Lock the directory for this comparison.

        Args:
            again: Whether to remove the results of an earlier comparison.

        Raises:
            ValueError: Another process uses the directory, or it holds something else.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.out, os.O_RDONLY)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"another comparison is using {str(self.out)!r}") from None
            self._claim(again)
            yield
        finally:
            os.close(lock)

    def _claim(self, again: bool) -> None:
        path, basis = self.out / BASIS, self.basis()
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            if again:
                for name in (REFERENCE, *before["traces"]):
                    shutil.rmtree(self.out / name, ignore_errors=True)
            elif differences := _differences(before, basis):
                raise ValueError(
                    f"{str(self.out)!r} holds the results of another comparison: "
                    f"{'; '.join(differences)}. --again starts over, --out chooses "
                    "another directory"
                )
            else:
                for kind in ("traces", "rules"):
                    basis[kind] = before[kind] | basis[kind]
        elif any(self.out.iterdir()):
            raise ValueError(
                f"{str(self.out)!r} is not empty and holds no comparison: choose another directory"
            )
        write_json(path, basis)

    def start(self, cell: Cell) -> subprocess.Popen[bytes]:
        """Start one run, in an empty directory."""
        directory = self.out / cell.place
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        trace = None if cell.trace is None else self.traces[cell.trace]
        env = launch.environment_of(
            directory,
            trace=None if trace is None else write_trace(trace, directory),
            end="hold" if trace is None else trace.end,
            rule=cell.rule,
            seed=cell.seed,
        )
        env["OMP_NUM_THREADS"] = "1"  # runs share the machine; results do not depend on its cores
        arguments = [argument.replace("{seed}", str(cell.seed)) for argument in self.arguments]
        with (directory / LOG).open("wb") as output:
            return launch.begin(launch.command(self.script, arguments, seeded=True), env, output)


def run_cells(
    grid: Runs[AnyCell],
    cells: Sequence[AnyCell],
    finish: Callable[[AnyCell, Path], None],
    *,
    jobs: int,
    say: Callable[[str], None],
) -> list[Failure[AnyCell]]:
    """Run cells, several at a time. Running processes are stopped if this function is left early.

    Args:
        grid: Starts the cells.
        cells: The cells to run.
        finish: Records the result of a successful run. A `ValueError` marks this run as failed; an
            `ConcernsAllRuns` is propagated.
        jobs: Number of parallel runs.
        say: Called with a description of each run that ended.
    """
    _validate.whole("jobs", jobs, at_least=1)
    waiting = list(reversed(cells))
    running: dict[AnyCell, tuple[subprocess.Popen[bytes], float]] = {}
    failures: list[Failure[AnyCell]] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                cell = waiting.pop()
                running[cell] = grid.start(cell), time.monotonic()
            ended = [cell for cell, (process, _) in running.items() if process.poll() is not None]
            for cell in ended:
                process, began = running.pop(cell)
                reason = _reason(grid, cell, launch.exit_code(process), finish)
                if reason is not None:
                    failures.append(Failure(cell, reason, log_end(grid.out / cell.place / LOG)))
                left = len(waiting) + len(running)
                took = f"{time.monotonic() - began:.1f} s"
                say(f"{cell.place}: {reason or took}; {len(cells) - left} of {len(cells)} runs")
            if not ended:
                time.sleep(POLL)
    finally:
        launch.end([process for process, _ in running.values()], launch.SCRIPT_GRACE)
    return failures


def _reason(
    grid: Runs[AnyCell], cell: AnyCell, code: int, finish: Callable[[AnyCell, Path], None]
) -> str | None:
    """The reason why a run has no result; None if it has one."""
    if code:
        return f"failed with exit code {code}"
    try:
        finish(cell, grid.out / cell.place)
    except ConcernsAllRuns:
        raise
    except ValueError as error:
        return f"failed: {error}"
    return None


def log_end(path: Path) -> str:
    """The last lines of a log."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-LOG_END:])


def write_json(path: Path, value: Any) -> None:
    """Write a file atomically."""
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    hidden.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    hidden.replace(path)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Descriptions of changed inputs. Traces and rules may be added or removed, but not change."""
    changed = [
        f"{what} was {before[what]!r} and is {now[what]!r}"
        for what in ("script", "arguments")
        if before[what] != now[what]
    ]
    if not changed and before["content of the script"] != now["content of the script"]:
        changed.append(f"the content of {now['script']} has changed")
    for kind, what in (("traces", "trace"), ("rules", "the module of rule")):
        for name, digest in now[kind].items():
            if before[kind].get(name, digest) != digest:
                changed.append(f"{what} {name} has changed")
    return changed
