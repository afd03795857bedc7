"""A worker's connection: however it ends, whoever waits is woken and told why."""

import json
import os
import socket
import subprocess
import sys
import threading

import pytest

from resilin.core.live import Authority, Form, Join, Remove, Renew, apply
from resilin.core.membership import Member
from resilin.core.recovery import Version
from resilin.engine.copies import Place
from resilin.engine.live import client as module
from resilin.engine.live.client import Client
from resilin.engine.live.follower import Follower

LONG = 60.0
FIRST = Authority.start("one", [Member(name="a"), Member(name="b")])


def line(message):
    return json.dumps(message).encode() + b"\n"


HELLO = line({"hello": {"secret": "00ff", "address": "here", "authority": FIRST.to_json()}})


@pytest.fixture
def launcher(tmp_path):
    """A bare socket in place of a launcher: accepts one client, and hands its own end over."""
    path = str(tmp_path / "socket")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    opened = [listener]

    def accept(first=HELLO):
        made, failed = [], []

        def connect():
            try:
                made.append(Client(path, "a"))
            except ConnectionError as error:
                failed.append(error)

        connecting = threading.Thread(target=connect)
        connecting.start()
        accepted, _ = listener.accept()
        accepted.settimeout(LONG)
        opened.append(accepted)
        accepted.sendall(first)
        if first == b"":
            accepted.shutdown(socket.SHUT_WR)
        connecting.join(LONG)
        if failed:
            raise failed[0]
        opened.append(made[0])
        return made[0], accepted

    yield accept
    for each in reversed(opened):
        each.close()


def test_hello_says_what_a_member_needs(launcher):
    client, accepted = launcher()
    assert (client.name, client.secret, client.address) == ("a", b"\x00\xff", "here")
    assert client.newest == FIRST
    messages = [json.loads(each) for each in accepted.makefile("rb").readline().splitlines()]
    assert messages == [{"name": "a"}]


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (b"", "closed the connection"),
        (b"junk\n", "must be an object of JSON"),
        (line({"refused": "you are not a"}), "you are not a"),
        (line({"hello": {}}), "secret"),
        (line({"alive": True}), "hello"),
        (line({"hello": {"secret": "0", "address": "", "authority": None}}), "hex"),
        (line({"hello": {"secret": "00", "address": "", "authority": {}}}), "not an authority"),
    ],
)
def test_a_launcher_that_says_something_else_is_none(launcher, first, message):
    with pytest.raises(ConnectionError, match=f"is no launcher for a: .*{message}"):
        launcher(first)


def test_of_two_announcements_the_later_one_counts(launcher):
    client, accepted = launcher()
    heard = []
    client.on_change = heard.append
    second = apply(FIRST, Renew(0))
    third = apply(second, Renew(1))
    for each in (third, second, FIRST, third):
        accepted.sendall(line({"authority": each.to_json()}))
    other = Authority.start("two", FIRST.roster.members)
    accepted.sendall(line({"authority": other.to_json()}))
    # Whether to continue with another authority is for the engine to say.
    assert client.wait(lambda newest: newest.identity == "two", LONG) == other
    assert heard == [third, other]


def test_a_member_knows_whether_it_was_announced(launcher):
    others = Authority.start("one", [Member(name="b")])
    state = {"secret": "00", "address": "", "authority": others.to_json()}
    client, accepted = launcher(line({"hello": state}))
    assert not client.joined
    waits = apply(others, Join(Member(name="a")))
    accepted.sendall(line({"authority": waits.to_json()}))
    assert client.wait(lambda newest: newest.revision == 1, LONG) == waits
    assert client.joined
    accepted.sendall(line({"authority": apply(waits, Remove("a")).to_json()}))
    assert client.wait(lambda newest: "a" not in newest, LONG) is not None
    assert client.joined


def asks(client, timeout=LONG):
    """An ask in a thread, and what it raises."""
    caught = []

    def ask():
        try:
            client.ask(Renew(0), timeout)
        except OSError as error:
            caught.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread, caught


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (b"", "the other side has closed the connection"),
        (b"junk\n", "must be an object of JSON"),
        (line({"authority": [1]}), "not an authority"),
    ],
)
def test_an_end_of_the_connection_wakes_all(launcher, caplog, last, reason):
    client, accepted = launcher()
    asking, caught = asks(client)
    got = []
    waiting = threading.Thread(target=lambda: got.append(client.wait(lambda newest: False, LONG)))
    waiting.start()
    accepted.sendall(last)
    accepted.shutdown(socket.SHUT_WR)
    for each in (asking, waiting):
        each.join(LONG)
    assert client.lost
    assert got == [None]
    assert reason in str(caught[0])
    assert isinstance(caught[0], ConnectionError)
    assert f"a lost its launcher: {reason}" in caplog.text or reason in caplog.text
    # Whatever is sent now is lost, and asking says so at once.
    client.tell(Renew(0))
    with pytest.raises(ConnectionError, match="no answer to Renew"):
        client.ask(Renew(0), LONG)


