"""Scaling rules: changes to the optimizer for a step at another batch size.

With scale `S = B / B0` and efficiency `E = gain / S`, the known rules are one family,
`lr / lr0 = S^p * E^q`: `PowerRule(p, q)`. A static rule (q = 0) uses the `samples` clock,
an adaptive one (q > 0) the `progress` clock; gain-scaled learning rates on the samples
clock are the worst of both. Time constants follow the clock: if a step advances it by c
reference steps, `beta -> beta^c`, SGD's momentum `mu -> mu^c`, a model's moving average
`rho -> rho^c`, and `lr * wd` grows by c. Every rule also holds below the reference batch,
where S < 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from types import MappingProxyType
from typing import Literal, Protocol, runtime_checkable

from resilin.core import _exact, _validate
from resilin.core._warn import warn
from resilin.core.clock import CLOCKS, ClockName
from resilin.core.noise import Noise, gain

ClipPolicy = Literal["loosen", "fixed", "invariant"]
"""Policies by which a clipping threshold follows the batch size; see `clip_threshold`."""
CLIP_POLICIES: tuple[ClipPolicy, ...] = ("loosen", "fixed", "invariant")
"""The names of all policies."""


class WeakEvidenceWarning(UserWarning):
    """A default was chosen that few experiments support."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """Input of a rule for one step and one parameter group."""

    scale: float
    """Global batch over reference batch, S."""
    gain: float
    """Worth of the step in reference steps, by the noise of this parameter group."""
    advance: float
    """Reference steps by which the rule's clock moves in this step: S, or the model's gain."""
    elapsed: float = 0.0
    """Reading of the rule's clock before the step, in reference steps."""

    def __post_init__(self) -> None:
        _validate.real("scale", self.scale, above=0)
        _validate.real("gain", self.gain, above=0)
        _validate.real("advance", self.advance, above=0)
        _validate.real("elapsed", self.elapsed, at_least=0)

    @property
    def efficiency(self) -> float:
        """Progress per sample, relative to the reference batch."""
        return self.gain / self.scale


@dataclass(frozen=True, slots=True)
class Factors:
    """Factors on the hyper-parameters of one group during one step."""

    lr: float = 1.0
    """Multiplies the learning rate."""
    beta_power: float = 1.0
    """Exponent of the Adam betas."""
    eps: float = 1.0
    """Multiplies Adam's epsilon."""
    weight_decay: float = 1.0
    """Multiplies a weight decay that is applied as `lr * wd * parameter`: AdamW's or SGD's."""
    ema_power: float = 1.0
    """Exponent of the decay of a moving average of the model."""
    momentum_power: float = 1.0
    """Exponent of SGD's momentum, whose buffer keeps its scale; see `resilin.core.momentum`."""


@runtime_checkable
class ScalingRule(Protocol):
    """The interface of a rule, also for your own rules."""

    @property
    def clock(self) -> ClockName:
        """The clock in which this rule measures training time."""
        ...

    @property
    def adaptive(self) -> bool:
        """Whether the rule uses the noise; if not, none has to be measured."""
        ...

    def factors(self, scaling: Scaling) -> Factors:
        """Factors for one parameter group in one step. Must be pure: replicas have to agree."""
        ...


@dataclass(frozen=True, slots=True)
class PowerRule:
    """The family `lr / lr0 = S^p * E^q`, with scale S and efficiency E = gain / S.

    `E` depends on the noise estimate: for SGD this is AdaScale's argument; for Adam-like optimizers
    it is supported by experiments. No rule keeps a small-batch trajectory at equal cost once the
    batch is far above the noise scale: adaptive ones then use more samples instead.
    """

    p: float
    """Power of the scale."""
    q: float = 0.0
    """Power of the efficiency; 0 makes the rule static."""
    betas: bool = False
    """Whether Adam's betas keep their time constants: `beta^c`."""
    eps: bool = False
    """Whether Adam's epsilon follows the gradient noise: `eps / sqrt(S)`."""
    weight_decay: bool = False
    """Whether `lr * wd` is kept constant per unit of the clock."""
    # None only until __post_init__, so that the attribute always holds the name of a clock.
    clock: ClockName = None  # type: ignore[assignment]
    """Clock that measures training time; the default is `progress` if q > 0, else `samples`."""
    momentum: bool = False
    """Whether SGD's momentum keeps its time constant: `momentum^c`; see `resilin.core.momentum`."""

    def __post_init__(self) -> None:
        _validate.real("p", self.p, at_least=0)
        _validate.real("q", self.q, at_least=0)
        if self.clock is None:
            object.__setattr__(self, "clock", "progress" if self.q else "samples")
        _validate.one_of("clock", self.clock, CLOCKS)

    @property
    def adaptive(self) -> bool:
        """Whether the rule uses the noise."""
        return self.q > 0 or self.clock == "progress"

    def factors(self, scaling: Scaling) -> Factors:
        """Factors for one parameter group in one step."""
        # S^p * E^q with E = gain / S, written so that the powers of 1 and 0 are exact.
        lr = _exact.power(scaling.scale, self.p - self.q) * _exact.power(scaling.gain, self.q)
        return Factors(
            lr=lr,
            beta_power=scaling.advance if self.betas else 1.0,
            eps=_exact.power(scaling.scale, -0.5) if self.eps else 1.0,
            weight_decay=scaling.advance / lr if self.weight_decay else 1.0,
            ema_power=scaling.advance,
            momentum_power=scaling.advance if self.momentum else 1.0,
        )


