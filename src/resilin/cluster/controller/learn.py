"""First part of a step: compare what the backend lists with what was announced.

It finds parts that run, ended, or are missing, those that nobody announced, and jobs that have
finished or failed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from resilin.cluster.backends.base import PartState, PartStatus
from resilin.cluster.controller import records as r
from resilin.cluster.controller.rules import Draft, Rules
from resilin.cluster.controller.state import PartRecord
from resilin.cluster.node import Node

PART = re.compile(r"(.+)-g([0-9]{1,9})-([0-9]{1,9})")
"""Name of a part: its job, the life of it, and a number."""


def learn(
    draft: Draft, nodes: Sequence[Node], parts: Sequence[PartStatus], rules: Rules
) -> set[str]:
    """Add records of what has changed.

    Returns:
        Nodes that have a part which is not ours to stop, and whose size nobody knows: they are
        left out.
    """
    listed = {status.name: status for status in parts}
    ended = [
        found
        for part in list(draft.state.parts.values())
        if (found := _look(draft, part, listed.get(part.name), rules))
    ]
    sizes = {node.name: node.accelerators for node in nodes}
    strange = _adopt(draft, listed, sizes, rules)
    _look_at_nodes(draft, nodes, listed, rules)
    by_job: dict[str, list[tuple[PartRecord, r.Ended]]] = {}
    for part, end in ended:
        by_job.setdefault(part.job, []).append((part, end))
    for job, its in by_job.items():
        _judge(draft, job, its, rules)
    return strange


def _look(
    draft: Draft, part: PartRecord, status: PartStatus | None, rules: Rules
) -> tuple[PartRecord, r.Ended] | None:
    """Records of one part; its end if it has ended."""
    now = draft.now
    if status is None:
        if part.seen and part.missed is None:
            draft.add(r.Missed(time=now, name=part.name))
            return None
        # A part that was never listed is started once more, unless it is to leave.
        since = part.missed if part.seen else part.asked
        if since is None or now - max(since, part.announced) < rules.absent:
            return None
        end = r.Ended(time=now, name=part.name, code=None, why="not listed", sure=False)
    elif status.state is PartState.ENDED:
        how = f"code {status.code}" if status.code is not None else "lost"
        why = f"{how}, {status.reason}" if status.reason else how
        end = r.Ended(time=now, name=part.name, code=status.code, why=why)
    else:
        running = status.state is PartState.RUNNING
        if not part.seen or part.missed is not None or (running and part.began is None):
            draft.add(r.Seen(time=now, name=part.name, running=running))
        if not running and part.asked is None and now - part.announced > rules.pending:
            why = f"it got no machine within {rules.pending:g} s"
            draft.add(r.Asked(time=now, name=part.name, why=why, now=True))
        return None
    draft.add(end)
    return part, end


def _adopt(
    draft: Draft, listed: Mapping[str, PartStatus], sizes: Mapping[str, int], rules: Rules
) -> set[str]:
    """Take over parts that nobody announced, as after the loss of a part of the journal."""
    strange = set()
    past = {each.name: each for each in draft.state.history}
    for name, status in listed.items():
        if name in draft.state.parts or status.state is PartState.ENDED:
            continue
        found = PART.fullmatch(name)
        if found is None or found[1] not in draft.state.jobs:
            draft.troubles.append(
                f"part {name} on {status.node or 'no node'} belongs to no job that is known here: "
                "it is left alone, and so is its node"
            )
            if status.node is not None:
                strange.add(status.node)
            continue
        node = status.node or ""
        if name in past and past[name].sure and draft.now - past[name].ended < rules.absent:
            continue  # an answer that is late: names are not used twice
        if name in past:
            size = past[name].accelerators
        else:
            # Nobody knows how many it uses: as many as there are.
            known = draft.state.nodes.get(node)
            size = sizes.get(node, 1 if known is None else known.node.accelerators)
        draft.add(
            r.Announced(
                time=draft.now,
                name=name,
                job=found[1],
                life=int(found[2]),
                node=node,
                accelerators=max(1, size),
                adopted=True,
            )
        )
    return strange


def _look_at_nodes(
    draft: Draft, nodes: Sequence[Node], listed: Mapping[str, PartStatus], rules: Rules
) -> None:
    """Records of nodes that are new, changed, or missing."""
    for node in nodes:
        known = draft.state.nodes.get(node.name)
        if known is None or known.missed is not None or known.node != node:
            draft.add(r.NodeSeen(time=draft.now, node=node))
    here = {node.name for node in nodes}
    busy = {
        draft.state.parts[name].node
        for name, status in listed.items()
        if status.state is PartState.RUNNING and name in draft.state.parts
    }
    for name, known in list(draft.state.nodes.items()):
        if name in here:
            continue
        # A node whose parts run is not gone because one answer left it out.
        waited = known.missed is not None and draft.now - known.missed >= rules.absent
        if name not in busy or waited:
            draft.add(r.NodeMissed(time=draft.now, node=name, lost=True))
        elif known.missed is None:
            draft.add(r.NodeMissed(time=draft.now, node=name, lost=False))


def _judge(
    draft: Draft, name: str, ended: Sequence[tuple[PartRecord, r.Ended]], rules: Rules
) -> None:
    """Find out whether a job has finished, stumbled or failed by the ends of its parts."""
    job = draft.state.jobs[name]
    own = [(part, end) for part, end in ended if part.asked is None and part.life == job.life]
    if job.outcome is not None or not own:
        return
    if any(end.code == 0 for _, end in own):
        draft.add(
            r.Closed(time=draft.now, job=name, outcome=r.FINISHED, why="its script has ended")
        )
        return
    if job.cancelled:
        return
    part, end = next(((p, e) for p, e in own if e.code is not None), own[0])
    meeting = draft.state.meeting
    moved = meeting is not None and part.announced < meeting.since
    if end.code is None or moved:
        why = "its rendezvous store was lost" if moved else f"{part.name} was lost: {end.why}"
        wait = max(job.retry, draft.now + (rules.backoff if moved else 0.0))
        draft.add(r.Stumbled(time=draft.now, job=name, failures=job.failures, retry=wait, why=why))
        return
    if draft.now < job.retry:
        return  # another part of the same failure
    failures = 1 if job.progress > job.mark else job.failures + 1
    log = rules.log(part.name)
    why = f"{part.name} on {part.node} ended with {end.why}" + (f"; output: {log}" if log else "")
    if failures >= rules.failures:
        text = f"it failed {failures} times without progress: {why}"
        draft.add(r.Closed(time=draft.now, job=name, outcome=r.FAILED, why=text))
        return
    wait = min(rules.backoff * 2 ** (failures - 1), rules.backoff_limit)
    draft.add(
        r.Stumbled(time=draft.now, job=name, failures=failures, retry=draft.now + wait, why=why)
    )
