"""The launcher's socket, with real members: who is heard, and that nobody harms another one."""

import contextlib
import logging
import os
import random
import signal
import socket
import threading
import time

import pytest

from resilin.core.live import Form, Join, Leave, NotLive, Renew
from resilin.core.membership import Member
from resilin.core.recovery import Version
from resilin.engine.authority import listener
from resilin.engine.authority.keeper import LocalKeeper
from resilin.engine.live.client import Client
from resilin.engine.live.wire import encode
from tests.cli.live.conftest import SECRET

LONG = 60.0


def until(condition):
    """Waits for what must come."""
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.005)


@pytest.fixture
def client():
    """Members in this process."""
    made = []

    def make(heard, name, member=None):
        heard.server.expect(name, os.getpid(), member)
        made.append(Client(heard.path, name, member=member))
        return made[-1]

    yield make
    for each in made:
        each.close()


def joins(client):
    client.tell(Join(Member(name=client.name)))


def forms(client):
    roster = client.newest.roster
    return client.ask(Form(roster.generation, roster.names, Version(0, 0)), LONG)


def comes(client, revision):
    return client.wait(lambda newest: newest.revision >= revision, LONG)


def test_a_process_speaks_for_the_copy_that_it_has_a_part_of_and_goes_with_it(serve, client):
    heard = serve(num_founders=2)
    first, part, other = client(heard, "a"), client(heard, "a-1", "a"), client(heard, "b")
    first.tell(Join(Member(name="a", hosts=("h", "h"))))
    # The job begins with two members, of two processes each.
    other.tell(Join(Member(name="b", hosts=("h", "h"))))
    assert comes(part, 0).roster.names == comes(first, 0).roster.names == ("a", "b")
    assert part.joined
    forms(first)
    assert part.ask(Leave("a"), LONG).leaving == {"a"}
    part.tell(Leave("b"))  # it has no say in that
    until(lambda: part.lost)
    heard.server.drop("a-1")
    newest = other.wait(lambda newest: "a" not in newest, LONG)
    assert newest.roster.names == ("b",)


# A job -------------------------------------------------------------------------------------------


def test_a_job_begins_when_all_have_joined_and_others_join_it(serve, member):
    heard = serve(num_founders=2)
    first, second = member(heard, "a"), member(heard, "b")
    assert first.says() == ["a", "127.0.0.1", SECRET.hex()]
    assert second.says() == ["b", "127.0.0.1", SECRET.hex()]
    # The order is that in which the launcher started them.
    assert second.do("join") is None
    assert second.do("newest") is None
    assert first.do("ask") == [0, ["a", "b"], 0]
    assert second.do("wait 0") == [0, ["a", "b"], 0]
    third = member(heard, "c")
    third.says()
    assert third.do("ask") == [0, ["a", "b"], 1]
    assert first.do("form") == [1, ["a", "b", "c"], 2]
    assert [each.do("wait 1") for each in (second, third)] == [[1, ["a", "b", "c"], 2]] * 2
    # The launcher sees an exit.
    second.process.kill()
    heard.server.drop("b")
    assert first.do("wait 2") == [2, ["a"], 3]
    assert heard.keeper.newest.broken == 1
    assert third.do("finish") is None
    until(lambda: heard.finished == ["c"])
    assert {"a", "b", "c"} <= {*heard.alive}
    assert heard.restart == []


def test_a_child_of_a_member_has_no_part_in_its_connection(serve, member):
    heard = serve()
    only = member(heard, "a")
    only.says()
    assert only.do("ask") == [0, ["a"], 0]
    assert only.do("fork") == 0
    assert only.do("form") == [0, ["a"], 1]


def test_a_founder_that_dies_before_the_others_came_is_replaced(serve, member):
    heard = serve(num_founders=2)
    first, second = member(heard, "a"), member(heard, "b")
    first.says(), second.says()
    first.tell("ask")
    second.process.kill()
    second.process.wait(timeout=60)
    heard.server.drop("b")
    third = member(heard, "c")
    third.says()
    assert third.do("ask") == [0, ["a", "c"], 0]
    assert first.says() == [0, ["a", "c"], 0]