def test_a_failure_of_the_engine_ends_the_connection_and_is_logged(launcher, caplog):
    client, accepted = launcher()

    def fails(authority):
        raise RuntimeError("a defect")

    client.on_change = fails
    accepted.sendall(line({"authority": apply(FIRST, Renew(0)).to_json()}))
    assert client.wait(lambda newest: False, LONG) is None
    assert client.lost
    assert "a defect" in caplog.text


@pytest.mark.parametrize("wait", [lambda c: c.wait(bool, LONG), lambda c: c.ask(Renew(0), LONG)])
def test_the_thread_does_not_wait_for_itself(launcher, caplog, wait):
    client, accepted = launcher()
    client.on_change = lambda authority: wait(client)
    accepted.sendall(line({"authority": apply(FIRST, Renew(0)).to_json()}))
    assert client.wait(lambda newest: False, LONG) is None
    assert "on_change and on_stop must not wait for the launcher" in caplog.text


def test_a_launcher_that_does_not_answer_is_waited_for_so_long(launcher):
    client, accepted = launcher()
    with pytest.raises(TimeoutError, match=r"no answer to Renew\(generation=0\) within 0.01 s"):
        client.ask(Renew(0), 0.01)
    # A late answer is nobody's, and changes nothing but what is known.
    second = apply(FIRST, Renew(0))
    accepted.sendall(line({"answer": 1, "authority": second.to_json()}))
    assert client.wait(lambda newest: newest.revision == 1, LONG) == second
    assert client._answers == {}


def test_a_launcher_that_does_not_read_holds_nobody_up(launcher, monkeypatch, caplog):
    client, _ = launcher()
    monkeypatch.setattr(module, "_FLUSH_WITHIN", 0.05)
    for _ in range(20):
        client.restart("x" * 100_000)
    assert client._connection.pending
    client.close()
    assert "some reports were not sent" in caplog.text


def test_what_was_said_before_the_end_arrives(launcher):
    client, accepted = launcher()
    client.finished()
    client.close()
    sent = [json.loads(each) for each in accepted.makefile("rb")]
    assert {"finished": True} in sent
    assert client.lost


SERVER = """
import sys, threading
from resilin.engine.authority.keeper import LocalKeeper
from resilin.engine.authority.server import Server
server = Server(
    sys.argv[1], LocalKeeper(), num_founders=1, secret=b"s", address="",
    on_alive=print, on_finished=print, on_restart=print,
)
server.expect("a", int(sys.argv[2]))
print("ready", flush=True)
threading.Event().wait()
"""


def test_a_launcher_that_is_killed_is_lost(tmp_path):
    path = str(tmp_path / "socket")
    launcher = subprocess.Popen(
        [sys.executable, "-c", SERVER, path, str(os.getpid())],
        stdout=subprocess.PIPE,
    )
    try:
        assert launcher.stdout.readline() == b"ready\n"
        client = Client(path, "a")
        asking, caught = asks(client)  # there is no first generation: no answer comes
        launcher.kill()
        asking.join(LONG)
        assert isinstance(caught[0], ConnectionError)
        assert client.wait(lambda newest: False, LONG) is None
        assert client.lost
        client.close()
    finally:
        launcher.kill()
        launcher.communicate(timeout=60)


FOUNDED = Authority.start("two", [Member(name="c")])
"""A job that was begun by another launcher."""


@pytest.mark.parametrize(
    ("announced", "founds"),
    [
        (FIRST, True),
        (apply(FIRST, Remove("b")), True),
        (FOUNDED, False),
        (apply(FOUNDED, Join(Member(name="a"))), False),
        (apply(apply(FOUNDED, Form(0, ("c",), Version(0, 0))), Join(Member(name="a"))), False),
    ],
    ids=["first", "one-lost", "others", "waits", "announced"],
)
def test_a_member_founds_a_job_only_if_nobody_else_has_begun_it(launcher, announced, founds):
    hello = {"secret": "00ff", "address": "127.0.0.1", "authority": None}
    client, accepted = launcher(line({"hello": hello}))
    client.tell(Join(Member(name="a")))
    accepted.sendall(line({"authority": announced.to_json()}))
    # A process that joins a running job is expected to have built its script by then.
    assert Follower(client, Place(client.name)).founds() is founds
