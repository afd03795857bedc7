"""Third part of a step: announce the stops and starts that lead to what is wanted.

Stops come first. A part is started when its accelerators are free, and joins the life of its job;
a new life begins when all parts of the former one have ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from resilin.cluster.controller import records as r
from resilin.cluster.controller.rules import Act, Draft, Rules, Start, Stop
from resilin.cluster.controller.state import Job, PartRecord, State
from resilin.cluster.node import Node

MARGIN = 5.0
"""Seconds beyond the grace before a stop is repeated: the backend has ended the part by then."""


def carry_out(draft: Draft, nodes: Sequence[Node], rules: Rules) -> None:
    """Add announcements of stops and starts, and the end of jobs that were cancelled."""
    usable = {node.name: node for node in nodes}
    by_job = draft.state.by_job()
    cancelled = [name for name, job in draft.state.jobs.items() if job.cancelled]
    for name in dict.fromkeys([*by_job, *cancelled]):
        job = draft.state.jobs[name]
        parts = by_job.get(name, [])
        _stop(draft, job, parts, _shares(draft.state, job, usable), rules)
        if job.cancelled and job.outcome is None and not parts:
            why = "its user cancelled it"
            draft.add(r.Closed(time=draft.now, job=name, outcome=r.CANCELLED, why=why))
    # Nothing is started on a node that is not reported at present.
    left = {
        name: node.accelerators if draft.state.nodes[name].missed is None else 0
        for name, node in usable.items()
    }
    for part in draft.state.parts.values():
        if part.node in left:
            left[part.node] -= part.accelerators
    by_job = draft.state.by_job()
    for name in draft.state.wanted:
        job = draft.state.jobs[name]
        if job.active and draft.now >= job.retry:
            shares = _shares(draft.state, job, usable)
            _start(draft, job, by_job.get(name, []), shares, left, rules)


def acts(state: State, now: float, rules: Rules) -> tuple[Act, ...]:
    """All that has been announced and is not known to be done: stops, then starts."""
    stops = [
        Stop(part.name, 0.0 if part.now else max(0.0, part.asked + rules.grace - now))
        for part in state.parts.values()
        if part.asked is not None
    ]
    starts = [
        Start(part.name) for part in state.parts.values() if part.asked is None and not part.seen
    ]
    return (*stops, *starts)


def _shares(state: State, job: Job, usable: Mapping[str, Node]) -> dict[str, int]:
    """Accelerators that the job is to have on each node that can be used."""
    wanted = state.wanted.get(job.spec.id) if job.active else None
    if wanted is None:
        return {}
    shares = {name: count for name, count in wanted.shares if name in usable}
    return shares if sum(shares.values()) >= job.spec.min_replicas else {}


def _stop(
    draft: Draft,
    job: Job,
    parts: Sequence[PartRecord],
    shares: Mapping[str, int],
    rules: Rules,
) -> None:
    now, taken = draft.now, set[str]()
    # The agents of a job of a fixed size wait for as many parts as there were at the start.
    regrouped = bool(shares) and not job.spec.elastic and len(shares) != job.hosts
    for part in parts:
        if part.asked is not None:
            if not part.now and now - part.asked >= rules.grace + MARGIN:
                why = f"it did not leave within {rules.grace:g} s"
                draft.add(r.Asked(time=now, name=part.name, why=why, now=True))
            continue
        fits = shares.get(part.node) == part.accelerators and part.node not in taken
        if fits and part.life == job.life and not regrouped:
            taken.add(part.node)
            continue
        since = now if job.ended is None else job.ended
        if job.outcome == r.FINISHED and now - since < rules.finishing:
            continue  # it is about to end as well
        # What a former life would save now is older than what the present one has made of it.
        former = part.life != job.life
        draft.add(r.Asked(time=now, name=part.name, why=_why(job, part, shares), now=former))


def _why(job: Job, part: PartRecord, shares: Mapping[str, int]) -> str:
    if not job.active:
        return f"its job is {job.outcome or r.CANCELLED}"
    if part.life != job.life:
        return "it belongs to a former life of its job"
    if not shares:
        return "its job has to wait"
    if part.node in shares:
        return f"its job gets {shares[part.node]} accelerators on {part.node}"
    return f"its job leaves {part.node}"


def _start(
    draft: Draft,
    job: Job,
    parts: Sequence[PartRecord],
    shares: Mapping[str, int],
    left: dict[str, int],
    rules: Rules,
) -> None:
    name, now = job.spec.id, draft.now
    staying = [part for part in parts if part.asked is None and part.life == job.life]
    if parts and not staying:
        return  # a new life begins when the former one has ended
    here = {part.node for part in parts}
    ready = {
        node: count for node, count in shares.items() if node not in here and left[node] >= count
    }
    if not staying and len(ready) < len(shares):
        # All parts start together, so that the first ones are not interrupted by the others.
        since = now if job.changed is None else job.changed
        few = sum(ready.values()) < job.spec.min_replicas
        if few or now - since < rules.grace + 2 * MARGIN:
            return
    life, number = (job.life, job.parts) if staying else (draft.state.lives + 1, 0)
    for node, count in ready.items():
        number += 1
        left[node] -= count
        draft.add(
            r.Announced(
                time=now,
                name=f"{name}-g{life}-{number}",
                job=name,
                life=life,
                node=node,
                accelerators=count,
                hosts=0 if staying else len(shares),
            )
        )
