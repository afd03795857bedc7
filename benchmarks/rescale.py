"""Time without training when members change: live, restarted, and a bare script under torchrun.

The same model with AdamW (25 and 300 MB of state) trains on 2, 3 and 4 replicas as

- `live`: `resilin run --live --warm`, whose survivors keep running;
- `warm`: `resilin run --warm`, which forks new workers from a process that has imported torch;
- `bare`: plain DDP under torchrun, which reads a `torch.save` file when it is started again. It has
  the rendezvous settings of `resilin run`, because torchrun's own wait for half a minute.

They take turns, each in jobs of its own. One job has one launcher: a worker is killed, stopped
(SIGSTOP), asked to leave, and replaced. Another one has a launcher per worker: one launcher leaves,
one joins, one is lost together with its worker; and the authority is killed: the etcd of a live
job, which comes back, or the store of a rendezvous, which would come back empty.

`seconds` are those from the fault until all replicas have completed a step; `stall` is the time
between two steps around the change, less a usual step (`rescale_figures.py` has the parts).
Limits, for live over warm: the median of the ratios after SIGKILL and after the loss of a host,
which includes the lease; of the stalls of planned changes the median and the largest. A stall on
one machine is compared with a restart after SIGKILL, which is the shortest restart there is; that
of a launcher with the same change of a job that restarts. Further, in seconds: from noticed to
wrapped where nothing is transferred, and SIGSTOP beyond heartbeat and two steps. Warm over bare
must be below 1.

The full form also measures `cold` (without `--warm`) and, once, torchrun's default settings, on two
replicas with 300 MB. The quick form has 25 MB, two replicas, SIGKILL, join, leave and the loss of a
host, and checks only ratios of which it is far away.

    python benchmarks/rescale.py --check           # half an hour; needs etcd
    python benchmarks/rescale.py --quick --check   # about 2 minutes
"""

from __future__ import annotations

import itertools
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import finish, make_parser
from rescale_figures import Change, summary
from rescale_runs import HEARTBEAT, Job
from rescale_scenes import Found, one_machine, several

LIMITS = {
    "failures": 0,
    "num_left_out": 0,
    "live_kill": 0.25,
    "live_host": 0.35,
    "live_stall": 0.15,
    "live_stall_most": 0.4,
    "live_wrapped_seconds": 0.15,
    "live_stop_beyond_seconds": 0.5,
    "warm_kill": 1.0,
    "warm_host": 1.0,
}
QUICK_LIMITS = {
    "failures": 0,
    "num_left_out": 0,
    "live_kill": 0.5,
    "live_host": 1.0,
    "live_stall_most": 1.0,
    "warm_kill": 1.0,
}
"""A single sample beside other work: whoever restarts by mistake is at 1 or above."""
TAKEN = ("live", "warm", "bare")
Scene = Callable[..., Found]


@contextmanager
def place() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="resilin-rescale-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


class Bench:
    """Runs jobs, and keeps what they have shown."""

    def __init__(self, folder: Path, *, quick: bool) -> None:
        self._folder, self._quick = folder, quick
        self._numbers = itertools.count()
        self.found: dict[tuple[str, str, str, int, int], Found] = {}
        """By contender, scene, size, replicas and turn."""
        self.failed: list[str] = []
        """Jobs that did not recover, and why."""

    def run(self, scene: Scene, contender: str, size: str, num: int, turn: int) -> None:
        agents, workers = (1, num) if scene is one_machine else (num, 1)
        name = f"{contender}-{scene.__name__}-{size}-{num}-{next(self._numbers)}"
        job = Job(contender, size, self._folder / name, agents, workers)

        def tell(kind: str, change: Change) -> None:
            parts = ", ".join(f"{phase} {part:.2f}" for phase, part in change.phases.items())
            text = f"{name} {kind}: {change.seconds:.2f} s ({parts}), stall {change.stall:.2f}"
            print(f"{text}, step {change.step_seconds:.2f}", file=sys.stderr, flush=True)

        quick = self._quick or contender in ("cold", "default")
        try:
            found = scene(job, turn, quick=quick, tell=tell)
        except (RuntimeError, TimeoutError) as error:
            # The others are measured still; the check fails.
            self.failed.append(f"{name}: {error}")
            print(f"--- {error}", file=sys.stderr)
            for path in sorted(job.folder.glob("host-*.log")):
                print(f"--- {path.name}", path.read_text(errors="replace")[-3000:], file=sys.stderr)
            return
        finally:
            job.end()
            shutil.rmtree(job.folder)
        if found.authority:
            print(f"{name} authority: {found.authority}", file=sys.stderr, flush=True)
        self.found[contender, scene.__name__, size, num, turn] = found

    def changes(self, contender: str, scene: str, kind: str) -> dict[Any, Change]:
        """Changes of one kind, by size, replicas and turn."""
        return {
            key[2:]: found.changes[kind]
            for key, found in self.found.items()
            if key[:2] == (contender, scene) and kind in found.changes
        }

    def ratios(self, ours: dict[Any, float], over: dict[Any, Change], value: str) -> list[float]:
        """Ratios within a turn: the machine may be busier in another one."""
        both = ours.keys() & over.keys()
        return [ours[key] / getattr(over[key], value) for key in sorted(both)]


