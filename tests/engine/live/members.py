"""Processes that form a generation, each with credentials of its own."""

from __future__ import annotations

import multiprocessing
import time

import torch

from resilin.core.membership import Member, Roster
from resilin.engine.live.forming import form, open_store
from resilin.engine.lost import PeerLost

SECONDS = 60
"""Time limit of a process; nothing waits for it unless something is wrong."""


def member(number, addresses, results, credentials, act):
    """One process: it opens its store, tells its address, and forms the generation."""
    torch.set_num_threads(1)
    store, address, _listeners = open_store("127.0.0.1")
    addresses.put((number, address))
    known = dict(results["addresses"].get(timeout=SECONDS))
    members = tuple(Member(name=str(n), address=known[n]) for n in sorted(known))
    roster = Roster(generation=3, members=members)
    began = time.monotonic()

    def superseded():
        return time.monotonic() - began > results["patience"]

    try:
        place = roster.membership(str(number))
        formed = form(roster, place, store, credentials, superseded, never_formed=superseded)
        results["outcomes"].put((number, act(number, formed)))
    except PeerLost as lost:
        results["outcomes"].put((number, f"PeerLost: {lost}"))
    results["end"].wait(SECONDS)


def run(credentials, act, patience=SECONDS, deaths=0):
    """Runs one process per credential, and returns their outcomes by number.

    Those of `deaths` processes are not waited for: `act` kills them.
    """
    context = multiprocessing.get_context("spawn")
    addresses, outcomes, end = context.Queue(), context.Queue(), context.Event()
    told = [context.Queue() for _ in credentials]
    processes = [
        context.Process(
            target=member,
            args=(
                number,
                addresses,
                {"addresses": told[number], "outcomes": outcomes, "end": end, "patience": patience},
                each,
                act,
            ),
        )
        for number, each in enumerate(credentials)
    ]
    for process in processes:
        process.start()
    try:
        known = [addresses.get(timeout=SECONDS) for _ in processes]
        for each in told:
            each.put(known)
        return dict(outcomes.get(timeout=SECONDS) for _ in processes[deaths:])
    finally:
        end.set()
        for process in processes:
            process.join(10)
            process.kill()
            process.join()
