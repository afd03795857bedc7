"""Requests of users and jobs, without HTTP: each is checked and written down."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from typing import Any

from resilin.cluster.controller import records as r
from resilin.cluster.controller.codec import from_json
from resilin.cluster.controller.decide import usable
from resilin.cluster.controller.loop import Controller
from resilin.cluster.controller.state import Job, State
from resilin.cluster.controller.views import job_view, jobs_view, nodes_view, why_view
from resilin.cluster.job import JobSpec, check_name
from resilin.cluster.menu import offers
from resilin.core import _validate
from resilin.core.hints import HintsError, JobHints

FIELDS = frozenset(
    {"name", "launch", "tenant", "priority", "min", "max", "preemptible", "kinds"},
)
"""Fields of a submission."""
OWN_OPTIONS = frozenset(
    {
        *("--live", "--membership", "--nnodes", "--nproc", "--nproc-per-node", "--nproc_per_node"),
        *("--rdzv-id", "--rdzv_id", "--rdzv-endpoint", "--rdzv_endpoint", "--standalone"),
        *("--rdzv-backend", "--rdzv_backend", "--rdzv-conf", "--rdzv_conf"),
    }
)
"""Options of `resilin run` that the controller sets, or cannot honour."""
MOST = 1e18
"""Largest number of samples, and of samples per second, in hints."""
MOST_RESCALE = 86400.0
"""Longest time that a change of size may be said to take, in seconds."""
AHEAD = 600.0
"""Seconds by which the clock of a job may be ahead of ours."""
MOST_DRAIN = 366 * 86400.0
"""Seconds in the future within which a node can be announced to leave."""


class Unknown(LookupError):
    """There is no such job or node."""


class Conflict(ValueError):
    """It contradicts what is known; a repeat will not help."""


class Api:
    """Requests of users and jobs to a controller."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    @property
    def controller(self) -> Controller:
        """The controller."""
        return self._controller

    # Jobs ------------------------------------------------------------------------------------

    def submit(self, told: Mapping[str, Any]) -> str:
        """Take a job.

        Args:
            told: `launch` (see `records.Launch`), and optionally `name`, `tenant`, `priority`,
                `min`, `max`, `preemptible`, `kinds`.

        Returns:
            Its id.

        Raises:
            ValueError: A field is wrong.
            Conflict: The name is taken.
        """
        unknown = sorted(set(told) - FIELDS)
        if unknown:
            raise ValueError(f"{unknown[0]!r} must be one of {', '.join(sorted(FIELDS))}")
        launch = from_json(r.Launch, told.get("launch"))
        if not launch.script or not launch.directory.startswith("/"):
            raise ValueError(
                f"launch must have a script ({launch.script}) and an absolute directory "
                f"({launch.directory!r})"
            )
        for option in launch.options:
            if option.partition("=")[0] in OWN_OPTIONS:
                raise ValueError(
                    f"option {option!r} of resilin run must be left to the controller: it gives "
                    "each part its number of workers and its rendezvous, and no part is live"
                )
        now, given = time.time(), told.get("name")
        least = _validate.whole("min", told.get("min", 1), at_least=1)
        preemptible = told.get("preemptible", True)
        if not isinstance(preemptible, bool):
            raise ValueError(f"preemptible ({preemptible!r}) must be true or false")
        priority = told.get("priority", 0)
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise ValueError(f"priority ({priority!r}) must be a whole number")
        wishes: dict[str, Any] = {
            "submitted": now,
            "tenant": told.get("tenant", "default"),
            "priority": priority,
            "min_replicas": least,
            "max_replicas": _validate.whole("max", told.get("max", max(64, least)), at_least=1),
            "preemptible": preemptible,
            "kinds": _validate.texts("kinds", told.get("kinds", [])),
        }
        if given is not None:
            check_name("name", given)
        names: list[str] = []

        def make(state: State) -> list[r.Record]:
            name = _name(state, given, launch.script)
            names.append(name)
            return [r.Submitted(time=now, spec=JobSpec(id=name, **wishes), launch=launch)]

        self._controller.change(make)
        return names[0]

    def jobs(self) -> list[dict[str, Any]]:
        """All jobs."""
        return jobs_view(self._controller.state)

    def job(self, name: str) -> dict[str, Any]:
        """One job, with its parts."""
        state = self._controller.state
        job = _find(state, name)
        parts = state.by_job().get(name, [])
        logs = [(part.name, self._controller.rules.log(part.name)) for part in parts]
        former = [each for each in state.history if each.job == name][-20:]
        return {
            **job_view(state, job, parts),
            "parts": [
                {"name": part.name, "node": part.node, "accelerators": part.accelerators}
                for part in parts
            ],
            "former": [
                {"name": each.name, "node": each.node, "code": each.code, "ended": each.ended}
                for each in former
            ],
            "logs": dict(logs),
        }

    def why(self, name: str) -> dict[str, Any]:
        """The reason for the size of a job."""
        state = self._controller.state
        job = _find(state, name)
        return why_view(state, job, state.by_job().get(name, []), time.time())

    def cancel(self, name: str) -> None:
        """End a job; its parts may save."""

        def make(state: State) -> list[r.Record]:
            job = _find(state, name)
            if job.outcome is not None:
                raise Conflict(f"{name} has {job.outcome} already")
            return [] if job.cancelled else [r.CancelAsked(time=time.time(), job=name)]

        self._controller.change(make)

    def hint(self, name: str, told: Any) -> dict[str, Any]:
        """Take the hints of a job.

        Returns:
            Its wanted size, the sizes on offer, and when one of its nodes leaves.

        Raises:
            ValueError: They are not hints; the last good ones stay.
            Conflict: Later ones are known, or the job has ended.
        """
        hints = JobHints.from_json(told)
        _check_size(hints)
        now = time.time()
        if hints.job is not None and hints.job != name:
            raise ValueError(f"job.id ({hints.job}) must be {name}, whose address was used")
        if hints.time is not None and hints.time > now + AHEAD:
            raise ValueError(f"job.time ({hints.time}) must not be after the present ({now:.0f})")

        def make(state: State) -> list[r.Record]:
            job = _find(state, name)
            if job.outcome is not None:
                raise Conflict(f"{name} has {job.outcome}")
            _check_later(job, hints)
            return [r.Hinted(time=now, job=name, hints=hints.to_json())]

        first = self._controller.state.jobs.get(name)
        new = first is not None and first.hints is None
        # They are sent again soon: they need not be on disk, unless a decision depends on them.
        state = self._controller.change(make, sync=new)
        wanted = state.wanted.get(name)
        leaving = {
            node["name"]: node["leaves"] for node in nodes_view(state) if node["leaves"] is not None
        }
        times = [
            leaving[part.node] for part in state.by_job().get(name, []) if part.node in leaving
        ]
        nodes = usable(state, now, self._controller.rules, set())
        return {
            "replicas": 0 if wanted is None else wanted.size,
            "menu": offers(nodes),
            "leaves": min(times, default=None),
        }

    # Nodes -----------------------------------------------------------------------------------

    def nodes(self) -> list[dict[str, Any]]:
        """All nodes."""
        return nodes_view(self._controller.state)

    def drain(self, node: str, at: float | None) -> None:
        """Have a node empty by a time; None means now."""
        now = time.time()
        when = now if at is None else _validate.real("at", at, at_least=0)
        if when > now + MOST_DRAIN:
            raise ValueError(f"at ({when:.0f}) must be within a year from now ({now:.0f})")

        def make(state: State) -> list[r.Record]:
            if node not in state.nodes:
                raise Unknown(f"node {node} must be one of {', '.join(state.nodes) or 'none'}")
            return [r.Drained(time=now, node=node, at=when)]

        self._controller.change(make)

    def undrain(self, node: str) -> None:
        """Use a node again."""

        def make(state: State) -> list[r.Record]:
            if node not in state.drains:
                raise Unknown(f"node {node} is not drained")
            return [r.Drained(time=time.time(), node=node, at=None)]

        self._controller.change(make)