@dataclass(frozen=True, slots=True)
class LEGW:
    """Linear-epoch gradual warm-up: `lr * sqrt(S)`, warmed up over S times as many samples.

    The rule includes the warm-up: the user's own schedule must not have one. It was published
    for one batch size per run; if the batch grows during the warm-up, the warm-up gets longer.
    """

    warmup: float
    """Length of the warm-up at the reference batch, in reference steps."""

    def __post_init__(self) -> None:
        _validate.real("warmup", self.warmup, above=0)

    @property
    def clock(self) -> ClockName:
        """The clock in which this rule measures training time."""
        return "samples"

    @property
    def adaptive(self) -> bool:
        """Whether the rule uses the noise."""
        return False

    def factors(self, scaling: Scaling) -> Factors:
        """Factors for one parameter group in one step."""
        # At the end of the step, so that the first step of a run does not have a rate of zero.
        elapsed = scaling.elapsed + scaling.advance
        warm = min(1.0, elapsed / (self.warmup * scaling.scale))
        return Factors(lr=warm * math.sqrt(scaling.scale), ema_power=scaling.advance)


RULES: Mapping[str, Callable[..., ScalingRule]] = MappingProxyType(
    {
        "constant": lambda: PowerRule(0),
        "linear": lambda: PowerRule(1),
        "sqrt": lambda: PowerRule(0.5, weight_decay=True),
        "adascale": lambda: PowerRule(1, 1),
        "sgdscale": lambda: PowerRule(1, 1, momentum=True),
        "adamscale": lambda: PowerRule(0.5, 0.5, betas=True, weight_decay=True),
        "muonscale": lambda: PowerRule(1, 1, weight_decay=True, momentum=True),
        "surge": lambda: PowerRule(0.5, 1),
        "legw": LEGW,
    }
)
"""The rules that have a name. Your own rules are passed as objects.

`sqrt` keeps Adam's betas and epsilon; the square-root rule of Malladi et al. (2022), which scales
them too, is `PowerRule(0.5, betas=True, eps=True)`. `sgdscale` is `adascale` with a momentum that
remembers as long as in the reference run, measured in progress; without momentum they are the same.
`muonscale` keeps a decoupled weight decay per unit of progress, too.
"""


def get_rule(rule: str | ScalingRule, **parameters: float) -> ScalingRule:
    """The rule of this name, or the rule itself.

    Args:
        rule: A name in `RULES`, or an object with the methods of `ScalingRule`.
        **parameters: Parameters of a named rule, such as `warmup` for `legw`.

    Raises:
        ValueError: Unknown name, or parameters that the rule does not take or lacks.
        TypeError: An object that is not a rule.
    """
    if not isinstance(rule, str):
        if parameters:
            raise ValueError(f"parameters {sorted(parameters)} can only be passed with a rule name")
        if not isinstance(rule, ScalingRule):
            raise TypeError(f"{rule!r} is not a scaling rule: it needs clock, adaptive, factors")
        return rule
    if rule not in RULES:
        raise ValueError(f"rule ({rule!r}) must be one of {', '.join(RULES)}, or an object")
    try:
        return RULES[rule](**parameters)
    except TypeError as error:
        raise ValueError(
            f"rule {rule!r} with parameters {parameters}: {error}; if only a name can be given, "
            "pass the rule itself, such as resilin.core.rules.LEGW(warmup=...)"
        ) from None


def rule_name(rule: ScalingRule) -> str:
    """The name of the rule in `RULES` if it has one, else its text form, or that of its class."""
    for name, make in RULES.items():
        # A rule that needs parameters is not identified by its name.
        needed = [p for p in signature(make).parameters.values() if p.default is p.empty]
        if not needed and make() == rule:
            return name
    kind = type(rule)
    # The text form of a plain object has its address in it, which no other process has.
    plain = kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__
    return kind.__qualname__ if plain else str(rule)


