"""Random training programs under random kills, against plain PyTorch.

Each program is made from a seed: a loop with some of the features that people combine, a number of
replicas for each life of the job, and SIGKILLs at chosen points. It runs under `resilin run`; the
oracle runs the same program in one process without resilin, with the same global batches, in
float64. At the end parameters, optimizer, scheduler, averages and evaluations must be the same to a
relative 1e-10, and the same bits on all replicas. `docs/testing.md` describes it.

    python benchmarks/torture.py --check             # at least 300 programs and 300 kills
    python benchmarks/torture.py --quick --check     # a fixed list of cases, within 2 minutes
    python benchmarks/torture.py --seed new --minutes 30    # hunt: new seeds, failures are shrunk
    python benchmarks/torture.py --seed 1234         # one seed
    python benchmarks/torture.py --replay case.json  # one case that was kept
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import finish

from tests.fuzz.driver import Outcome, run_cases, scratch
from tests.fuzz.program import (
    Case,
    generate,
    generate_home,
    generate_sharded,
    generate_stream,
)
from tests.fuzz.shrink import keep, shrink

FUZZ = Path(__file__).parents[1] / "tests" / "fuzz"
FOUND = FUZZ / "found.jsonl"
"""Cases that showed a fault once. They are records and not seeds, so that they stay what they are
when the generator changes."""
BATCH = 20
"""Cases that share one launched job."""
QUICK_SEEDS = range(14)
"""Seeds of the quick form, after the cases that were found."""
QUICK_SHARDED = range(4)
"""Seeds of the quick form with sharded models."""
QUICK_STREAMS = (1, 8, 16, 17)
"""Seeds of the quick form whose data are streams: shards that skip, are read again, and have a
state, all of them killed."""
QUICK_SHAPES = range(12)
"""Seeds of the quick form whose loops have a shape of their own."""
NUM_PROGRAMS, NUM_KILLS = 300, 300
HOMES = ("lightning", "keras", "huggingface")
"""Families of programs that train within another framework; Accelerate is in the last one."""
NUM_SHARDED_PROGRAMS = 60
"""Programs with sharded models in the full form."""
NUM_STREAM_PROGRAMS = 40
"""Programs on streams in the full form."""
NUM_SHAPE_PROGRAMS = 100
"""Programs whose loops have a shape of their own in the full form."""
NUM_HOME_PROGRAMS = 12
"""Programs of each of these in the full form, compared with an undisturbed run of the same one."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the fixed list only")
    parser.add_argument("--check", action="store_true", help="exit 1 if anything is different")
    parser.add_argument("--seed", help="`new` for unused seeds, or a number to begin at")
    parser.add_argument(
        "--family",
        default="loops",
        help="loops, sharded, streams, shapes, or a module of families/",
    )
    parser.add_argument("--num", type=int, help="how many programs, from --seed on")
    parser.add_argument("--minutes", type=float, help="how long to hunt")
    parser.add_argument("--replay", type=Path, help="a case that was kept")
    parser.add_argument("--out", type=Path, default=Path("torture-failures"))
    parser.add_argument("--no-shrink", action="store_true", help="keep failures as they are")
    return parser.parse_args()


def found() -> list[Case]:
    lines = FOUND.read_text().splitlines() if FOUND.exists() else []
    return [Case.from_json(line) for line in lines if line.strip()]


