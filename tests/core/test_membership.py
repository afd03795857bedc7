"""Who is in a job after any history of changes, as every one of its members computes it."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilin.core.membership import (
    Member,
    Membership,
    Roster,
    change,
)


def roster(*names, parts=1, **facts):
    return Roster(members=tuple(Member(name=each, hosts=("h",) * parts) for each in names), **facts)


@st.composite
def histories(draw):
    """A first roster, and for each change who leaves and who joins; names are never used again."""
    parts = draw(st.integers(1, 3))
    numbers = iter(range(1000))

    def new():
        hosts = draw(st.lists(st.sampled_from("abc"), min_size=parts, max_size=parts))
        return Member(name=f"r{next(numbers)}", hosts=tuple(hosts))

    first = Roster(members=tuple(new() for _ in range(draw(st.integers(1, 5)))))
    rosters = [first]
    for _ in range(draw(st.integers(0, 8))):
        old = rosters[-1]
        leaving = draw(st.sets(st.sampled_from(old.names), max_size=len(old.names) - 1))
        joining = [new() for _ in range(draw(st.integers(0, 3)))]
        rosters.append(change(old, leaving=leaving, joining=joining))
    return rosters


@given(histories())
def test_every_place_is_taken_once_in_every_generation(rosters):
    for generation, each in enumerate(rosters):
        parts = len(each.members[0].hosts)
        views = [each.membership(name, part) for name in each.names for part in range(parts)]
        num = len(views)
        assert [view.process for view in views] == list(range(num))
        assert [view.replica for view in views] == [process // parts for process in range(num)]
        assert {view.generation for view in views} == {generation}
        assert {view.num_processes for view in views} == {num}
        assert {view.num_replicas for view in views} == {len(each.names)}
        hosts = {view.host for view in views}
        assert hosts == set(range(views[0].num_hosts))
        for host in hosts:
            here = [view for view in views if view.host == host]
            assert [view.local_process for view in here] == list(range(len(here)))
            assert {view.num_local_processes for view in here} == {len(here)}
        assert [view.is_first for view in views] == [True, *[False] * (num - 1)]


@given(histories())
def test_those_that_stay_keep_their_order_and_come_first(rosters):
    for old, new in itertools.pairwise(rosters):
        stayed = tuple(name for name in old.names if name in new.names)
        assert new.names[: len(stayed)] == stayed
        assert stayed
        assert new.reformed
        # Replica 0 has been here at least as long as everybody else, so it has the state.
        assert new.names[0] in old.names


def test_one_for_one_is_another_generation_with_the_same_numbers():
    old = roster("a", "b", "c")
    new = change(old, leaving={"a"}, joining=[Member(name="d")])
    assert new.names == ("b", "c", "d")
    assert new.membership("b").replica == 0
    assert new.membership("c").num_replicas == old.membership("c").num_replicas
    assert new.membership("c").generation == 1
    assert change(new).membership("d").generation == 2


def test_a_sharded_replica_has_one_number_and_several_processes():
    each = roster("a", "b", parts=2).membership("b", 1)
    assert (each.replica, each.num_replicas) == (1, 2)
    assert (each.process, each.num_processes) == (3, 4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Membership(replica=2, num_replicas=2), r"replica \(2\) must be in \[0, num_rep"),
        (lambda: Membership(process=-1), r"process \(-1\)"),
        (lambda: Membership(generation=-1), r"generation \(-1\) must be at least 0"),
        (lambda: Roster(members=()), "at least 1 replica"),
        (lambda: roster("a", "a"), r"\(a, a\) must differ"),
        (lambda: Roster(members=(Member(name="a", hosts=()),)), "0 processes"),
        (
            lambda: Roster(members=(Member(name="a"), Member(name="b", hosts=("", "")))),
            "1, 2 processes",
        ),
        (lambda: roster("a").membership("b"), "'b' must be one of the members, a"),
        (lambda: roster("a").membership("a", 1), r"part \(1\) must be in \[0, 1\)"),
        (lambda: change(roster("a"), leaving={"b"}), "b cannot leave"),
        (lambda: change(roster("a"), joining=[Member(name="a")]), "a cannot join"),
        (lambda: change(roster("a"), leaving={"a"}), "nobody stays"),
    ],
)
def test_what_cannot_be_is_refused_in_words(make, words):
    with pytest.raises(ValueError, match=words):
        make()
