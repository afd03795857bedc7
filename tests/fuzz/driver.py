"""Runs cases under the real launcher, and compares what comes out with the oracle."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore

from tests.fuzz import script
from tests.fuzz.families import shapes_program
from tests.fuzz.oracle import Oracle
from tests.fuzz.program import Case

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-10
"""Largest relative distance that counts as the same, in float64."""
HANG = 180.0
"""Seconds without any sign of life after which a case counts as hung."""
NUM_WORKERS = 4

REFUSALS: dict[str, str] = {
    "accumulation": r"accumulation by hand\?",
    "kept batch": r"a step on a batch that is not that of a pass over an AdaptiveDataLoader",
    "over the end": r"a backward pass came for a step that is over|counted as left out",
    "undecided": r"nothing tells whose they are",
    "unequal parts": r"one loss over batches of several loaders",
    "fewer rows": r"collate_fn has made \d+ rows of",
    "nothing left": r"collate_fn fails if none is left",
    "hook": r"a hook on .* in the backward pass",
    "in turn": r"in turn need one micro-batch per step",
}
"""Refusals that are right where a program has them in its list, by name: a regular expression of
the sentence that resilin raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one case."""

    case: Case
    kind: str
    """`same`, `refused`, or a failure: `different`, `error`, `hung`, `restart loop`."""
    detail: str = ""
    distance: float = 0.0
    kills: int = 0
    """SIGKILLs that have happened: a case may end before one that is planned."""
    terms: int = 0
    """SIGTERMs that have happened."""
    lives: int = 0

    @property
    def failed(self) -> bool:
        return self.kind not in ("same", "refused")


# Running ---------------------------------------------------------------------------------------


def run_cases(
    cases: Sequence[Case], folder: Path, *, on_done: Callable[[Outcome], None] = lambda _: None
) -> list[Outcome]:
    """Runs cases one after the other in one launched job of four workers."""
    for number, case in enumerate(cases):
        twin = [(f"{number:04d}-twin", case.twin)] if case.has_twin else []
        for name, each in (*twin, (f"{number:04d}", case)):
            path = folder / "cases" / name
            path.mkdir(parents=True)
            (path / "case.json").write_text(each.to_json())
            (path / "script.py").write_text(source(each))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
        "FUZZ_PORT": str(store.port),
        "FUZZ_LAUNCH": uuid.uuid4().hex,
        "RESILIN_LOG": os.environ.get("RESILIN_LOG", "WARNING"),
    }
    environ.pop("RESILIN_MEMORY_DIR", None)
    command = [sys.executable, "-m", "resilin.cli", "run", "--warm"]
    command += ["--nproc", str(max(max(case.worlds) for case in cases)), "--run-dir", "off"]
    command += ["--memory-dir", str(folder / "unused"), "--max-restarts", "100000"]
    command += [str(ROOT / "tests" / "fuzz" / "worker.py"), str(folder)]
    outcomes: list[Outcome] = []
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environ, start_new_session=True
        )
    try:
        for number, case in enumerate(cases):
            path = folder / "cases" / f"{number:04d}"
            twin_state: dict[str, Any] | Outcome | None = None
            if case.has_twin:
                _wait(path.with_name(path.name + "-twin"), process)
                twin_state = final_state(case.twin, path.with_name(path.name + "-twin"))
            _wait(path, process)
            outcomes.append(judge(case, path, twin_state))
            on_done(outcomes[-1])
        process.wait(timeout=60)
    finally:
        _end(process)
        del store
    return outcomes


def _oracle(case: Case, got: dict[str, Any]) -> dict[str, Any]:
    """What plain PyTorch makes of the program; from the run comes only what nobody else knows."""
    torch.set_num_threads(1)
    if case.family == "shapes":
        plain = shapes_program.oracle(case.options)
        if "refused" not in got:
            return plain.final_state()
        return {**got, "parameters": plain.trajectory[got["steps"]]}
    diary = got.get("diary")
    expected = Oracle(case.program, diary).run()
    return expected if diary is None else {**expected, "diary": diary}


def _wait(path: Path, process: subprocess.Popen[bytes]) -> None:
    """Waits until the case is done; one that hangs is ended, and the workers with it."""
    seen: set[str] = set()
    since = time.monotonic()
    while not (path / "done").exists():
        now = {entry.name for entry in path.iterdir()} | _written(path)
        if now != seen:
            seen, since = now, time.monotonic()
        if process.poll() is not None and not (path / "done").exists():
            (path / "done").write_text(f"launcher ended with {process.returncode}")
        elif time.monotonic() - since > HANG:
            life = len(list(path.glob("life-*"))) - 1
            record = {"type": "Hung", "message": f"for {HANG} s", "time": 0, "traceback": ""}
            (path / f"error-{life}-driver").write_text(json.dumps(record))
            for pid in _descendants(process.pid):
                _signal(pid, signal.SIGUSR2)
            time.sleep(1)
            for pid in _descendants(process.pid):
                if b"worker.py" in _command(pid) or _is_worker(pid, process.pid):
                    _signal(pid, signal.SIGKILL)
            since = time.monotonic()
        time.sleep(0.02)


def _written(path: Path) -> set[str]:
    """Signs that something is happening, besides new files."""
    with contextlib.suppress(OSError):
        return {f"{e.name}@{e.stat().st_mtime_ns}" for e in (path / "memory").iterdir()}
    return set()


def _descendants(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, timeout=10)
    mine = [int(line) for line in found.stdout.split()]
    return mine + [other for child in mine for other in _descendants(child)]


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _is_worker(pid: int, agent: int) -> bool:
    """Workers are forked from a server that is a child of the agent."""
    with contextlib.suppress(OSError, IndexError):
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return parent != agent and b"forkserver" in _command(parent)
    return False


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _end(process: subprocess.Popen[bytes]) -> None:
    pids = _descendants(process.pid)
    if process.poll() is None:
        process.kill()
    for pid in pids:
        _signal(pid, signal.SIGKILL)
    process.wait()


# Judging ---------------------------------------------------------------------------------------


def source(case: Case) -> str:
    """The script of a case."""
    if case.family == "loops":
        return script.write(case.program)
    written: str = family(case.family).write(case.options)
    return written


def final_state(case: Case, path: Path) -> dict[str, Any] | Outcome:
    """What all replicas of the last life wrote down alike, or what became of the case instead."""
    lives = len(list(path.glob("life-*")))
    facts: dict[str, Any] = {"case": case, **_counted(path)}
    how = (path / "done").read_text()
    if how == "error":
        errors = [json.loads(p.read_text()) for p in path.glob(f"error-{lives - 1}-*")]
        first = min(errors, key=lambda error: error["time"])
        told = f"{first['type']}: {first['message']}"
        for name in family(case.family).refusals(case.options) if case.family == "shapes" else ():
            if re.search(REFUSALS[name], told):
                # Until then, all steps must have been right.
                got = torch.load(next(path.glob(f"refused-{lives - 1}-*.pt")))
                return {**got, "refused": name}
        kind = "hung" if first["type"] == "Hung" else "error"
        return Outcome(**facts, kind=kind, detail=told + "\n" + first["traceback"])
    if how != "ran":
        return Outcome(**facts, kind="restart loop", detail=how)
    replicas = [torch.load(p) for p in sorted(path.glob(f"result-{lives - 1}-*.pt"))]
    if len(replicas) != case.world(lives - 1):
        return Outcome(**facts, kind="error", detail=f"{len(replicas)} replicas have reported")
    for number, other in enumerate(replicas[1:], 1):
        where = difference(replicas[0], other, 0.0)[0]
        if where:
            told = f"replicas 0 and {number} differ: {where}"
            return Outcome(**facts, kind="different", detail=told)
    state: dict[str, Any] = replicas[0]
    return state


def judge(case: Case, path: Path, twin: dict[str, Any] | Outcome | None = None) -> Outcome:
    """Compares what the replicas wrote down with each other and with what had to come out."""
    got = final_state(case, path)
    if isinstance(got, Outcome):
        return got
    if isinstance(twin, Outcome):
        # The undisturbed run itself has failed, and the disturbed one has not.
        return dataclasses.replace(twin, case=case, detail=f"undisturbed: {twin.detail}")
    expected = _oracle(case, got) if twin is None else twin
    where, distance = difference(expected, got, TOLERANCE)
    refused = got.get("refused", "")
    return Outcome(
        case=case,
        kind="different" if where else "refused" if refused else "same",
        detail=where or refused,
        distance=distance,
        **_counted(path),
    )


def _counted(path: Path) -> dict[str, int]:
    how = [marker.read_text() for marker in path.glob("killed-*")]
    return {
        "kills": sum(text.startswith("kill") for text in how),
        "terms": sum(text.startswith("term") for text in how),
        "lives": len(list(path.glob("life-*"))),
    }


def family(name: str) -> Any:
    """The module of a family: `write(options)`, `options(dice)`, `HOOKS`."""
    return importlib.import_module(f"tests.fuzz.families.{name}")


def difference(expected: Any, got: Any, tolerance: float, name: str = "") -> tuple[str, float]:
    """Where two states differ, in words (empty if nowhere), and the largest relative distance."""
    if isinstance(expected, dict) and isinstance(got, dict):
        if expected.keys() != got.keys():
            odd = sorted(map(str, expected.keys() ^ got.keys()))
            return f"{name}: only one side has {odd}", 1.0
        pairs = [(f"{name}.{k}".lstrip("."), expected[k], got[k]) for k in expected]
    elif isinstance(expected, list | tuple) and isinstance(got, list | tuple):
        if len(expected) != len(got):
            return f"{name}: expected {len(expected)} values and got {len(got)}", 1.0
        pairs = [(f"{name}[{i}]", e, g) for i, (e, g) in enumerate(zip(expected, got, strict=True))]
    else:
        return _value_difference(expected, got, tolerance, name)
    found, worst = "", 0.0
    for key, e, g in pairs:
        where, distance = difference(e, g, tolerance, key)
        found, worst = found or where, max(worst, distance)
    return found, worst


def _value_difference(expected: Any, got: Any, tolerance: float, name: str) -> tuple[str, float]:
    numbers = isinstance(expected, int | float) and isinstance(got, int | float)
    if not numbers and not (isinstance(expected, Tensor) and isinstance(got, Tensor)):
        return ("", 0.0) if expected == got else (f"{name}: expected {expected}, got {got}", 1.0)
    e, g = torch.as_tensor(expected).double(), torch.as_tensor(got).double()
    if e.shape != g.shape:
        return f"{name}: expected shape {tuple(e.shape)}, got {tuple(g.shape)}", 1.0
    if torch.equal(e, g):
        return "", 0.0
    length = max(float(e.norm()), 1e-3)
    distance = float((e - g).norm()) / length
    if distance <= tolerance:
        return "", distance
    return f"{name}: expected {e.tolist()}, got {g.tolist()} (relative {distance:.3g})", distance


@contextlib.contextmanager
def scratch() -> Any:
    """A folder in memory, removed in the end."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="resilin-fuzz-", dir=place))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
