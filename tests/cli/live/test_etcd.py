import itertools
import json
import logging
import math
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from resilin.cli.live.access import Access
from resilin.cli.live.etcd import EtcdKeeper
from resilin.cli.live.gateway import Gateway
from resilin.core.live import Authority, Form, Join, Leave, NotLive, Remove, Renew
from resilin.core.membership import Member
from resilin.core.recovery import Version
from tests.cli.live.etcd_process import EtcdProcess, Network, cluster, until

pytestmark = pytest.mark.processes

RUN = "job-1"


def member(name):
    return Member(name=name, hosts=(name[0],))


def form(keeper):
    """Replica 0 reports that the newest generation is formed."""
    roster = keeper.newest.roster
    return keeper.apply(Form(roster.generation, roster.names, Version(roster.generation, 0)))


class Notes:
    """What a launcher is told, with the times."""

    def __init__(self, keeper):
        self.authorities, self.times, self.over = [], [], []
        keeper.on_change = self._note
        keeper.on_over = self.over.append

    def _note(self, authority):
        self.times.append(time.monotonic())
        self.authorities.append(authority)

    @property
    def generations(self):
        return [each.roster.generation for each in self.authorities]


@pytest.fixture
def etcd(tmp_path):
    process = EtcdProcess(tmp_path)
    yield process
    process.kill()


@pytest.fixture
def launchers(etcd):
    """Makes keepers, and closes them."""
    made = []

    def make(access=None, **settings):
        keeper = EtcdKeeper(access or etcd.access, RUN, **{"lease": 2.0} | settings)
        made.append(keeper)
        return keeper

    yield make
    for keeper in made:
        keeper.close()


@pytest.fixture
def network(etcd):
    process = Network(etcd)
    yield process
    process.mend()
    process.close()


def two(launchers, second=None, **settings):
    """Two launchers of a job with the members a and b, which is formed."""
    one = launchers(**settings)
    one.start([member("a")])
    form(one)
    other = launchers(second, **settings)
    other.hold("b")
    other.apply(Join(member("b")))
    form(other)
    until(lambda: one.newest == other.newest, "both know the same")
    assert one.newest.formed.names == ("a", "b")
    return one, other


def test_launchers_see_what_others_change(launchers):
    one = launchers()
    assert one.newest is None
    first = one.start([member("a"), member("A")])
    assert first.roster.names == ("a", "A")
    assert first.roster.generation == 0
    form(one)
    other = launchers()
    assert other.newest == one.newest
    notes = Notes(one)
    # Its workers come with `start`, too: the job is there already.
    joined = other.start([member("b"), member("B")])
    assert joined.roster.names == ("a", "A", "b")
    assert joined.waiting == (member("B"),)
    until(lambda: notes.authorities and notes.authorities[-1] == joined, "told of b and B")
    assert form(other).roster.names == ("a", "A", "b", "B")
    form(other)
    other.apply(Leave("A"))
    until(lambda: one.newest == other.newest, "told of the leave")
    assert one.newest.roster.names == ("a", "b", "B")
    assert one.newest.leaving == {"A"}
    assert one.newest.identity == first.identity
    assert notes.generations == sorted(notes.generations)


@pytest.mark.parametrize("finished", [True, False])
def test_the_end_of_a_job_is_not_the_loss_of_its_last_member(launchers, finished):
    one, waiting = launchers(), launchers()
    one.start([member("a")])
    form(one)
    until(lambda: waiting.newest == one.newest, "both know the same")
    notes = Notes(waiting)
    if finished:
        one.finish()
    one.close()
    # Removed by the one that is left, who has looked whether that was the end.
    until(lambda: not waiting._members.answered(["a"]), "a is gone")
    until(lambda: waiting._members.next_due() == math.inf, "a was removed")
    assert waiting.finished == finished
    assert len(notes.over) == (0 if finished else 1)


def test_a_member_that_exits_is_removed_at_once(launchers):
    # By the watch: the lease lasts longer than any test.
    one, other = two(launchers, lease=600.0)
    notes = Notes(one)
    other.drop("b")
    assert other.newest.roster.names == ("a",)
    until(lambda: notes.authorities, "told that b is gone")
    assert notes.authorities[0].roster.names == ("a",)
    # It was removed once, though both have seen its key vanish.
    assert one.newest.roster.generation == other.newest.roster.generation == 2


