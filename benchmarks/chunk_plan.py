"""State in chunks at full size: 100 GB of it on 1,000 processes of 125 hosts.

    python benchmarks/chunk_plan.py [--quick] [--check]

Plans a model of 8.3 billion parameters with AdamW in float32, as 1-D FSDP, HSDP and DP x TP: which
rectangles each process holds, what it stages and writes of them, and, after a change to 768
processes, who reads which piece and what a process gets from whom. Prints the CPU time of a plan
for all processes and of the part that one process computes, the most bytes of memory copies on a
host (two turns of each), how far a process is above its part, elements that no process stages, and
the size of the table by which all hosts tell each other which pieces they have in memory. No
process is started, and torch is not loaded.
"""

from __future__ import annotations

import json
import math
import time
from typing import Any, NamedTuple

import numpy as np
from harness import finish, parse_args

from resilin.core.chunk_dealing import Dealing
from resilin.core.chunk_reading import Pieces, readers
from resilin.core.chunk_table import Chunk, Summary, order, runs, runs_told, shapes_told
from resilin.core.mesh_spread import Numbers, Spread
from resilin.core.placement import Placement, Sizes

PER_HOST = 8
TURNS = 2
"""Files of memory copies that are written alternately."""
ITEMSIZE = 4
LAYERS, WIDTH, HIDDEN, TOKENS = 33, 4096, 14_336, 128_256
ONE_D, HSDP, DP_TP, AFTER = (1000,), (125, 8), (125, 8), (768,)
SAMPLED = (0, 383, 767)
"""Processes whose part of the restore is planned."""


class Tensor(NamedTuple):
    """A tensor of the state."""

    shape: Sizes
    split: int | None
    """The dimension that tensor parallelism splits."""


class Plan(NamedTuple):
    """Bytes of a plan."""

    held: Numbers
    """Bytes of the chunks that each process holds, each divided by its holders."""
    staged: Numbers
    """Bytes that each process stages."""
    uncovered: int
    """Elements that no process stages, or more than one."""


