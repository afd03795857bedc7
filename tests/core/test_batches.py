"""A sample stream cut into batches: positions of steps, ends of epochs, the reference run."""

import pytest

from resilin.core.batches import Batches
from resilin.core.stream import SampleStream


def batches(tail="short", batch_size=4):
    return Batches(stream=SampleStream(10), tail=tail, batch_size=batch_size)


@pytest.mark.parametrize(
    ("tail", "spans"),
    [
        ("short", [range(0, 4), range(4, 8), range(8, 10), range(10, 14)]),
        ("drop", [range(0, 4), range(4, 8), range(10, 14)]),
        ("straddle", [range(0, 4), range(4, 8), range(8, 12), range(12, 16)]),
    ],
)
def test_steps_follow_each_other(tail, spans):
    data, position = batches(tail), 0
    for span in spans:
        assert data.span(position, 4) == span
        position = span.stop


def test_an_epoch_ends_before_a_tail_that_is_dropped():
    assert batches("drop").are_over(8, 10, 4)
    assert batches("drop").epoch(8, 4) == 1
    assert not batches("short").are_over(8, 10, 4)
    assert batches("short").epoch(8, 4) == 0
    assert batches("short").epoch_end(8, 4) == 10
    # A smaller batch still fits.
    assert not batches("drop").are_over(8, 10, 2)


@pytest.mark.parametrize(("tail", "steps"), [("short", 3), ("drop", 2), ("straddle", 2.5)])
def test_the_reference_run(tail, steps):
    data = batches(tail)
    assert data.steps_per_epoch == steps
    assert (data.reference.batch_size, data.reference.steps_per_epoch) == (4, steps)
    assert data.reference_steps(0, 10) == steps


def test_progress_counts_epochs_in_spite_of_rounding():
    data = batches()
    gains = 0.0
    for _ in range(30):  # not sum(), which since Python 3.12 makes up for the rounding
        gains += 0.1
    assert gains != 3
    assert data.epochs_of_progress(gains) == 1
    assert data.reaches(gains, 1)
    assert not data.reaches(2.9, 1)
