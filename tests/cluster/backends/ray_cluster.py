"""A Ray cluster of several nodes on this machine, as a process that takes orders.

    python ray_cluster.py NODES ACCELERATORS

It prints the address of the cluster as a line of JSON. Each line of its input is an order: `kill
ID` kills the node of this id at once, with the processes of its workers, `add` adds a node. It
answers each with a line, and ends with its input. The head has no accelerators.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "RESILIN_RUN_DIR": "off",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's own choice is 15: beside any other busy process, workers would hardly run.
    "RAY_worker_niceness": "0",
}


class Nodes:
    """The process that has the nodes, for tests."""

    def __init__(self, number: int, accelerators: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(number), str(accelerators)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        )
        first = self._read()
        self.address: str = first["address"]
        self.ids: list[str] = first["nodes"]
        """Ids of the nodes with which it began."""

    def order(self, text: str) -> str:
        """Give an order; returns the id of its node."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{text}\n")
        self._process.stdin.flush()
        (answer,) = self._read().values()
        return str(answer)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise AssertionError("the process that has the nodes has ended")

    def close(self) -> None:
        """End all nodes, and what runs on them."""
        self._process.communicate(timeout=100)


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


def main() -> None:
    from ray.cluster_utils import Cluster

    num_nodes, accelerators = int(sys.argv[1]), int(sys.argv[2])
    head = {"num_cpus": 0, "include_dashboard": False, "no_monitor": True}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        nodes = [cluster.add_node(num_cpus=accelerators) for _ in range(num_nodes)]
        say({"address": cluster.address, "nodes": [node.node_id for node in nodes]})
        for line in sys.stdin:
            match line.split():
                case ["kill", node_id]:
                    (node,) = [node for node in nodes if node.node_id == node_id]
                    raylet = node.all_processes["raylet"][0].process.pid
                    workers = children(raylet)
                    nodes.remove(node)
                    cluster.remove_node(node, allow_graceful=False)
                    # Workers see only later that their node is gone. They would be, too.
                    for worker in workers:
                        with suppress(ProcessLookupError):
                            os.kill(worker, signal.SIGKILL)
                    say({"killed": node_id})
                case ["add"]:
                    nodes.append(cluster.add_node(num_cpus=accelerators))
                    say({"added": nodes[-1].node_id})
                case other:
                    raise ValueError(f"no such order: {other}")
    finally:
        cluster.shutdown()


def say(facts: dict[str, object]) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
