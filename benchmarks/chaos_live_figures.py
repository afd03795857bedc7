"""What the diaries of a live job say: see `chaos_live`."""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]
"""One line of a diary: an event, its time, the process, and its generation."""


def longest_wait(lines: list[Line], happened: Sequence[tuple[float, float]]) -> float:
    """The longest time between two signs of a process that trains, without that of noticing.

    Args:
        lines: The diaries.
        happened: Times of the faults, and how long each takes to be noticed.
    """
    signs: dict[int, list[float]] = defaultdict(list)
    for line in sorted(lines, key=lambda line: line["time"]):
        if line["event"] == "done" or signs[line["pid"]]:
            signs[line["pid"]].append(line["time"])
    waits = [0.0]
    for times in signs.values():
        for before, after in itertools.pairwise(times):
            # The part of it in which nobody could know: a last step may end right after the fault.
            noticing = sum(
                max(0.0, min(after, when + notice) - max(before, when)) for when, notice in happened
            )
            waits.append(after - before - noticing)
    return round(max(waits), 2)


def made_again(lines: list[Line]) -> int:
    """Steps that all replicas of a generation had completed, and that a later one made again."""
    who: dict[int, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    replicas: dict[int, int] = {}
    for line in lines:
        if line["event"] == "done":
            who[line["step"]][line["generation"]].add(line["pid"])
            replicas[line["generation"]] = line["replicas"]
    again = 0
    for generations in who.values():
        for generation, pids in generations.items():
            later = any(other > generation for other in generations)
            again += later and len(pids) == replicas[generation]
    return again


def unequal(lines: list[Line]) -> int:
    """Steps after which replicas of one generation have different parameters."""
    found: dict[tuple[int, int], set[int]] = defaultdict(set)
    for line in lines:
        if line["event"] == "done":
            found[line["generation"], line["step"]].add(line["checksum"])
    return sum(len(checksums) > 1 for checksums in found.values())


def both_commit(lines: list[Line]) -> int:
    """Steps that two groups have made beside each other, as two halves of a network might.

    When a group breaks, some of its members may have one step more than those who continue. They
    are gone then: nobody who continues has that step, and nobody has a second one.
    """
    made: dict[int, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for line in lines:
        if line["event"] == "done":
            made[line["generation"]][line["pid"]].add(line["step"])
    wrong = 0
    for older, newer in itertools.combinations(sorted(made), 2):
        began = min(min(steps) for steps in made[newer].values()) - 1
        for pid, steps in made[older].items():
            ahead = {step for step in steps if step > began}
            wrong += len(ahead - {began + 1}) + bool(ahead and pid in made[newer])
    return wrong


def footprint_of(process: int | str) -> dict[str, int]:
    """Memory in MB, threads, descriptors and ports of a process."""
    own = Path(f"/proc/{process}")
    status = dict(line.split(":", 1) for line in (own / "status").read_text().splitlines())
    descriptors, sockets = 0, set()
    for name in os.listdir(own / "fd"):
        try:
            target = os.readlink(own / "fd" / name)
        except OSError:  # that of the listing itself
            continue
        descriptors += 1
        if target.startswith("socket:["):
            sockets.add(target[len("socket:[") : -1])
    tables = [(own / "net" / name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    return {
        "memory": int(status["VmRSS"].split()[0]) // 1024,
        "threads": int(status["Threads"]),
        "descriptors": descriptors,
        "ports": sum(line.split()[9] in sockets for line in itertools.chain(*tables)),
    }


SIZES = {
    "memory": "memory_growth_mb",
    "threads": "thread_growth",
    "descriptors": "descriptor_growth",
    "ports": "port_growth",
}
"""Names of figures, by those of footprints."""


def growth(lines: list[Line]) -> dict[str, float]:
    """What the process that has seen most generations has more at its end than in its third.

    Among generations of the same size, of which it has seen most: a group of more members has more
    connections. Also the number of all of its generations.
    """
    own: dict[int, list[Line]] = defaultdict(list)
    for line in lines:
        if line["event"] == "done" and "memory" in line:
            own[line["pid"]].append(line)
    longest = max(own.values(), key=lambda steps: len({m["generation"] for m in steps}), default=[])
    generations = sorted({line["generation"] for line in longest})
    figures: dict[str, float] = {
        "generations": len(generations),
        **dict.fromkeys(SIZES.values(), 0),
    }
    of_size: dict[int, set[int]] = defaultdict(set)
    for line in longest:
        of_size[line["replicas"]].add(line["generation"])
    generations = sorted(max(of_size.values(), key=len, default=set()))
    if len(generations) < 6:
        return figures
    early = [line for line in longest if line["generation"] in generations[2:5]]
    late = [line for line in longest if line["generation"] in generations[-3:]]
    for name, figure in SIZES.items():
        # A group that was given up keeps its threads until its timeout: the least counts.
        figures[figure] = min(m[name] for m in late) - min(m[name] for m in early)
    return figures


def growth_of_launcher(sizes: Sequence[dict[str, int]]) -> dict[str, float]:
    """What the launcher that has lived longest has more at its end than in its third fault."""
    names = {f"launcher_{figure}": name for name, figure in SIZES.items()}
    own: dict[int, list[dict[str, int]]] = defaultdict(list)
    for each in sizes:
        own[each["pid"]].append(each)
    longest = max(own.values(), key=len, default=[])
    if len(longest) < 8:
        return dict.fromkeys(names, 0)
    return {
        figure: min(m[name] for m in longest[-3:]) - min(m[name] for m in longest[2:5])
        for figure, name in names.items()
    }
