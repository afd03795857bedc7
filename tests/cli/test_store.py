import os
import re
import signal
import socket
import subprocess
import sys
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from resilin.cli import etcd_server, store
from resilin.cli.live.access import access
from resilin.cli.live.gateway import Away, Gateway
from resilin.engine.stop import StopRequest
from tests.cli.live.certificates import Signer

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("port", ["65536", "-1", "http"])
def test_a_port_that_does_not_exist_is_a_wrong_usage(port, capsys):
    with pytest.raises(SystemExit) as end:
        store.main([f"--port={port}"])
    assert end.value.code == 2
    assert f"argument --port: '{port}' is not a port from 0 to 65535" in capsys.readouterr().err


def test_agents_can_meet_until_a_signal_ends_it():
    command = [sys.executable, "-m", "resilin.cli", "store", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            port = int(process.stdout.readline().split()[-1])
            meeting = TCPStore("127.0.0.1", port, timeout=timedelta(seconds=20))
            meeting.set("here", "yes")
            assert meeting.get("here") == b"yes"
            # On that address and on no other, unless it is told.
            with pytest.raises(OSError, match="refused"):
                socket.create_connection(("127.0.0.2", port), timeout=20)
            taken = subprocess.run([*command[:-1], str(port)], timeout=60, stdout=subprocess.PIPE)
            assert taken.returncode == 1
            assert f"no store on 127.0.0.1:{port}" in taken.stdout.decode()
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=20) == 0
        finally:
            process.kill()


# etcd ------------------------------------------------------------------------------------------


STORE = [sys.executable, "-m", "resilin.cli", "store"]


def fake_etcd(directory, said):
    """An etcd that only says its version."""
    path = directory / "etcd"
    path.write_text(f"#!/bin/sh\necho '{said}'\n")
    path.chmod(0o755)


def serve(capsys, **settings):
    """The code with which serving an etcd ends, and what it says."""
    code = etcd_server.serve(etcd_server.Settings(**{"port": 0} | settings), StopRequest())
    return code, capsys.readouterr().out


def test_an_etcd_is_served_until_a_signal_ends_it(tmp_path):
    data = tmp_path / "data"
    command = [*STORE, "--etcd", "--port", "0", "--data", str(data), "--unsafe-version"]
    # What is set for another etcd is not for this one.
    environment = {**os.environ, "ETCD_LISTEN_CLIENT_URLS": "http://127.0.0.1:1"}
    for turn in range(2):
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment
        ) as process:
            try:
                line = process.stdout.readline()
                said = re.fullmatch(r"resilin: serving etcd 3\.\d+\.\d+ at (\S+) \(.*\)\n", line)
                given = access(said[1], {})
                assert given.endpoints[0][0] == "127.0.0.1"
                gateway = Gateway(given)
                # Its data outlive it.
                assert gateway.swap("there", 0, b"yes").done == (turn == 0)
                assert gateway.read("there").entries[0].value == b"yes"
                assert data.stat().st_mode & 0o077 == 0
                with pytest.raises(OSError, match="refused"):
                    socket.create_connection(("127.0.0.2", given.endpoints[0][1]), timeout=20)
                process.send_signal(signal.SIGTERM)
                assert process.wait(timeout=60) == 0
            finally:
                process.kill()
        with pytest.raises(Away):
            gateway.read("there")


def test_certificates_keep_others_out(tmp_path):
    signer = Signer(tmp_path, "signer")
    server, client = signer.sign("server"), signer.sign("client")
    files = ["--certificate", server.certificate, "--key", server.key, "--client-ca", signer.ca]
    command = [*STORE, "--etcd", "--port", "0", "--unsafe-version", *files]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().split()[5]
            assert url.startswith("etcds://127.0.0.1:")
            known = {
                "ETCDCTL_CACERT": signer.ca,
                "ETCDCTL_CERT": client.certificate,
                "ETCDCTL_KEY": client.key,
            }
            assert Gateway(access(url, known)).swap("there", 0, b"yes").done
            with pytest.raises(Away):
                Gateway(access(url, {"ETCDCTL_CACERT": signer.ca})).read("there")
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()


@pytest.mark.parametrize("version", ["3.5.0", "3.5.4", "3.4.20", "3.3.25"])
def test_versions_that_are_not_to_be_relied_on_are_refused(tmp_path, monkeypatch, capsys, version):
    fake_etcd(tmp_path, f"etcd Version: {version}")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    code, said = serve(capsys)
    assert code == 1
    assert f"is etcd {version}" in said
    assert "apt install etcd-server" in said


def test_versions():
    for version in ((3, 4, 21), (3, 4, 23), (3, 5, 5), (3, 6, 0)):
        etcd_server.check_version(version, "etcd", unsafe_version=False)
    etcd_server.check_version((3, 5, 1), "etcd", unsafe_version=True)
    with pytest.raises(etcd_server.NoEtcd):
        etcd_server.check_version((3, 3, 0), "etcd", unsafe_version=True)


def test_without_an_etcd_it_says_how_to_get_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, said = serve(capsys)
    assert code == 1
    assert "no etcd on the path" in said
    assert "apt install etcd-server" in said
    fake_etcd(tmp_path, "hello")
    code, said = serve(capsys)
    assert code == 1
    assert "does not say its version: hello" in said


def test_an_etcd_that_ends_at_once_is_told_with_its_reason(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, said = serve(capsys, port=taken.getsockname()[1], unsafe_version=True)
    assert code == 1
    assert "etcd ended with code" in said
    assert "address already in use" in said


def test_options_of_etcd_need_it(capsys):
    with pytest.raises(SystemExit):
        store.main(["--data", "x"])
    assert "--data must come with --etcd" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        store.main(["--etcd", "--certificate", "x"])
    assert "a certificate and its key must both be given" in capsys.readouterr().err


def test_who_listens_beyond_this_machine_is_warned():
    assert etcd_server.Settings(host="10.0.0.1").is_open
    assert not etcd_server.Settings().is_open
    closed = etcd_server.Settings(host="10.0.0.1", certificate="c", key="k", ca="a")
    assert not closed.is_open