_STRONG = {"SGD": "adascale", "Adam": "adamscale", "AdamW": "adamscale"}
_WEAK = ("Adafactor", "Adamax", "Lion", "NAdam", "RAdam", "RMSprop")
MUON = (
    "Dion",
    "DistMuon",
    "DistMuonAdamW",
    "Muon",
    "MuonAdamW",
    "MuonWithAuxAdam",
    "NorMuon",
    "SingleDeviceMuon",
    "SingleDeviceMuonWithAuxAdam",
)
"""Names of the classes that are Muon, or Muon for some of their groups."""


def default_rule(optimizer: str, *, has_betas: bool = False) -> ScalingRule:
    """The default rule for an optimizer, by the name of its class.

    Args:
        optimizer: The name.
        has_betas: Whether some of its groups have betas, as where one class is Muon for some groups
            and AdamW for others.

    Warns:
        WeakEvidenceWarning: The optimizer is sign-like or Adam-like, but few experiments exist.

    Raises:
        ValueError: There is no evidence: the user has to choose.
    """
    if optimizer in _STRONG:
        return get_rule(_STRONG[optimizer])
    if optimizer in _WEAK:
        warn(
            f"the default rule for {optimizer}, lr * sqrt(gain), rests on weak evidence; pass "
            "rule= to choose one yourself",
            WeakEvidenceWarning,
        )
        return PowerRule(0.5, 0.5)
    if optimizer in MUON:
        # One rule for all of its groups: that of AdamW, which leaves Muon's momentum as it is.
        name = "adamscale" if has_betas else "muonscale"
        warn(
            f"the default rule for {optimizer}, {name}, rests on weak evidence: two small tasks; "
            "pass rule= to choose one yourself",
            WeakEvidenceWarning,
        )
        return get_rule(name)
    raise ValueError(
        f"no default rule for optimizer {optimizer!r} (there is one for "
        f"{', '.join((*_STRONG, *_WEAK, *MUON))}); pass rule= one of {', '.join(RULES)}, or your "
        "own"
    )


def group_factors(
    rule: ScalingRule | Sequence[ScalingRule],
    *,
    batch_size: float,
    reference: float,
    noise: Sequence[Noise | None],
    elapsed: float = 0.0,
) -> tuple[Factors, ...]:
    """Factors of every parameter group for one step.

    The learning rate of a group follows the noise of that group; the clock, and with it every
    time constant, follows the noise of the whole model.

    Args:
        rule: The scaling rule, or that of each group; all of them have the same clock.
        batch_size: Samples (or tokens) in the step.
        reference: The same for a reference step.
        noise: Noise of each parameter group; None where it is not known yet.
        elapsed: Reading of the rule's clock, in reference steps.
    """
    scale = batch_size / reference
    advance = scale
    rules = rule if isinstance(rule, Sequence) else (rule,) * len(noise)
    if rules[0].clock == "progress":
        advance = gain(total_noise(noise), batch_size, reference)
    return tuple(
        own.factors(Scaling(scale, gain(group, batch_size, reference), advance, elapsed))
        for own, group in zip(rules, noise, strict=True)
    )


def total_noise(noise: Sequence[Noise | None]) -> Noise | None:
    """Noise of the whole model from that of its parameter groups; None if none is known."""
    known = [group for group in noise if group is not None]
    return sum(known[1:], known[0]) if known else None


def clip_threshold(max_norm: float, gain: float, policy: ClipPolicy = "loosen") -> float:
    """Clipping threshold for the averaged gradient of a step, from that at the reference batch.

    Averaging more samples shrinks the gradient: `E|g_B|^2 = E|g_B0|^2 / gain`. `invariant`
    follows that with `max_norm / sqrt(gain)` and so clips equally often at every batch size.
    `fixed` keeps `max_norm`. `loosen`, the default, never tightens: it is fixed above the
    reference batch, where tightening cost accuracy in experiments, and invariant below it.

    Args:
        max_norm: The threshold at the reference batch.
        gain: Worth of the step in reference steps.
        policy: One of the three policies.
    """
    _validate.real("max_norm", max_norm, above=0)
    _validate.real("gain", gain, above=0)
    _validate.one_of("policy", policy, CLIP_POLICIES)
    if policy == "fixed":
        return max_norm
    invariant = max_norm / math.sqrt(gain)
    return invariant if policy == "invariant" else max(max_norm, invariant)
