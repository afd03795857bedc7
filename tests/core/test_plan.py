from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilin.core.plan import BatchBounds, BatchPlan, PlanError

batches = st.integers(1, 5000)
replica_counts = st.integers(1, 64)
limits = st.integers(1, 300)


def sizes(plan: BatchPlan) -> list[int]:
    """All micro-batches but the fillers."""
    return [size for r in range(plan.replicas) for size in plan.micro_batches(r) if size]


def assert_alike(plan: BatchPlan) -> None:
    """All replicas run as many micro-batches, with fillers only where samples are too few."""
    assert plan.steps == max(1, -(-max(map(plan.share, range(plan.replicas))) // plan.batch_size))
    for replica in range(plan.replicas):
        parts = plan.micro_batches(replica)
        assert len(parts) == plan.steps
        assert sum(parts) == plan.share(replica)
        assert max(parts) - min(parts) <= 1
        fillers = parts.count(0)
        assert fillers == max(0, plan.steps - plan.share(replica))
        # No gradient has to be put aside for a filler.
        assert not any(parts[:fillers])
        assert list(parts[fillers:]) == sorted(parts[fillers:], reverse=True)


@given(batches, replica_counts, st.none() | limits)
def test_equal_replicas_split_exactly(batch, replicas, max_local):
    plan = BatchPlan(batch, replicas, max_local_bsz=max_local)
    every = sizes(plan)
    assert sum(every) == batch
    assert max(every) - min(every) <= 1
    assert min(every) >= 1
    assert max_local is None or max(every) <= max_local
    assert plan.batch_size == max(every)
    assert_alike(plan)
    shares = [plan.share(r) for r in range(replicas)]
    assert max(shares) - min(shares) <= 1
    # No more accumulation than the maximum forces.
    assert plan.steps == (1 if max_local is None else -(-max(shares) // max_local))


@given(batches, replica_counts, limits, limits, st.booleans())
def test_a_plan_keeps_every_bound_or_is_refused(batch, replicas, a, b, accumulate):
    lower, upper = min(a, b), max(a, b)
    bounds = BatchBounds(local_bsz_bounds=(lower, upper), gradient_accumulation=accumulate)
    smallest, largest = batch // replicas, -(-batch // replicas)
    steps = -(-largest // upper)
    if smallest // steps < lower or (steps > 1 and not accumulate):
        # Every refusal names two of the numbers that clash.
        with pytest.raises(PlanError, match=r"\(\d+\).*\(\d+\)"):
            bounds.plan(batch, replicas)
        return
    plan = bounds.plan(batch, replicas)
    assert all(lower <= size <= upper for size in sizes(plan))
    assert_alike(plan)
    assert lower == 0 or all(all(plan.micro_batches(r)) for r in range(replicas))
    assert accumulate or plan.steps == 1


def test_256_over_64():
    rows = {1: (64, 4), 2: (64, 2), 3: (43, 2), 4: (64, 1), 5: (52, 1)}
    for replicas, (local, steps) in rows.items():
        plan = BatchPlan(256, replicas, max_local_bsz=64)
        assert (plan.batch_size, plan.steps) == (local, steps)
        assert (plan.gpus, plan.global_batch_size) == (replicas, 256)


def test_300_over_64_does_not_exceed_the_maximum():
    # Rounding the number of micro-batches down would give 4 of 75.
    assert BatchPlan(300, 1, max_local_bsz=64).micro_batches(0) == (60,) * 5


def test_pieces_are_as_equal_as_they_can_be():
    # A compiled model meets one size instead of 8 and 2, and never more than two in a step.
    assert BatchPlan(10, 1, max_local_bsz=8).micro_batches(0) == (5, 5)
    for batch, replicas, largest in product(range(1, 40), range(1, 5), range(1, 12)):
        plan = BatchPlan(batch, replicas, max_local_bsz=largest)
        found = {size for r in range(replicas) for size in plan.micro_batches(r)}
        assert len(found) == (1 if batch % (replicas * plan.steps) == 0 else 2)
        assert max(found) - min(found) <= 1


def test_more_replicas_than_samples_leaves_some_without():
    plan = BatchPlan(2, 4)
    assert [plan.micro_batches(r) for r in range(4)] == [(1,), (1,), (0,), (0,)]


def test_a_lower_bound_of_zero_lets_replicas_go_without():
    bounds = BatchBounds(10, (0, 4))
    assert bounds.max_replicas is None
    assert [bounds.plan(2, 3).micro_batches(r) for r in range(3)] == [(1,), (1,), (0,)]


def test_a_replica_with_fewer_samples_than_micro_batches_runs_fillers_first():
    plan = BatchPlan(7, 3, max_local_bsz=1)
    assert [plan.micro_batches(r) for r in range(3)] == [(1, 1, 1), (0, 1, 1), (0, 1, 1)]


def test_replicas_of_unequal_shares_run_the_same_number_of_micro_batches():
    plan = BatchPlan(256, 3, max_local_bsz=64, shares=(128, 64, 64))
    assert [plan.micro_batches(r) for r in range(3)] == [(64, 64), (32, 32), (32, 32)]
    with pytest.raises(PlanError, match=r"share of 64 needs 2 micro-batches.*\(32\).*\(40\)"):
        BatchPlan(256, 3, max_local_bsz=64, min_local_bsz=40, shares=(128, 64, 64))


def test_eleven_replicas_cannot_be_scheduled():
    bounds = BatchBounds(max_batch_size=1000, local_bsz_bounds=(100, 200))
    assert bounds.max_replicas == 10
    bounds.check_replicas(10)
    with pytest.raises(PlanError, match=r"11 replicas cannot be scheduled.*\(100\).*\(1000\)"):
        bounds.check_replicas(11)
    with pytest.raises(PlanError, match="11 replicas"):
        bounds.plan(900, 11)
    assert bounds.possible_replicas(550, range(1, 12)) == [1, 2, 3, 4, 5]


def test_the_table_names_what_is_not_possible():
    table = BatchBounds(local_bsz_bounds=(40, 64)).table(256, [1, 2, 4, 7])
    assert table.splitlines()[:4] == [
        "replicas  local batch x accumulation",
        "       1  64 x 4",
        "       2  64 x 2",
        "       4  64 x 1",
    ]
    assert "7 replicas cannot be scheduled" in table.splitlines()[4]


def test_bounds_leave_holes_when_they_are_narrow():
    with pytest.raises(PlanError, match=r"share of 70 needs 2 micro-batches.*\(35\).*\(60\)"):
        BatchBounds(local_bsz_bounds=(60, 64)).plan(70, 1)


def test_accumulation_can_be_off():
    bounds = BatchBounds(local_bsz_bounds=(1, 64), gradient_accumulation=False)
    assert bounds.plan(128, 2).steps == 1
    with pytest.raises(
        PlanError, match=r"\(129\) exceeds replicas \(2\) x largest local batch \(64\)"
    ):
        bounds.plan(129, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BatchPlan(0, 1), r"global_batch_size \(0\) must be at least 1"),
        (lambda: BatchPlan(8, 0), r"replicas \(0\)"),
        (lambda: BatchPlan(8.0, 1), r"global_batch_size \(8.0\) must be a whole number"),
        (lambda: BatchPlan(8, 1, max_local_bsz=0), r"max_local_bsz \(0\)"),
        (lambda: BatchPlan(8, 2, shares=(8,)), r"shares \(\(8,\)\) must be those of 2 replicas"),
        (lambda: BatchPlan(8, 2).share(2), r"replica \(2\) must be in \[0, 2\)"),
        (lambda: BatchBounds(local_bsz_bounds=(9, 8)), r"\(9\) must be at most .* \(8\)"),
        (lambda: BatchBounds(local_bsz_bounds=(-1, 8)), r"lower bound .* \(-1\)"),
        (lambda: BatchBounds(local_bsz_bounds=(0, 0)), r"upper bound .* \(0\)"),
        (lambda: BatchBounds(local_bsz_bounds=8), "must be a pair"),
        (lambda: BatchBounds(7, (8, 9)), r"max_batch_size \(7\) must be at least .* \(8\)"),
        (lambda: BatchBounds(100).plan(101, 1), r"\(101\) exceeds max_batch_size \(100\)"),
        (lambda: BatchBounds().possible_replicas(0, [1]), r"global_batch_size \(0\)"),
    ],
)
def test_errors_name_the_value_and_the_rule(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_plan_for_many_replicas_builds_nothing_of_their_number():
    plan = BatchPlan(10**6 + 3, 10**5, max_local_bsz=4)
    assert plan.micro_batches(99_999) == (4, 3, 3)
    assert plan.micro_batches(0) == (4, 4, 3)