def state() -> list[Tensor]:
    """All tensors that are split: parameters, and two averages of each."""
    layer = [
        *[Tensor((WIDTH, WIDTH), dim) for dim in (0, 1)],
        *[Tensor((WIDTH // 4, WIDTH), 0)] * 2,
        *[Tensor((HIDDEN, WIDTH), 0)] * 2,
        Tensor((WIDTH, HIDDEN), 1),
        *[Tensor((WIDTH,), None)] * 2,
    ]
    ends = [Tensor((TOKENS, WIDTH), 0), Tensor((TOKENS, WIDTH), 0), Tensor((WIDTH,), None)]
    return 3 * [*layer * LAYERS, *ends]


def spread_of(tensor: Tensor, mesh: Sizes, parallel: str) -> Spread:
    """The spread of a tensor over a mesh."""
    if parallel == "fsdp":
        return Spread(mesh, (0,))
    if parallel == "hsdp":
        return Spread(mesh, (None, 0))
    # FSDP splits what tensor parallelism has left.
    return Spread(mesh, (0, tensor.split), order=(1, 0))


def plan(tensors: list[Tensor], mesh: Sizes, parallel: str) -> Plan:
    """What every process of a mesh stages."""
    num = math.prod(mesh)
    held, staged = np.zeros(num), np.zeros(num)
    uncovered = 0
    by_spread: dict[Spread, list[Tensor]] = {}
    for tensor in tensors:
        by_spread.setdefault(spread_of(tensor, mesh, parallel), []).append(tensor)
    for spread, its in by_spread.items():
        sizes = {shape: spread.rectangles(shape)[1] for shape in {each.shape for each in its}}
        if spread.num_holders == 1:
            mine = sum(sizes[each.shape].prod(axis=1) for each in its) * ITEMSIZE
            held += mine
            staged += mine
        for group in spread.groups() if spread.num_holders > 1 else ():
            chunks = [tuple(sizes[each.shape][group[0]].tolist()) for each in its]
            dealing = Dealing(chunks, [ITEMSIZE] * len(chunks), len(group))
            held[group] += dealing.num_bytes / len(group)
            staged[group] += dealing.loads()
        whole = sum(math.prod(each.shape) for each in its)
        found = sum(
            int(sizes[each.shape][spread.groups()[:, 0]].prod(axis=1).sum()) for each in its
        )
        uncovered += abs(whole - found)
    uncovered += abs(sum(math.prod(each.shape) for each in tensors) - int(staged.sum()) // ITEMSIZE)
    return Plan(held, staged, uncovered)


class Restore(NamedTuple):
    """The part of one process in a restore."""

    ratio: float
    """Bytes that it reads, over those that it needs."""
    seconds: float
    """Time of its plan."""
    sources: int
    """Processes that it gets something from."""


def restore(tensors: list[Tensor], process: int) -> Restore:
    """The part of one process in a change of 1-D FSDP from 1,000 processes to 768."""
    written, wanted = Spread(ONE_D, (0,)), Spread(AFTER, (0,))
    shapes = {each.shape for each in tensors}
    tables = {shape: written.rectangles(shape) for shape in shapes}
    # As a checkpoint says it: pieces by their writers, of each writer all tensors.
    lengths = np.stack([tables[each.shape][1].prod(axis=1) for each in tensors], axis=1) * ITEMSIZE
    needs = sum(wanted.rectangles(each.shape)[1].prod(axis=1) for each in tensors) * ITEMSIZE
    pieces = {
        shape: Pieces([Placement(shape, tuple(o), tuple(s)) for o, s in _rows(*table)])
        for shape, table in tables.items()
    }
    began = time.process_time()
    reader = np.array(readers(lengths.ravel().tolist(), needs.tolist())).reshape(lengths.shape)
    sources: set[int] = set()
    for column, tensor in enumerate(tensors):
        mine = wanted.placement(tensor.shape, process)
        found = 0
        for number, common in pieces[tensor.shape].overlapping(mine):
            sources.add(int(reader[number, column]))
            found += common.num_elements
        assert found == mine.num_elements
    seconds = time.process_time() - began
    read = np.bincount(reader.ravel(), weights=lengths.ravel(), minlength=AFTER[0])
    needed = needs > 0
    assert not read[~needed].any()
    return Restore(float((read[needed] / needs[needed]).max()), seconds, len(sources))


class Told(NamedTuple):
    """The table of all pieces in the memory of hosts, as processes tell it to each other."""

    num_bytes: int
    """Bytes of JSON that all of them tell together, and each of them gets."""
    seconds: float
    """Time in which one process makes its own part of it, and reads all."""


def table(tensors: list[Tensor], every: int) -> Told:
    """The table of 1-D FSDP: each host has the pieces of its processes.

    Args:
        tensors: The state.
        every: 1 to look at all hosts; else one of so many, each of which stands for as many.
    """
    spread = Spread(ONE_D, (0,))
    shapes = {f"model.layers.{i}.weight": each.shape for i, each in enumerate(tensors)}
    told: list[Summary] = []
    seconds = 0.0
    for first in range(0, math.prod(ONE_D), PER_HOST * every):
        places = {
            shape: [spread.placement(shape, first + local) for local in range(PER_HOST)]
            for shape in set(shapes.values())
        }
        chunks = [
            Chunk(name, place, "float32")
            for name, shape in shapes.items()
            for place in places[shape]
            if place.num_elements
        ]
        began = time.process_time()
        found = runs(sorted(chunks, key=order))
        mine = Summary(found[::PER_HOST], shapes)
        seconds = max(seconds, time.process_time() - began)
        told += [mine, *(Summary(found[i::PER_HOST], shapes) for i in range(1, PER_HOST))]
    texts = [json.dumps(each.rows) for each in told]
    everyone = [json.loads(text) for text in texts]
    lists: dict[str, Any] = {}
    for process, (whole, rows) in enumerate(everyone):
        if not {whole, *(row[0] for row in rows)} <= lists.keys():
            lists.update(told[process].lists(process, everyone))
    began = time.process_time()
    known: dict[str, list[Placement]] = {name: [] for name in shapes_told(everyone, lists)}
    for said in everyone:
        for run in runs_told(said, lists):
            for name in run.names:
                known[name].append(run.placement)
    seconds += (time.process_time() - began) * every
    if every == 1:
        for name, shape in shapes.items():
            assert sum(place.num_elements for place in known[name]) == math.prod(shape)
    return Told(sum(map(len, texts)) * every + len(json.dumps(lists)), seconds)


def _rows(offsets: Numbers, sizes: Numbers) -> zip[tuple[list[int], list[int]]]:
    return zip(offsets.tolist(), sizes.tolist(), strict=True)


def _most(found: Numbers, expected: Numbers) -> float:
    """The largest ratio; processes that hold nothing are to have nothing."""
    there = expected > 0
    assert not found[~there].any()
    return float((found[there] / expected[there]).max())


def main() -> None:
    args = parse_args(__doc__ or "")
    tensors = state()
    total = sum(math.prod(each.shape) for each in tensors) * ITEMSIZE
    plans, times = {}, {}
    for parallel, mesh in (("fsdp", ONE_D), ("hsdp", HSDP), ("dp_tp", DP_TP)):
        began = time.process_time()
        plans[parallel] = plan(tensors, mesh, parallel)
        times[parallel] = time.process_time() - began
    told = table(tensors, every=25 if args.quick else 1)
    found = [restore(tensors, process) for process in SAMPLED[: 1 if args.quick else None]]
    hosts = [each.staged.reshape(-1, PER_HOST).sum(axis=1).max() for each in plans.values()]
    figures = {
        "tensors": len(tensors),
        "total_gb": round(total / 1e9, 1),
        **{f"{name}_plan_s": round(seconds, 3) for name, seconds in times.items()},
        "plan_s": round(max(times.values()), 3),
        "host_gb": round(TURNS * float(max(hosts)) / 1e9, 3),
        "staged_ratio": round(max(_most(each.staged, each.held) for each in plans.values()), 4),
        "uncovered": sum(each.uncovered for each in plans.values()),
        "read_ratio": round(max(each.ratio for each in found), 3),
        "restore_plan_s": round(max(each.seconds for each in found), 3),
        "sources": max(each.sources for each in found),
        "table_mb": round(told.num_bytes / 1e6, 3),
        "table_s": round(told.seconds, 3),
    }
    limits = {
        "plan_s": 2.0,
        "host_gb": 2.0,
        "staged_ratio": 1.1,
        "uncovered": 0,
        "read_ratio": 1.5,
        "restore_plan_s": 2.0,
        "table_mb": 2.0,
        "table_s": 2.0,
    }
    finish("chunk_plan", figures, limits, check=args.check)


if __name__ == "__main__":
    main()
