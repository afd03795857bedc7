"""Groups of generations that are over are closed where nobody waits for that."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from resilin.core.membership import Member, Roster
from resilin.engine.live.closing import close
from resilin.engine.live.forming import Generation
from resilin.engine.live.inherited import Listeners, listening

pytestmark = pytest.mark.processes

PEER = """
import json, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from resilin.engine.live.inherited import listening
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=timedelta(seconds=60))
dist.init_process_group("gloo", store=store, rank=1, world_size=2)
print(json.dumps([*listening().values()]), flush=True)
time.sleep(600)
"""


@pytest.fixture
def peer(monkeypatch):
    """A process that is the other member of the default group, and then is frozen."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    limit = timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    command = [sys.executable, "-c", PEER, str(store.port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=limit)
            process.listens = [tuple(each) for each in json.loads(process.stdout.readline())]
            os.kill(process.pid, signal.SIGSTOP)
            yield process
        finally:
            process.kill()
            if dist.is_initialized():
                dist.destroy_process_group()


def test_nobody_waits_for_a_collective_with_a_frozen_peer_in_a_group_that_is_over(peer):
    generation = Generation(
        Roster(generation=0, members=(Member(name="a"), Member(name="b"))),
        {"gradients": dist.group.WORLD},
    )
    left_behind = dist.all_reduce(torch.ones(3), async_op=True)
    # An error of a lost step: its frames have the group, and it is in a cycle.
    error = RuntimeError()
    error.frames = [error, generation]
    close(generation.groups.values())
    dist.destroy_process_group()
    del generation, error
    threads = [each for each in threading.enumerate() if each.name == "resilin-closing"]
    gc.collect()
    # Otherwise this would have waited until the collective has failed.
    assert not left_behind.is_completed()
    peer.kill()
    for each in threads:
        each.join(60)
        assert not each.is_alive()


def test_a_group_that_is_over_ends_though_a_peer_is_frozen(peer):
    listeners = Listeners([*peer.listens, *listening().values()])
    left_behind = dist.all_reduce(torch.ones(3), async_op=True)
    groups = [dist.group.WORLD]
    dist.destroy_process_group()
    close(groups, listeners)
    groups.clear()
    (thread,) = [each for each in threading.enumerate() if each.name == "resilin-closing"]
    # The peer is frozen still, and its connections are open.
    thread.join(30)
    assert not thread.is_alive()
    assert peer.poll() is None
    with pytest.raises(RuntimeError):
        left_behind.wait()