def test_the_members_of_a_launcher_that_is_lost_are_removed(etcd, launchers):
    one = launchers()
    one.start([member("a")])
    form(one)
    script = (
        "import sys, time\n"
        "from resilin.cli.live.access import access\n"
        "from resilin.cli.live.etcd import EtcdKeeper\n"
        "from resilin.core.live import Join\n"
        "from resilin.core.membership import Member\n"
        "keeper = EtcdKeeper(access(sys.argv[1]), sys.argv[2], lease=2.0)\n"
        "keeper.start([Member(name='b', hosts=('b',)), Member(name='B', hosts=('b',))])\n"
        "print('there', flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", script, str(etcd.access), RUN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "there\n"
            until(lambda: "B" in one.newest, "told of b and B")
            form(one)
            form(one)
            assert one.newest.formed.names == ("a", "b", "B")
            before = len(changes(etcd))
        finally:
            process.kill()
    until(lambda: one.newest.roster.names == ("a",), "b and B removed")
    # Both with one change, as they were lost together.
    assert len(changes(etcd)) == before + 1


@pytest.mark.nightly(part="clusters")
def test_processes_that_join_at_the_same_time_all_succeed(etcd, launchers):
    one = launchers()
    notes = Notes(one)
    one.start([member("a")])
    script = (
        "import sys\n"
        "from resilin.cli.live.access import access\n"
        "from resilin.cli.live.etcd import EtcdKeeper\n"
        "from resilin.core.live import Form, Join, Leave\n"
        "from resilin.core.membership import Member\n"
        "from resilin.core.recovery import Version\n"
        "number = sys.argv[3]\n"
        "keeper = EtcdKeeper(access(sys.argv[1]), sys.argv[2])\n"
        "sys.stdin.readline()\n"
        "for round in range(5):\n"
        "    name = f'p{number}-{round}'\n"
        "    keeper.hold(name)\n"
        "    keeper.apply(Join(Member(name=name, hosts=('p',))))\n"
        "    roster = keeper.newest.roster\n"
        "    keeper.apply(Form(roster.generation, roster.names, Version(roster.generation, 0)))\n"
        "print('joined', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(etcd.access), RUN, str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    try:
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        assert [process.stdout.readline() for process in processes] == ["joined\n"] * 4
        form(one)
        until(lambda: len(one.newest.roster.members) == 21, "all of them")
        names = {f"p{number}-{turn}" for number in range(4) for turn in range(5)}
        assert {*one.newest.roster.names} == names | {"a"}
        history = changes(etcd)
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=20)
    generations = [each.roster.generation for each in history]
    steps = [after - before for before, after in itertools.pairwise(generations)]
    assert {*steps} <= {0, 1}, generations
    # What one launcher is told is in the same order.
    assert notes.generations == sorted(notes.generations)


def changes(etcd):
    """All authorities that there ever were, as etcd remembers them."""
    gateway = Gateway(etcd.access)
    newest = gateway.read(f"/resilin/{RUN}/authority").entries[0].revision
    found = []
    for entry in gateway.watch(f"/resilin/{RUN}/authority", 1):
        found.append(Authority.from_json(json.loads(entry.value)["authority"]))
        if entry.revision >= newest:
            break
    gateway.close()
    return found


def test_training_goes_on_without_etcd_and_changes_wait(etcd, launchers, caplog):
    caplog.set_level(logging.WARNING, "resilin")
    one, other = two(launchers)
    etcd.kill()
    until(lambda: caplog.messages, "noticed")
    known = one.newest
    answers = []
    asking = threading.Thread(
        target=lambda: answers.append(one.apply(Renew(known.roster.generation)))
    )
    asking.start()
    other.drop("b")
    # Longer than the lease, in which everybody would be removed.
    time.sleep(3.0)
    assert not answers
    assert one.newest == known
    etcd.start()
    asking.join(timeout=60)
    assert len(answers) == 1
    until(lambda: one.newest == other.newest and "b" not in one.newest, "b removed")
    assert one.newest.identity == known.identity
    assert "a" in one.newest
    until(lambda: len(caplog.messages) == 4, f"a line each: {caplog.messages}")
    said = [each.partition(" (")[0] for each in caplog.messages]
    assert sorted(said) == ["etcd answers again"] * 2 + ["etcd does not answer"] * 2
    one.apply(Leave("a"))


def test_an_etcd_without_its_data_is_not_continued_with(etcd, launchers):
    one, other = two(launchers)
    notes = [Notes(one), Notes(other)]
    etcd.wipe()
    for each in notes:
        until(lambda each=each: each.over, "told")
        assert len(each.over) == 1
        assert "lost" in each.over[0]
    with pytest.raises(NotLive, match="lost"):
        one.apply(Join(member("c")))
    with pytest.raises(NotLive, match="lost"):
        other.apply(Remove("a"))
    assert not notes[0].authorities
    # Those who come anew begin anew.
    third = launchers()
    assert third.newest is None
    assert third.start([member("d")]).identity != one.newest.identity


@pytest.mark.nightly(part="clusters")
def test_an_etcd_that_was_refilled_by_others_is_not_continued_with(etcd, launchers, network):
    one = launchers(network.access)
    one.start([member("a")])
    form(one)
    notes = Notes(one)
    network.cut()
    etcd.wipe()
    # The same job, begun by somebody else, with the same names and as many changes.
    other = launchers()
    other.start([member("a")])
    form(other)
    network.mend()
    with pytest.raises(NotLive):
        one.apply(Join(member("c")))
    until(lambda: notes.over or one._record.over, "noticed")
    assert other.newest.roster.names == ("a",)
    assert other.newest.identity != one.newest.identity


def test_a_name_that_another_launcher_took_meanwhile_ends_the_job_and_not_the_thread(
    etcd, launchers, network
):
    one = launchers(network.access)
    one.start([member("a")])
    form(one)
    notes = Notes(one)
    network.cut()
    one.hold("b")  # It is written as soon as etcd answers.
    launchers().hold("b")
    network.mend()
    until(lambda: notes.over, "told")
    assert "'b' must be a name that no other launcher has given" in notes.over[0]
    # The lease is kept alive all the same.
    one.hold("c")
    one.apply(Join(member("c")))
    assert "c" in one.newest


@pytest.mark.nightly(part="clusters")
def test_an_etcd_that_has_lost_its_newest_change_is_not_continued_with(etcd, launchers, tmp_path):
    one = launchers()
    one.start([member("a")])
    form(one)
    etcd.kill()
    shutil.copytree(etcd.data, tmp_path / "older")
    etcd.start()
    one.hold("b")
    one.apply(Join(member("b")))
    notes, lost = Notes(one), one.newest
    etcd.kill()
    shutil.rmtree(etcd.data)
    shutil.move(tmp_path / "older", etcd.data)
    etcd.start()
    until(lambda: notes.over, "told")
    assert "the etcd has lost data" in notes.over[0]
    assert one.newest == lost
    with pytest.raises(NotLive, match="lost data"):
        one.apply(Leave("a"))


@pytest.mark.nightly(part="clusters")
def test_a_lost_change_is_noticed_also_if_another_has_its_revision(etcd, launchers):
    one = launchers()
    one.start([member("a")])
    form(one)
    # As if this launcher had seen another value of the same revision, which the etcd has lost.
    record = one._record
    record.known = replace(record.known, mark="lost")
    assert record.attempt(lambda before: before) is None
    assert "the etcd has lost data" in record.over
    gateway = Gateway(etcd.access)
    assert b'"over"' not in gateway.read(record.key).entries[0].value


def test_a_launcher_that_is_cut_off_finds_its_members_removed(launchers, network):
    one, other = two(launchers, network.access)
    notes = Notes(other)
    network.cut()
    until(lambda: one.newest.roster.names == ("a",), "b removed")
    assert other.newest.roster.names == ("a", "b")
    form(one)
    network.mend()
    until(lambda: notes.authorities, "told")
    assert "b" not in notes.authorities[-1]
    # Under a new name it joins again.
    other.hold("b2")
    assert other.apply(Join(member("b2"))).roster.names == ("a", "b2")
    assert not notes.over


@pytest.mark.nightly(part="clusters")
def test_a_launcher_that_was_cut_off_keeps_members_that_nobody_removed(launchers, network):
    one = launchers(network.access)
    one.start([member("a")])
    form(one)
    notes = Notes(one)
    network.cut()
    # Until the lease has surely expired: others would see the key vanish.
    gateway = Gateway(launchers()._gateway.access)
    until(lambda: not gateway.read(f"/resilin/{RUN}/members/a").entries, "the lease expired")
    network.mend()
    until(lambda: gateway.read(f"/resilin/{RUN}/members/a").entries, "a is there again")
    one.hold("c")
    assert one.apply(Join(member("c"))).roster.names == ("a", "c")
    assert not notes.over


def test_a_job_whose_members_are_all_gone_is_begun_anew(etcd, launchers):
    one = launchers()
    first = one.start([member("a")])
    form(one)
    with pytest.raises(NotLive, match="last member"):
        one.drop("a")
    assert one._record.over is not None
    other = launchers(above=7)
    assert other.newest is None
    second = other.start([member("b")])
    assert second.identity != first.identity
    assert second.roster.generation == 8
    # Its launcher ended without a word: a lease later somebody else may begin.
    key = f"/resilin/{RUN}/authority"
    gateway = Gateway(etcd.access)
    kept = gateway.read(key).entries[0]
    other.close()
    ended = gateway.read(key).entries[0]
    assert b"over" in ended.value
    assert gateway.swap(key, ended.revision, kept.value).done
    third = launchers()
    assert third.newest is None
    began = time.monotonic()
    again = third.start([member("c")])
    assert time.monotonic() - began > 1.5
    assert again.roster.generation == 9
    assert again.roster.names == ("c",)


def test_a_join_that_comes_after_the_end_of_its_process_is_taken_back(etcd, launchers):
    one = launchers()
    with pytest.raises(ValueError, match="must come after the first generation"):
        one.apply(Join(member("a")))
    one.start([member("a")])
    form(one)
    one.hold("b")
    one.drop("b")
    one.hold("b")
    assert "b" not in one.apply(Join(member("b")))
    assert not Gateway(etcd.access).read(f"/resilin/{RUN}/members/b").entries


def test_joiners_alone_cannot_continue_and_are_told(launchers):
    one = launchers()
    one.start([member("a")])
    form(one)
    other = launchers()
    notes = Notes(other)
    other.hold("b")
    other.apply(Join(member("b")))
    with pytest.raises(NotLive, match="none has its state"):
        one.drop("a")
    until(lambda: notes.over, "told")
    assert "none has its state" in notes.over[0]
    with pytest.raises(NotLive):
        other.apply(Leave("b"))


def test_a_name_belongs_to_one_launcher(launchers):
    one, other = launchers(), launchers()
    one.hold("a")
    one.hold("a")
    with pytest.raises(ValueError, match="'a' must be a name that no other launcher"):
        other.hold("a")


@pytest.mark.nightly(part="clusters")
def test_three_servers_lose_one_and_nothing_else(tmp_path):
    servers = cluster(tmp_path, 3)
    access = Access(endpoints=tuple(("127.0.0.1", each.port) for each in servers))
    one, other = EtcdKeeper(access, RUN, lease=2.0), EtcdKeeper(access, RUN, lease=2.0)
    notes = [Notes(one), Notes(other)]
    try:
        one.start([member("a")])
        form(one)
        until(lambda: other.newest == one.newest, "told")
        # Both are connected to this one, and it may be the one that leads.
        servers[0].kill()
        other.hold("b")
        assert other.apply(Join(member("b"))).roster.names == ("a", "b")
        until(lambda: "b" in one.newest, "told by another server")
        form(one)
        # The one that is left must not decide alone.
        servers[1].kill()
        answers = []
        asking = threading.Thread(target=lambda: answers.append(one.apply(Leave("a"))))
        asking.start()
        time.sleep(3.0)
        assert not answers
        assert one.newest.leaving == frozenset()
        servers[0].start()
        asking.join(timeout=60)
        assert answers[0].leaving == {"a"}
        until(lambda: one.newest == other.newest, "told")
        assert one.newest.roster.names == ("b",)
        assert not any(each.over for each in notes)
    finally:
        one.close()
        other.close()
        for each in servers:
            each.kill()


@pytest.mark.nightly(part="clusters")
def test_an_etcd_may_start_a_little_later(etcd):
    etcd.kill()
    made = []
    thread = threading.Thread(
        target=lambda: made.append(EtcdKeeper(etcd.access, RUN, patience=60.0))
    )
    thread.start()
    time.sleep(0.5)
    etcd.start()
    thread.join(timeout=60)
    made[0].close()


def test_settings_are_checked(etcd):
    with pytest.raises(ValueError, match=r"name of the run \('a/b'\) must"):
        EtcdKeeper(etcd.access, "a/b")
    with pytest.raises(ValueError, match=r"lease \(1\) must be at least 2"):
        EtcdKeeper(etcd.access, RUN, lease=1)
    etcd.kill()
    with pytest.raises(ConnectionError, match=f"127.0.0.1:{etcd.port}"):
        EtcdKeeper(etcd.access, RUN, patience=0.0)


def test_the_secret_is_made_once_or_is_given(etcd, launchers, tmp_path, monkeypatch):
    one, other = launchers(), launchers()
    assert len(one.secret()) == 64
    assert one.secret() == other.secret()
    etcd.kill()
    etcd.start()
    assert other.secret() == one.secret()
    given = tmp_path / "secret"
    given.write_text("as long as it must be\n")
    given.chmod(0o600)
    monkeypatch.setenv("RESILIN_SECRET_FILE", str(given))
    assert one.secret() == b"as long as it must be"


def test_nothing_is_left_after_a_close(etcd):
    before = threading.active_count()
    for _ in range(3):
        keeper = EtcdKeeper(etcd.access, RUN)
        keeper.start([member("a")])
        keeper.close()
    assert threading.active_count() == before
    gateway = Gateway(etcd.access)
    assert not gateway.read(f"/resilin/{RUN}/members/", prefix=True).entries
    assert not gateway.read(f"/resilin/{RUN}/launchers/", prefix=True).entries
