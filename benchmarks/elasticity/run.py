"""The elasticity benchmark: the same task and the same faults under all contenders.

    python benchmarks/elasticity/run.py                  # all contenders, about 40 minutes
    python benchmarks/elasticity/run.py --only torchrun  # this one anew, merged into the JSON
    python benchmarks/elasticity/run.py --more           # one turn more, added to the JSON
    python benchmarks/elasticity/run.py --quick --check  # resilin alone, about a minute

`docs/elasticity.md` says what is measured and how. Each contender has a small script in
`contenders/`, and a few lines in `launch.py`.
"""

from __future__ import annotations

import json
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import figures
import torch
from faults import KINDS, NUM_HOSTS, Fault, schedule, spot
from hosts import Run
from launch import CONTENDERS, Contender

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
OUT = ROOT / "docs" / "figures" / "elasticity.json"
NUM_SAMPLES, BATCH = 1797, 60
EPOCHS, PAUSE = 12, 0.005
QUICK_EPOCHS, QUICK_GAP = 4, (4.0, 6.0)
QUICK = ("resilin live", "resilin restart")
LIMIT, QUICK_LIMIT = 150.0, 180.0
"""Seconds after which a run is given up."""
SPOT = "capacity/gcp_spot_a100.csv"
SPOT_SECONDS = 60.0
TURNS = 2
YARDSTICK = "torchrun"
"""The contender whose undisturbed run is goodput 1."""
TOLERANCE = 1e-9
"""Largest relative deviation of final parameters of resilin, in float64."""


def traces(turn: int, *, quick: bool) -> dict[str, list[Fault]]:
    """The faults of one turn, by the name of the trace."""
    if quick:
        return {"schedule": schedule(turn, ("kill", "lose"), QUICK_GAP)}
    found = {"schedule": schedule(turn, KINDS[turn % len(KINDS)])}
    path = Path(os.environ.get("RESILIN_DATA", ROOT.parent / "shared" / "data")) / SPOT
    if path.exists():
        from resilin.lab.replay import read_trace

        market: Any = read_trace(path)
        found["spot"] = spot(market.times, market.replicas, SPOT_SECONDS, turn)
    else:
        print(f"no spot trace: {path} does not exist, see docs/elasticity.md", file=sys.stderr)
    return found


