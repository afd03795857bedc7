"""Lines of JSON over a Unix socket, in any pieces, to a side that may not read."""

import os
import socket
import subprocess
import sys

import pytest

from resilin.engine.live import wire
from resilin.engine.live.wire import Connection, connect, descends, encode, peer


@pytest.fixture
def ends():
    """A connection, and the bare socket at its other end."""
    here, there = socket.socketpair(socket.AF_UNIX)
    there.settimeout(30)
    connection = Connection(here, longest=100)
    yield connection, there
    connection.close()
    there.close()


def test_messages_come_whole_however_they_were_cut(ends):
    connection, there = ends
    assert [*connection.receive()] == []
    for byte in b'{"a": 1}\n{"b":':
        there.send(bytes([byte]))
    assert [*connection.receive()] == [{"a": 1}]
    assert [*connection.receive()] == []
    there.send(b' "\xc3\xa9"}\n{"c": null}\n')
    assert [*connection.receive()] == [{"b": "\u00e9"}, {"c": None}]


def test_what_was_sent_before_the_end_is_received(ends):
    connection, there = ends
    there.send(b'{"a": 1}\n{"half')
    there.close()
    assert [*connection.receive()] == [{"a": 1}]
    for _ in range(2):
        with pytest.raises(ConnectionError, match="closed the connection"):
            list(connection.receive())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"hello\n", "must be an object of JSON"),
        (b"[1]\n", "must be an object of JSON"),
        (b"\xff\xfe\n", "must be an object of JSON"),
        (b"\n", "must be an object of JSON"),
        (b"[" * 90 + b"\n", "must be an object of JSON"),
        (b"x" * 101, "at most 100 bytes"),
        (b'{"a": "' + b"x" * 101 + b'"}\n', "at most 100 bytes"),
    ],
)
def test_a_line_that_is_no_message_is_refused(ends, line, message):
    connection, there = ends
    there.send(line)
    with pytest.raises(ValueError, match=message):
        list(connection.receive())


def test_a_line_that_nests_deeply_is_no_message():
    with pytest.raises(ValueError, match="must be an object of JSON"):
        wire._decode(b"[" * 1_000_000)


def test_what_came_before_such_a_line_counts(ends):
    connection, there = ends
    there.send(b'{"a": 1}\njunk\n')
    messages = connection.receive()
    assert next(messages) == {"a": 1}
    with pytest.raises(ValueError, match="b'junk' must be"):
        next(messages)


def test_nobody_waits_for_a_side_that_does_not_read(ends):
    connection, there = ends
    size = 100_000
    for number in range(100):
        connection.announce(encode({"number": number, "filling": "x" * size}))
    assert connection.pending
    assert not connection.flush()
    connection.send({"answer": 1})
    # What the system has taken, one line that was begun, the answer, and the newest alone.
    other = Connection(there)
    came = []
    while not came or came[-1].get("number") != 99:
        connection.flush()
        came += other.receive()
    numbers = [each["number"] for each in came if "number" in each]
    assert len(numbers) < 20
    assert numbers == sorted(numbers)
    assert {"answer": 1} in came
    assert not connection.pending


def test_a_side_that_asks_and_does_not_read_is_given_up(ends, monkeypatch):
    connection, _ = ends
    monkeypatch.setattr(wire, "MOST_KEPT", 1_000_000)

    def ask():
        for _ in range(90):
            connection.send({"answer": "x" * 10_000})

    ask()
    with pytest.raises(ConnectionError, match="has left 1000000 bytes unread"):
        ask()


def test_the_system_says_who_is_at_the_other_end(tmp_path):
    path = str(tmp_path / "socket")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    mine = connect(path)
    accepted, _ = listener.accept()
    assert peer(accepted) == (os.getpid(), os.getuid())
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert descends(child.pid, child.pid)
    assert descends(child.pid, os.getpid())
    assert not descends(os.getpid(), child.pid)
    child.communicate(b"\n", timeout=60)
    assert not descends(child.pid, os.getpid())
    for each in (mine, accepted, listener):
        each.close()


def test_where_nobody_listens_the_path_is_named(tmp_path):
    with pytest.raises(ConnectionError, match=r"cannot connect to .*/none: No such file"):
        connect(str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"has 20. bytes, and must have at most 107: set TMPDIR"):
        connect("/" + "x" * 199)
