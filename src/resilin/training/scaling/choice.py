"""The scaling rule of a job: chosen by its optimizer, and checked against it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import SGD, Optimizer

from resilin.core._warn import warn
from resilin.core.rules import PowerRule, ScalingRule, default_rule, get_rule, rule_name
from resilin.training.gates.describe import MOMENTUM_NAMES, description_of, momentum_name
from resilin.training.gates.factors import refuse_momentum
from resilin.training.gates.optimizer import groups_of, name_of

logger = logging.getLogger("resilin")

_NOT_SET = frozenset({"params", "initial_lr"})
"""Parts of a parameter group that are no settings of the script."""


def choose_rules(
    rule: str | ScalingRule | Sequence[str | ScalingRule], optimizers: Sequence[Optimizer]
) -> list[ScalingRule]:
    """The rule of each optimizer.

    Args:
        rule: One for all, or one for each; see `choose_rule`.
        optimizers: The optimizers that step together.

    Raises:
        ValueError: There is not one for each, or they have different clocks, of which a job has
            one.
    """
    if isinstance(rule, Sequence) and not isinstance(rule, str):
        each = list(rule)
    else:
        each = [rule] * len(optimizers)
    if len(each) != len(optimizers):
        raise ValueError(
            f"rule has {len(each)} entries and there are {len(optimizers)} optimizers: pass one "
            "rule for all of them, or one for each"
        )
    rules = [choose_rule(*pair) for pair in zip(each, optimizers, strict=True)]
    first = rules[0]
    for own, optimizer in zip(rules, optimizers, strict=True):
        if own.clock != first.clock:
            raise ValueError(
                f"rule {rule_name(first)} of {type(optimizers[0]).__name__} measures training time "
                f"by the {first.clock} clock, and {rule_name(own)} of {type(optimizer).__name__} "
                f"by the {own.clock} clock: optimizers that step together have one clock; choose "
                "rules with the same one"
            )
    return rules


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
        betas = ((g, name) for g in optimizer.param_groups for name in ("betas", "beta1"))
        chosen = default_rule(kind.__name__, has_betas=any(name in g for g, name in betas))
    else:
        chosen = get_rule(rule)
    if not _can_honour(chosen, optimizer):
        raise refuse_momentum(optimizer)
    _warn_of_decay(chosen, optimizer)
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
    """Whether each group has a momentum of a known form, or none.

    Adam's first beta is its momentum, and only some rules change that.
    """
    if not _changes_momentum(rule):
        return True
    betas = isinstance(rule, PowerRule) and rule.betas
    for group in optimizer.param_groups:
        known = description_of(optimizer, group)
        if momentum_name(group) is not None:
            if known.momentum is None:
                return False
        elif not any(name in group for name in MOMENTUM_NAMES) and not (
            betas and any(name in group for name in known.betas)
        ):
            return False
    return True


def _warn_of_decay(rule: ScalingRule, optimizer: Optimizer) -> None:
    """Warn of a weight decay that the rule changes, if what it does is not known."""
    decays = any(
        group.get("weight_decay") and description_of(optimizer, group).decay is None
        for group in optimizer.param_groups
    )
    if decays and isinstance(rule, PowerRule) and rule.weight_decay:
        kind = type(optimizer).__qualname__
        warn(
            f"rule {rule_name(rule)} scales the weight decay, and what weight_decay does in {kind} "
            f"is not known: it stays as it is. Say it with resilin.describe({kind}, decay=...)"
        )


def _steps_by_itself(kind: type[Any]) -> bool:
    # torch wraps the method of a class when the first optimizer of it is made.
    return inspect.unwrap(kind.step) is not inspect.unwrap(SGD.step)


def settings_of(optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """What the script sets: the classes, and the numbers of each group before its scheduler."""
    groups = []
    for group in groups_of(optimizers):
        first = {**group, "lr": group.get("initial_lr", group.get("lr"))}
        numbers = {name: _numbers(first[name]) for name in group if name not in _NOT_SET}
        groups.append({name: found for name, found in numbers.items() if found})
    return {"class": name_of(optimizers), "groups": groups}


def _numbers(setting: Any) -> list[float]:
    """The numbers that a setting is; none if it is something else."""
    several = setting if isinstance(setting, tuple | list) else (setting,)
    kinds = (int, float, Tensor)
    fits = all(isinstance(n, kinds) and not isinstance(n, bool) for n in several)
    return list(map(float, several)) if fits else []


def compare_settings(settings: dict[str, Any], saved: dict[str, Any] | None) -> None:
    """Log which settings of the optimizer a script has changed before it resumes.

    Args:
        settings: Those of this run.
        saved: Those of the run before; None in a state from before they were kept.

    Raises:
        ValueError: It is another optimizer, and the state lacks what this one needs.
    """
    if saved is None:
        return
    kind, former = settings["class"], saved["class"]
    changes = [f"{kind} ({former} in the state)"] if kind != former else []
    groups = list(zip(settings["groups"], saved["groups"], strict=False))
    for number, (now, was) in enumerate(groups):
        if kind != former and (missing := sorted(now.keys() - was.keys())):
            raise ValueError(
                f"the saved state belongs to another optimizer: it was {former} and is {kind}, "
                f"which needs {', '.join(missing)}; resume with {former}, or begin a new job with "
                "the weights of the old one"
            )
        where = f" of group {number}" if len(groups) > 1 else ""
        changes += [
            f"{name}{where} {_words(now[name])} ({_words(was[name])} in the state)"
            for name in sorted(now.keys() & was.keys())
            if now[name] != was[name]
        ]
    if changes:
        logger.warning(
            "the script gives the optimizer other settings than the run that it resumes: %s. "
            "Those of the state win, as with load_state_dict() of torch; a change takes effect in "
            "the loop, in optimizer.param_groups",
            ", ".join(changes),
        )


def _words(numbers: list[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)


def compare_with_saved(name: str, saved: str | None) -> None:
    """Log that a job continues with another rule than it was saved with.

    Args:
        name: Name of the rule of this run.
        saved: Name of the rule in the state; None in a state from before it was kept.
    """
    if saved is not None and saved != name:
        logger.warning(
            "the state was trained with rule %s, and this run continues with %s; to keep the "
            "former, pass it as rule=",
            saved,
            name,
        )