def test_a_process_that_is_quicker_than_the_launcher_waits_for_it(serve, member):
    heard = serve()
    early = member(heard, "a", expect=False)
    until(lambda: heard.server._claims)
    heard.server.expect("a", early.process.pid)
    assert early.says()[0] == "a"


def test_all_workers_hear_that_the_job_stops_and_nobody_leaves_then(serve, client):
    heard = serve()
    early = client(heard, "a")
    joins(early)
    assert comes(early, 0) is not None
    stopped = threading.Event()
    early.on_stop = stopped.set
    heard.server.stop_all()
    assert stopped.wait(LONG)
    assert early.ask(Leave("a"), LONG).leaving == frozenset()
    late, again = client(heard, "b"), threading.Event()
    until(lambda: late._stopping)
    late.on_stop = again.set  # it comes after the message
    assert again.is_set()


def test_a_worker_says_that_the_job_cannot_continue(serve, client):
    heard = serve()
    client(heard, "a").restart("forming failed twice")
    until(lambda: heard.restart == [("a", "forming failed twice")])


# Who is heard ------------------------------------------------------------------------------------


def raw(heard, *lines):
    """What a bare connection gets until it is closed."""
    with socket.socket(socket.AF_UNIX) as bare:
        bare.settimeout(LONG)
        bare.connect(heard.path)
        got = b""
        with contextlib.suppress(ConnectionError):
            for line in lines:
                bare.sendall(line)
            while data := bare.recv(65536):
                got += data
        return got


def test_a_foreign_process_is_refused_and_does_not_learn_the_secret(serve, member, caplog):
    heard = serve(num_founders=2)
    real = member(heard, "a")
    real.says()
    foreign = member(heard, "a", expect=False)
    assert "is not a, which is process" in foreign.says()
    # Also if it comes before the real one.
    early = member(heard, "b", expect=False)
    until(lambda: heard.server._claims)
    late = member(heard, "b")
    assert late.says()[0] == "b"
    assert "is not b, which is process" in early.says()
    got = raw(heard, b'{"name": "a"}\n')
    assert b"refused" in got
    assert SECRET.hex().encode() not in got
    assert real.do("join") is None
    assert late.do("ask") == [0, ["a", "b"], 0]
    assert [each.getMessage()[:20] for each in caplog.records] == ["refused a connection"] * 3


def test_a_process_of_another_user_is_refused(serve, monkeypatch, caplog):
    heard = serve()
    mine = os.getuid()
    monkeypatch.setattr(listener.os, "getuid", lambda: mine + 1)
    assert raw(heard, b'{"name": "a"}\n') == b""
    assert f"process {os.getpid()} of user {mine}: it is not ours" in caplog.text


def test_one_name_has_one_connection(serve, client, caplog):
    heard = serve()
    first = client(heard, "a")
    with pytest.raises(ConnectionError, match="a has a connection already"):
        Client(heard.path, "a")
    joins(first)
    assert comes(first, 0).roster.names == ("a",)
    # Until it ends: then the process may come again.
    first.close()
    until(lambda: heard.server._workers["a"].connection is None)
    second = Client(heard.path, "a")
    assert second.newest.roster.names == ("a",)
    second.close()


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.1\r\n",
        b"\x80\x04\x95\x10\x00\n",
        b"[]\n",
        b"{}\n",
        b'{"alive": 1}\n',
        b'{"name": "b"}\n',
        b'{"event": {"leave": "other"}, "ask": null}\n',
        b'{"event": {"remove": "other"}, "ask": null}\n',
        b'{"event": {"join": ["other", "", [""]]}, "ask": 1}\n',
        b'{"event": {"form": [0, ["other"], [0, 0, 0, 0]]}, "ask": 1}\n',
        b'{"event": {"renew": "x"}, "ask": 1}\n',
        b'{"event": {"renew": 0}, "ask": "x"}\n',
        b'{"restart": 5}\n',
        b"x" * (listener.LONGEST + 1),
    ],
)
def test_a_foreign_line_ends_its_connection_and_harms_nobody(serve, client, caplog, line):
    caplog.set_level(logging.WARNING)
    heard = serve()
    other = client(heard, "other")
    heard.server.expect("bad", os.getpid())
    got = raw(heard, b'{"name": "bad"}\n', line)
    assert got.startswith(b'{"hello"')
    lines = [each.getMessage() for each in caplog.records]
    assert len(lines) == 1
    assert f"the connection of process {os.getpid()} was closed" in lines[0]
    assert len(lines[0]) < 500
    joins(other)
    assert comes(other, 0).roster.names == ("other",)


