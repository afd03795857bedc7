"""Live elasticity on Ray: actors come and go with the nodes, and those that stay keep running."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from resilin.integrations.ray_authority import Budget, LiveAuthority, Terms
from resilin.integrations.ray_worker import TrainFunction
from resilin.telemetry.extras import load

ray: Any = load("ray", "ray", "resilin.integrations.ray")

NAME = "resilin-live"
"""Name of the authority's actor, unless the user gives one."""
HEARTBEAT = 5.0
"""Seconds without a sign of life after which a worker is killed."""


def run_live(
    train: TrainFunction,
    config: Any = None,
    *,
    min_workers: int,
    max_workers: int,
    resources_per_worker: Mapping[str, float] | None = None,
    max_failures: int = 3,
    heartbeat: float = HEARTBEAT,
    name: str = NAME,
) -> list[Any]:
    """Train on Ray actors that come and go while the others keep running.

    The job begins with `min_workers` actors. Ray is asked for `max_workers` at all times: where it
    has no place for one, that one waits, joins when a node is added, and is requested again when it
    is lost. If fewer than `min_workers` are left, those train on.

    Args:
        train: The function that each actor runs: a loop with `resilin.init_process_group()`.
        config: Argument of the function; None calls it without one.
        min_workers: Actors with which the job begins.
        max_workers: The most that it may have.
        resources_per_worker: Resources of Ray for each actor; `{"CPU": 1}` if None.
        max_failures: How often a function may raise an error, or the job be started again from its
            checkpoint, before it fails. Actors and nodes that are lost do not count. -1 for any
            number.
        heartbeat: Seconds without a sign of life after which an actor is killed.
        name: Name of the actor that knows who is in the job, for `ray.get_actor`. Its method
            `status` says who.

    Returns:
        What the functions have returned, in the order of the replicas at the end.

    Raises:
        ValueError: An argument cannot be honoured.
        RuntimeError: The job has failed too often, or its function before the first step.
    """
    resources = _checked(min_workers, max_workers, resources_per_worker, max_failures, heartbeat)
    if not ray.is_initialized():
        ray.init()
    terms = Terms(
        train=train,
        config=config,
        min_workers=min_workers,
        max_workers=max_workers,
        options={**resources, "max_restarts": 0, "scheduling_strategy": "SPREAD"},
        max_failures=max_failures,
        heartbeat=heartbeat,
    )
    budget = Budget(max_failures)
    while True:
        authority = _start(name)
        try:
            values: list[Any] = ray.get(authority.run.remote(terms))
            return values
        except ray.exceptions.ActorDiedError as error:
            if not ray.is_initialized():
                raise  # the caller has left the cluster
            # Its workers are gone with it: another one begins from their checkpoint.
            budget.spend(f"the authority of the job is lost: {error}")
        finally:
            if ray.is_initialized():  # otherwise Ray would start a cluster for this call
                ray.kill(authority)


def _start(name: str) -> Any:
    """Start the authority on this node: with it, the job would be lost in any case."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"num_cpus": 0, "max_concurrency": 4, "name": name, "scheduling_strategy": here}
    return ray.remote(LiveAuthority).options(**options).remote()


def _checked(
    min_workers: int,
    max_workers: int,
    resources: Mapping[str, float] | None,
    max_failures: int,
    heartbeat: float,
) -> dict[str, Any]:
    """Options of an actor with these resources; refuses what cannot be honoured."""
    if not 1 <= min_workers <= max_workers:
        raise ValueError(
            f"min_workers ({min_workers}) must be at least 1, and at most max_workers "
            f"({max_workers})"
        )
    if max_failures < -1:
        raise ValueError(f"max_failures ({max_failures}) must be at least 0, or -1 for any number")
    if not 0 < heartbeat < math.inf:
        raise ValueError(f"heartbeat ({heartbeat}) must be a number of seconds above 0")
    rest = {"CPU": 1.0} if resources is None else dict(resources)
    for kind, amount in rest.items():
        if not 0 <= amount < math.inf:
            raise ValueError(f"resources_per_worker[{kind!r}] ({amount}) must be at least 0")
    if gpus := rest.pop("GPU", 0):
        raise ValueError(
            f"resources_per_worker asks for {gpus} GPUs, and a live job has groups of the backend "
            "gloo, on CPUs: use TorchTrainer, which restarts workers that are lost"
        )
    options: dict[str, Any] = {"num_cpus": rest.pop("CPU", 0)}
    if "memory" in rest:
        options["memory"] = rest.pop("memory")
    return {**options, "resources": rest}
