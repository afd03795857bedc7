"""The decisions of recovery over random histories; `benchmarks/protocol.py` runs a million."""

import pytest

from resilin.core.recovery import (
    COPY_SHARE,
    LOSS_EVERY,
    CopyFile,
    Held,
    Version,
    candidates,
    complete_copies,
    next_generation,
    seconds_between_copies,
    shares_written,
)
from tests.protocol.mutations import MUTATIONS
from tests.protocol.simulator import Violation, run


def test_no_history_loses_repeats_or_mixes_anything():
    counts = run(range(2000))
    # Histories without faults, or that all end in a refusal, would show nothing.
    assert counts["generations"] > 4000
    assert counts["refused"] < 100


# Rare coincidences, found by a million histories. In the first eight the judgement took a state of
# a job that had begun anew for one that the winner came from; in the last two a state that was
# complete by luck gave way to the copy before it, while a branch left behind had more steps.
FOUND = [75253, 210478, 315290, 327310, 342749, 604783, 668162, 779778, 194622, 554477]


@pytest.mark.parametrize("seed", FOUND)
def test_a_history_that_was_once_judged_wrong(seed):
    run(range(seed, seed + 1))


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_rule_is_caught(name):
    with pytest.raises(Violation):
        run(range(3000), MUTATIONS[name])


def test_a_state_that_cannot_be_read_does_not_lend_its_number():
    assert next_generation([]) == 0
    assert next_generation([Version(3, 10), Version(5, 2)]) == 6


@pytest.mark.parametrize("num", [1, 2, 3, 7])
def test_each_share_is_written_by_two_replicas_where_there_are_two(num):
    writers = [share for replica in range(num) for share in shares_written(replica, num)]
    assert sorted(writers) == sorted(list(range(num)) * min(2, num))


def test_files_of_two_branches_do_not_complete_each_other():
    def file(share, branch):
        return CopyFile(version=Version(1, 2, 0, branch), host=0, share=share, num_shares=2)

    assert complete_copies([file(0, 7), file(1, 8)]) == {}
    assert list(complete_copies([file(0, 7), file(1, 7)])) == [Version(1, 2, 0, 7)]


def test_a_state_with_missing_parts_gives_way_to_the_copy_before_it_alone():
    old, before, newest = Version(0, 0), Version(0, 8), Version(0, 9)
    states = [
        Held(version=newest, num_replicas=2, previous=before, parts={0: True}),
        Held(version=before, num_replicas=2, previous=old, parts={0: True, 1: True}),
        Held(version=old, num_replicas=2, parts={0: False, 1: False}),
    ]
    assert [each.version for each in candidates(states)] == [before, newest, old]
    lost = [states[0], Held(version=before, num_replicas=2, parts={0: True}), states[2]]
    assert [each.version for each in candidates(lost)] == [newest, before, old]


def test_memory_is_tried_before_storage_for_the_same_state():
    state = Held(version=Version(2, 5), num_replicas=1, parts={0: False})
    order = candidates([state], [Version(2, 5), Version(2, 7), Version(1, 9)])
    assert [(each.version.step, each.source) for each in order] == [
        (7, "checkpoint"),
        (5, "memory"),
        (5, "checkpoint"),
        (9, "checkpoint"),
    ]


@pytest.mark.parametrize("copy_seconds", [1e-4, 0.02, 1.0, 15.0])
@pytest.mark.parametrize("trained", [4000.0, 36000.0])
def test_no_other_time_between_copies_loses_less(copy_seconds, trained):
    def lost_share(between):
        return copy_seconds / between + between / 2 / LOSS_EVERY

    between = seconds_between_copies(copy_seconds, trained)
    assert copy_seconds / between <= COPY_SHARE
    least = lost_share(between)
    assert all(lost_share(between * other) > least for other in (0.5, 0.9, 1.1, 2))


def test_copies_are_frequent_after_a_start():
    apart = [seconds_between_copies(0.001, trained) for trained in (0.0, 0.5, 5.0, 50.0, 500.0)]
    assert apart == sorted(set(apart))
    assert apart[:2] == [0.001 / COPY_SHARE, pytest.approx(0.1)]
    assert seconds_between_copies(0.0, 100.0) == 0  # Not measured yet: every step.


def test_copies_that_take_long_keep_to_their_share_of_the_time():
    assert seconds_between_copies(60.0, 1e6) == pytest.approx(60.0 / COPY_SHARE)
