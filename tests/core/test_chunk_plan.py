"""Who holds, stages and reads which part of a state, as arithmetic: no process, no tensor."""

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from resilin.core.chunk_dealing import Dealing, keepers, ranges_kept
from resilin.core.chunk_reading import Pieces, readers, spare
from resilin.core.mesh_spread import Spread
from resilin.core.placement import Placement, check_split, overlap

FSDP, HSDP = Spread((4,), (0,)), Spread((2, 2), (None, 0))
SAME_DIM, OTHER_DIM = Spread((2, 2), (0, 0), order=(1, 0)), Spread((2, 3), (0, 1))


def rectangles(spread, shape):
    return [spread.placement(shape, process) for process in range(spread.num_processes)]


@pytest.mark.parametrize("shape", [(8, 6), (7, 5), (3, 2), (1, 9), (10,), (0, 4)])
@pytest.mark.parametrize(
    "spread", [FSDP, HSDP, Spread((2, 2), (0, 0)), SAME_DIM, OTHER_DIM, Spread((), ())]
)
def test_rectangles_of_all_groups_are_the_whole_tensor(spread, shape):
    if any(dim is not None and dim >= len(shape) for dim in spread.splits):
        with pytest.raises(ValueError, match=r"must be dimensions of the shape"):
            spread.rectangles(shape)
        return
    found = rectangles(spread, shape)
    groups = spread.groups()
    check_split("x", shape, [found[group[0]] for group in groups])
    for group in groups.tolist():
        assert len({found[process] for process in group}) == 1
        for process in group:
            assert spread.holders(process) == tuple(group)
    assert len(groups) * spread.num_holders == spread.num_processes


def test_splits_are_those_of_chunk_and_in_their_order():
    assert [(each.offsets[0], each.sizes[0]) for each in rectangles(FSDP, (6, 2))] == [
        (0, 2),
        (2, 2),
        (4, 2),
        (6, 0),
    ]
    # FSDP splits what tensor parallelism has left: process 1 is the first of the second half.
    found = [(each.offsets[0], each.sizes[0]) for each in rectangles(SAME_DIM, (10,))]
    assert found == [(0, 3), (5, 3), (3, 2), (8, 2)]
    found = [(each.offsets[0], each.sizes[0]) for each in rectangles(Spread((2, 2), (0, 0)), (10,))]
    assert found == [(0, 3), (3, 2), (5, 3), (8, 2)]


@pytest.mark.parametrize("arguments", [((2,), ()), ((2, 2), (0, 1), (0, 0)), ((2,), (0,), (1,))])
def test_a_spread_that_is_none_is_refused(arguments):
    with pytest.raises(ValueError, match="must have as many splits"):
        Spread(*arguments)


def test_holders_share_their_chunks_evenly_and_each_row_once():
    rng = random.Random(0)
    for _ in range(100):
        num = rng.randint(1, 7)
        chunks = [
            tuple(rng.randint(0, 200) for _ in range(rng.randint(0, 3)))
            for _ in range(rng.randint(0, 6))
        ]
        itemsizes = [rng.choice([1, 2, 4, 8]) for _ in chunks]
        dealing = Dealing(chunks, itemsizes, num)
        pieces = [[] for _ in chunks]
        loads = []
        for holder in range(num):
            load = 0
            for part in dealing.parts(holder):
                piece = Placement.whole(chunks[part.chunk]).part(*part[1:])
                pieces[part.chunk].append(piece)
                load += piece.num_elements * itemsizes[part.chunk]
            loads.append(load)
        for chunk, found in zip(chunks, pieces, strict=True):
            if math.prod(chunk):
                check_split("x", chunk, found)
        assert dealing.loads().tolist() == loads
        assert sum(loads) == dealing.num_bytes
        # A boundary is off by half a row: of a long dimension, or of the longest there is.
        rows = [
            math.prod(c) * i // (max(c, default=1) if max(c, default=1) < 16 * num else 16 * num)
            for c, i in zip(chunks, itemsizes, strict=True)
            if math.prod(c)
        ]
        assert max(loads) <= dealing.num_bytes / num + max(rows, default=0)


def test_one_large_tensor_is_shared_as_well():
    dealing = Dealing([(100_000, 64), (3,), (64,)], [4, 4, 4], 125)
    assert dealing.loads().max() <= 1.01 * dealing.num_bytes / 125


@pytest.mark.parametrize("num", [1, 2, 3, 8])
@pytest.mark.parametrize("copies", [1, 2, 3])
def test_a_range_is_kept_by_so_many_holders(num, copies):
    kept = [ranges_kept(holder, num, copies) for holder in range(num)]
    for each in range(num):
        assert sum(each in ranges for ranges in kept) == min(copies, num)
        assert each in kept[each]
        assert keepers(each, num, copies) == tuple(h for h in range(num) if each in kept[h])


def test_pieces_that_overlap_are_found_among_many():
    rng = random.Random(1)
    for num in (2, 40):
        spread = Spread((num, 3), (0, 1))
        held = rectangles(spread, (101, 11))
        pieces = Pieces(held)
        for _ in range(20):
            begin, end = sorted(rng.choices(range(102), k=2))
            wanted = Placement((101, 11), (begin, 2), (end - begin, 7))
            found = dict(pieces.overlapping(wanted))
            expected = {
                i: common for i, each in enumerate(held) if (common := overlap(each, wanted))
            }
            assert found == expected
            assert sum(common.num_elements for common in found.values()) == wanted.num_elements
        with pytest.raises(ValueError, match=r"a piece of \(101, 11\) cannot be a piece of"):
            list(pieces.overlapping(Placement.whole((100, 11))))


def test_each_piece_is_read_once_by_those_that_need_most():
    sizes = [10] * 12
    assert readers(sizes, [1, 1, 1]) == [0] * 4 + [1] * 4 + [2] * 4
    assert readers(sizes, [30, 0, 90]) == [0] * 3 + [2] * 9
    assert readers(sizes, [90, 30, 0]) == [0] * 9 + [1] * 3
    assert readers(sizes, [0, 0]) == [0] * 12
    assert readers([], [1, 1]) == []
    assert readers([0, 0], [0, 7]) == [1, 1]
    uneven = np.random.default_rng(0).integers(0, 1000, 500).tolist()
    loads = np.bincount(readers(uneven, [1] * 7), weights=uneven)
    assert max(loads) <= sum(uneven) / 7 + 1000


def test_those_that_read_least_for_themselves_read_for_others():
    assert spare([10, 0], 10) == [0, 10]
    assert spare([10, 0], 20) == [5, 15]
    assert spare([4, 9, 0], 2) == [0, 0, 2]
    assert spare([3], 7) == [7]
    assert spare([5, 5], 0) == [0, 0]
    assert spare([], 0) == []
    rng = random.Random(2)
    for _ in range(100):
        loads = [rng.randint(0, 50) for _ in range(rng.randint(1, 6))]
        extra = rng.randint(0, 200)
        taken = spare(loads, extra)
        assert extra <= sum(taken) < extra + len(loads)
        highest = max(load + more for load, more in zip(loads, taken, strict=True))
        assert highest <= max(max(loads), -(-(sum(loads) + extra) // len(loads)))


def test_a_plan_for_a_thousand_processes():
    benchmark = Path(__file__).parents[2] / "benchmarks" / "chunk_plan.py"
    ran = subprocess.run(
        [sys.executable, str(benchmark), "--quick", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["uncovered"] == 0