def spread(figures: dict[str, Any], name: str, values: list[float]) -> None:
    """Puts the median and the largest of some values among the figures."""
    if values:
        figures[name] = round(statistics.median(values), 3)
        figures[f"{name}_most"] = round(max(values), 3)
        figures[f"{name}_num"] = len(values)


def judge(bench: Bench) -> dict[str, Any]:
    """The figures that have limits."""
    figures: dict[str, Any] = {}
    one, more = one_machine.__name__, several.__name__
    for name, scene, kind in (("kill", one, "kill"), ("host", more, "host")):
        live, warm, bare, cold = (
            bench.changes(contender, scene, kind) for contender in (*TAKEN, "cold")
        )
        seconds = {key: change.seconds for key, change in live.items()}
        spread(figures, f"live_{name}", bench.ratios(seconds, warm, "seconds"))
        spread(figures, f"live_{name}_over_bare", bench.ratios(seconds, bare, "seconds"))
        for contender, taken in (("warm", warm), ("cold", cold)):
            seconds = {key: change.seconds for key, change in taken.items()}
            spread(figures, f"{contender}_{name}", bench.ratios(seconds, bare, "seconds"))
    stalls: list[float] = []
    for scene, kind in itertools.product((one, more), ("leave", "join", "join_again")):
        ours = {key: c.stall for key, c in bench.changes("live", scene, kind).items()}
        if scene == one:
            stalls += bench.ratios(ours, bench.changes("warm", one, "kill"), "seconds")
        else:
            stalls += bench.ratios(ours, bench.changes("warm", more, kind), "stall")
    spread(figures, "live_stall", stalls)
    wrapped = [
        change.wrapped
        for scene, kind in (
            (one, "kill"),
            (one, "stop"),
            (one, "leave"),
            (more, "leave"),
        )
        for change in bench.changes("live", scene, kind).values()
    ]
    spread(figures, "live_wrapped_seconds", wrapped)
    stopped = bench.changes("live", one, "stop").values()
    beyond = [change.seconds - HEARTBEAT - 2 * change.step_seconds for change in stopped]
    spread(figures, "live_stop_beyond_seconds", beyond)
    return figures


def rows(bench: Bench) -> dict[str, Any]:
    """Everything that was measured, by change, contender, size and replicas."""
    taken: dict[str, list[Change]] = {}
    for (contender, scene, size, num, _), found in bench.found.items():
        for kind, change in found.changes.items():
            taken.setdefault(f"{kind} {scene} {contender} {size} {num}", []).append(change)
    told: dict[str, Any] = {name: summary(changes) for name, changes in sorted(taken.items())}
    for (contender, _, size, num, _), found in bench.found.items():
        if found.authority:
            told[f"authority {contender} {size} {num}"] = found.authority
    return told


def main() -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no more jobs after that")
    args = parser.parse_args()
    sizes = ["small"] if args.quick else ["small", "large"]
    numbers = [2] if args.quick else [2, 3, 4]
    began = time.time()
    deadline = began + 60 * args.minutes
    with place() as folder:
        bench, left_out = Bench(folder, quick=args.quick), list[str]()
        for turn, (num, size) in enumerate(itertools.product(numbers, sizes)):
            for scene, contender in itertools.product((one_machine, several), TAKEN):
                if time.time() < deadline:
                    bench.run(scene, contender, size, num, turn)
                else:
                    left_out.append(f"{contender} {scene.__name__} {size} {num}")
        if not args.quick and time.time() < deadline:
            # Over the bare ones of the turn with as many replicas and as much state.
            turn = 1
            for scene in (one_machine, several):
                bench.run(scene, "cold", "large", 2, turn)
            bench.run(several, "default", "large", 2, turn)
        figures = {**judge(bench), "seconds": round(time.time() - began), "rows": rows(bench)}
        figures |= {"failures": len(bench.failed), "failed": bench.failed}
        figures |= {"num_left_out": len(left_out), "left_out": left_out}
    limits = QUICK_LIMITS if args.quick else LIMITS
    limits = {key: limit for key, limit in limits.items() if key in figures}
    finish("rescale", figures, limits, check=args.check)


if __name__ == "__main__":
    main()
