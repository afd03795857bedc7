"""`step`: what the controller does next, as one pure function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from resilin.cluster.backends.base import PartStatus
from resilin.cluster.controller.carry_out import acts, carry_out
from resilin.cluster.controller.decide import decide, usable
from resilin.cluster.controller.learn import learn
from resilin.cluster.controller.records import Record
from resilin.cluster.controller.rules import Act, Draft, Rules
from resilin.cluster.controller.state import State
from resilin.cluster.decision import Policy
from resilin.cluster.node import Node


@dataclass(frozen=True, slots=True)
class Step:
    """Everything that has to be done, in this order."""

    records: tuple[Record, ...]
    """To be written to the journal, and to disk, before anything is done."""
    state: State
    """The state after the records."""
    acts: tuple[Act, ...]
    """To be done by the backend; all of them may have been done before."""
    troubles: tuple[str, ...]
    """Sentences for the operator."""


def step(
    state: State,
    nodes: Sequence[Node],
    parts: Sequence[PartStatus],
    now: float,
    policy: Policy,
    rules: Rules,
) -> Step:
    """Learn what has changed, decide, and announce what is to be done about it.

    Args:
        state: All that is known.
        nodes: Nodes that the backend reports.
        parts: Parts that it lists.
        now: The time, in seconds since 1970.
        policy: Decides who gets what.
        rules: Limits.
    """
    draft = Draft(state, now)
    strange = learn(draft, nodes, parts, rules)
    places = usable(draft.state, now, rules, strange)
    decide(draft, places, policy, rules)
    carry_out(draft, places, rules)
    after = draft.result()
    return Step(tuple(draft.records), after, acts(after, now, rules), tuple(draft.troubles))
