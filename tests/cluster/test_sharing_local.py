"""Three elastic jobs share four nodes of this machine under the controller."""

import pytest

from tests.cluster.served import Served
from tests.cluster.sharing import assert_three_jobs_share

pytestmark = pytest.mark.nightly(part="clusters")


@pytest.mark.timeout(900)
def test_three_jobs_share_four_nodes_of_which_one_is_drained_and_one_is_lost(tmp_path):
    options = ("--option", "nodes=a=1,b=1,c=1,d=1", "--interval", "5", "--grace", "60")
    with Served(tmp_path / "state", *options) as served:
        _, lost = assert_three_jobs_share(
            served, tmp_path, lose=lambda node: served.local().kill_node(node)
        )
        assert lost not in [node["name"] for node in served.client.nodes()]