def test_random_lines_harm_nobody(serve, client):
    heard = serve(num_founders=2)
    other = client(heard, "other")
    rng = random.Random(7)
    good = [
        b'{"alive": true}\n',
        b'{"event": {"join": ["bad", "", [""]]}, "ask": 1}\n',
        b'{"event": {"form": [0, ["bad"], [0, 0, 0, 0]]}, "ask": 2}\n',
        b'{"finished": true}\n',
    ]
    for number in range(200):
        name = f"bad{number}"
        heard.server.expect(name, os.getpid())
        line = bytearray(rng.choice(good).replace(b"bad", name.encode()))
        for _ in range(rng.randint(1, 4)):
            line[rng.randrange(len(line))] = rng.randrange(256)
        with socket.socket(socket.AF_UNIX) as bare:
            bare.connect(heard.path)
            bare.sendall(encode({"name": name}) + line + b"\n")
    until(lambda: len(heard.server._names) == 1)
    joins(other)
    joins(client(heard, "last"))
    assert comes(other, 0) is not None
    assert heard.restart == []


def test_nobody_is_heard_before_it_says_a_name(serve, client):
    heard = serve()
    assert raw(heard, b'{"alive": true}\n') == b""
    assert raw(heard, b'{"name": "unknown"}\n', b'{"alive": true}\n') == b""
    assert heard.alive == []


# An authority that fails -------------------------------------------------------------------------