def _find(state: State, name: str) -> Job:
    if name not in state.jobs:
        raise Unknown(f"there is no job {name}")
    return state.jobs[name]


def _name(state: State, given: str | None, script: tuple[str, ...]) -> str:
    """The name that was given, or one after the script."""
    if given is not None:
        if given in state.jobs:
            raise Conflict(f"name {given!r} is taken: there is such a job")
        return given
    stem = script[1] if script[0] == "-m" and len(script) > 1 else script[0].rpartition("/")[2]
    base = re.sub(r"[^a-z0-9]+", "-", stem.removesuffix(".py").lower())[:30].strip("-") or "job"
    number = 1
    while f"{base}-{number}" in state.jobs:
        number += 1
    return f"{base}-{number}"


def _check_later(job: Job, hints: JobHints) -> None:
    """Raises if later hints of this life are known: one from another machine may overtake."""
    if job.hints is None or job.hinted is None or job.hinted < job.lived:
        return
    known = JobHints.from_json(job.hints)
    later = 0.0
    if hints.time is not None and known.time is not None:
        later = hints.time - known.time
    # A job that has lost all its state within one life begins with generation 0 again: a later time
    # says so.
    if hints.generation < known.generation and later <= 0:
        raise Conflict(
            f"job.generation ({hints.generation}) must be at least {known.generation}, the last "
            f"one, unless job.time ({hints.time}) is later than {known.time}"
        )
    if later < 0:
        raise Conflict(f"job.time ({hints.time}) must be at least {known.time}, the last one")


def _check_size(hints: JobHints) -> None:
    """Raises if numbers are so large or small that sums over all jobs would suffer from them."""
    work = [("progress", hints.progress * hints.reference)]
    if hints.total is not None:
        work.append(("total", hints.total * hints.reference))
    for name, value in work:
        if not value <= MOST:
            raise HintsError(f"progress.{name} ({value:g} samples) must be at most {MOST:g}")
    for table in hints.tables:
        for value in table.goodput:
            if value and not 1 / MOST <= value <= MOST:
                raise HintsError(
                    f"goodput.{table.kind} ({value:g}) must be 0, or from {1 / MOST:g} to {MOST:g}"
                )
    if not (hints.rescale_seconds or 0.0) <= MOST_RESCALE:
        raise HintsError(
            f"job.rescale_seconds ({hints.rescale_seconds}) must be at most {MOST_RESCALE:g}"
        )


def parse(body: bytes) -> Any:
    """JSON of a request.

    Raises:
        ValueError: It is not JSON.
    """
    try:
        return json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body must be JSON: {error}") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
