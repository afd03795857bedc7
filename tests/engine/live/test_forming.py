"""Forming a generation with real processes: who belongs to it, who does not, and who is gone."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, distributed_c10d

from resilin.core.membership import Member, Roster
from resilin.engine.collectives import Collectives, Messages
from resilin.engine.live.forming import (
    SLICE,
    Credentials,
    Generation,
    be_alone,
    form,
    open_store,
)
from resilin.engine.lost import PeerLost
from tests.engine.live.members import run

pytestmark = pytest.mark.processes


class Impostor(Credentials):
    """Knows where members meet, and not the secret."""

    def sign(self, *words):
        if words[0] == "meeting":
            return Credentials(self.identity, b"secret").sign(*words)
        return super().sign(*words)


def add_up(number, formed):
    control = Collectives(formed.guarded("control"))
    numbers = torch.tensor([float(number)])
    send_late(number, formed)
    formed.wait(dist.all_reduce(numbers, group=formed.groups["gradients"], async_op=True))
    return control.gather(number), numbers.item(), dist.get_rank()


def send_late(number, formed):
    """Sends a message for which the other one waits longer than a slice."""
    if number < 2:
        group, said = formed.groups["control"], torch.tensor([5.0 * number])
        if number:
            time.sleep(5 * SLICE.total_seconds())
        move = dist.isend if number else dist.irecv
        formed.wait(Messages([move(said, 1 - number, group=group)]))
        assert said.item() == 5


def test_members_come_together():
    ours = Credentials("job", b"secret")
    assert run([ours] * 3, add_up) == {n: ([0, 1, 2], 3.0, n) for n in range(3)}


def test_a_process_without_the_secret_never_meets_the_members():
    outcomes = run(
        [Credentials("job", b"secret"), Credentials("job", b"guess")], add_up, patience=2
    )
    assert all(text.startswith("PeerLost: generation 3 is over") for text in outcomes.values())


@pytest.mark.parametrize("impostor", [0, 1])
def test_a_process_that_cannot_prove_that_it_knows_the_secret_is_refused(impostor):
    credentials = [Credentials("job", b"secret"), Credentials("job", b"secret")]
    credentials[impostor] = Impostor("job", b"guess")
    outcomes = run(credentials, add_up)
    honest = outcomes[1 - impostor]
    assert honest == f"PeerLost: process {impostor} does not know the secret of the job"


class Frozen(Credentials):
    """Belongs to the job, and is frozen before it has proved that."""

    def sign(self, *words):
        if words[0] == "member":
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().sign(*words)


def test_nobody_waits_for_the_proof_of_a_member_that_is_gone_without_a_word():
    outcomes = run([Frozen("job", b"secret"), Credentials("job", b"secret")], add_up, 4, deaths=1)
    reason = "there was a newer one before it was formed"
    assert outcomes == {1: f"PeerLost: generation 3 cannot continue: {reason}"}


def lose(number, formed):
    """Gives the generation up while a collective waits for one that never comes."""
    if number == 1:
        return "silent"
    work = dist.all_reduce(torch.ones(4), group=formed.groups["gradients"], async_op=True)
    formed.give_up("member 1 is gone")
    began = time.monotonic()
    with pytest.raises(PeerLost, match="generation 3 cannot continue: member 1 is gone"):
        formed.wait(work)
    assert time.monotonic() - began < 10  # its time limit is ten minutes
    with pytest.raises(PeerLost):
        formed.wait(dist.all_reduce(torch.ones(4), group=formed.groups["control"], async_op=True))
    return "lost"


def test_nobody_waits_for_a_store_whose_process_is_gone_once_there_is_a_newer_generation():
    looks = itertools.count()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        # Connections are taken by the system, and nobody speaks.
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        members = (Member(name="a", address=address), Member(name="b", address="127.0.0.1:1"))
        roster = Roster(generation=3, members=members)
        with pytest.raises(PeerLost, match="does not answer, and there is a newer generation"):
            form(
                roster,
                roster.membership("b"),
                None,
                Credentials("job", b"secret"),
                superseded=lambda: next(looks) > 2,
                never_formed=lambda: False,
                patience=timedelta(seconds=20),
            )


def test_nobody_waits_for_the_connections_of_a_member_that_is_gone():
    looks, credentials = itertools.count(), Credentials("job", b"secret")
    store, address, _ = open_store("127.0.0.1")
    # The other one came, and was killed before it connected.
    PrefixStore(credentials.sign("meeting", 3), store).add("came", 1)
    members = (Member(name="a", address=address), Member(name="b", address="127.0.0.1:1"))
    roster = Roster(generation=3, members=members)
    with pytest.raises(PeerLost, match="generation 3 is over, and there is a newer generation"):
        form(
            roster,
            roster.membership("a"),
            store,
            credentials,
            superseded=lambda: False,
            never_formed=lambda: next(looks) > 2,
            patience=timedelta(seconds=20),
        )
    assert not dist.is_initialized()
    assert distributed_c10d.ProcessGroupGloo is dist.ProcessGroupGloo


def test_generations_do_not_pile_up_hooks_for_errors(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", print)
    try:
        be_alone()
        be_alone()
        assert sys.excepthook is print
    finally:
        dist.destroy_process_group()


def test_a_generation_that_is_given_up_keeps_nobody_waiting():
    ours = Credentials("job", b"secret")
    assert run([ours, ours], lose) == {0: "lost", 1: "silent"}


RESET = "[/src/gloo/transport/tcp/pair.cc:534] Connection reset by peer [127.0.0.1]:1"


def test_a_collective_that_is_refused_is_a_loss_only_if_a_member_is_gone():
    whole = Generation(Roster(generation=3, members=(Member(name="0"),)), {})
    error = whole.refused(RuntimeError("unsupported dtype\nmore"))
    assert not isinstance(error, PeerLost)
    assert str(error) == (
        "a collective was refused, though generation 3 has lost no member: unsupported dtype"
    )
    assert not whole.broken
    lost = whole.refused(RuntimeError(RESET))
    assert isinstance(lost, PeerLost)
    assert "Connection reset by peer" in whole.broken
    # Whatever a group says once a member is gone.
    given_up = Generation(Roster(generation=3, members=(Member(name="0"),)), {})
    given_up.give_up("member 1 is gone")
    assert isinstance(given_up.refused(RuntimeError("anything")), PeerLost)
    assert given_up.broken == "member 1 is gone"