class Failing(LocalKeeper):
    """A keeper that takes no event."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def apply(self, event):
        raise self.error


def test_what_ends_the_live_job_reaches_the_worker_and_the_launcher(serve, client):
    heard = serve(keeper=Failing(NotLive("nobody has its state")))
    only = client(heard, "a")
    joins(only)
    comes(only, 0)
    # Its own joining is applied once more after the first announcement, and is not taken either.
    until(lambda: heard.restart)
    heard.restart.clear()
    with pytest.raises(NotLive, match="nobody has its state"):
        only.ask(Renew(0), LONG)
    assert heard.restart == [("a", "nobody has its state")]


def test_an_authority_that_cannot_be_reached_is_no_end(serve, client, caplog):
    keeper = LocalKeeper()
    heard = serve(keeper=keeper)
    only = client(heard, "a")
    joins(only)
    comes(only, 0)
    keeper.apply = Failing(ConnectionRefusedError("no etcd")).apply
    with pytest.raises(ConnectionError, match="was not taken: no etcd"):
        only.ask(Renew(0), LONG)
    assert heard.restart == []
    del keeper.apply
    assert only.ask(Renew(0), LONG).broken == 0


class Slow(LocalKeeper):
    """A keeper that takes no event before it may."""

    def __init__(self):
        super().__init__()
        self.asked, self.may = threading.Event(), threading.Event()

    def apply(self, event):
        self.asked.set()
        assert self.may.wait(LONG)
        return super().apply(event)


def test_signs_of_life_come_through_while_the_authority_is_slow(serve, client):
    keeper = Slow()
    keeper.start([Member(name="a"), Member(name="b")])
    heard = serve(keeper=keeper)
    first, second = client(heard, "a"), client(heard, "b")
    first.tell(Renew(0))
    assert keeper.asked.wait(LONG)
    heard.alive.clear()
    until(lambda: {"a", "b"} <= {*heard.alive})
    keeper.may.set()
    assert second.wait(lambda newest: newest.broken == 0, LONG) is not None


class Lagging(LocalKeeper):
    """A keeper that says what has changed when asked to, and the oldest last."""

    def __init__(self):
        super().__init__()
        self.later = []

    def apply(self, event):
        told, self.on_change = self.on_change, self.later.append
        try:
            return super().apply(event)
        finally:
            self.on_change = told

    def catch_up(self):
        while self.later:
            self.on_change(self.later.pop())


def test_an_answer_is_as_new_as_its_event_and_nothing_older_follows(serve, client):
    keeper = Lagging()
    keeper.start([Member(name="a"), Member(name="b")])
    heard = serve(keeper=keeper)
    first, second = client(heard, "a"), client(heard, "b")
    seen = []
    second.on_change = seen.append
    assert first.ask(Renew(0), LONG).broken == 0
    assert first.ask(Renew(1), LONG).broken == 1
    keeper.catch_up()
    assert first.ask(Renew(2), LONG).broken == 2
    assert second.wait(lambda newest: newest.broken == 2, LONG) is not None
    assert [each.revision for each in seen] == sorted({each.revision for each in seen})


def test_a_server_that_closes_in_the_middle_of_an_ask_ends_it(serve, client):
    keeper = Slow()
    keeper.start([Member(name="a")])
    heard = serve(keeper=keeper)
    only = client(heard, "a")
    caught = []

    def ask():
        try:
            only.ask(Renew(0), LONG)
        except ConnectionError as error:
            caught.append(str(error))

    asking = threading.Thread(target=ask)
    asking.start()
    assert keeper.asked.wait(LONG)
    closing = threading.Thread(target=heard.server.close)
    closing.start()
    asking.join(LONG)
    assert len(caught) == 1
    assert "closed the connection" in caught[0]
    assert only.lost
    keeper.may.set()
    closing.join(LONG)
    assert not os.path.exists(heard.path)


# Many, and frozen --------------------------------------------------------------------------------


def test_a_frozen_member_holds_nobody_up_and_gets_the_newest_alone(serve, member, client):
    keeper = LocalKeeper()
    many = [Member(name=f"m{number}", address="x" * 40) for number in range(2000)]
    keeper.start([Member(name="a"), Member(name="b"), *many])
    heard = serve(keeper=keeper)
    awake, frozen = client(heard, "a"), member(heard, "b")
    frozen.says()
    frozen.process.send_signal(signal.SIGSTOP)
    for generation in range(50):
        # 50 announcements of 150 kB are many times what a socket holds.
        assert awake.ask(Renew(generation), LONG).broken == generation
    connection = heard.server._workers["b"].connection
    assert connection.pending
    kept = len(connection._sending) + len(connection._announcement) + connection._num_kept
    assert kept < 500_000
    frozen.process.send_signal(signal.SIGCONT)
    assert frozen.do("revision 50")[0] == 50
    assert frozen.do("renew 50")[0] == 51


def test_a_member_that_dies_before_its_answer_harms_nobody(serve, member, client):
    keeper = Slow()
    keeper.start([Member(name="a")])
    heard = serve(keeper=keeper)
    other, dying = client(heard, "a"), member(heard, "b")
    dying.says()
    dying.tell("ask")
    assert keeper.asked.wait(LONG)
    dying.process.kill()
    dying.process.wait(timeout=60)
    heard.server.drop("b")
    keeper.may.set()
    assert "b" not in forms(other)
    # It was removed before its event was taken: it does not come back.
    assert other.ask(Renew(0), LONG).roster.names == ("a",)


@pytest.mark.nightly(part="jobs")
def test_two_hundred_join_at_once(serve):
    heard = serve()
    heard.server.expect("first", os.getpid())
    first = Client(heard.path, "first")
    joins(first)
    comes(first, 0)
    forms(first)
    names = [f"m{number}" for number in range(200)]
    for name in names:
        heard.server.expect(name, os.getpid())
    together, clients = threading.Barrier(len(names)), {}

    def join(name):
        clients[name] = Client(heard.path, name)
        together.wait(LONG)
        clients[name].ask(Join(Member(name=name)), LONG)

    threads = [threading.Thread(target=join, args=[name]) for name in names]
    for each in threads:
        each.start()
    for each in threads:
        each.join(LONG)
    # The first of them was announced, and the others wait until that one is in.
    assert len(comes(first, 201).waiting) == 199
    forms(first)
    newest = forms(first)
    assert len(newest.roster.names) == 201
    assert newest.roster.generation == 2
    for each in clients.values():
        assert each.wait(lambda known: known.revision == newest.revision, LONG) == newest
        each.close()
    first.close()
    until(lambda: not heard.server._names)
