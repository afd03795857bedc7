"""How an optimizer keeps what scaling rules change: momentum, weight decay, betas, periods.

Rules scale time constants and weight decay, and what these are called and do is up to a class. For
classes of torch and for well-known ones it is written here; `describe` adds others, and a parameter
group may have an entry `resilin` of its own, where one class has several kinds of groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

from torch.optim import SGD, Adam, AdamW, Optimizer

from resilin.core import _validate
from resilin.core.rules import MUON

Momentum = Literal["sum", "mean"]
Decay = Literal["decoupled", "gradient"]
ENTRY = "resilin"
"""Name of the entry of a parameter group that says it for this group."""
MOMENTUM_NAMES = ("momentum", "mu")
"""Settings that are a momentum."""
_FLAGS = ("decoupled_weight_decay", "use_decoupled_weight_decay")


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What the settings of a parameter group do."""

    momentum: Momentum | None = None
    """`sum`: `buffer = momentum * buffer + gradient`, and the step is `lr * buffer`, as in SGD.
    `mean`: the buffer is a mean, or only its direction counts, as in Muon. None: not known."""
    decay: Decay | None = None
    """`decoupled`: `lr * weight_decay * parameter`. `gradient`: a part of a gradient that is
    divided by its own size, as in Adam; it has no factor. None: not known."""
    betas: tuple[str, ...] = ("betas",)
    """Settings that are decays of moving averages per step, such as Adam's betas."""
    periods: tuple[str, ...] = ()
    """Settings that are a number of steps between two events, such as those of Shampoo."""

    def __post_init__(self) -> None:
        if self.momentum is not None:
            _validate.one_of("momentum", self.momentum, ("sum", "mean"))
        if self.decay is not None:
            _validate.one_of("decay", self.decay, ("decoupled", "gradient"))


_MUON = Description(momentum="mean", decay="decoupled", betas=("betas", "beta1", "beta2"))
_KNOWN: Mapping[str, Description] = {
    "Adafactor": Description(decay="decoupled"),
    "Lion": Description(decay="decoupled"),
    "SOAP": Description(
        decay="decoupled",
        betas=("betas", "shampoo_beta"),
        periods=("precondition_frequency",),
    ),
    "Shampoo": Description(
        betas=("betas", "beta3"),
        periods=("precondition_frequency", "preconditioning_compute_steps"),
    ),
    **dict.fromkeys(MUON, _MUON),
}
"""By the name of the class, whatever its module: scripts have copies of most of these."""
_PLAIN = Description()
_described: WeakKeyDictionary[type[Optimizer], Description] = WeakKeyDictionary()


def describe(
    kind: type[Optimizer],
    *,
    momentum: Momentum | None = None,
    decay: Decay | None = None,
    betas: tuple[str, ...] = ("betas",),
    periods: tuple[str, ...] = (),
) -> None:
    """Says how a class of optimizers keeps what scaling rules change.

    Call it before the optimizer is given to `AdaptiveDataParallel`. Where groups of one class
    differ, give a group an entry `resilin` in place of it, such as
    `{"params": ..., "resilin": {"momentum": "mean", "decay": "decoupled"}}`.

    Args:
        kind: The class; its subclasses have the same, unless they are described.
        momentum: What `momentum` (or `mu`) of a group does: `sum`, as in SGD; `mean`, where the
            buffer is a mean or only its direction counts, as in Muon; None if there is none.
        decay: What `weight_decay` does: `decoupled`, as in AdamW; `gradient`, as in Adam.
        betas: Settings that are decays of moving averages per step.
        periods: Settings that are numbers of steps between two events.

    Raises:
        ValueError: `momentum` or `decay` is none of these, or `kind` is no class of optimizers.
    """
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise ValueError(f"kind ({kind!r}) must be a class of optimizers")
    _described[kind] = Description(momentum=momentum, decay=decay, betas=betas, periods=periods)


def description_of(optimizer: Optimizer, group: Mapping[str, Any]) -> Description:
    """What the settings of this group do.

    Raises:
        ValueError: The entry of the group says something else than `describe` can take.
    """
    found = _of_class(type(optimizer))
    flag = next((group[name] for name in _FLAGS if name in group), None)
    if flag is not None:
        found = Description(**{**asdict(found), "decay": "decoupled" if flag else "gradient"})
    if ENTRY not in group:
        return found
    try:
        return Description(**{**asdict(found), **group[ENTRY]})
    except TypeError as error:
        names = ", ".join(asdict(_PLAIN))
        raise ValueError(
            f"the entry 'resilin' of a parameter group ({group[ENTRY]!r}) must be a dict of some "
            f"of {names}"
        ) from error


def _of_class(kind: type[Optimizer]) -> Description:
    for base in kind.__mro__:
        if base in _described:
            return _described[base]
        if base is SGD:
            # Its step is linear in the gradient, and so in the decay that is a part of it.
            return Description(momentum="sum", decay="decoupled")
        if base is AdamW:
            return Description(decay="decoupled")
        if base is Adam:
            return Description(decay="gradient")
        if base.__name__ in _KNOWN:
            return _KNOWN[base.__name__]
    return _PLAIN


def momentum_name(group: Mapping[str, Any]) -> str | None:
    """The setting of a group that is its momentum; None if it has none."""
    return next((name for name in MOMENTUM_NAMES if group.get(name)), None)
