"""Which part of a tensor is where, as arithmetic."""

import itertools
import math
import random
import time

import numpy as np
import pytest

from resilin.core.placement import Placement, check_split, deal, overlap


def rows(num, *lengths, width=3):
    """A tensor of `num` rows, split into so many rows each."""
    starts = itertools.accumulate(lengths, initial=0)
    return [
        Placement((num, width), (start, 0), (length, width))
        for start, length in zip(starts, lengths, strict=False)
    ]


def random_split(generator, shape):
    """Cuts a tensor in two, and the parts again, along any dimension."""
    pieces = [Placement.whole(shape)]
    for _ in range(generator.randrange(6)):
        piece = pieces.pop(generator.randrange(len(pieces)))
        dim = generator.randrange(len(shape))
        cut = generator.randint(0, piece.sizes[dim])
        for begin, size in ((0, cut), (cut, piece.sizes[dim] - cut)):
            offsets, sizes = list(piece.offsets), list(piece.sizes)
            offsets[dim] += begin
            sizes[dim] = size
            pieces.append(Placement(shape, tuple(offsets), tuple(sizes)))
    return pieces


def test_any_split_is_filled_from_any_other_one():
    generator = random.Random(0)
    for _ in range(300):
        shape = tuple(generator.randint(1, 5) for _ in range(generator.randint(1, 3)))
        whole = np.arange(math.prod(shape)).reshape(shape)

        def part(piece, whole=whole):
            region = zip(piece.offsets, piece.sizes, strict=True)
            return whole[tuple(slice(begin, begin + size) for begin, size in region)]

        held, wanted = random_split(generator, shape), random_split(generator, shape)
        check_split("x", shape, held)
        for target in wanted:
            found = np.full(target.sizes, -1)
            for source in held:
                common = overlap(source, target)
                if common is not None:
                    found[common.target] = part(source)[common.source]
            assert np.array_equal(found, part(target))


def test_scalars_and_empty_tensors_are_whole():
    for shape in ((), (0,), (0, 7)):
        piece = Placement.whole(shape)
        assert piece.is_whole
        check_split("x", shape, [piece])
    assert overlap(Placement.whole(()), Placement.whole(())).num_elements == 1


def test_an_uneven_split_may_have_empty_pieces():
    pieces = rows(3, 1, 1, 1, 0)
    check_split("x", (3, 3), pieces)
    assert not pieces[0].is_whole


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        (rows(4, 2, 1), "x has 12 elements, and its pieces have 9"),
        ([], "and its pieces have 0"),
        (rows(4, 2, 2) + rows(4, 2), "two pieces for the same elements"),
        (rows(5, 2, 3), r"has the shape \(4, 3\), and a piece of \(5, 3\)"),
        (
            [
                Placement((4, 3), (0, 0), (4, 2)),
                Placement((4, 3), (1, 2), (3, 1)),
                Placement((4, 3), (3, 1), (1, 1)),
            ],
            r"at \(0, 0\) of sizes \(4, 2\), and at \(3, 1\) of sizes \(1, 1\)",
        ),
    ],
)
def test_pieces_that_are_not_one_tensor_are_refused(pieces, message):
    with pytest.raises(ValueError, match=message):
        check_split("x", (4, 3), pieces)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((4,), (0, 0), (4,)), "as many dimensions"),
        (((4,), (2,), (3,)), "must be within the shape"),
        (((4,), (-1,), (2,)), "must be within the shape"),
        (((4,), (2,), (-1,)), "must be within the shape"),
    ],
)
def test_a_placement_outside_its_tensor_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Placement(*arguments)


def test_placements_of_different_tensors_have_nothing_in_common():
    with pytest.raises(ValueError, match="cannot be a piece of"):
        overlap(Placement.whole((2,)), Placement.whole((3,)))


def test_a_thousand_pieces_are_checked_in_no_time():
    pieces = rows(10_000, *[10] * 1000)
    random.Random(0).shuffle(pieces)
    began = time.perf_counter()
    check_split("x", (10_000, 3), pieces)
    # 0.003 s here; every pair would be half a million.
    assert time.perf_counter() - began < 1


def test_what_all_hold_is_dealt_out_evenly():
    sizes = {f"t{i}": size for i, size in enumerate([7, 1, 5, 5, 2, 0, 4])}
    dealt = deal(sizes, 3)
    assert sorted(name for share in dealt for name in share) == sorted(sizes)
    loads = [sum(sizes[name] for name in share) for share in dealt]
    assert max(loads) - min(loads) <= 4
    assert deal(dict(reversed(sizes.items())), 3) == dealt
