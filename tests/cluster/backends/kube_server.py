"""A real kube-apiserver and etcd on this machine, from a directory that has both.

`KUBEBUILDER_ASSETS` names the directory, as for the tests of Kubernetes' own tools. If it has
kube-controller-manager, too, the real controller looks after Jobs; `kube_hands.py` does what else
there is to do.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import subprocess
import time
import urllib.request
from pathlib import Path

ASSETS = "KUBEBUILDER_ASSETS"
CERTIFICATE = "certificates/apiserver.crt"
"""File that the server makes, with its own certificate and the one that signed it."""
USERS = {"admin": "system:masters", "controller": ""}
"""Users that the server knows, and their groups; the token of each is its name."""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def kubeconfig(folder: Path, url: str, user: str) -> Path:
    """A file with which a client is this user, in the namespace `default`."""
    path = folder / f"{user}.kubeconfig"
    cluster = {"server": url, "certificate-authority": str(folder / CERTIFICATE)}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "here", "cluster": cluster}],
        "users": [{"name": user, "user": {"token": user}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": user}}],
        "current-context": "here",
    }
    path.write_text(json.dumps(content))
    return path


class RealServer:
    """kube-apiserver over etcd, on loopback."""

    def __init__(self, folder: Path) -> None:
        self._assets = Path(os.environ[ASSETS])
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        client, peer, port = (free_port() for _ in range(3))
        etcd = shutil.which("etcd", path=f"{self._assets}:{os.environ['PATH']}")
        assert etcd is not None
        self._run(
            self._folder,
            "etcd",
            etcd,
            "--data-dir",
            str(folder / "etcd"),
            f"--listen-client-urls=http://127.0.0.1:{client}",
            f"--advertise-client-urls=http://127.0.0.1:{client}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-cluster=default=http://127.0.0.1:{peer}",
            "--unsafe-no-fsync",
        )
        key = folder / "accounts.key"
        subprocess.run(
            ["openssl", "genrsa", "-out", str(key), "2048"],
            check=True,
            capture_output=True,
            timeout=60,
        )
        lines = [f'{name},{name},{name},"{group}"' for name, group in USERS.items()]
        (folder / "tokens").write_text("\n".join(lines))
        self._run(
            self._folder,
            "kube-apiserver",
            str(self._assets / "kube-apiserver"),
            f"--etcd-servers=http://127.0.0.1:{client}",
            f"--cert-dir={folder / 'certificates'}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={port}",
            "--authorization-mode=RBAC",
            f"--token-auth-file={folder / 'tokens'}",
            "--service-account-issuer=https://127.0.0.1",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-cluster-ip-range=10.0.0.0/24",
            # Controllers that do not run make the accounts of pods, and remove the taint that a
            # new node has.
            "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",
        )
        self.url = f"https://127.0.0.1:{port}"
        try:
            self._await()
            self.has_controllers = self._start_controllers()
            """Whether Jobs are looked after by Kubernetes itself."""
        except BaseException:
            self.close()
            raise

    def _start_controllers(self) -> bool:
        program = self._assets / "kube-controller-manager"
        if not program.exists():
            return False
        self._run(
            self._folder,
            "kube-controller-manager",
            str(program),
            f"--kubeconfig={kubeconfig(self._folder, self.url, 'admin')}",
            "--controllers=job-controller,ttl-after-finished-controller",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            f"--secure-port={free_port()}",
            f"--cert-dir={self._folder / 'controllers'}",
        )
        return True

    def _run(self, folder: Path, name: str, *command: str) -> None:
        with (folder / f"{name}.log").open("wb") as log:
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=log))

    def _await(self) -> None:
        request = urllib.request.Request(
            f"{self.url}/api/v1/namespaces/default", headers={"Authorization": "Bearer admin"}
        )
        deadline = time.monotonic() + 200
        while not self._answers(request):
            ended = [each.args for each in self._processes if each.poll() is not None]
            assert not ended, f"ended: {ended}"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.2)

    def _answers(self, request: urllib.request.Request) -> bool:
        try:
            context = ssl.create_default_context(cafile=self._folder / CERTIFICATE)
            with urllib.request.urlopen(request, context=context, timeout=10):
                return True
        except OSError:
            return False

    def close(self) -> None:
        for process in reversed(self._processes):
            # etcd last: the server would wait for it.
            process.terminate()
            process.wait(timeout=60)
