"""Actors of Ray that hold the parts of a cluster: one for each part, and a ledger of all.

Ray frees the name of an actor that is dead, and forgets it: a part whose node is lost would be
unknown, and a repeated start would start it again. So one actor, the ledger, starts the others,
remembers them, and keeps the exit codes of the last hour. Nothing in here is called from outside
of Ray but by `RayBackend`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from resilin.cluster.backends.base import Part, PartState, PartStatus

REMEMBERED = 3600.0
"""Seconds for which a part that ended is remembered."""
ANSWER_SECONDS = 2.0
"""Seconds that all parts together have to answer; a part that does not keeps its last state."""
LEDGER = "ledger"
"""Name of the actor that knows all parts; no part has it."""
NODE_ID = "ray.io/node-id"
"""Label that Ray gives to each node: its id."""


def node_name(node: Mapping[str, Any]) -> str:
    """Name of a node: the one that Ray has, which several may share, and the start of its id."""
    return f"{node['NodeName']}-{node['NodeID'][:8]}"


class Holder:
    """The actor of one part: it starts the command, and knows whether it runs.

    Args:
        part: The part.
    """

    def __init__(self, part: Part) -> None:
        self._facts: dict[str, Any] = {}
        self._guard = subprocess.Popen(
            [sys.executable, "-m", "resilin.cluster.backends.guard"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        order = {
            "command": list(part.command),
            "environment": dict(part.environment),
            "directory": part.directory,
            "log": part.log,
        }
        self._send(order)
        threading.Thread(target=self._read, name="resilin-part", daemon=True).start()

    def facts(self) -> dict[str, Any]:
        """Facts that the guard has reported: `pid`, then `code`; or `error`."""
        return dict(self._facts)

    def stop(self, grace: float) -> None:
        """Pass on a request to stop."""
        self._send({"grace": grace})

    def _send(self, request: dict[str, Any]) -> None:
        assert self._guard.stdin is not None
        try:
            self._guard.stdin.write(json.dumps(request).encode() + b"\n")
            self._guard.stdin.flush()
        except BrokenPipeError:
            pass  # the part has ended; its exit code is there, or on its way

    def _read(self) -> None:
        assert self._guard.stdout is not None
        for line in self._guard.stdout:
            self._facts |= json.loads(line)
        if not {"code", "error"} & self._facts.keys():
            self._facts["error"] = "the process that watched it was killed"


@dataclass(kw_only=True)
class Entry:
    """A part that the ledger knows."""

    accelerators: int
    """Accelerators that it has."""
    node: str
    """Name of its node."""
    node_id: str
    """Id of its node in Ray."""
    actor: Any = None
    """Its actor; None when it is gone."""
    group: Any = None
    """Its placement group; None when it is gone."""
    state: PartState = PartState.PENDING
    code: int | None = None
    reason: str = ""
    ended: float | None = None
    """When its end was seen, in seconds; None before."""


class Ledger:
    """The actor that starts the parts of one cluster, and remembers them.

    Its calls are made one after the other. If its process is killed, Ray starts it again, and it
    finds the parts that run; parts that ended before are then forgotten.

    Args:
        resource: Resource of Ray that is counted as accelerators.
        namespace: Namespace of the actors of this cluster.
    """

    def __init__(self, resource: str, namespace: str) -> None:
        self._resource = resource
        self._namespace = namespace
        self._entries: dict[str, Entry] = {}
        self._adopt()

    def start(self, part: Part) -> str | None:
        """Start a part, unless there is or was one of this name.

        Returns:
            Why it cannot be started; None if it is.
        """
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if part.name in self._entries:
            return None
        ray: Any = import_module("ray")
        ids = {node_name(node): node["NodeID"] for node in ray.nodes() if node["Alive"]}
        if part.node not in ids:
            there = ", ".join(sorted(ids)) or "no nodes"
            return f"{part.name} cannot start on {part.node}: Ray has {there}"
        node_id = ids[part.node]
        resources = {self._resource: float(part.accelerators)}
        group = placement_group(
            [resources],
            strategy="STRICT_PACK",
            name=part.name,
            lifetime="detached",
            bundle_label_selector=[{NODE_ID: node_id}],
        )
        options: dict[str, Any] = {"num_cpus": 0}
        field = {"CPU": "num_cpus", "GPU": "num_gpus"}.get(self._resource)
        options |= {field: part.accelerators} if field else {"resources": resources}
        actor = (
            ray.remote(Holder)
            .options(
                name=part.name,
                namespace=self._namespace,
                lifetime="detached",
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group),
                **options,
            )
            .remote(part)
        )
        self._entries[part.name] = Entry(
            accelerators=part.accelerators,
            node=part.node,
            node_id=node_id,
            actor=actor,
            group=group,
        )
        return None

    def stop(self, name: str, grace: float) -> None:
        """Ask a part to save and leave, and see that it ends after `grace` seconds."""
        from ray.util.placement_group import placement_group_table

        entry = self._entries.get(name)
        if entry is None or entry.actor is None:
            return
        # A group without a place has never had one: its command has not been started.
        if placement_group_table(entry.group)["state"] in ("PENDING", "PREPARED"):
            self._end(entry, None, "stopped before it had a place")
        else:
            entry.actor.stop.remote(grace)

    def list(self) -> list[PartStatus]:
        """All parts that exist, and those that ended in the last hour."""
        self._look()
        return [
            PartStatus(
                name=name,
                state=entry.state,
                node=entry.node,
                code=entry.code,
                reason=entry.reason,
            )
            for name, entry in self._entries.items()
        ]

    def used(self) -> dict[str, int]:
        """Accelerators that parts of this cluster use, by the id of the node."""
        self._look()
        used: dict[str, int] = {}
        for entry in self._entries.values():
            if entry.group is not None:
                used[entry.node_id] = used.get(entry.node_id, 0) + entry.accelerators
        return used

    # What became of the parts ---------------------------------------------------------------

    def _look(self) -> None:
        """Ask all parts, and let go of those that have ended."""
        ray: Any = import_module("ray")
        open_ = [entry for entry in self._entries.values() if entry.actor is not None]
        asked = {entry.actor.facts.remote(): entry for entry in open_}
        if asked:
            answered, silent = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_SECONDS)
            for answer in answered:
                self._learn(asked[answer], answer)
            alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
            for answer in silent:
                if asked[answer].node_id not in alive:
                    self._end(asked[answer], None, "its node is lost")
        now = time.time()
        self._entries = {
            name: entry
            for name, entry in self._entries.items()
            if entry.ended is None or now - entry.ended < REMEMBERED
        }

    def _learn(self, entry: Entry, answer: Any) -> None:
        import ray

        try:
            facts = ray.get(answer)
        except ray.exceptions.ActorUnavailableError:
            return  # it may answer again
        except ray.exceptions.RayActorError as error:
            self._end(entry, None, str(error).splitlines()[0])
            return
        if "code" in facts:
            self._end(entry, facts["code"], facts.get("error", ""))
        elif "error" in facts:
            self._end(entry, None, facts["error"])
        elif "pid" in facts:
            entry.state = PartState.RUNNING

    def _end(self, entry: Entry, code: int | None, reason: str) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        entry.state, entry.code, entry.reason = PartState.ENDED, code, reason
        entry.ended = time.time()
        ray.kill(entry.actor)
        remove_placement_group(entry.group)
        entry.actor = entry.group = None

    def _adopt(self) -> None:
        """Find the parts that run, after this actor was started again."""
        from ray.util.placement_group import get_placement_group, placement_group_table

        ray: Any = import_module("ray")
        names = {node["NodeID"]: node_name(node) for node in ray.nodes()}
        for each in ray.util.list_named_actors(all_namespaces=True):
            if each["namespace"] != self._namespace or each["name"] == LEDGER:
                continue
            actor = ray.get_actor(each["name"], namespace=self._namespace)
            group = get_placement_group(each["name"])
            table = placement_group_table(group)
            node_id = table["bundles_to_node_id"].get(0, "")
            entry = Entry(
                accelerators=int(table["bundles"][0][self._resource]),
                node=names.get(node_id, node_id),
                node_id=node_id,
                actor=actor,
                group=group,
            )
            self._entries[each["name"]] = entry
            if not node_id:
                self._end(entry, None, "it had no place when the ledger was started again")
