"""A million random histories of crashes, run through the decisions of recovery.

    python benchmarks/protocol.py [--quick] [--check]

A history is a job with one to three hosts, up to three replicas on each, one to five faults: killed
replicas, torn copies, lost hosts, hosts that come back, slow and damaged checkpoints, a memory file
system without room, a stop in order. What is kept and which state wins is decided by
`resilin.core.recovery` and `resilin.core.passes`, which the live job runs as well; see
`tests/protocol/simulator.py`. Figures: violations, time per history (CPU time of one process), and
how many deliberately broken rules were caught.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from harness import finish, parse_args

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.protocol.mutations import MUTATIONS
from tests.protocol.simulator import Violation, run

CHUNK = 5000


def histories(first: int) -> tuple[dict[str, int], float, str]:
    """Counts, CPU seconds and the first violation of one chunk of seeds."""
    began = time.process_time()
    try:
        counts, violation = run(range(first, first + CHUNK)), ""
    except Violation as error:
        counts, violation = {"histories": 0, "generations": 0, "refused": 0}, str(error)
    return counts, time.process_time() - began, violation


def caught(name: str) -> bool:
    """Whether the simulator sees that this rule is broken."""
    try:
        run(range(CHUNK), MUTATIONS[name])
    except Violation:
        return True
    return False


def main() -> None:
    args = parse_args(__doc__.partition("\n")[0])
    num = 20_000 if args.quick else 1_000_000
    with ProcessPoolExecutor(2) as pool:
        results = list(pool.map(histories, range(0, num, CHUNK)))
        seen = list(pool.map(caught, MUTATIONS))
    missed = [name for name, it in zip(MUTATIONS, seen, strict=True) if not it]
    violations = [text for _, _, text in results if text]
    for text in violations[:10]:
        print(text, file=sys.stderr)
    for name in missed:
        print(f"not caught: {name}", file=sys.stderr)
    total = sum(counts["histories"] for counts, _, _ in results)
    cpu_seconds = sum(spent for _, spent, _ in results)
    figures = {
        "histories": total,
        "generations": sum(counts["generations"] for counts, _, _ in results),
        "refused": sum(counts["refused"] for counts, _, _ in results),
        "violations": len(violations),
        "microseconds_per_history": round(cpu_seconds / max(total, 1) * 1e6, 1),
        "mutations": len(MUTATIONS),
        "mutations_missed": len(missed),
    }
    finish("protocol", figures, {"violations": 0, "mutations_missed": 0}, check=args.check)


if __name__ == "__main__":
    main()
