"""Forked children of a member, as workers of a DataLoader: none of its connections is theirs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from resilin.engine.live.forming import Credentials
from resilin.engine.lost import PeerLost
from tests.engine.live.members import SECONDS, run

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forked children"),
]


def internet_sockets():
    """Ports at both ends of this process' TCP sockets."""
    found = []
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):
            looked_at = socket.socket(fileno=os.dup(int(name)))
            with looked_at:
                if looked_at.family in (socket.AF_INET, socket.AF_INET6):
                    peer = None
                    with contextlib.suppress(OSError):
                        peer = looked_at.getpeername()[1]
                    found.append([looked_at.getsockname()[1], peer])
    return sorted(found, key=str)


class Sockets(Dataset):
    """Samples that say what their worker holds; the second one of each worker never comes."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index >= 2:
            threading.Event().wait(2 * SECONDS)
        return {"process": os.getpid(), "sockets": internet_sockets()}


def die_with_workers(directory, number, formed):
    if number == 0:
        # The other one never comes to this: it ends by the closed connection, or after ten minutes.
        work = dist.all_reduce(torch.ones(4), group=formed.groups["gradients"], async_op=True)
        with pytest.raises(PeerLost, match="a collective failed"):
            formed.wait(work)
        told = json.loads((directory / "told").read_text())
        for each in told["workers"]:
            os.kill(each["process"], 0)  # they live, and still wait for their second sample
        return told
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        port, other = server.getsockname()[1], theirs.getsockname()[1]
        loader = iter(DataLoader(Sockets(), None, num_workers=2, multiprocessing_context="fork"))
        workers = [next(loader), next(loader)]
        own = internet_sockets()
        told = {"workers": workers, "user": [[port, None], [other, port]], "own": own}
        (directory / "told").write_text(json.dumps(told))
        os.kill(os.getpid(), signal.SIGKILL)
        return None


def test_the_death_of_a_member_is_seen_though_its_workers_live(tmp_path: Path):
    ours = Credentials("job", b"secret")
    try:
        told = run([ours, ours], partial(die_with_workers, tmp_path), deaths=1)[0]
    finally:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for each in json.loads((tmp_path / "told").read_text())["workers"]:
                os.kill(each["process"], signal.SIGKILL)
    for each in told["workers"]:
        # Its queues work: they brought this. The user's own sockets are left alone.
        assert each["sockets"] == sorted(told["user"], key=str)
    assert len(told["own"]) > len(told["user"]) + 6  # three groups, and the stores
