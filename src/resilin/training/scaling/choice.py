"""The scaling rule of a job: chosen by its optimizer, and checked against it."""

from __future__ import annotations

import inspect
import logging
from typing import Any

from torch.optim import SGD, Optimizer

from resilin.core.rules import PowerRule, ScalingRule, default_rule, get_rule, rule_name
from resilin.training.gates.factors import keeps_sgd_buffer, refuse_momentum

logger = logging.getLogger("resilin")


def choose_rule(rule: str | ScalingRule, optimizer: Optimizer) -> ScalingRule:
    """The rule that was asked for, or the default one of the optimizer.

    Args:
        rule: Name of a rule or a rule; `auto` chooses by the optimizer.
        optimizer: The optimizer that it will change.

    Raises:
        ValueError: Unknown name, no default, or a rule that the optimizer cannot honour.
    """
    kind = type(optimizer)
    if rule == "auto":
        return default_rule(kind.__name__)
    chosen = get_rule(rule)
    if not _can_honour(chosen, optimizer):
        raise refuse_momentum(optimizer)
    if _changes_momentum(chosen) and isinstance(optimizer, SGD) and _steps_by_itself(kind):
        logger.warning(
            "%s has a step of its own: rule %s takes its momentum for that of torch.optim.SGD",
            kind.__qualname__,
            rule_name(chosen),
        )
    return chosen


def _changes_momentum(rule: ScalingRule) -> bool:
    # Rules of users are checked in the step, by what they return.
    return isinstance(rule, PowerRule) and rule.momentum


def _can_honour(rule: ScalingRule, optimizer: Optimizer) -> bool:
    if not _changes_momentum(rule) or keeps_sgd_buffer(optimizer):
        return True
    # Adam's first beta is its momentum.
    betas = isinstance(rule, PowerRule) and rule.betas
    return betas and all(
        "betas" in group and not group.get("momentum") for group in optimizer.param_groups
    )


def _steps_by_itself(kind: type[Any]) -> bool:
    # torch wraps the method of a class when the first optimizer of it is made.
    return inspect.unwrap(kind.step) is not inspect.unwrap(SGD.step)


def compare_with_saved(rule: ScalingRule, saved: str | None) -> None:
    """Log that a job continues with another rule than it was saved with.

    Args:
        rule: The rule of this run.
        saved: Name of the rule in the state; None in a state from before it was kept.
    """
    name = rule_name(rule)
    if saved is not None and saved != name:
        logger.warning(
            "the state was trained with rule %s, and this run continues with %s; to keep the "
            "former, pass it as rule=",
            saved,
            name,
        )
