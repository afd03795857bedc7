"""What the controllers, the scheduler and the kubelets of Kubernetes do to a part, through the API.

A Job gets a pod, the pod gets its node, its command runs as a process of this machine, and whoever
deletes the pod makes it get SIGTERM, and SIGKILL after its grace period. All of it as Kubernetes
documents it, as far as Jobs of one pod need it. `look` is one round, so that a test says when
things happen.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from kubernetes import client, config


class Hands:
    """Plays the rest of a Kubernetes cluster.

    Args:
        kubeconfig: File of a user who may do anything.
        controls: Whether to look after Jobs, because nobody else does.
    """

    def __init__(self, kubeconfig: Path, *, controls: bool) -> None:
        self._controls = controls
        settings = client.Configuration()
        config.load_kube_config(str(kubeconfig), client_configuration=settings)
        self._api = client.ApiClient(settings)
        self.core = client.CoreV1Api(self._api)
        self.batch = client.BatchV1Api(self._api)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._made: set[str] = set()
        self._asked: dict[int, float] = {}
        self.started: list[str] = []
        """Names of the Jobs whose command was started, in order."""

    def add_node(self, name: str, accelerators: int, **spec: Any) -> None:
        amounts = {"nvidia.com/gpu": str(accelerators), "cpu": "64", "pods": "100"}
        labels = {"nvidia.com/gpu.product": "T4", "pool": "training"}
        body = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": labels},
            "spec": spec,
            "status": {"capacity": amounts, "allocatable": amounts},
        }
        self.core.create_node(body)
        self.set_ready(name, "True")

    def set_ready(self, name: str, status: str) -> None:
        condition = {"type": "Ready", "status": status}
        self.core.patch_node_status(name, {"status": {"conditions": [condition]}})

    def look(self) -> None:
        """Do what there is to do."""
        pods: dict[str, list[Any]] = {}
        for pod in self.core.list_namespaced_pod("default").items:
            name = (pod.metadata.labels or {}).get("resilin/part")
            if name is not None:
                pods.setdefault(name, []).append(pod)
        for job in self.batch.list_namespaced_job("default").items:
            if self._controls and not any(
                each.status == "True" for each in job.status.conditions or []
            ):
                self._control(job, pods.get(job.metadata.name, []))
        for each in pods.values():
            for pod in each:
                self._run(pod)

    def _control(self, job: Any, pods: list[Any]) -> None:
        """The Job's controller."""
        name, deadline = job.metadata.name, job.spec.active_deadline_seconds
        if job.status.start_time is None:
            self._status(job, startTime=_now())
            return
        over = [pod for pod in pods if pod.status.phase in ("Succeeded", "Failed")]
        if over:
            self._end(job, over[0].status.phase == "Succeeded", "BackoffLimitExceeded")
        elif deadline is not None and time.time() - job.status.start_time.timestamp() > deadline:
            for pod in pods:
                if pod.metadata.deletion_timestamp is None:
                    self.core.delete_namespaced_pod(pod.metadata.name, "default")
            if not pods:
                self._end(job, False, "DeadlineExceeded")
        elif job.spec.parallelism == 0:
            for pod in pods:
                if pod.metadata.deletion_timestamp is None:
                    self.core.delete_namespaced_pod(pod.metadata.name, "default")
        elif not pods and name not in self._made:
            self._made.add(name)
            template = self._api.sanitize_for_serialization(job.spec.template)
            metadata = {**template["metadata"], "name": f"{name}-x7k2p"}
            body = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": metadata,
                "spec": template["spec"],
            }
            self.core.create_namespaced_pod("default", body)
        elif not pods:
            self._end(job, False, "BackoffLimitExceeded")

    def _end(self, job: Any, good: bool, reason: str) -> None:
        about = {"status": "True", "lastTransitionTime": _now(), "lastProbeTime": _now()}
        kinds = ("SuccessCriteriaMet", "Complete") if good else ("FailureTarget", "Failed")
        conditions = [
            {"type": kind, **about, **({} if good else {"reason": reason})} for kind in kinds
        ]
        ends = {"completionTime": _now(), "succeeded": 1} if good else {"failed": 1}
        self._status(job, conditions=conditions, **ends)

    def _status(self, job: Any, **facts: Any) -> None:
        body = {"status": {**facts, "uncountedTerminatedPods": {}}}
        self.batch.patch_namespaced_job_status(job.metadata.name, "default", body)

    def _run(self, pod: Any) -> None:
        """The scheduler and the kubelet."""
        name, uid = pod.metadata.name, pod.metadata.uid
        process = self._processes.get(uid)
        if pod.status.phase in ("Succeeded", "Failed"):
            if pod.metadata.deletion_timestamp is not None:
                self._forget(name)
        elif process is None and pod.metadata.deletion_timestamp is None:
            terms = pod.spec.affinity.node_affinity
            terms = terms.required_during_scheduling_ignored_during_execution.node_selector_terms
            node = terms[0].match_fields[0].values[0]
            if node not in {each.metadata.name for each in self.core.list_node().items}:
                return
            if pod.spec.node_name is None:
                target = {"apiVersion": "v1", "kind": "Node", "name": node}
                body = {"metadata": {"name": name}, "target": target}
                # Its client takes the answer for another kind of object.
                raw = {"_preload_content": False}
                self.core.create_namespaced_pod_binding(name, "default", body, **raw)
            container = pod.spec.containers[0]
            variables = {each.name: each.value for each in container.env or []}
            self._processes[uid] = subprocess.Popen(
                container.command,
                env={**os.environ, **variables},
                cwd=container.working_dir,
                start_new_session=True,
            )
            self.started.append(pod.metadata.labels["resilin/part"])
            self._pod_status(name, phase="Running")
        elif process is not None and (code := process.poll()) is not None:
            code = 128 - code if code < 0 else code
            ended = {"exitCode": code, "reason": "Completed" if code == 0 else "Error"}
            state = {"name": "part", "state": {"terminated": ended}, "ready": False}
            state |= {"image": "x", "imageID": "", "restartCount": 0}
            phase = "Failed" if code else "Succeeded"
            self._pod_status(name, phase=phase, containerStatuses=[state])
        elif process is not None and pod.metadata.deletion_timestamp is not None:
            if process.pid not in self._asked:
                self._asked[process.pid] = time.monotonic()
                process.send_signal(signal.SIGTERM)
            # The time counts from the request, whichever round saw it.
            grace = pod.metadata.deletion_grace_period_seconds
            if time.monotonic() > self._asked[process.pid] + grace:
                os.killpg(process.pid, signal.SIGKILL)
        elif process is None:
            self._forget(name)

    def _pod_status(self, name: str, **facts: Any) -> None:
        self.core.patch_namespaced_pod_status(name, "default", {"status": facts})

    def _forget(self, name: str) -> None:
        self.core.delete_namespaced_pod(name, "default", body={"gracePeriodSeconds": 0})

    def close(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=60)
        self._api.close()


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
