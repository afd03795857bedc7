"""`apply`: what each record of the journal changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from resilin.cluster.controller import records as r
from resilin.cluster.controller.state import Job, KnownNode, Meeting, PartRecord, Past, State

HISTORY = 2000
"""Number of former parts that are remembered, for the chart of the page."""
ENDED_KEPT = 1000
"""Number of jobs that have ended and are remembered."""


class Owned(dict[str, Any]):
    """A mapping of a state that nobody else has seen yet: it may be changed in place."""


def own(state: State) -> State:
    """A copy of a state, which `apply` may change; to be given out by `release`."""
    return replace(
        state, jobs=Owned(state.jobs), parts=Owned(state.parts), nodes=Owned(state.nodes)
    )


def release(state: State) -> State:
    """The state that `own` has begun, which does not change any more."""
    return replace(state, jobs=dict(state.jobs), parts=dict(state.parts), nodes=dict(state.nodes))


def apply_all(state: State, records: Iterable[r.Record]) -> State:
    """The state after many records, in a time that does not grow with the state for each."""
    owned = own(state)
    for record in records:
        owned = apply(owned, record)
    return release(owned)


def apply(state: State, record: r.Record) -> State:
    """The state after a record. One that is owned may be the same object, changed."""
    return _APPLY[type(record)](state, record)


def _put(state: State, name: str, key: str, value: Any) -> State:
    """The state with one entry of a mapping changed, added or, with None, removed."""
    before = getattr(state, name)
    entries = before if isinstance(before, Owned) else dict(before)
    if value is None:
        entries.pop(key, None)
    else:
        entries[key] = value
    changes: dict[str, Any] = {name: entries}
    return state if entries is before else replace(state, **changes)


def _with_job(state: State, name: str, **changes: Any) -> State:
    return _put(state, "jobs", name, replace(state.jobs[name], **changes))


def _with_part(state: State, name: str, **changes: Any) -> State:
    if name not in state.parts:
        return state
    return _put(state, "parts", name, replace(state.parts[name], **changes))


def _opened(state: State, record: r.Opened) -> State:
    return replace(state, cluster=record.cluster)


def _met(state: State, record: r.Met) -> State:
    met = Meeting(endpoint=record.endpoint, number=record.number, since=record.time)
    return replace(state, meeting=met)


def _submitted(state: State, record: r.Submitted) -> State:
    job = Job(spec=record.spec, launch=record.launch, waiting_since=record.time)
    return _put(_put(state, "jobs", record.spec.id, None), "jobs", record.spec.id, job)


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
    return _put(state, "nodes", record.node.name, KnownNode(node=record.node))


def _node_missed(state: State, record: r.NodeMissed) -> State:
    known = state.nodes.get(record.node)
    if known is None:
        return state
    missed = None if record.lost else replace(known, missed=record.time)
    return _put(state, "nodes", record.node, missed)


def _decided(state: State, record: r.Decided) -> State:
    jobs = state.jobs if isinstance(state.jobs, Owned) else dict(state.jobs)
    for name, job in list(jobs.items()):
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
    running = part.accelerators if record.adopted else 0
    changes = (changes if record.life >= job.life else {}) | {"running": job.running + running}
    state = replace(state, lives=max(state.lives, record.life))
    return _with_job(_put(state, "parts", record.name, part), record.job, **changes)


def _seen(state: State, record: r.Seen) -> State:
    part = state.parts.get(record.name)
    if part is None:
        return state
    if not record.running or part.began is not None:
        return _with_part(state, record.name, seen=True, missed=None)
    state = _with_part(state, record.name, seen=True, missed=None, began=record.time)
    job = state.jobs[part.job]
    running = job.running + part.accelerators
    profiled = max(job.profiled, running)
    return _with_job(state, part.job, running=running, profiled=profiled)


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
    job = state.jobs[part.job]
    running = job.running - (part.accelerators if part.began is not None else 0)
    state = replace(state, history=(*state.history, past)[-HISTORY:])
    state = _put(state, "parts", record.name, None)
    return _with_job(state, part.job, served=job.served + served, running=running)


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
    for name in dropped:
        state = _put(state, "jobs", name, None)
    return state


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
