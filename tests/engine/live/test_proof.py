"""A worker and an authority on two machines: each proves to the other that it knows the secret."""

import json
import socket
import threading

import pytest

from resilin.core.live import Join
from resilin.core.membership import Member
from resilin.engine.authority.keeper import LocalKeeper
from resilin.engine.authority.server import Server
from resilin.engine.live.client import Client
from resilin.engine.live.proof import Greeting
from resilin.engine.live.wire import host_and_port

LONG = 60.0
SECRET = b"known to the job alone"


@pytest.fixture
def server():
    server = Server(
        "tcp://127.0.0.1:0",
        LocalKeeper(),
        num_founders=1,
        secret=SECRET,
        address="",
        on_alive=lambda name: None,
        on_finished=lambda name: None,
        on_restart=lambda name, reason: None,
    )
    server.expect("a", 0)
    yield server
    server.close()


class Speaker:
    """A bare connection to a server."""

    def __init__(self, server):
        self.socket = socket.create_connection(host_and_port(server.address), timeout=LONG)
        self.file = self.socket.makefile("rb")

    def say(self, message):
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def hear(self):
        """The next message; None if the other side has closed the connection."""
        try:
            line = self.file.readline()
        except ConnectionError:
            return None
        return json.loads(line) if line else None


@pytest.fixture
def speaker(server):
    speaker = Speaker(server)
    yield speaker
    speaker.file.close()
    speaker.socket.close()


def test_a_worker_with_the_secret_is_a_member(server):
    client = Client(server.address, "a", SECRET)
    authority = client.ask(Join(Member(name="a", address="127.0.0.1:1", hosts=("h",))), LONG)
    assert authority.roster.names == ("a",)
    assert client.secret == SECRET
    assert client.address == "127.0.0.1"
    client.close()


def test_the_secret_is_never_sent(server, speaker):
    greeting = Greeting("a")
    speaker.say(greeting.claim())
    challenge = speaker.hear()
    speaker.say(greeting.answer(SECRET, challenge))
    hello = speaker.hear()
    assert hello == {"hello": {"authority": None}}
    assert SECRET.hex() not in json.dumps([challenge, hello])


def test_a_worker_without_the_secret_finds_out_who_it_speaks_to(server):
    with pytest.raises(ConnectionError, match="does not know the secret"):
        Client(server.address, "a", b"another")


@pytest.mark.parametrize("proof", ["0" * 64, "", "\u00e9", "\ud800"])
def test_a_worker_without_the_secret_is_refused_and_others_are_heard(server, speaker, proof):
    speaker.say({"name": "a", "nonce": "1"})
    assert set(speaker.hear()) == {"challenge", "proof"}
    speaker.say({"proof": proof})
    assert speaker.hear() is None
    Client(server.address, "a", SECRET).close()


@pytest.mark.parametrize("words", ["\ud800", "\u00e9"])
def test_a_claim_of_strange_words_closes_one_connection(server, speaker, words):
    speaker.say({"name": words, "nonce": words})
    speaker.say({"proof": "0"})
    while speaker.hear() is not None:
        pass
    Client(server.address, "a", SECRET).close()


def test_the_proof_of_the_authority_is_none_of_a_worker(speaker):
    """Whoever does not know the secret may not send back what it was sent."""
    speaker.say({"name": "a", "nonce": "1"})
    speaker.say({"proof": speaker.hear()["proof"]})
    assert speaker.hear() is None


def test_an_old_proof_is_of_no_use(server, speaker):
    greeting = Greeting("a", "1")
    old = Greeting("a", "1", "an earlier challenge").challenge(SECRET)
    speaker.say(greeting.claim())
    speaker.hear()
    speaker.say(greeting.answer(SECRET, old))
    assert speaker.hear() is None


@pytest.mark.parametrize(
    "message",
    [
        {"alive": True},
        {"proof": "0" * 64},
        {"event": {"leave": "a"}, "ask": None},
        {"finished": True},
        {"restart": "now"},
    ],
    ids=lambda message: next(iter(message)),
)
def test_nobody_says_anything_before_the_proof(speaker, message):
    speaker.say(message)
    assert speaker.hear() is None


def test_nothing_is_taken_between_the_claim_and_the_proof(speaker):
    speaker.say({"name": "a", "nonce": "1"})
    speaker.hear()
    speaker.say({"restart": "now"})
    assert speaker.hear() is None


def test_a_name_has_one_connection(server):
    first = Client(server.address, "a", SECRET)
    with pytest.raises(ConnectionError, match="has a connection already"):
        Client(server.address, "a", SECRET)
    first.close()


def test_an_impostor_in_place_of_the_authority_learns_nothing():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        heard = []

        def answer():
            accepted, _ = listener.accept()
            with accepted, accepted.makefile("rb") as file:
                heard.append(json.loads(file.readline()))
                accepted.sendall(b'{"challenge":"1","proof":"2"}\n')
                heard.append(file.readline())

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConnectionError, match="does not know the secret"):
            Client(f"tcp://127.0.0.1:{listener.getsockname()[1]}", "a", SECRET)
        thread.join(LONG)
    claim, rest = heard
    assert set(claim) == {"name", "nonce"}
    assert rest == b""


@pytest.mark.parametrize("address", ["tcp://", "tcp://host", "tcp://:1", "tcp://host:x"])
def test_an_address_has_host_and_port(address):
    with pytest.raises(ValueError, match="must be tcp://HOST:PORT"):
        host_and_port(address)