def carry_out(
    contender: Contender,
    faults: Sequence[Fault],
    folder: Path,
    epochs: int,
    pause: float,
    limit: float,
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Runs a contender once: what its ledgers say, and its final parameters."""
    settings = {"ELASTICITY_EPOCHS": f"{epochs}", "ELASTICITY_PAUSE": f"{pause}"}
    run = Run(contender, folder, settings)
    run.carry_out(faults, limit)
    steps = figures.lineage(run.lines)
    repeated, missing = figures.samples(steps, NUM_SAMPLES, epochs)
    when = figures.progress(run.lines)
    result: dict[str, Any] = {
        "finished": run.finished,
        "steps": max(steps, default=0),
        "redone": figures.redone(run.lines),
        "repeated": repeated,
        "missing": missing if run.finished else None,
        "spared": run.spared,
        "relaunched": run.relaunched,
        "faults": len(run.happened),
        "load": round(os.getloadavg()[0], 1),
    }
    if run.began is not None:
        end = when[-1][0] if run.finished else run.ended
        result["seconds"] = round(end - run.began, 2)
        result["useful"] = figures.useful(steps, run.began)
        times = [time for time, _ in run.happened]
        result["waits"] = [round(wait, 2) for wait in figures.waits(run.lines, times, end)]
    state = torch.load(folder / "final.pt", weights_only=True) if run.finished else None
    return result, state


def distance(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Relative distance of two sets of parameters."""
    a, b = (torch.cat([value.flatten() for value in state.values()]) for state in (ours, theirs))
    return float((a - b).norm() / b.norm())


class Bench:
    """Runs contenders, and keeps what they have shown."""

    def __init__(self, folder: Path, *, quick: bool) -> None:
        self._folder, self._quick = folder, quick
        self._epochs = QUICK_EPOCHS if quick else EPOCHS
        self._limit = QUICK_LIMIT if quick else LIMIT
        self._calm: dict[tuple[str, ...], dict[str, Any]] = {}
        """Final parameters without faults, by scripts."""
        self.results: dict[str, dict[str, Any]] = {}
        """By contender and trace."""

    def run(self, name: str, trace: str, faults: Sequence[Fault], turn: int) -> None:
        import task

        contender = CONTENDERS[name]
        folder = self._folder / f"{name.replace(' ', '-')}-{trace}-{turn}-{time.time_ns() % 10**6}"
        # Without faults, only the time of the yardstick is asked for.
        pause = 0.0 if trace == "calm" and name != YARDSTICK else PAUSE
        result, state = carry_out(contender, faults, folder, self._epochs, pause, self._limit)
        if state is not None:
            result["loss"] = task.loss_of(state)
            if trace == "calm":
                self._calm[contender.scripts] = state
            elif contender.scripts in self._calm:
                calm = self._calm[contender.scripts]
                loss = task.loss_of(calm)
                result["deviation"] = distance(state, calm)
                result["loss_deviation"] = abs(result["loss"] - loss) / loss
        self.results.setdefault(name, {}).setdefault(trace, []).append(result)
        print(f"{name}, {trace} {turn}: {json.dumps(result)}", file=sys.stderr, flush=True)
        if not result["finished"]:
            for path in sorted(folder.glob("*.log")):
                print(f"--- {path.name}", path.read_text(errors="replace")[-2000:], file=sys.stderr)
        shutil.rmtree(folder)


def summary(results: dict[str, Any], ideal: float | None) -> dict[str, Any]:
    """Figures of one contender.

    Args:
        results: By trace, those of each turn.
        ideal: Seconds that one sample needs of an undisturbed run of torchrun; None if unknown.
    """
    found: dict[str, Any] = {}
    for trace, runs in results.items():
        entry: dict[str, Any] = {"runs": len(runs), "finished": sum(r["finished"] for r in runs)}
        if ideal is not None:
            entry["goodput"] = figures.middle(
                r["useful"] * ideal / r["seconds"] if "seconds" in r else 0.0 for r in runs
            )
        pauses = [wait for r in runs for wait in r.get("waits", [])]
        entry["next_step_seconds"] = figures.middle(pauses)
        for key in ("seconds", "redone", "repeated", "missing", "deviation", "loss_deviation"):
            entry[key] = figures.middle(r.get(key) for r in runs)
        found[trace] = entry
    return found


def tell(results: dict[str, Any], *, quick: bool, seconds: float) -> dict[str, Any]:
    """All figures, from what each run has shown."""
    base = results.get(YARDSTICK, {}).get("calm", [])
    ideal = base[0]["seconds"] / base[0]["useful"] if base and not quick else None
    plain = (HERE / "contenders" / "plain.py").read_text()
    table = {}
    for name, contender in CONTENDERS.items():
        if name in results:
            changed = figures.lines_changed(plain, contender.text)
            table[name] = {"versions": contender.versions(), "lines_changed": changed}
            table[name] |= summary(results[name], ideal)
    ours = [
        run
        for name, traces in results.items()
        if name.startswith("resilin")
        for runs in traces.values()
        for run in runs
    ]
    return {
        "resilin_unfinished": sum(not run["finished"] for run in ours),
        "resilin_repeated": sum(run["repeated"] for run in ours),
        "resilin_missing": sum(run["missing"] or 0 for run in ours),
        "resilin_redone": sum(run["redone"] for run in ours),
        "resilin_deviation": max((run.get("deviation", 0.0) for run in ours), default=0.0),
        "about": {
            "hosts": NUM_HOSTS,
            "batch": BATCH,
            "epochs": QUICK_EPOCHS if quick else EPOCHS,
            "pause_per_sample": PAUSE,
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "limit_seconds": QUICK_LIMIT if quick else LIMIT,
            "seconds": round(seconds),
        },
        "contenders": table,
    }


def main() -> None:
    sys.path.insert(0, str(HERE.parent))
    from harness import finish, make_parser

    parser = make_parser(__doc__ or "")
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), help="these alone")
    parser.add_argument("--turns", type=int, default=TURNS, help="runs of each trace (%(default)s)")
    parser.add_argument("--more", action="store_true", help="one turn more, beside those there are")
    parser.add_argument("--out", type=Path, help=f"where to write the JSON ({OUT}, none if quick)")
    args = parser.parse_args()
    names = args.only or (QUICK if args.quick else list(CONTENDERS))
    for name in names:
        if lacking := " ".join(CONTENDERS[name].lacking()):
            parser.error(f"{name}: pip install {lacking}, or choose others with --only")
    out = args.out or (None if args.quick else OUT)
    kept = {}
    if out and (args.only or args.more) and out.exists():
        kept = json.loads(out.read_text())["runs"]
    turns = range(1 if args.quick else args.turns)
    if args.more:
        # Those that have most turns set the number of the next one, and so its faults.
        known = max((len(traces["schedule"]) for traces in kept.values()), default=0)
        turns = range(known, known + 1)
    dice, began = random.Random(turns.start), time.time()

    def keep() -> dict[str, Any]:
        results = {**kept, **bench.results}
        if args.more:
            results = {**kept, **{name: added(name) for name in bench.results}}
        told = tell(results, quick=args.quick, seconds=time.time() - began)
        if out is not None:
            out.write_text(json.dumps({**told, "runs": results}, indent=1) + "\n")
        return told

    def added(name: str) -> dict[str, Any]:
        """What there is of a contender, and its new runs; the first undisturbed run counts."""
        old, new = kept.get(name, {}), bench.results[name]
        joined = {trace: old.get(trace, []) + new.get(trace, []) for trace in {**old, **new}}
        return {**joined, "calm": old.get("calm", new["calm"])}

    # One that is told to end takes its hosts with it.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    folder = Path(tempfile.mkdtemp(prefix="elasticity-"))
    try:
        bench = Bench(folder, quick=args.quick)
        for name in names[:1] if args.quick else names:
            bench.run(name, "calm", [], 0)
        for turn in turns:
            for trace, faults in traces(turn, quick=args.quick).items():
                for name in dice.sample(names, len(names)):
                    bench.run(name, trace, faults, turn)
                    keep()
    finally:
        shutil.rmtree(folder)
    told = keep()
    limits = {key: 0.0 for key in told if key.startswith("resilin_")}
    finish("elasticity", told, limits | {"resilin_deviation": TOLERANCE}, check=args.check)


if __name__ == "__main__":
    main()
