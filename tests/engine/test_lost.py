"""What a replica says when another one is gone."""

import sys

import pytest

from resilin.engine import environment, lost

GLOO = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:19365: "
    "Connection reset by peer. This may indicate a remote rank is gone"
)
CALLBACK = f"Got the following error when running the callback: RuntimeError: {GLOO}"


def chained():
    try:
        try:
            raise ValueError("the cause")
        finally:
            raise RuntimeError(GLOO)
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError(GLOO), "Read error [127.0.0.1]:19365: Connection reset by peer"),
        (RuntimeError(CALLBACK), "Read error [127.0.0.1]:19365: Connection reset by peer"),
        (RuntimeError("[gloo/transport/tcp/pair.cc:1] Timed out waiting 1000ms"), None),
        (RuntimeError("the sampler: Connection reset by peer"), None),
        (ConnectionResetError(GLOO), None),
        (chained(), None),
    ],
    ids=["plain", "in a callback", "a timeout", "another's", "another kind", "not the first"],
)
def test_only_a_connection_of_gloo_is_taken_for_a_lost_replica(error, said):
    assert lost.lost_connection(error) == said


@pytest.mark.parametrize(
    ("level", "brief"), [("INFO", True), ("debug", False), (None, False)], ids=str
)
def test_a_lost_replica_is_a_line_and_any_other_error_a_traceback(
    level, brief, monkeypatch, caplog
):
    if level is None:
        monkeypatch.delenv(environment.LOG, raising=False)
    else:
        monkeypatch.setenv(environment.LOG, level)
    shown = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: shown.append(error[1]))
    lost.shorten_traceback(3)
    peer, own = RuntimeError(GLOO), RuntimeError("the loss is not finite")
    sys.excepthook(RuntimeError, peer, None)
    sys.excepthook(RuntimeError, own, None)
    assert shown == ([own] if brief else [peer, own])
    assert ("replica 3 lost its connection to a peer (Read error" in caplog.text) == brief


@pytest.mark.parametrize("agent", [True, False])
def test_where_an_agent_reports_the_cause_a_lost_replica_says_nothing(monkeypatch, caplog, agent):
    monkeypatch.setenv(environment.LOG, "INFO")
    monkeypatch.setattr(sys, "excepthook", lambda *error: None)
    told = []
    lost.shorten_traceback(3, lambda error: told.append(error) or agent)
    peer = RuntimeError(GLOO)
    sys.excepthook(RuntimeError, peer, None)
    assert told == [peer]
    assert ("lost its connection" in caplog.text) == (not agent)
