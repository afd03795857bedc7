"""Parts, nodes and states as objects of Kubernetes: pure functions over the JSON of its API.

A part is one Job with one pod. It stays as a record for an hour after its end, because a part that
is stopped is not deleted: its pod is, and the Job is given a deadline that has passed.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from resilin.cluster.backends.base import Part, PartState, PartStatus
from resilin.cluster.node import Node

CLUSTER, JOB, PART = "resilin/cluster", "resilin/job", "resilin/part"
"""Labels of all objects of a part."""
REMEMBERED = 3600
"""Seconds for which a part that ended is remembered."""
LOST_SECONDS = 30
"""Seconds after which the pod of a node that does not answer is given up."""
LONGEST_NAME = 63
"""Longest name of a Job: its pods have it as a label."""
OVER = ("Succeeded", "Failed")
"""Phases of a pod whose processes are gone."""
LEAVING = (
    "ToBeDeletedByClusterAutoscaler",
    "aws-node-termination-handler/",
    "cloud.google.com/impending-node-termination",
    "karpenter.sh/disrupted",
    "node.kubernetes.io/out-of-service",
    "node.kubernetes.io/unschedulable",
)
"""Taints that say that a node is about to go, or how their names begin."""
_UNITS = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}

Object = Mapping[str, Any]


def job_of(part: Part, cluster: str, template: Object, resource: str) -> dict[str, Any]:
    """The Job of a part.

    Args:
        part: The part.
        cluster: Name of the cluster.
        template: Template of pods; its first container runs the command.
        resource: Name of the resource that counts as accelerators.

    Raises:
        ValueError: The name of the part is too long.
    """
    if len(part.name) > LONGEST_NAME:
        raise ValueError(
            f"{part.name} has {len(part.name)} characters: a Job has at most {LONGEST_NAME}"
        )
    labels = {CLUSTER: cluster, JOB: part.job, PART: part.name}
    pod = copy.deepcopy(dict(template))
    pod["metadata"] = {**pod.get("metadata", {})}
    pod["metadata"]["labels"] = {**pod["metadata"].get("labels", {}), **labels}
    spec = pod["spec"]
    spec["restartPolicy"] = "Never"
    # As process 1, the command would ignore signals until it handles them, seconds later.
    spec["shareProcessNamespace"] = True
    here = {"key": "metadata.name", "operator": "In", "values": [part.node]}
    required = {"nodeSelectorTerms": [{"matchFields": [here]}]}
    affinity = {"requiredDuringSchedulingIgnoredDuringExecution": required}
    spec["affinity"] = {**spec.get("affinity", {}), "nodeAffinity": affinity}
    spec["tolerations"] = tolerations(template, resource)
    container = spec["containers"][0]
    container["command"], container["args"] = list(part.command), []
    if part.directory != ".":
        container["workingDir"] = part.directory
    given = [each for each in container.get("env", []) if each["name"] not in part.environment]
    ours = [{"name": name, "value": value} for name, value in part.environment.items()]
    container["env"] = given + ours
    for each in spec["containers"]:
        # Files may have numbers here, which the client refuses.
        for kind, amounts in each.get("resources", {}).items():
            each["resources"][kind] = {name: str(amount) for name, amount in amounts.items()}
    needs = container.setdefault("resources", {})
    for kind in ("requests", "limits"):
        needs[kind] = {**needs.get(kind, {}), resource: str(part.accelerators)}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": part.name, "labels": labels},
        "spec": {
            "parallelism": 1,
            "completions": 1,
            # A part that fails is not started again but by the controller.
            "backoffLimit": 0,
            "podReplacementPolicy": "Failed",
            "ttlSecondsAfterFinished": REMEMBERED,
            "template": pod,
        },
    }


def tolerations(template: Object, resource: str) -> list[dict[str, Any]]:
    """Taints that the pods of parts tolerate."""
    gone = [
        {"key": f"node.kubernetes.io/{state}", "effect": "NoExecute", "operator": "Exists"}
        for state in ("not-ready", "unreachable")
    ]
    accelerator = {"key": resource, "operator": "Exists"}
    return [
        *template["spec"].get("tolerations", []),
        # Nodes with accelerators often have a taint that keeps other pods away.
        *([accelerator] if "/" in resource else []),
        *({**each, "tolerationSeconds": LOST_SECONDS} for each in gone),
    ]


def status_of(job: Object, pods: Iterable[Object], up: Iterable[str]) -> PartStatus:
    """State of a part.

    Args:
        job: Its Job.
        pods: Pods of that Job that exist.
        up: Names of the nodes that answer.
    """
    name = job["metadata"]["name"]
    pods = sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))
    living = [pod for pod in pods if pod["status"].get("phase") not in OVER]
    last: Object | None = next(reversed(living or pods), None)
    node = None if last is None else last["spec"].get("nodeName")
    if living:
        if node is not None and node not in set(up):
            lost = f"{node} does not answer"
            return PartStatus(name=name, state=PartState.ENDED, node=node, reason=lost)
        running = any(pod["status"].get("phase") == "Running" for pod in living)
        state = PartState.RUNNING if running else PartState.PENDING
        return PartStatus(name=name, state=state, node=node, reason=_reason(living[-1]))
    if last is not None:
        # Kubernetes may have yet to count it; no other one will come.
        return PartStatus(
            name=name, state=PartState.ENDED, node=node, code=_code(last), reason=_reason(last)
        )
    # The pod is gone: either none was made yet, or Kubernetes has begun to count it.
    counts = job.get("status", {})
    uncounted = counts.get("uncountedTerminatedPods") or {}
    ends = _ends(job)
    good = "Complete" in ends or "SuccessCriteriaMet" in ends
    if good or counts.get("succeeded") or uncounted.get("succeeded"):
        return PartStatus(name=name, state=PartState.ENDED, code=0)
    if ends or counts.get("failed") or uncounted.get("failed"):
        reason = str((ends.get("Failed") or ends.get("FailureTarget") or {}).get("reason", ""))
        return PartStatus(name=name, state=PartState.ENDED, reason=reason)
    return PartStatus(name=name, state=PartState.PENDING)


def is_over(job: Object) -> bool:
    """Whether a Job is complete or has failed."""
    return not {"Complete", "Failed"}.isdisjoint(_ends(job))


def _ends(job: Object) -> dict[str, Object]:
    """Conditions of a Job that say that it is over, or will be when its pods are gone."""
    kinds = ("Complete", "Failed", "SuccessCriteriaMet", "FailureTarget")
    found = job.get("status", {}).get("conditions") or []
    return {
        each["type"]: each for each in found if each["type"] in kinds and each["status"] == "True"
    }


def _code(pod: Object) -> int | None:
    """Exit code of the first container of a pod."""
    for container in pod["status"].get("containerStatuses") or []:
        if ended := container.get("state", {}).get("terminated"):
            return int(ended["exitCode"])
        break
    return None


def _reason(pod: Object) -> str:
    """The reason why a pod was evicted, waits or failed, in the words of Kubernetes."""
    status = pod["status"]
    for condition in status.get("conditions") or []:
        disrupted = condition["type"] == "DisruptionTarget" and condition["status"] == "True"
        unscheduled = condition["type"] == "PodScheduled" and condition["status"] == "False"
        if disrupted or unscheduled:
            return str(condition.get("reason", ""))
    for container in status.get("containerStatuses") or []:
        state = container.get("state", {})
        # Completed and Error are what the exit code says.
        why = str((state.get("waiting") or state.get("terminated") or {}).get("reason", ""))
        return "" if why in ("Completed", "Error") else why
    return str(status.get("reason") or "")


def nodes_of(
    nodes: Iterable[Object],
    pods: Iterable[Object],
    *,
    cluster: str,
    template: Object,
    resource: str,
    kind_label: str,
    now: float,
) -> tuple[Node, ...]:
    """Nodes that are up and may run parts, with the accelerators that other pods do not use.

    Args:
        nodes: All nodes.
        pods: All pods that have not ended, of all namespaces.
        cluster: Name of the cluster: its own pods are not counted.
        template: Template of pods, with the taints that they tolerate.
        resource: Name of the resource that counts as accelerators.
        kind_label: Label of nodes with the kind of their accelerators.
        now: The time, in seconds.
    """
    used: dict[str, Decimal] = {}
    for pod in pods:
        if pod["metadata"].get("labels", {}).get(CLUSTER) != cluster:
            node = pod["spec"].get("nodeName", "")
            used[node] = used.get(node, Decimal(0)) + request_of(pod, resource)
    found = []
    for node in nodes:
        name = node["metadata"]["name"]
        total = quantity(node["status"].get("allocatable", {}).get(resource, "0"))
        taints = [each for each in node["spec"].get("taints") or [] if _repels(each)]
        leaving = [each for each in taints if each["key"].startswith(LEAVING)]
        ours = tolerations(template, resource)
        alien = [each for each in taints if each not in leaving and not _tolerated(each, ours)]
        if not is_up(node) or total < 1 or alien:
            continue
        leaves = now if leaving or node["spec"].get("unschedulable") else None
        free = max(0, math.floor(total - used.get(name, Decimal(0))))
        labels = node["metadata"].get("labels", {})
        kind = labels.get(kind_label) or resource.rpartition("/")[2]
        found.append(Node(name=name, accelerators=free, kind=kind, leaves=leaves))
    return tuple(sorted(found, key=lambda node: node.name))


def is_up(node: Object) -> bool:
    """Whether a node answers."""
    conditions = node["status"].get("conditions") or []
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _repels(taint: Object) -> bool:
    return taint["effect"] in ("NoSchedule", "NoExecute")


def _tolerated(taint: Object, by: Iterable[Object]) -> bool:
    """Whether a toleration matches a taint, by the rules of Kubernetes."""
    for each in by:
        same_effect = each.get("effect", "") in ("", taint["effect"])
        same_key = each.get("key", "") in ("", taint["key"])
        exists = each.get("operator", "Equal") == "Exists"
        if same_effect and same_key and (exists or each.get("value", "") == taint.get("value", "")):
            return True
    return False


def request_of(pod: Object, resource: str) -> Decimal:
    """Amount of a resource that a pod has: what its containers ask for at the same time."""

    def asked(container: Object) -> Decimal:
        needs = container.get("resources", {})
        found = {**needs.get("limits", {}), **needs.get("requests", {})}
        return quantity(found.get(resource, "0"))

    beside = most = Decimal(0)
    for container in pod["spec"].get("initContainers") or []:
        if container.get("restartPolicy") == "Always":
            beside += asked(container)
            most = max(most, beside)
        else:
            most = max(most, beside + asked(container))
    return max(most, beside + sum(map(asked, pod["spec"]["containers"]), Decimal(0)))


def quantity(text: str) -> Decimal:
    """A quantity of Kubernetes, such as 4, 500m, 2k or 1Gi.

    Raises:
        ValueError: It is none.
    """
    found = re.fullmatch(r"([+-]?[0-9.]+)([eE][+-]?[0-9]+)?([numkMGTPE]|[KMGTPE]i)?", text)
    if found is None or (found[2] and found[3]):
        raise ValueError(f"{text!r} must be a quantity of Kubernetes, such as 4 or 500m")
    unit = found[3] or ""
    factor = Decimal(1024) ** _BINARY[unit] if unit in _BINARY else Decimal(10) ** _UNITS[unit]
    return Decimal(found[1] + (found[2] or "")) * factor
