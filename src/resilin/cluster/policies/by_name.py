"""Policies by the names that people write on the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any

from resilin.cluster.decision import Policy
from resilin.cluster.division.constraints import Constraints
from resilin.cluster.division.value import Urgency

POLICIES: Mapping[str, tuple[str, str]] = {
    "fifo": ("resilin.cluster.policies.fifo", "Fifo"),
    "tiresias": ("resilin.cluster.policies.tiresias", "Tiresias"),
    "optimus": ("resilin.cluster.policies.optimus", "Optimus"),
    "pollux": ("resilin.cluster.policies.pollux", "Pollux"),
    "sia": ("resilin.cluster.policies.sia", "Sia"),
    "ours": ("resilin.cluster.policies.goodput", "Goodput"),
}
"""Module and class of each policy; it is loaded when it is asked for."""


def by_name(name: str, **options: Any) -> Policy:
    """Make a policy.

    Args:
        name: One of `POLICIES`.
        options: Arguments of the policy. Fields of `Constraints` (`patience`, `dwell`, `changes`,
            `lead`) and, for `ours`, of `Urgency` (`p`, `p_unknown`, `even`, `horizon`) may be
            given as such.

    Raises:
        ValueError: There is no such policy, or it does not take an option.
    """
    if name not in POLICIES:
        raise ValueError(f"policy ({name!r}) must be one of {', '.join(POLICIES)}")
    module, cls = POLICIES[name]
    make: Callable[..., Policy] = getattr(import_module(module), cls)
    groups: dict[str, type[Constraints] | type[Urgency]] = {"constraints": Constraints}
    if name == "ours":
        groups["urgency"] = Urgency
    arguments = dict(options)
    for argument, group in groups.items():
        names = {each.name for each in fields(group)}
        inner = {key: arguments.pop(key) for key in sorted(names & set(arguments))}
        if inner:
            arguments[argument] = group(**inner)
    try:
        return make(**arguments)
    except TypeError as error:
        raise ValueError(f"policy {name} does not take these options: {error}") from None
