import socket
import threading
import time
from dataclasses import replace

import pytest

from resilin.cli.live.access import Access
from resilin.cli.live.etcd import EtcdKeeper
from resilin.cli.live.gateway import Away, Gateway, Rejected
from resilin.core.live import Join, NotLive
from resilin.core.membership import Member
from tests.cli.live.certificates import Signer
from tests.cli.live.etcd_process import EtcdProcess, Network, free_port, until

pytestmark = pytest.mark.processes

RUN = "job-2"


@pytest.fixture
def start(tmp_path):
    """Starts servers, and ends them."""
    started = []

    def make(*more, **settings):
        directory = tmp_path / str(len(started))
        directory.mkdir()
        started.append(EtcdProcess(directory, *more, **settings))
        return started[-1]

    yield make
    for process in started:
        process.kill()


def test_a_value_is_swapped_only_if_nobody_has_changed_it(start):
    gateway = Gateway(start().access)
    assert gateway.read("a").entries == ()
    first = gateway.swap("a", 0, b"1")
    assert first.done
    again = gateway.swap("a", 0, b"2")
    assert not again.done
    assert [(each.value, each.revision) for each in again.entries] == [(b"1", first.revision)]
    second = gateway.swap("a", first.revision, b"2")
    assert second.done
    assert gateway.swap("a", second.revision, None).done
    assert gateway.read("a").entries[0].value == b"2"
    gateway.delete("a")
    assert not gateway.swap("a", second.revision, b"3").done


def test_a_watch_tells_every_change_from_a_revision_on(start):
    gateway = Gateway(start().access)
    # Larger than the pieces in which it arrives.
    values = [str(number).encode() * 200_000 for number in range(1, 5)]
    revisions = [gateway.swap("/w/a", 0, values[0]).revision]
    for value in values[1:]:
        revisions.append(gateway.swap("/w/a", revisions[-1], value).revision)
    gateway.swap("/wx", 0, b"another prefix")
    gateway.delete("/w/a")
    seen = []
    for entry in gateway.watch("/w/", revisions[1]):
        seen.append(entry)
        if entry.deleted:
            break
    assert [each.revision for each in seen[:-1]] == revisions[1:]
    assert [each.value for each in seen[:-1]] == values[1:]


def test_a_watch_ends_at_once_when_it_is_told_to(start):
    gateway = Gateway(start().access)
    ended = []

    def watch():
        try:
            for _ in gateway.watch("/w/", 1):
                pass
        except Away:
            ended.append(True)

    thread = threading.Thread(target=watch)
    thread.start()
    until(lambda: gateway._watching is not None, "watching")
    # Until it waits for news, and before that.
    time.sleep(0.2)
    gateway.close()
    thread.join(timeout=20)
    assert ended
    with pytest.raises(Away, match="closed"):
        next(gateway.watch("/w/", 1))


def test_a_lease_ends_when_it_is_revoked(start):
    gateway = Gateway(start().access)
    lease, seconds = gateway.grant(1)
    # etcd decides.
    assert seconds == 2.0
    assert gateway.claim("/k", b"mine", lease)
    assert gateway.claim("/k", b"mine", lease)
    assert not gateway.claim("/k", b"yours", lease)
    assert gateway.keep(lease)
    gateway.revoke(lease)
    gateway.revoke(lease)
    assert not gateway.keep(lease)
    assert gateway.read("/k").entries == ()
    with pytest.raises(Rejected, match="lease not found"):
        gateway.claim("/k", b"mine", lease)


@pytest.mark.nightly(part="clusters")
def test_another_server_answers_if_one_does_not(start, tmp_path):
    etcd = start()
    network = Network(etcd)
    try:
        three = (("127.0.0.1", free_port()), ("127.0.0.1", network.port), ("127.0.0.1", etcd.port))
        gateway = Gateway(Access(endpoints=three))
        assert gateway.swap("a", 0, b"1").done
        assert gateway._server == 1
        ended = threading.Event()

        def watch():
            with pytest.raises(Away):
                list(gateway.watch("/w/", 1))
            ended.set()

        thread = threading.Thread(target=watch)
        thread.start()
        until(lambda: gateway._watching is not None, "watching")
        # It hears nothing any more, and nobody tells it; the next call finds out.
        network.cut()
        assert gateway.read("a").entries[0].value == b"1"
        assert gateway._server == 2
        assert ended.wait(timeout=20)
        thread.join(timeout=20)
    finally:
        network.mend()
        network.close()


def test_a_server_that_talks_nonsense_is_away():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        def answer():
            for reply in (b"what?\r\n\r\n", b"HTTP/1.1 502 Bad Gateway\r\n\r\n\x1b[31mno"):
                client, _ = listening.accept()
                with client, client.makefile("rb") as request:
                    # All of it, or the rest would reset the connection.
                    while request.read(1) != b"}":
                        pass
                    client.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        gateway = Gateway(Access(endpoints=(("127.0.0.1", port),)))
        with pytest.raises(Away, match="what"):
            gateway.read("a")
        with pytest.raises(Away, match=r"says \?\[31mno \(502\)"):
            gateway.read("a")
        thread.join(timeout=20)


