"""Kubernetes: each part is a Job with one pod that is tied to its node.

With one Job for all parts, Kubernetes would choose which pod leaves when it shrinks; with one for
each, the controller does. Only objects of `batch/v1` and `v1` are used, with the official client.
"""

from __future__ import annotations

import builtins
import json
import os
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from resilin.cluster.backends import kubernetes_objects as objects
from resilin.cluster.backends.base import BackendError, Part, PartStatus
from resilin.cluster.job import check_name
from resilin.cluster.node import Node

OPTIONS = ("image", "template", "namespace", "kubeconfig", "context", "resource", "kind", "nodes")
"""Names of the options."""
GRACE_SECONDS = 120
"""Time to save of a pod that somebody else deletes, in seconds, unless the template has one."""
TIMEOUTS = (10.0, 30.0)
"""Seconds for a connection, and for an answer."""
PAGE = 500
"""Most objects in one answer."""
HERE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""File that tells a pod its namespace."""


def backend(cluster: str, options: Mapping[str, str]) -> KubernetesBackend:
    """Make the backend of a cluster.

    Args:
        cluster: Name of the cluster: several may share a namespace.
        options: `image` of the pods, or `template`, a file with a PodTemplateSpec in JSON or YAML
            whose first container runs the command; `namespace` (default: that of this pod or of
            the context); `kubeconfig` and `context` (default: this pod's account, or the usual
            file); `resource` that counts as accelerators (default: `nvidia.com/gpu`); `kind`, the
            label of nodes with the kind of their accelerators (default:
            `nvidia.com/gpu.product`); `nodes`, a selector of labels that limits the nodes.

    Raises:
        ValueError: An option is unknown or missing, or the template is not one.
    """
    for name in options:
        if name not in OPTIONS:
            raise ValueError(f"option {name!r} must be one of {', '.join(OPTIONS)}")
    if ("image" in options) == ("template" in options):
        raise ValueError(f"options {dict(options)} must have either image or template")
    return KubernetesBackend(cluster, options)


class KubernetesBackend:
    """The `Backend` of a Kubernetes cluster. See `backend` for the options."""

    def __init__(self, cluster: str, options: Mapping[str, str]) -> None:
        self._cluster = check_name("cluster", cluster)
        self._options = dict(options)
        self._resource = options.get("resource", "nvidia.com/gpu")
        self._template = _template(options)
        self._namespace = options.get("namespace", "")
        self._api: Any = None

    def detect(self) -> str | None:
        """The reason why Kubernetes cannot be used here; None if it can."""
        try:
            self._jobs()
            self.nodes()
        except (BackendError, ImportError) as error:
            return str(error)
        return None

    def nodes(self) -> tuple[Node, ...]:
        """Nodes that are up, with the accelerators that pods of others do not use."""
        living = "status.phase!=Succeeded,status.phase!=Failed"
        return objects.nodes_of(
            self._nodes(),
            self._list("core", "list_pod_for_all_namespaces", field_selector=living),
            cluster=self._cluster,
            template=self._template,
            resource=self._resource,
            kind_label=self._options.get("kind", "nvidia.com/gpu.product"),
            now=time.time(),
        )

    def start(self, part: Part) -> None:
        """Start a part. One of this name that exists, or ended in the last hour, is left alone."""
        job = objects.job_of(part, self._cluster, self._template, self._resource)
        self._connect()
        if self._ask("batch", "create_namespaced_job", self._namespace, job, allow=(409,)):
            return
        read = "read_namespaced_job"
        found = self._ask("batch", read, part.name, self._namespace, allow=(404,))
        if found and found["metadata"].get("labels", {}).get(objects.CLUSTER) != self._cluster:
            raise BackendError(
                f"{part.name} cannot start: namespace {self._namespace} has a Job of this name "
                f"that is not of cluster {self._cluster}"
            )

    def stop(self, name: str, grace: float) -> None:
        """Ask a part to save and leave, and end it after `grace` seconds; 0 ends it now."""
        # With 0, the pod would be gone before its processes are.
        seconds = max(1, round(grace))
        for pod in self._pods(f"{objects.PART}={name}"):
            if pod["status"].get("phase") in objects.OVER:
                continue  # its exit code stays readable
            which = pod["metadata"]["name"]
            body = {
                "gracePeriodSeconds": seconds,
                "preconditions": {"uid": pod["metadata"]["uid"]},
            }
            delete = "delete_namespaced_pod"
            self._ask("core", delete, which, self._namespace, body=body, allow=(404, 409))
        # Without a place for pods it makes no more; past its deadline, it stays as a record.
        for job in self._jobs(f"{objects.PART}={name}"):
            if not objects.is_over(job):
                body = {"spec": {"parallelism": 0, "activeDeadlineSeconds": 1}}
                patch = "patch_namespaced_job"
                self._ask("batch", patch, name, self._namespace, body, allow=(404,))

    def list(self) -> tuple[PartStatus, ...]:
        """All parts of this cluster that exist, and those that ended in the last hour."""
        # Pods first: a Job that is over in the later answer may have one that was not yet.
        pods: dict[str, builtins.list[objects.Object]] = {}
        for pod in self._pods():
            pods.setdefault(pod["metadata"]["labels"][objects.PART], []).append(pod)
        jobs = self._jobs()
        up = {node["metadata"]["name"] for node in self._nodes() if objects.is_up(node)}
        return tuple(
            objects.status_of(job, pods.get(job["metadata"]["name"], []), up) for job in jobs
        )

    # ----------------------------------------------------------------------------------------

    def _nodes(self) -> Sequence[objects.Object]:
        return self._list("core", "list_node", label_selector=self._options.get("nodes", ""))

    def _jobs(self, *more: str) -> Sequence[objects.Object]:
        return self._ours("batch", "list_namespaced_job", *more)

    def _pods(self, *more: str) -> Sequence[objects.Object]:
        return self._ours("core", "list_namespaced_pod", *more)

    def _ours(self, group: str, method: str, *more: str) -> Sequence[objects.Object]:
        selector = ",".join((f"{objects.CLUSTER}={self._cluster}", *more))
        self._connect()
        return self._list(group, method, self._namespace, label_selector=selector)

    def _list(self, group: str, method: str, *arguments: Any, **more: Any) -> Sequence[Any]:
        """All objects of a list, page by page."""
        found: builtins.list[Any] = []
        token = ""
        while True:
            options = {**more, "limit": PAGE, "_continue": token}
            answer = self._ask(group, method, *arguments, allow=(410,), **options)
            if answer is None:  # the list has changed too much since its first page
                found, token = [], ""
                continue
            found += answer["items"]
            token = answer["metadata"].get("continue", "")
            if not token:
                return found

    def _ask(
        self, group: str, method: str, *arguments: Any, allow: Sequence[int] = (), **more: Any
    ) -> Any:
        """Call the API.

        Returns:
            Its answer; None if it refused with a status in `allow`.

        Raises:
            BackendError: It refused with another one, or did not answer.
        """
        api = self._connect()
        from kubernetes import client
        from urllib3.exceptions import HTTPError

        # The answer as it is: the client's models refuse what they do not know.
        more |= {"_preload_content": False, "_request_timeout": TIMEOUTS}
        owner = {"core": client.CoreV1Api, "batch": client.BatchV1Api}[group](api)
        try:
            return json.loads(getattr(owner, method)(*arguments, **more).data)
        except client.ApiException as error:
            if error.status in allow:
                return None
            raise BackendError(f"Kubernetes refused {method}: {_words(error)}") from error
        except ValueError as error:  # the client checks some of it before it asks
            raise BackendError(f"{method} cannot be asked for: {error}") from error
        except HTTPError as error:
            raise BackendError(f"no answer from Kubernetes to {method}: {error}") from error

    def _connect(self) -> Any:
        """The client, made on first use, and the namespace."""
        if self._api is not None:
            return self._api
        try:
            config = import_module("kubernetes.config")
            client = import_module("kubernetes.client")
        except ModuleNotFoundError as error:
            if not str(error.name).startswith("kubernetes"):
                raise
            raise ImportError(
                "the backend kubernetes needs kubernetes: pip install 'resilin[kubernetes]'"
            ) from None
        where = {
            "config_file": self._options.get("kubeconfig"),
            "context": self._options.get("context"),
        }
        settings = client.Configuration()
        try:
            if "KUBERNETES_SERVICE_HOST" in os.environ and not any(where.values()):
                config.load_incluster_config(client_configuration=settings)
                default = HERE.read_text().strip()
            else:
                config.load_kube_config(client_configuration=settings, **where)
                contexts, active = config.list_kube_config_contexts(where["config_file"])
                named = [each for each in contexts if each["name"] == where["context"]]
                default = (named or [active])[0]["context"].get("namespace", "default")
        except (config.ConfigException, OSError) as error:
            raise BackendError(f"no access to Kubernetes: {error}") from error
        self._namespace = self._namespace or default
        self._api = client.ApiClient(settings)
        return self._api


def _words(error: Any) -> str:
    """The reason that the API gives for an error."""
    try:
        return str(json.loads(error.body)["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.status} {error.reason}"


def _template(options: Mapping[str, str]) -> dict[str, Any]:
    """The template of pods.

    Raises:
        ValueError: The file has none.
    """
    if "image" in options:
        found: Any = {"spec": {"containers": [{"name": "part", "image": options["image"]}]}}
    else:
        try:
            yaml = import_module("yaml")  # which the client of Kubernetes needs, too
        except ModuleNotFoundError:
            raise ImportError(
                "the option template needs PyYAML: pip install 'resilin[kubernetes]'"
            ) from None
        found = yaml.safe_load(Path(options["template"]).read_text())
        if not isinstance(found, dict) or not (found.get("spec") or {}).get("containers"):
            raise ValueError(f"{options['template']} must have spec.containers, as a pod template")
    found["spec"].setdefault("terminationGracePeriodSeconds", GRACE_SECONDS)
    return dict(found)
