"""The rules of live membership over random histories of losses, returns, partitions and changes."""

import time
from dataclasses import replace

import pytest

from resilin.core import live
from resilin.core.live import Authority, NotLive, heal, is_broken
from resilin.core.membership import Member
from resilin.core.recovery import Version
from tests.protocol.live_simulator import FAULTS, PLANNED, Rules, Violation, run


def test_no_history_loses_mixes_or_repeats_a_step():
    counts = run(range(2000))
    # Histories in which nothing happens would show nothing.
    assert counts["formed"] > 10_000
    assert counts["healed"] > 4000
    assert counts["returned"] > 300
    assert counts["late"] > 30
    assert counts["settled"] > 500


def test_planned_changes_drop_no_step():
    counts = run(range(1500), faults=PLANNED)
    assert counts["left"] > 3000
    assert counts["dropped"] == 0


def test_an_authority_without_its_memory_ends_the_live_job():
    counts = run(range(500), faults=(*FAULTS, "forget"))
    assert counts["forget"] > 100
    assert counts["restarts"] >= counts["forget"]


# Each of these made the rule that it names necessary.
FOUND = {
    "the generation that made a step is reported before it": 42,
    "a state is compared with what the last generation began with": 2758,
    "members that were all removed do not begin": 4580,
}


@pytest.mark.parametrize("seed", FOUND.values(), ids=FOUND)
def test_a_history_that_went_wrong_once(seed):
    run([seed])


def _forms_without_members(authority, roster, state):
    if authority.formed is not None and roster.generation <= authority.formed.generation:
        return authority
    return replace(authority, formed=roster, state=state)


def _removes_the_last_witness(authority, name):
    return replace(replace(authority, formed=None).remove(name), formed=authority.formed)


MUTATIONS = {
    "a state is known by its step alone": Rules(committed_in=lambda generation, before: 0),
    "a state half loaded counts as the one before": Rules(loads=lambda before: before),
    "nobody breaks a group off": Rules(is_broken=lambda group, newest, leaving: False),
    "nobody reports that a generation is formed": Rules(reports=lambda replica: False),
    "an old state is as good": Rules(
        heal=lambda generation, held, least: heal(generation, held, None)
    ),
    "members that were removed form a generation": Rules(form=_forms_without_members),
    "joiners continue without any member": Rules(remove=_removes_the_last_witness),
    "a broken group is not renewed": Rules(renew=lambda authority, broken: authority),
    "nobody moves on": Rules(all_have_seen=lambda votes, members: False),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_rule_is_caught(name):
    with pytest.raises(Violation):
        run(range(6000), MUTATIONS[name])


def test_an_authority_that_forgets_unnoticed_is_caught():
    with pytest.raises(Violation):
        run(range(500), Rules(check=lambda authority, known: None), (*FAULTS, "forget"))


def test_a_leaver_that_is_taken_for_lost_costs_steps():
    rules = Rules(is_broken=lambda group, newest, leaving: is_broken(group, newest, ()))
    assert run(range(200), rules, PLANNED)["dropped"] > 0


# The rules, one by one ---------------------------------------------------------------------------


def job(*names):
    return Authority.start("one", [Member(name=name) for name in names])


def test_generations_are_numbered_above_every_saved_state():
    assert Authority.start("one", [Member(name="a")], above=7).roster.generation == 8
    authority = job("a", "b").join(Member(name="c"))
    assert (authority.roster.generation, authority.roster.names) == (1, ("a", "b", "c"))
    # Two may report the same loss, and each member that its group broke.
    lost = authority.remove("b")
    assert lost.remove("b") == lost
    renewed = lost.renew(2)
    assert (renewed.roster.generation, renewed.renew(2)) == (3, renewed)


def test_who_leaves_is_there_until_it_is_gone():
    authority = job("a", "b").ask_to_leave("b")
    assert authority.leaving == {"b"}
    assert not is_broken(job("a", "b").roster, authority.roster, authority.leaving)
    died = authority.remove("b")
    assert died.roster.generation == authority.roster.generation + 1
    assert is_broken(job("a", "b").roster, died.roster, died.leaving)
    formed = authority.form(authority.roster, Version(0, 3))
    assert formed.leaving == frozenset()


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


@pytest.mark.parametrize(
    ("happens", "message"),
    [
        (lambda: job("a").remove("a"), "a, the last member of generation 0, left"),
        (
            lambda: (
                job("a").form(job("a").roster, Version(0, 0)).join(Member(name="b")).remove("a")
            ),
            "no member of generation 0 is left, and of those that have joined since .b. none",
        ),
        (lambda: job("a").check("two"), "began with authority two, and this is one"),
    ],
)
def test_what_ends_a_live_job_says_why(happens, message):
    with pytest.raises(NotLive, match=message):
        happens()


def test_decisions_for_a_thousand_members_are_small():
    authority = job(*(f"m{number}" for number in range(1000)))
    began = time.process_time()
    for number in range(20):
        authority = authority.join(Member(name=f"n{number}")).remove(f"m{number}")
        held = dict.fromkeys(range(1000), Version(0, 5)) | {7: None}
        assert heal(1, held, Version(0, 5)).lacking == (7,)
        assert not live.moves_on(1, 1)
    # 40 changes and 20 healings: seconds would stop a job for as long.
    assert time.process_time() - began < 2
