"""The rules of live membership over random histories of losses, returns, partitions and changes."""

import json
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilin.core import live
from resilin.core.forming import all_have_seen, heal, is_broken, next_move
from resilin.core.live import (
    Authority,
    Form,
    Join,
    Leave,
    NotLive,
    Remove,
    Renew,
    event_from_json,
    event_to_json,
)
from resilin.core.membership import Member, Roster
from resilin.core.recovery import Version
from tests.protocol.live_simulator import FAULTS, PLANNED, Rules, Violation, run


def test_no_history_loses_mixes_or_repeats_a_step():
    counts = run(range(2000))
    # Histories in which nothing happens would show nothing.
    assert counts["formed"] > 10_000
    assert counts["healed"] > 4000
    assert counts["returned"] > 300
    assert counts["late"] > 30
    assert counts["inside"] > 800
    assert counts["settled"] > 500


def test_planned_changes_drop_no_step():
    counts = run(range(1500), faults=PLANNED)
    assert counts["left"] > 3000
    assert counts["dropped"] == 0


def test_an_authority_without_its_memory_ends_the_live_job():
    counts = run(range(500), faults=(*FAULTS, "forget"))
    assert counts["forget"] > 100
    assert counts["restarts"] >= counts["forget"]


def _except(kind, change):
    """The rules, with another one for one kind of event."""

    def apply(authority, event):
        if isinstance(event, kind):
            return change(authority, event)
        return live.apply(authority, event)

    return Rules(apply=apply)


def _any_generation_forms(authority, event):
    if authority.formed is not None and event.generation <= authority.formed.generation:
        return authority
    members = tuple(Member(name=name) for name in event.names)
    reformed = event.generation > 0
    roster = Roster(generation=event.generation, members=members, reformed=reformed)
    return replace(authority, formed=roster, state=event.state)


def _removes_the_last_witness(authority, event):
    if len(authority.roster.names) == 1:
        return authority.remove(event.name)
    return replace(
        replace(authority, formed=None).remove(event.name),
        formed=authority.formed,
        least=authority.state,
    )


def _joiners_come(authority, event):
    after = authority.remove(event.name)
    if after.broken == authority.broken:
        return after
    members = (*after.roster.members, *after.waiting)
    return replace(after, roster=replace(after.roster, members=members), waiting=())


def _unformed_joiners_stay(authority, event):
    after = authority.remove(event.name)
    if after.broken == authority.broken:
        return after
    announced = [each for each in authority.roster.members if each.name not in after.roster.names]
    members = tuple(each for each in announced if each.name != event.name)
    return replace(
        after,
        roster=replace(after.roster, members=(*after.roster.members, *members)),
        waiting=tuple(each for each in after.waiting if each not in members),
    )


