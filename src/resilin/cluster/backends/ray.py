"""Ray: each part is a detached actor with a placement group of its own, pinned to its node.

The actors outlive this process; another one that connects to the same Ray cluster finds them. The
command of a part is a process of its own beside the actor (`guard`), and ends with the actor.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeVar

from resilin.cluster.backends.base import BackendError, Part, PartStatus
from resilin.cluster.backends.ray_actors import LEDGER, Ledger, node_name
from resilin.cluster.job import check_name
from resilin.cluster.node import Node
from resilin.compat import ray_names

OPTIONS = ("address", "resource", "kind")
"""Names of the options."""
SECONDS = 30.0
"""Longest wait for an answer of Ray, in seconds."""
SETTLE_SECONDS = 0.5
"""Time in which Ray's nodes report what they have given or freed."""
HEAD = "node:__internal_head__"
"""Resource that the first node of a Ray cluster has."""

_T = TypeVar("_T")


def backend(cluster: str, options: Mapping[str, str]) -> RayBackend:
    """Make the backend of a cluster.

    Args:
        cluster: Name of the cluster: several may share one Ray.
        options: `address` of Ray (default: `auto`); `resource` that counts as accelerators
            (default: `GPU`; `CPU` for nodes without any); `kind` of them (default: what Ray has
            found out, or the name of the resource in lower case).

    Raises:
        ValueError: An option is unknown.
    """
    for name in options:
        if name not in OPTIONS:
            raise ValueError(f"option {name!r} must be one of {', '.join(OPTIONS)}")
    return RayBackend(cluster, **options)


class RayBackend:
    """The `Backend` of a Ray cluster. See `backend` for the arguments."""

    def __init__(
        self, cluster: str, *, address: str = "auto", resource: str = "GPU", kind: str = ""
    ) -> None:
        self._namespace = f"resilin-{check_name('cluster', cluster)}"
        self._address = address
        self._resource = resource
        self._kind = kind
        self._ledger: Any = None

    def detect(self) -> str | None:
        """The reason why Ray cannot be used here; None if it can."""
        try:
            self._connect()
        except (BackendError, ImportError) as error:
            return str(error)
        return None

    def nodes(self) -> tuple[Node, ...]:
        """Nodes that are up, with the accelerators that nobody else uses."""
        ray = self._connect()
        return self._call(lambda: self._nodes(ray))

    def start(self, part: Part) -> None:
        """Start a part. One of this name that exists, or has existed, is left alone."""
        refused: str | None = self._ask("start", part)
        if refused is not None:
            raise BackendError(refused)

    def stop(self, name: str, grace: float) -> None:
        """Ask a part to save and leave, and end it after `grace` seconds; 0 ends it now."""
        self._ask("stop", name, grace)

    def list(self) -> tuple[PartStatus, ...]:
        """All parts of this cluster that exist, and those that ended in the last hour."""
        found: Sequence[PartStatus] = self._ask("list")
        return tuple(found)

    # ----------------------------------------------------------------------------------------

    def _nodes(self, ray: Any) -> tuple[Node, ...]:
        alive = [node for node in ray.nodes() if node["Alive"]]
        others = self._used_by_others(alive)
        if any(others.values()):
            # A part that has just ended may be counted still; what others use stays in use.
            time.sleep(SETTLE_SECONDS)
            again = self._used_by_others(alive)
            others = {node: min(others[node], again[node]) for node in others}
        leaves = ray_names.draining_nodes()
        found = []
        for node in alive:
            total = int(node["Resources"].get(self._resource, 0))
            if not total:
                continue
            found.append(
                Node(
                    name=node_name(node),
                    accelerators=max(0, total - others[node["NodeID"]]),
                    kind=self._kind or _kind(node, self._resource),
                    # Without a deadline, it leaves now.
                    leaves=leaves[node["NodeID"]] or time.time()
                    if node["NodeID"] in leaves
                    else None,
                )
            )
        return tuple(sorted(found, key=lambda node: node.name))

    def _used_by_others(self, alive: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        """Accelerators that actors and tasks of others use, by the id of the node."""
        ours = self._ask("used")
        free = ray_names.available_resources()
        used = {}
        for node in alive:
            total = node["Resources"].get(self._resource, 0.0)
            taken = total - free.get(node["NodeID"], {}).get(self._resource, 0.0)
            # A fraction that somebody uses makes a whole accelerator useless to us.
            used[node["NodeID"]] = max(0, -int(-taken // 1) - ours.get(node["NodeID"], 0))
        return used

    def _connect(self) -> Any:
        """Connect this process to Ray, unless it is connected; return the module.

        Raises:
            BackendError: There is no Ray at the address.
            ImportError: Ray is not installed.
        """
        try:
            ray: Any = import_module("ray")
        except ModuleNotFoundError as error:
            if error.name != "ray":
                raise
            raise ImportError("the backend ray needs ray: pip install 'resilin[ray]'") from None
        if not ray.is_initialized():
            self._ledger = None
            try:
                ray.init(
                    address=self._address,
                    namespace=self._namespace,
                    log_to_driver=False,
                    logging_level=logging.WARNING,
                )
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise BackendError(f"no Ray at {self._address}: {error}") from error
        return ray

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the ledger."""
        ray = self._connect()

        def call() -> Any:
            if self._ledger is None:
                self._ledger = self._open(ray)
            return ray.get(getattr(self._ledger, method).remote(*arguments), timeout=SECONDS)

        return self._call(call)

    def _open(self, ray: Any) -> Any:
        """The ledger of this cluster: on the head, without which there is no Ray."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        (head,) = (node["NodeID"] for node in ray.nodes() if HEAD in node["Resources"])
        return (
            ray.remote(Ledger)
            .options(
                name=LEDGER,
                namespace=self._namespace,
                get_if_exists=True,
                lifetime="detached",
                max_restarts=-1,
                max_task_retries=0,
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(head, soft=False),
            )
            .remote(self._resource, self._namespace)
        )

    def _call(self, call: Callable[[], _T]) -> _T:
        """Call, with the errors of Ray as those of a backend."""
        import ray

        try:
            return call()
        except (ray.exceptions.RayError, ConnectionError) as error:
            self._ledger = None
            raise BackendError(f"Ray at {self._address}: {error}") from error


def _kind(node: Mapping[str, Any], resource: str) -> str:
    """Kind of the accelerators of a node."""
    prefix = "accelerator_type:"
    types = sorted(each for each in node["Resources"] if each.startswith(prefix))
    return (types[0].removeprefix(prefix) if types and resource == "GPU" else resource).lower()
