"""Three elastic jobs share four nodes of a real Ray cluster under the controller."""

import importlib.util

import pytest

from tests.cluster.backends.ray_cluster import ENVIRONMENT, Nodes
from tests.cluster.served import Served
from tests.cluster.sharing import assert_three_jobs_share

pytestmark = pytest.mark.nightly(part="clusters")


@pytest.fixture
def nodes():
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed")
    nodes = Nodes(4, 1)
    yield nodes
    nodes.close()


@pytest.mark.timeout(900)
def test_three_jobs_share_four_ray_nodes_of_which_one_is_drained_and_one_is_lost(nodes, tmp_path):
    def lose(node):
        (its_id,) = [each for each in nodes.ids if each.startswith(node[-8:])]
        nodes.order(f"kill {its_id}")

    options = ("--backend", "ray", "--option", f"address={nodes.address}")
    options += ("--option", "resource=CPU", "--interval", "5", "--grace", "60")
    with Served(tmp_path / "state", *options, env=ENVIRONMENT) as served:
        _, lost = assert_three_jobs_share(served, tmp_path, lose=lose)
        assert lost not in [node["name"] for node in served.client.nodes()]
