import time
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from resilin.cluster.backends.base import BackendError, PartState
from resilin.cluster.backends.local import LocalBackend
from resilin.cluster.controller.changes import apply
from resilin.cluster.controller.meeting import OutsideStore, StoreProcess
from resilin.cluster.controller.state import State

pytestmark = pytest.mark.processes


class Told:
    """What was announced, and the state after it."""

    def __init__(self):
        self.state, self.records = State(), []

    def __call__(self, met):
        self.records.append(met)
        self.state = apply(self.state, met)


@pytest.fixture
def store(tmp_path):
    yield StoreProcess(tmp_path, "127.0.0.1", "127.0.0.1")
    processes = LocalBackend(tmp_path, "store", ())
    for each in processes.list():
        processes.stop(each.name, 0)
    while any(each.state is not PartState.ENDED for each in processes.list()):
        time.sleep(0.05)


def meet(endpoint):
    host, _, port = endpoint.partition(":")
    return TCPStore(host, int(port), timeout=timedelta(seconds=60))


def test_the_store_is_kept_over_controllers_and_replaced_at_the_same_port(store, tmp_path):
    told = Told()
    store.ensure(None, told)
    first = told.state.meeting
    meet(first.endpoint).set("here", "yes")
    # Another controller, after a crash.
    again = StoreProcess(tmp_path, "127.0.0.1", "127.0.0.1")
    again.ensure(first, told)
    assert len(told.records) == 1
    assert meet(first.endpoint).get("here") == b"yes"
    again.stop(first)
    processes = LocalBackend(tmp_path, "store", ())
    while processes.list()[0].state is not PartState.ENDED:
        time.sleep(0.05)
    again.ensure(first, told)
    second = told.state.meeting
    assert (second.number, second.endpoint) == (2, first.endpoint)
    assert not meet(second.endpoint).check(["here"])


def test_a_store_that_was_announced_and_not_started_is_started(store):
    told = Told()

    class Crash(Exception):
        pass

    def crash(met):
        told(met)
        raise Crash

    with pytest.raises(Crash):
        store.ensure(None, crash)
    store.ensure(told.state.meeting, told)
    assert len(told.records) == 1
    meet(told.state.meeting.endpoint).set("here", "yes")


def test_a_port_that_is_taken_is_told(store):
    told = Told()
    store.ensure(None, told)
    other = StoreProcess(store._directory / "other", "127.0.0.1", "127.0.0.1")
    with pytest.raises(BackendError, match="has ended: see"):
        other.ensure(told.state.meeting, told)


def test_a_store_of_the_operator():
    told = Told()
    OutsideStore("head:29500").ensure(None, told)
    assert told.state.meeting.endpoint == "head:29500"
    OutsideStore("head:29500").ensure(told.state.meeting, told)
    assert len(told.records) == 1
    OutsideStore("head:29501").ensure(told.state.meeting, told)
    assert told.state.meeting.number == 2
    with pytest.raises(ValueError, match="must be HOST:PORT"):
        OutsideStore("head")
