"""Parts on Kubernetes.

Each test runs on a server over the published OpenAPI schema and, if `KUBEBUILDER_ASSETS` names a
directory with kube-apiserver, on the real one. There is no kubelet: pods are processes of this
machine (`kube_hands.py`).
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from decimal import Decimal
from pathlib import Path

import pytest

from resilin.cluster.backends.base import BackendError, Part, PartState
from resilin.cluster.backends.kubernetes import backend
from resilin.cluster.backends.kubernetes_objects import job_of, quantity, request_of

pytest.importorskip("kubernetes")
pytest.importorskip("kubernetes_validate")

import yaml

from tests.cluster import sharing
from tests.cluster.backends.elastic import hurry, part_of_rank_0, serving_store, training
from tests.cluster.backends.kube_hands import Hands
from tests.cluster.backends.kube_schema import SchemaServer
from tests.cluster.backends.kube_server import ASSETS, RealServer, kubeconfig

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy" / "kubernetes"
PATIENCE = 120.0
"""Seconds after which something that has not happened never will."""
SAVES = "trap 'sleep 0.3; exit 143' TERM; echo $$ >> {}; while :; do sleep 0.05; done"
"""A command that writes down its process, and leaves in good order."""
REFUSES = "trap '' TERM; echo $$ >> {}; while :; do sleep 0.05; done"


@pytest.fixture(scope="module", params=["schema", "real"])
def server(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kubernetes")
    if request.param == "schema":
        made = SchemaServer()
        made.has_controllers = False
        (folder / "certificates").mkdir()
    elif not Path(os.environ.get(ASSETS, "/nowhere"), "kube-apiserver").exists():
        pytest.skip(f"{ASSETS} names no directory with kube-apiserver")
    else:
        made = RealServer(folder)
    made.folder = folder
    made.is_real = request.param == "real"
    yield made
    made.close()


@pytest.fixture
def hands(server):
    """The rest of the cluster, with two nodes of four accelerators."""
    hands = Hands(
        kubeconfig(server.folder, server.url, "admin"), controls=not server.has_controllers
    )
    for name in ("gpu-1", "gpu-2"):
        hands.add_node(name, 4)
    yield hands
    hands.close()
    wait_until(lambda: nothing_left(hands))
    for node in hands.core.list_node().items:
        hands.core.delete_node(node.metadata.name)


def nothing_left(hands) -> bool:
    """Delete all Jobs and pods, those that a controller has just made included."""
    from kubernetes.client import ApiException

    jobs = hands.batch.list_namespaced_job("default").items
    pods = hands.core.list_namespaced_pod("default").items
    for job in jobs:
        now = {"propagationPolicy": "Background"}
        hands.batch.delete_namespaced_job(job.metadata.name, "default", body=now)
    for pod in pods:
        now = {"gracePeriodSeconds": 0}
        with suppress(ApiException):  # it is gone already
            hands.core.patch_namespaced_pod(
                pod.metadata.name, "default", {"metadata": {"finalizers": None}}
            )
            hands.core.delete_namespaced_pod(pod.metadata.name, "default", body=now)
    return not jobs and not pods


def make(server, cluster="test", **options):
    config = str(kubeconfig(server.folder, server.url, options.pop("user", "admin")))
    return backend(cluster, {"image": "resilin:1", "kubeconfig": config, **options})


@pytest.fixture
def ours(server, hands):
    found = make(server)
    assert found.detect() is None
    return found


def part_of(name, node="gpu-1", command="sleep 1000", accelerators=1, **more):
    command = ["bash", "-c", command] if isinstance(command, str) else command
    job = name.rpartition("-g")[0]
    return Part(name=name, job=job, node=node, accelerators=accelerators, command=command, **more)


def status(ours, name):
    (found,) = [part for part in ours.list() if part.name == name]
    return found


def wait_for(ours, hands, name, state):
    deadline = time.monotonic() + PATIENCE
    while (found := status(ours, name)).state is not state:
        assert time.monotonic() < deadline, found
        hands.look()
        time.sleep(0.05)
    return found


def wait_until(what):
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.05)


def pids(path):
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def test_nodes_have_their_accelerators_and_kinds(ours, hands):
    hands.add_node("cpu-1", 0)
    hands.add_node("down", 4)
    hands.set_ready("down", "Unknown")
    taint = {"key": "team", "value": "others", "effect": "NoSchedule"}
    hands.add_node("theirs", 4, taints=[taint])
    gpu = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
    hands.add_node("gpu-3", 2, taints=[gpu])
    found = [(node.name, node.accelerators, node.kind, node.leaves) for node in ours.nodes()]
    four = [("gpu-1", 4, "T4", None), ("gpu-2", 4, "T4", None)]
    assert found == [*four, ("gpu-3", 2, "T4", None)]


def test_a_node_that_is_cordoned_leaves_now(ours, hands):
    hands.core.patch_node("gpu-1", {"spec": {"unschedulable": True}})
    taint = {"key": "ToBeDeletedByClusterAutoscaler", "value": "1", "effect": "NoSchedule"}
    hands.core.patch_node("gpu-2", {"spec": {"taints": [taint]}})
    before = time.time()
    assert all(before <= node.leaves <= time.time() for node in ours.nodes())
    assert len(ours.nodes()) == 2


def test_what_pods_of_others_use_is_not_ours(ours, hands):
    other = job_of(part_of("other-g1-0", accelerators=3), "else", spec_of(), "nvidia.com/gpu")
    template = other["spec"]["template"]
    spec = {**template["spec"], "nodeName": "gpu-1"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "other"}, "spec": spec}
    hands.core.create_namespaced_pod("default", pod)
    ours.start(part_of("mine-g1-0", "gpu-2"))
    wait_for(ours, hands, "mine-g1-0", PartState.RUNNING)
    assert [node.accelerators for node in ours.nodes()] == [1, 4]
    hands.core.patch_namespaced_pod_status("other", "default", {"status": {"phase": "Succeeded"}})
    assert [node.accelerators for node in ours.nodes()] == [4, 4]


def spec_of():
    return {"spec": {"containers": [{"name": "part", "image": "resilin:1"}]}}


def test_a_part_is_started_once_however_often_it_is_asked_for(ours, hands, tmp_path):
    part = part_of("once-g1-0", command=SAVES.format(tmp_path / "pid"))
    for _ in range(2):
        ours.start(part)
    assert status(ours, part.name).state is PartState.PENDING
    running = wait_for(ours, hands, part.name, PartState.RUNNING)
    assert running.node == "gpu-1"
    wait_until(lambda: pids(tmp_path / "pid"))
    ours.start(part)
    ours.stop(part.name, 60)
    ended = wait_for(ours, hands, part.name, PartState.ENDED)
    assert ended.code in (143, None)
    for _ in range(3):
        ours.start(part)
        hands.look()
    assert status(ours, part.name).state is PartState.ENDED
    assert hands.started == ["once-g1-0"]
    assert len(pids(tmp_path / "pid")) == 1


def test_a_part_that_ended_has_its_exit_code(ours, hands):
    ours.start(part_of("good-g1-0", command="true"))
    ours.start(part_of("bad-g1-0", command="exit 3"))
    assert wait_for(ours, hands, "good-g1-0", PartState.ENDED).code == 0
    assert wait_for(ours, hands, "bad-g1-0", PartState.ENDED).code == 3

    def counted():
        hands.look()
        jobs = hands.batch.list_namespaced_job("default").items
        return all(
            any(each.type in ("Complete", "Failed") for each in job.status.conditions or [])
            for job in jobs
        )

    wait_until(counted)
    ours.stop("bad-g1-0", 0)
    assert {part.name: part.code for part in ours.list()} == {"bad-g1-0": 3, "good-g1-0": 0}
    (bad, _good) = hands.batch.list_namespaced_job("default").items
    assert bad.spec.ttl_seconds_after_finished == 3600
    assert bad.spec.active_deadline_seconds is None


def test_a_part_that_does_not_leave_is_killed_and_a_second_call_shortens_its_time(
    ours, hands, tmp_path
):
    ours.start(part_of("stays-g1-0", command=REFUSES.format(tmp_path / "pid")))
    wait_for(ours, hands, "stays-g1-0", PartState.RUNNING)
    wait_until(lambda: pids(tmp_path / "pid"))
    ours.stop("stays-g1-0", 3600)
    for _ in range(20):
        hands.look()
        time.sleep(0.05)
    assert status(ours, "stays-g1-0").state is PartState.RUNNING
    ours.stop("stays-g1-0", 0)
    wait_for(ours, hands, "stays-g1-0", PartState.ENDED)
    (pid,) = pids(tmp_path / "pid")
    assert not Path(f"/proc/{pid}").exists()


def test_a_part_without_a_pod_can_be_stopped(ours, hands):
    ours.start(part_of("early-g1-0"))
    ours.stop("early-g1-0", 60)
    ended = wait_for(ours, hands, "early-g1-0", PartState.ENDED)
    assert (ended.code, ended.reason) == (None, "DeadlineExceeded")
    assert hands.started == []
    ours.stop("unknown-g1-0", 60)


def test_a_part_whose_node_does_not_answer_has_ended(ours, hands):
    ours.start(part_of("lost-g1-0", "gpu-2"))
    wait_for(ours, hands, "lost-g1-0", PartState.RUNNING)
    hands.set_ready("gpu-2", "Unknown")
    ended = status(ours, "lost-g1-0")
    assert (ended.state, ended.code) == (PartState.ENDED, None)
    assert ended.reason == "gpu-2 does not answer"
    assert [node.name for node in ours.nodes()] == ["gpu-1"]


def test_a_job_of_another_cluster_is_not_taken_for_a_part(ours, hands, server):
    other = make(server, cluster="else")
    other.start(part_of("same-g1-0"))
    with pytest.raises(BackendError, match=r"same-g1-0 cannot start: .* not of cluster test"):
        ours.start(part_of("same-g1-0"))
    assert ours.list() == ()
    ours.stop("same-g1-0", 0)
    assert [part.state for part in other.list()] == [PartState.PENDING]
    (job,) = hands.batch.list_namespaced_job("default").items
    assert job.spec.active_deadline_seconds is None


def test_lists_are_read_page_by_page(ours, monkeypatch):
    monkeypatch.setattr("resilin.cluster.backends.kubernetes.PAGE", 2)
    names = [f"many-g1-{number}" for number in range(5)]
    for name in names:
        ours.start(part_of(name))
    assert sorted(part.name for part in ours.list()) == names


def test_a_server_that_refuses_or_is_gone_is_an_error_of_the_backend(server, hands, tmp_path):
    ours = make(server, resource="nvidia.com/gpu")
    with pytest.raises(BackendError, match="create_namespaced_job"):
        ours.start(part_of("wrong-g1-0", command=[1]))
    gone = backend("test", {"image": "x", "kubeconfig": str(tmp_path / "none")})
    assert "no access to Kubernetes" in gone.detect()


def test_the_role_has_the_rights_that_are_needed_and_no_others(server, hands):
    if not server.is_real:
        pytest.skip("the server over the schema checks no rights")
    from kubernetes import client

    ours = make(server, user="controller")
    assert "cannot list resource" in ours.detect()
    rbac = client.RbacAuthorizationV1Api(hands.core.api_client)
    subject = {"kind": "User", "name": "controller", "apiGroup": "rbac.authorization.k8s.io"}
    for each in objects_of(DEPLOY / "controller.yaml"):
        if each["kind"].endswith("Binding"):
            each["subjects"] = [subject]
        each["metadata"].pop("namespace", None)
        match each["kind"]:
            case "Role":
                rbac.create_namespaced_role("default", each)
            case "RoleBinding":
                rbac.create_namespaced_role_binding("default", each)
            case "ClusterRole":
                rbac.create_cluster_role(each)
            case "ClusterRoleBinding":
                rbac.create_cluster_role_binding(each)
    wait_until(lambda: ours.detect() is None)  # the server reads its rules from time to time
    ours.start(part_of("right-g1-0"))
    ours.start(part_of("right-g1-0"))
    wait_for(ours, hands, "right-g1-0", PartState.RUNNING)
    ours.stop("right-g1-0", 0)
    wait_for(ours, hands, "right-g1-0", PartState.ENDED)
    for verb, resource in (("get", "secrets"), ("create", "pods"), ("delete", "jobs")):
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": "controller",
                "resourceAttributes": {"namespace": "default", "verb": verb, "resource": resource},
            },
        }
        if resource == "jobs":
            review["spec"]["resourceAttributes"]["group"] = "batch"
        access = client.AuthorizationV1Api(hands.core.api_client)
        assert not access.create_subject_access_review(review).status.allowed, (verb, resource)


# Elastic jobs -----------------------------------------------------------------------------------


@pytest.mark.nightly(part="clusters")
@pytest.mark.timeout(400)
def test_an_elastic_job_grows_and_shrinks_by_the_pod_of_rank_0(ours, hands, tmp_path):
    hands.add_node("gpu-3", 4)

    def wait(what):
        def looked():
            hands.look()
            return what()

        wait_until(looked)

    with serving_store() as endpoint:
        folder = tmp_path / "job"
        parts = [
            training(f"elastic-g1-{n}", f"gpu-{n + 1}", endpoint, folder, epochs=4, seed=3)
            for n in range(3)
        ]
        ours.start(parts[0])
        wait(lambda: sharing.steps_done(folder) >= 2)
        for part in parts[1:]:
            ours.start(part)
        wait(lambda: sharing.sizes_of(folder)[-1] == 3)
        reached = sharing.steps_done(folder)
        wait(lambda: sharing.steps_done(folder) >= reached + 2)
        first = part_of_rank_0(folder)
        ours.stop(first, 60)
        wait_for(ours, hands, first, PartState.ENDED)
        hurry(folder)
        for part in parts:
            if part.name != first:
                assert wait_for(ours, hands, part.name, PartState.ENDED).code == 0
    sizes = sharing.sizes_of(folder)
    assert (sizes[0], max(sizes), sizes[-1]) == (1, 3, 2)
    assert sorted(hands.started) == [part.name for part in parts]
    sharing.assert_as_undisturbed(folder, epochs=4, seed=3)


# Objects ----------------------------------------------------------------------------------------


def test_the_template_is_kept_and_the_part_is_put_into_it(tmp_path):
    template = tmp_path / "pod.yaml"
    template.write_text(
        """