MUTATIONS = {
    "a state is known by its step alone": Rules(committed_in=lambda generation, before: 0),
    "a state half loaded counts as a whole one": Rules(loads=lambda loading: loading),
    "nobody breaks a group off": Rules(is_broken=lambda group, newest: False),
    "nobody reports that a generation is formed": Rules(
        reports=lambda replica: False, continues=lambda reported: True
    ),
    "members continue before the report": Rules(continues=lambda reported: True),
    "an old state is as good": Rules(
        heal=lambda generation, held, least: heal(generation, held, None)
    ),
    "a generation forms after it was given up": _except(Form, _any_generation_forms),
    "joiners continue without any member": _except(Remove, _removes_the_last_witness),
    "a broken group is not renewed": _except(Renew, lambda authority, event: authority),
    "others do not see that a group was renewed": _except(
        Renew,
        lambda authority, event: replace(
            authority.renew(event.generation), broken=authority.broken
        ),
    ),
    "joiners come with a loss": _except(Remove, _joiners_come),
    "joiners that were announced stay after a loss": _except(Remove, _unformed_joiners_stay),
    "members come to joiners when their group breaks": Rules(
        next_move=lambda name, newest, present, left, *, joined: next_move(
            name, newest, present, "agreed", joined=joined
        )
    ),
    "nobody moves on": Rules(all_have_seen=lambda votes, members: False),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_rule_is_caught(name):
    with pytest.raises(Violation):
        run(range(6000), MUTATIONS[name])


def test_an_authority_that_forgets_unnoticed_is_caught():
    with pytest.raises(Violation):
        run(range(500), Rules(check=lambda authority, known: None), (*FAULTS, "forget"))


def test_a_leaver_that_is_taken_for_lost_is_caught():
    rules = Rules(
        is_broken=lambda group, newest: is_broken(group, replace(newest, leaving=frozenset()))
    )
    with pytest.raises(Violation):
        run(range(200), rules, PLANNED)


# The rules, one by one ---------------------------------------------------------------------------


def job(*names):
    return Authority.start("one", [Member(name=name) for name in names])


def formed(authority, step=0):
    roster = authority.roster
    return authority.form(roster.generation, roster.names, Version(0, step))


def after(authority, *events):
    for event in events:
        authority = live.apply(authority, event)
    return authority


def joins(name):
    return Join(Member(name=name))


def shown(authority):
    """Generation, members, who waits, who leaves, what is broken."""
    waiting = "".join(each.name for each in authority.waiting)
    leaving = "".join(sorted(authority.leaving))
    roster = authority.roster
    return roster.generation, "".join(roster.names), waiting, leaving, authority.broken


def test_generations_are_numbered_above_every_saved_state():
    assert Authority.start("one", [Member(name="a")], above=7).roster.generation == 8


def test_a_planned_change_waits_until_all_have_seen_it():
    assert [all_have_seen(votes, 3) for votes in range(4)] == [False, False, False, True]


def test_joiners_wait_for_a_formed_generation_and_come_all_at_once():
    waits = after(job("a", "b"), joins("c"), joins("d"))
    assert shown(waits) == (0, "ab", "cd", "", -1)
    comes = formed(waits)
    assert shown(comes) == (1, "abcd", "", "", -1)
    # The next one waits until they are in.
    assert shown(after(comes, joins("e"))) == (1, "abcd", "e", "", -1)
    assert shown(formed(after(comes, joins("e")))) == (2, "abcde", "", "", -1)
    assert after(comes, joins("c")) == comes


def test_a_loss_takes_a_planned_change_back_and_it_is_announced_again():
    planned = after(formed(job("a", "b", "c")), Leave("b"), joins("d"))
    assert shown(planned) == (1, "ac", "d", "b", -1)
    lost = after(planned, Remove("c"))
    assert shown(lost) == (2, "ab", "d", "b", 1)
    # Two may report the same loss.
    assert after(lost, Remove("c")) == lost
    again = formed(lost)
    assert shown(again) == (3, "ad", "", "b", 1)
    assert shown(formed(again)) == (3, "ad", "", "", 1)


def test_joiners_that_were_announced_wait_again_after_a_loss():
    announced = after(formed(job("a", "b")), joins("c"))
    assert shown(after(announced, Remove("b"))) == (2, "a", "c", "", 1)
    assert shown(after(announced, Renew(0))) == (2, "ab", "c", "", 1)
    assert shown(after(announced, Renew(1))) == (2, "ab", "c", "", 1)
    # One of them is gone: the group of the members is as good as before.
    gone = after(announced, Remove("c"))
    assert shown(gone) == (2, "ab", "", "", -1)
    assert not is_broken(announced.formed, gone)
    assert is_broken(announced.roster, gone)


def test_each_change_has_a_number_and_what_changes_nothing_has_none():
    authority = formed(job("a", "b"))
    assert after(authority, joins("c"), joins("c"), Remove("x"), Renew(0)).revision == 2
    assert after(authority, Leave("x")) is authority


def test_each_member_may_say_that_the_group_broke():
    renewed = after(formed(job("a", "b")), Renew(0))
    assert shown(renewed) == (1, "ab", "", "", 0)
    assert after(renewed, Renew(0)) == renewed
    assert after(formed(renewed), Renew(0)) == formed(renewed)
    with pytest.raises(ValueError, match=r"generation \(5\) must be at most the newest, 1"):
        after(renewed, Renew(5))


def test_who_leaves_is_there_until_others_formed_without_it():
    before = formed(job("a", "b"))
    authority = after(before, Leave("b"))
    assert shown(authority) == (1, "a", "", "b", -1)
    assert "b" in authority
    assert not is_broken(before.roster, authority)
    died = after(authority, Remove("b"))
    assert shown(died) == (2, "a", "", "", 1)
    assert is_broken(before.roster, died)
    assert "b" not in formed(authority)


def test_the_last_members_leave_when_others_have_come():
    asked = after(formed(job("a", "b")), Leave("a"), Leave("b"))
    assert shown(formed(asked)) == (1, "b", "", "b", -1)
    assert formed(asked).ends
    comes = after(formed(asked), joins("c"))
    assert shown(comes) == (2, "bc", "", "b", -1)
    assert not comes.ends
    assert shown(formed(comes)) == (3, "c", "", "b", -1)


def test_only_the_newest_generation_can_be_formed():
    announced = after(formed(job("a", "b")), Renew(0))
    assert after(announced, Form(0, ("a", "b"), Version(0, 9))) == announced
    assert after(announced, Form(1, ("a", "c"), Version(0, 9))) == announced
    report = Form(1, ("a", "b"), Version(0, 9))
    assert after(announced, report).state == Version(0, 9)
    assert after(announced, report, report) == after(announced, report)


def test_a_member_comes_to_joiners_only_if_all_agreed():
    before = formed(job("a", "b"))
    planned = after(before, joins("c"))
    assert next_move("a", planned, before.roster, "agreed") == "come"
    assert next_move("a", planned, before.roster, "broke") == "renew"
    assert next_move("a", planned, before.roster, "forming") == "wait"
    assert next_move("c", planned, None, "forming") == "come"
    renewed = after(planned, Renew(0))
    assert next_move("a", renewed, before.roster, "broke") == "come"
    assert next_move("c", renewed, planned.roster, "forming") == "wait"
    assert next_move("a", after(planned, Remove("a")), before.roster, "broke") == "out"


def test_a_joiner_that_was_not_heard_yet_is_not_gone():
    authority = formed(job("a"))
    assert next_move("b", authority, None, "forming") == "wait"
    heard = after(authority, joins("b"))
    assert next_move("b", heard, None, "forming", joined=True) == "come"
    gone = after(heard, Remove("b"))
    assert next_move("b", gone, None, "forming", joined=True) == "out"


def test_a_leaver_whose_group_breaks_says_so():
    before = formed(job("a", "b"))
    asked = after(before, Leave("a"))
    assert next_move("a", asked, before.roster, "broke") == "renew"
    assert next_move("a", asked, before.roster, "agreed") == "wait"
    assert next_move("a", after(asked, Renew(0)), before.roster, "broke") == "come"
    assert next_move("a", formed(asked), before.roster, "agreed") == "out"


@pytest.mark.parametrize(
    "event",
    [
        Join(Member(name="a", hosts=("x", "y"), address="127.0.0.1:5")),
        Leave("a"),
        Remove("a"),
        Renew(3),
        Form(3, ("a", "b"), Version(1, 2, 3, 4)),
    ],
)
def test_events_are_sent_as_they_are(event):
    assert event_from_json(json.loads(json.dumps(event_to_json(event)))) == event


@pytest.mark.parametrize(
    "sent",
    [
        None,
        [],
        {},
        {"end": 1},
        {"join": "a"},
        {"join": ["a", "", "host"]},
        {"join": ["a", 1, ["host"]]},
        {"leave": 3},
        {"leave": "a", "remove": "b"},
        {"renew": "3"},
        {"renew": -1},
        {"form": [1, "ab", [0, 0, 0, 0]]},
        {"form": [1, ["a"], [0, 0]]},
    ],
)
def test_what_is_no_event_is_refused(sent):
    with pytest.raises(ValueError, match="must be"):
        event_from_json(sent)


@pytest.mark.parametrize(
    "change",
    [
        {"roster": None},
        {"roster": [0, False, [7]]},
        {"roster": [0, False, []]},
        {"members": [["a"]]},
        {"state": [1]},
        {"broken": "no"},
        {"leaving": [3]},
        {"identity": None},
    ],
)
def test_what_is_no_authority_is_refused(change):
    sent = formed(job("a", "b")).to_json()
    assert Authority.from_json(sent) == formed(job("a", "b"))
    with pytest.raises(ValueError, match=r"must|not an authority|has 0"):
        Authority.from_json(sent | change)
    with pytest.raises(ValueError, match="not an authority"):
        Authority.from_json({key: sent[key] for key in sent if key not in change})


def test_a_joiner_has_as_many_processes_as_the_members():
    with pytest.raises(ValueError, match="c has 2 processes, and must have 1"):
        after(job("a"), Join(Member(name="c", hosts=("x", "y"))))


def test_the_newest_state_wins_and_its_holders_send_it():
    old, branch, newest = Version(1, 9), Version(2, 9), Version(2, 10)
    healing = heal(3, {0: old, 1: newest, 2: None, 3: newest, 4: branch}, least=branch)
    assert (healing.state, healing.holders, healing.lacking) == (newest, (1, 3), (0, 2, 4))
    with pytest.raises(NotLive, match="no member of generation 3 has a whole state"):
        heal(3, {0: old, 1: None}, least=branch)


def test_a_job_begins_with_the_objects_of_its_first_replica():
    healing = heal(0, {0: None, 1: None}, least=None)
    assert (healing.state, healing.holders, healing.lacking) == (Version(0, 0), (0,), (1,))
    with pytest.raises(NotLive):
        heal(4, {0: None, 1: None}, least=Version(0, 0))


def test_a_state_of_which_a_part_is_lost_does_not_win():
    old, new = Version(2, 9), Version(2, 10)
    # Each copy has two processes. The first process is ahead, and nobody has its other part.
    healing = heal(3, {0: new, 1: old, 2: old, 3: None}, old, processes_per_copy=2)
    assert (healing.state, healing.holders, healing.lacking) == (old, (1, 2), (0, 3))
    # Parts of different copies are a whole state, too.
    healing = heal(3, {0: new, 1: old, 2: old, 3: new}, old, processes_per_copy=2)
    assert (healing.state, healing.holders, healing.lacking) == (new, (0, 3), (1, 2))
    for held in ({0: new, 1: None, 2: new, 3: None}, {0: new, 1: old, 2: None, 3: None}):
        with pytest.raises(NotLive):
            heal(3, held, old, processes_per_copy=2)
    healing = heal(0, dict.fromkeys(range(4)), None, processes_per_copy=2)
    assert (healing.holders, healing.lacking) == ((0, 1), (2, 3))


@given(
    st.integers(1, 3).flatmap(
        lambda size: st.tuples(
            st.just(size),
            st.lists(st.none() | st.integers(0, 3), min_size=size, max_size=4 * size),
        )
    ),
    st.integers(0, 3),
)
def test_healing_leaves_every_process_with_the_newest_whole_state(said, least):
    size, steps = said
    steps = steps[: len(steps) // size * size]
    held = {i: None if step is None else Version(1, step) for i, step in enumerate(steps)}
    parts = {step: {i % size for i, each in enumerate(steps) if each == step} for step in steps}
    whole = [step for step in parts if step is not None and len(parts[step]) == size]
    if max(whole, default=-1) < least:
        with pytest.raises(NotLive):
            heal(2, held, Version(1, least), size)
        return
    healing = heal(2, held, Version(1, least), size)
    assert healing.state == Version(1, max(whole))
    assert sorted(healing.holders + healing.lacking) == sorted(held)
    assert all(held[process] == healing.state for process in healing.holders)
    assert {process % size for process in healing.holders} == set(range(size))


@pytest.mark.parametrize(
    ("happens", "message"),
    [
        (lambda: job("a").remove("a"), "a, the last member of generation 0, left"),
        (
            lambda: after(formed(job("a")), joins("b"), Remove("a")),
            "no member of generation 0 is left, and of those that have joined since .b. none",
        ),
        (lambda: job("a").check("two"), "began with authority two, and this is one"),
    ],
)
def test_what_ends_a_live_job_says_why(happens, message):
    with pytest.raises(NotLive, match=message):
        happens()


def test_decisions_for_a_thousand_members_are_small():
    names = [f"a1b2c3d4-{number}" for number in range(1000)]
    first = [
        Member(name=name, hosts=(f"node-{number // 8}",), address=f"10.0.{number // 250}.7:41234")
        for number, name in enumerate(names)
    ]
    authority = formed(Authority.start("one", first))
    held = dict.fromkeys(range(1000), Version(0, 5)) | {7: None}
    spent, largest = {"decisions": 0.0, "JSON": 0.0}, 0
    for number in range(20):
        began = time.process_time()
        authority = formed(after(authority, joins(f"n{number}")))
        authority = after(authority, Remove(names[number]))
        decided = time.process_time()
        sent = json.dumps(authority.to_json(), separators=(",", ":"))
        assert Authority.from_json(json.loads(sent)) == authority
        read = time.process_time()
        authority = formed(authority)
        assert heal(1, held, Version(0, 5)).lacking == (7,)
        assert is_broken(Roster(members=tuple(first)), authority)
        assert next_move(names[999], authority, authority.roster, "forming") == "wait"
        spent["decisions"] += decided - began + time.process_time() - read
        spent["JSON"] += read - decided
        largest = max(largest, len(sent))
    parts = ", ".join(f"{name} {seconds / 20 * 1e3:.1f} ms" for name, seconds in spent.items())
    print(f"1,000 members, one joins and one is lost: {largest} bytes an announcement, {parts}")
    # Each member is in it once: etcd takes 1.5 MiB, and each launcher gets one.
    assert largest < 100_000