# Who gets in -----------------------------------------------------------------------------------


def permit(gateway, role, prefix):
    """A role for all keys with a prefix that ends with a slash."""
    from resilin.cli.live.gateway import _encoded, _until

    key = {"key": _encoded(prefix), **_until(prefix)}
    gateway._call("auth/role/add", {"name": role})
    gateway._call("auth/role/grant", {"name": role, "perm": {"permType": "READWRITE", **key}})


def with_users(etcd):
    """Turns users on: root, `trainer` for keys of resilin, and `guest` for others."""
    gateway = Gateway(etcd.access)
    for user, role, prefix in (
        ("trainer", "resilin", "/resilin/"),
        ("guest", "guests", "/guests/"),
    ):
        permit(gateway, role, prefix)
        gateway._call("auth/user/add", {"name": user, "password": f"{user}-pa55"})
        gateway._call("auth/user/grant", {"user": user, "role": role})
    gateway._call("auth/user/add", {"name": "root", "password": "root-pa55"})
    gateway._call("auth/user/grant", {"user": "root", "role": "root"})
    gateway._call("auth/enable", {})


def test_only_a_user_of_etcd_can_join(start):
    etcd = start()
    with_users(etcd)
    trainer = replace(etcd.access, user="trainer", password="trainer-pa55")
    one = EtcdKeeper(trainer, RUN, lease=2.0)
    other = None
    try:
        secret = one.secret()
        one.start([Member(name="a", hosts=("a",))])
        for foreign, problem in (
            (etcd.access, "user name is empty"),
            (replace(trainer, password="guessed"), "authentication failed"),
            (replace(trainer, user="guest", password="guest-pa55"), "permission denied"),
        ):
            with pytest.raises(Rejected, match=problem) as raised:
                EtcdKeeper(foreign, RUN)
            assert "pa55" not in str(raised.value)
            gateway = Gateway(foreign)
            with pytest.raises(Rejected):
                gateway.read(f"/resilin/{RUN}/secret")
            with pytest.raises(Rejected):
                gateway.swap(f"/resilin/{RUN}/authority", 0, b"{}")
            with pytest.raises(Rejected):
                list(gateway.watch(f"/resilin/{RUN}/", 1))
        other = EtcdKeeper(trainer, RUN, lease=2.0)
        assert other.secret() == secret
        other.hold("b")
        # The etcd forgets its tokens with its process.
        etcd.kill()
        etcd.start()
        assert "b" in other.apply(Join(Member(name="b", hosts=("b",))))
        until(lambda: "b" in one.newest, "told")
    finally:
        one.close()
        if other is not None:
            other.close()


def test_only_a_client_with_a_certificate_can_join(start, tmp_path):
    signer, foreign = Signer(tmp_path, "signer"), Signer(tmp_path, "foreign")
    server, client = signer.sign("server"), signer.sign("client")
    etcd = start(
        f"--cert-file={server.certificate}",
        f"--key-file={server.key}",
        f"--trusted-ca-file={signer.ca}",
        "--client-cert-auth=true",
        scheme="https",
    )
    trusted = replace(
        etcd.access, tls=True, ca=signer.ca, certificate=client.certificate, key=client.key
    )
    one = EtcdKeeper(trusted, RUN, lease=2.0)
    try:
        one.start([Member(name="a", hosts=("a",))])
        other = EtcdKeeper(trusted, RUN, lease=2.0)
        assert other.secret() == one.secret()
        # The watch is encrypted, too, and ends with it.
        other.close()
        forged = foreign.sign("forged")
        for wrong in (
            etcd.access,
            replace(trusted, certificate=None, key=None),
            replace(trusted, certificate=forged.certificate, key=forged.key),
        ):
            with pytest.raises(Away):
                EtcdKeeper(wrong, RUN, patience=0.0)
        # Nor does a launcher talk to a server that others have signed.
        with pytest.raises(Away, match="certificate verify failed"):
            EtcdKeeper(replace(trusted, ca=foreign.ca), RUN, patience=0.0)
        assert one.newest.roster.names == ("a",)
    finally:
        one.close()


def test_what_is_no_authority_is_not_read_as_one(start):
    etcd = start()
    gateway = Gateway(etcd.access)
    key = f"/resilin/{RUN}/authority"
    gateway.swap(key, 0, b'{"format": 2, "authority": {}}')
    with pytest.raises(ValueError, match="its format is 2, and this version reads 1"):
        EtcdKeeper(etcd.access, RUN)
    gateway.delete(key)
    keeper = EtcdKeeper(etcd.access, RUN, lease=2.0)
    told = []
    keeper.on_over = told.append
    try:
        keeper.start([Member(name="a", hosts=("a",))])
        gateway.swap(key, gateway.read(key).entries[0].revision, b"\x80garbage")
        until(lambda: told, "told")
        assert "is no authority of resilin" in told[0]
        with pytest.raises(NotLive, match="is no authority of resilin"):
            keeper.apply(Join(Member(name="b", hosts=("b",))))
    finally:
        keeper.close()