metadata: {labels: {team: vision}}
spec:
  terminationGracePeriodSeconds: 300
  tolerations: [{key: spot, operator: Exists}]
  containers:
  - name: train
    image: mine:2
    env: [{name: A, value: kept}, {name: B, value: replaced}]
    resources: {limits: {memory: 1Gi, cpu: 2}}
    volumeMounts: [{name: data, mountPath: /data}]
  volumes: [{name: data, persistentVolumeClaim: {claimName: data}}]
"""
    )
    ours = backend("test", {"template": str(template)})
    part = part_of("tell-g1-0", command=["a"], environment={"B": "new"}, directory="/data")
    job = job_of(part, "test", ours._template, "nvidia.com/gpu")
    pod = job["spec"]["template"]
    assert pod["metadata"]["labels"]["team"] == "vision"
    assert pod["spec"]["terminationGracePeriodSeconds"] == 300
    assert pod["spec"]["tolerations"][0] == {"key": "spot", "operator": "Exists"}
    container = pod["spec"]["containers"][0]
    assert container["command"] == ["a"]
    assert container["workingDir"] == "/data"
    assert container["env"] == [{"name": "A", "value": "kept"}, {"name": "B", "value": "new"}]
    assert container["resources"]["limits"] == {
        "memory": "1Gi",
        "cpu": "2",
        "nvidia.com/gpu": "1",
    }
    assert job["metadata"]["labels"] == {
        "resilin/cluster": "test",
        "resilin/job": "tell",
        "resilin/part": "tell-g1-0",
    }


@pytest.mark.parametrize(
    ("text", "number"),
    [("4", 4), ("500m", "0.5"), ("2k", 2000), ("1Ki", 1024), ("1e3", 1000), ("1E", 10**18)],
)
def test_quantities_are_those_of_kubernetes(text, number):
    assert quantity(text) == Decimal(number)
    with pytest.raises(ValueError, match=r"'4x' must be a quantity"):
        quantity("4x")


def test_a_pod_asks_for_the_most_that_its_containers_need_at_once():
    def container(amount, **more):
        return {"resources": {"limits": {"gpu": str(amount)}}, **more}

    spec = {
        "initContainers": [container(1, restartPolicy="Always"), container(4)],
        "containers": [container(1), container(2)],
    }
    assert request_of({"spec": spec}, "gpu") == 5
    del spec["initContainers"][1]
    assert request_of({"spec": spec}, "gpu") == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"image": "x", "colour": "red"}, "option 'colour' must be one of image, template"),
        ({}, "must have either image or template"),
        ({"image": "x", "template": "y"}, "must have either image or template"),
    ],
    ids=["unknown", "none", "both"],
)
def test_options_that_cannot_be_honoured_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        backend("test", options)


def test_a_name_that_is_too_long_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match="has 70 characters: a Job has at most 63"):
        job_of(part_of("x" * 70), "test", spec_of(), "nvidia.com/gpu")


def test_without_the_client_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes.config", None)
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    ours = backend("test", {"image": "x"})
    assert ours.detect() == (
        "the backend kubernetes needs kubernetes: pip install 'resilin[kubernetes]'"
    )


# Manifests --------------------------------------------------------------------------------------


def objects_of(path):
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


def validated(path):
    """Objects of a file, each checked against the schema of Kubernetes; a JobSet has none there."""
    import kubernetes_validate

    found = objects_of(path)
    for each in found:
        if each["kind"] == "JobSet":
            # Its Jobs are Jobs: JobSet embeds the same type.
            for job in each["spec"]["replicatedJobs"]:
                whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}}
                kubernetes_validate.validate({**whole, **job["template"]}, "1.36", strict=True)
        else:
            kubernetes_validate.validate(each, "1.36", strict=True)
    return found


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("*.yaml")), ids=lambda path: path.name)
def test_manifests_are_valid(path):
    assert validated(path)


def test_there_are_manifests_and_a_wrong_one_would_be_found(tmp_path):
    import kubernetes_validate

    assert len(list(DEPLOY.glob("*.yaml"))) == 6
    text = (DEPLOY / "elastic-job.yaml").read_text()
    (tmp_path / "wrong.yaml").write_text(text.replace("completionMode:", "completionMood:"))
    with pytest.raises(kubernetes_validate.ValidationError):
        validated(tmp_path / "wrong.yaml")


def test_the_elastic_job_changes_its_size_by_a_patch(server, hands):
    (job,) = objects_of(DEPLOY / "elastic-job.yaml")
    hands.batch.create_namespaced_job("default", job)
    for size in (4, 1, 8):
        body = {"spec": {"parallelism": size, "completions": size}}
        changed = hands.batch.patch_namespaced_job("train", "default", body)
        assert (changed.spec.parallelism, changed.spec.completions) == (size, size)
    if server.is_real:
        from kubernetes.client import ApiException

        with pytest.raises(ApiException, match=r"spec\.completions"):
            hands.batch.patch_namespaced_job("train", "default", {"spec": {"completions": 2}})


def test_manifests_are_taken_by_the_server(server, hands):
    if not server.is_real:
        pytest.skip("the server over the schema knows Jobs, pods and nodes alone")
    from kubernetes import client, utils

    names = ("store.yaml", "etcd.yaml", "elastic-job-kueue.yaml", "controller.yaml")
    for each in (each for name in names for each in objects_of(DEPLOY / name)):
        each["metadata"].pop("namespace", None)
        each["metadata"]["name"] += "-tried"
        utils.create_from_dict(hands.core.api_client, each, dry_run="All")
    spec = next(
        each for each in objects_of(DEPLOY / "controller.yaml") if each["kind"] == "ConfigMap"
    )
    template = yaml.safe_load(spec["data"]["pod.yaml"])
    body = job_of(part_of("try-g1-0"), "test", template, "nvidia.com/gpu")
    client.BatchV1Api(hands.core.api_client).create_namespaced_job("default", body, dry_run="All")