def wanted(args: argparse.Namespace, outcomes: list[Outcome]) -> Iterator[list[Case]]:
    """Batches of cases, until there are enough."""
    if args.replay is not None:
        yield [Case.from_json(args.replay.read_text())]
        return
    if args.seed is not None:
        makers = {"loops": generate, "sharded": generate_sharded, "streams": generate_stream}
        make = makers.get(args.family, partial(generate_home, family=args.family))
        first = random.SystemRandom().randrange(10**6, 10**9) if args.seed == "new" else None
        start = first if first is not None else int(args.seed)
        if args.minutes is None:
            num = args.num or 1
            for begin in range(start, start + num, BATCH):
                yield [make(s) for s in range(begin, min(begin + BATCH, start + num))]
            return
        end = time.monotonic() + 60 * args.minutes
        while time.monotonic() < end:
            yield [make(seed) for seed in range(start, start + BATCH)]
            start += BATCH
        return
    cases = found() + [generate(seed) for seed in QUICK_SEEDS]
    sharded = range(NUM_SHARDED_PROGRAMS) if not args.quick else QUICK_SHARDED
    cases += [generate_sharded(seed) for seed in sharded]
    streams = range(NUM_STREAM_PROGRAMS) if not args.quick else QUICK_STREAMS
    cases += [generate_stream(seed) for seed in streams]
    shapes = range(NUM_SHAPE_PROGRAMS) if not args.quick else QUICK_SHAPES
    cases += [generate_home(seed, "shapes") for seed in shapes]
    yield from (cases[i : i + BATCH] for i in range(0, len(cases), BATCH))
    if args.quick:
        return
    for family in HOMES:
        yield [generate_home(seed, family) for seed in range(NUM_HOME_PROGRAMS)]
    start = QUICK_SEEDS.stop
    while len(outcomes) < NUM_PROGRAMS or sum(o.kills for o in outcomes) < NUM_KILLS:
        yield [generate(seed) for seed in range(start, start + BATCH)]
        start += BATCH


def tell(outcome: Outcome) -> None:
    first = outcome.detail.strip().partition("\n")[0][:200]
    name = "case" if outcome.case.seed is None else f"seed {outcome.case.seed}"
    told = f"{name}: {outcome.kind}, {outcome.kills} kills, {outcome.distance:.1e} {first}"
    print(told, file=sys.stderr, flush=True)


def fails_alike(outcome: Outcome, case: Case) -> bool:
    with scratch() as folder:
        again = run_cases([case], folder)[0]
    return again.kind == outcome.kind


def main() -> None:
    args = parse_args()
    began = time.monotonic()
    outcomes: list[Outcome] = []

    def done(outcome: Outcome) -> None:
        outcomes.append(outcome)
        tell(outcome)

    for cases in wanted(args, outcomes):
        with scratch() as folder:
            run_cases(cases, folder, on_done=done)
    failures = [outcome for outcome in outcomes if outcome.failed]
    for number, outcome in enumerate(failures):
        case = outcome.case
        if not args.no_shrink and not args.check:
            case = shrink(case, lambda case, outcome=outcome: fails_alike(outcome, case))
        name = f"{number}" if case.seed is None else f"seed-{case.seed}"
        print("kept", keep(case, outcome.detail, args.out / name), file=sys.stderr, flush=True)
    figures = {
        "programs": len(outcomes),
        "kills": sum(outcome.kills for outcome in outcomes),
        "terminated": sum(outcome.terms for outcome in outcomes),
        "lives": sum(outcome.lives for outcome in outcomes),
        "silent_differences": sum(outcome.kind == "different" for outcome in outcomes),
        "errors": sum(outcome.kind == "error" for outcome in outcomes),
        "hung": sum(outcome.kind in ("hung", "restart loop") for outcome in outcomes),
        "refusals": dict(Counter(o.detail for o in outcomes if o.kind == "refused")),
        "relative_distance": max((o.distance for o in outcomes if not o.failed), default=0.0),
        "failed_seeds": [outcome.case.seed for outcome in failures],
        "seconds": round(time.monotonic() - began),
    }
    full = not (args.quick or args.replay or args.seed)
    figures["programs_missing"] = max(0, NUM_PROGRAMS - len(outcomes)) if full else 0
    figures["kills_missing"] = max(0, NUM_KILLS - figures["kills"]) if full else 0
    limits = {
        "silent_differences": 0,
        "errors": 0,
        "hung": 0,
        "relative_distance": 1e-10,
        "programs_missing": 0,
        "kills_missing": 0,
    }
    finish("torture", figures, limits, check=args.check)


if __name__ == "__main__":
    main()
