"""`apply`: what each record of the journal changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from resilin.cluster.controller import records as r
from resilin.cluster.controller.state import Job, KnownNode, Meeting, PartRecord, Past, State

HISTORY = 2000
"""Number of former parts that are remembered, for the chart of the page."""
ENDED_KEPT = 1000
"""Number of jobs that have ended and are remembered."""


def apply(state: State, record: r.Record) -> State:
    """The state after a record."""
    return _APPLY[type(record)](state, record)


def _with_job(state: State, name: str, **changes: Any) -> State:
    return replace(state, jobs={**state.jobs, name: replace(state.jobs[name], **changes)})


def _with_part(state: State, name: str, **changes: Any) -> State:
    if name not in state.parts:
        return state
    return replace(state, parts={**state.parts, name: replace(state.parts[name], **changes)})


def _opened(state: State, record: r.Opened) -> State:
    return replace(state, cluster=record.cluster)


def _met(state: State, record: r.Met) -> State:
    met = Meeting(endpoint=record.endpoint, number=record.number, since=record.time)
    return replace(state, meeting=met)


def _submitted(state: State, record: r.Submitted) -> State:
    job = Job(spec=record.spec, launch=record.launch, waiting_since=record.time)
    jobs = {name: each for name, each in state.jobs.items() if name != record.spec.id}
    return replace(state, jobs={**jobs, record.spec.id: job})


def _cancel_asked(state: State, record: r.CancelAsked) -> State:
    return _with_job(state, record.job, cancelled=True)


def _hinted(state: State, record: r.Hinted) -> State:
    return _with_job(state, record.job, hints=record.hints, hinted=record.time)


def _drained(state: State, record: r.Drained) -> State:
    drains = {name: at for name, at in state.drains.items() if name != record.node}
    return replace(
        state, drains=drains if record.at is None else {**drains, record.node: record.at}
    )


def _node_seen(state: State, record: r.NodeSeen) -> State:
    known = KnownNode(node=record.node)
    return replace(state, nodes={**state.nodes, record.node.name: known})


def _node_missed(state: State, record: r.NodeMissed) -> State:
    nodes = dict(state.nodes)
    if record.lost:
        nodes.pop(record.node, None)
    elif record.node in nodes:
        nodes[record.node] = replace(nodes[record.node], missed=record.time)
    return replace(state, nodes=nodes)


def _decided(state: State, record: r.Decided) -> State:
    jobs = dict(state.jobs)
    for name, job in jobs.items():
        before, after = state.wanted.get(name), record.wanted.get(name)
        if job.outcome is not None or before == after:
            continue
        jobs[name] = replace(
            job,
            restarts=job.restarts + (job.changed is not None and after is not None),
            changed=record.time,
            waiting_since=record.time if after is None else None,
        )
    return replace(state, decision=record, jobs=jobs)


def _announced(state: State, record: r.Announced) -> State:
    part = PartRecord(
        name=record.name,
        job=record.job,
        life=record.life,
        node=record.node,
        accelerators=record.accelerators,
        announced=record.time,
        seen=record.adopted,
        began=record.time if record.adopted else None,
    )
    job = state.jobs[record.job]
    count = job.parts + 1 if job.life == record.life else 1
    number = record.name.rpartition("-")[2]
    changes: dict[str, Any] = {"life": record.life, "parts": max(count, int(number))}
    if record.life > job.life:
        changes["lived"] = record.time
    if record.hosts:
        changes["hosts"] = record.hosts
    state = replace(
        state,
        parts={**state.parts, record.name: part},
        lives=max(state.lives, record.life),
    )
    return _with_job(state, record.job, **changes) if record.life >= job.life else state


def _seen(state: State, record: r.Seen) -> State:
    changes: dict[str, Any] = {"seen": True, "missed": None}
    part = state.parts.get(record.name)
    if part is None:
        return state
    if record.running and part.began is None:
        changes["began"] = record.time
    state = _with_part(state, record.name, **changes)
    size = sum(
        each.accelerators
        for each in state.parts.values()
        if each.job == part.job and each.began is not None and each.asked is None
    )
    job = state.jobs[part.job]
    return _with_job(state, part.job, profiled=size) if size > job.profiled else state


def _missed(state: State, record: r.Missed) -> State:
    return _with_part(state, record.name, missed=record.time)


def _asked(state: State, record: r.Asked) -> State:
    part = state.parts[record.name]
    asked = record.time if part.asked is None else part.asked
    return _with_part(state, record.name, asked=asked, why=record.why, now=record.now)


def _ended(state: State, record: r.Ended) -> State:
    part = state.parts.get(record.name)
    if part is None:
        return state
    past = Past(
        **{name: getattr(part, name) for name in PartRecord.__dataclass_fields__},
        ended=record.time,
        code=record.code,
        sure=record.sure,
    )
    began = record.time if part.began is None else part.began
    served = part.accelerators * max(0.0, record.time - began)
    state = replace(
        state,
        parts={name: each for name, each in state.parts.items() if name != record.name},
        history=(*state.history, past)[-HISTORY:],
    )
    return _with_job(state, part.job, served=state.jobs[part.job].served + served)


def _stumbled(state: State, record: r.Stumbled) -> State:
    job = state.jobs[record.job]
    return _with_job(
        state,
        record.job,
        failures=record.failures,
        mark=job.progress if record.failures else job.mark,
        retry=record.retry,
        why=record.why,
    )


def _closed(state: State, record: r.Closed) -> State:
    state = _with_job(
        state,
        record.job,
        outcome=record.outcome,
        why=record.why,
        ended=record.time,
        waiting_since=None,
    )
    over = [name for name, job in state.jobs.items() if job.outcome is not None]
    used = {part.job for part in state.parts.values()}
    dropped = set(over[: max(0, len(over) - ENDED_KEPT)]) - used
    if not dropped:
        return state
    return replace(state, jobs={n: job for n, job in state.jobs.items() if n not in dropped})


_APPLY: dict[type[r.Record], Callable[[State, Any], State]] = {
    r.Opened: _opened,
    r.Met: _met,
    r.Submitted: _submitted,
    r.CancelAsked: _cancel_asked,
    r.Hinted: _hinted,
    r.Drained: _drained,
    r.NodeSeen: _node_seen,
    r.NodeMissed: _node_missed,
    r.Decided: _decided,
    r.Announced: _announced,
    r.Seen: _seen,
    r.Missed: _missed,
    r.Asked: _asked,
    r.Ended: _ended,
    r.Stumbled: _stumbled,
    r.Closed: _closed,
}
"""The effect of each kind of record."""
