"""Three elastic jobs share four nodes of a real Slurm; one node is drained, one is lost."""

from __future__ import annotations

import pytest

from tests.cluster.served import Served
from tests.cluster.sharing import assert_three_jobs_share
from tests.cluster.slurm_cluster import missing, slurm_cluster

pytestmark = [
    pytest.mark.nightly(part="clusters"),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.timeout(900),
]


@pytest.fixture
def slurm(tmp_path_factory, monkeypatch):
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), accelerators=1) as running:
        monkeypatch.setenv("SLURM_CONF", running.environment["SLURM_CONF"])
        yield running


def test_three_jobs_share_four_nodes_through_a_drain_and_a_loss(slurm, tmp_path):
    options = ("--backend", "slurm", "--poll", "0.5", "--interval", "10", "--grace", "40")
    with Served(tmp_path / "state", *options) as served:
        # The operator drains a node in Slurm: its job saves and leaves. Another node is set down.
        drained, lost = assert_three_jobs_share(
            served,
            tmp_path,
            drain=lambda node: slurm.set_state(node, "DRAIN"),
            lose=lambda node: slurm.set_state(node, "DOWN"),
        )
    names = slurm.call("squeue", "--noheader", "--states=all", "--format=%j").split()
    assert len(names) == len(set(names))  # no part was started twice
    failed = slurm.call("squeue", "--noheader", "--states=NODE_FAIL", "--format=%N").split()
    assert failed == [lost] != [drained]
