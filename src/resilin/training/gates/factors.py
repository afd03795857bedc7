"""`applied`: the factors of a scaling rule, in the optimizer for the length of one step.

Learning rate, betas, epsilon, weight decay and periods are numbers of the parameter groups, and
`describe.py` says what they do. So is the momentum of SGD, with its dampening;
`resilin.core.momentum` derives both, and why the gradient is multiplied instead where the momentum
is Nesterov's, and in the first step of a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from resilin.compat.torch_names import multiplied_all
from resilin.core import _exact
from resilin.core.momentum import scaled_momentum
from resilin.core.rules import Factors
from resilin.training.gates.describe import Description, description_of, momentum_name

_NONE = Factors()


@contextmanager
def applied(optimizer: Optimizer, factors: Sequence[Factors]) -> Iterator[None]:
    """Applies the factors to each parameter group, and restores the groups' own values.

    Raises:
        ValueError: There are not as many groups as factors, or the optimizer has no momentum of
            the form that the rule changes.
    """
    if len(optimizer.param_groups) != len(factors):
        raise ValueError(
            f"the optimizer has {len(optimizer.param_groups)} parameter groups, and had "
            f"{len(factors)} when it was given to AdaptiveDataParallel: add groups before that"
        )
    loan = _Loan(optimizer)
    try:
        _scale_rates(loan, factors)
        for group, factor in zip(optimizer.param_groups, factors, strict=True):
            if factor == _NONE:
                continue
            known = description_of(optimizer, group)
            if factor.beta_power != 1:
                _scale_time(loan, group, known, factor.beta_power)
            if factor.eps != 1 and "eps" in group:
                loan.set(group, "eps", group["eps"] * factor.eps)
            decays = group.get("weight_decay") and known.decay == "decoupled"
            if factor.weight_decay != 1 and decays:
                loan.set(group, "weight_decay", group["weight_decay"] * factor.weight_decay)
            if factor.momentum_power != 1:
                _scale_momentum(loan, group, known, factor.momentum_power)
        yield
    finally:
        loan.give_back()


def _scale_rates(loan: _Loan, factors: Sequence[Factors]) -> None:
    """Multiply the learning rate of each group."""
    tensors: dict[int, list[tuple[dict[str, Any], float]]] = {}
    for group, factor in zip(loan.optimizer.param_groups, factors, strict=True):
        if isinstance(group["lr"], Tensor):
            tensors.setdefault(id(group["lr"]), []).append((group, factor.lr))
        elif factor.lr != 1:
            loan.set(group, "lr", group["lr"] * factor.lr)
    # Groups share the tensor that was given to the optimizer as their default.
    for sharing in tensors.values():
        first, multiple = sharing[0]
        if any(other != multiple for _, other in sharing):
            for group, own in sharing:
                loan.set(group, "lr", group["lr"] * own)
        elif multiple != 1:
            # In place: a compiled step holds on to this very tensor.
            loan.multiply(first["lr"], multiple)


def _scale_time(loan: _Loan, group: dict[str, Any], known: Description, power: float) -> None:
    """Let the averages of a group forget, and its periods pass, as in `power` reference steps."""
    for name in known.betas:
        value = group.get(name)
        if isinstance(value, tuple | list):
            loan.set(group, name, tuple(_exact.power(beta, power) for beta in value))
        elif value is not None and 0 < value < 1:  # Others stand for a default.
            loan.set(group, name, _exact.power(value, power))
    for name in known.periods:
        if group.get(name, 0) > 1:
            loan.set(group, name, max(1, round(group[name] / power)))


def refuse_momentum(optimizer: Optimizer) -> ValueError:
    """The error about an optimizer whose momentum is of a form that is not known."""
    kind = type(optimizer).__qualname__
    return ValueError(
        f"the rule changes the momentum, and how {kind} of {type(optimizer).__module__} keeps it "
        f"is not known: say it with resilin.describe({kind}, momentum=...), or choose a rule that "
        "leaves the momentum alone, such as 'adascale' for the learning rate alone or 'adamscale' "
        "for Adam's betas (several optimizers may have a rule each)"
    )


def _scale_momentum(loan: _Loan, group: dict[str, Any], known: Description, power: float) -> None:
    """Give a group the momentum of a step that is worth `power` reference steps.

    Args:
        loan: Keeps what it replaces.
        group: The group, with its weight decay of this step.
        known: What its settings do.
        power: Exponent of the momentum.

    Raises:
        ValueError: What its momentum does is not known.
    """
    name = momentum_name(group)
    if name is None:
        return
    if known.momentum is None:
        raise refuse_momentum(loan.optimizer)
    if known.momentum == "mean":
        loan.set(group, name, _exact.power(float(group[name]), power))
        return
    dampening = float(group.get("dampening", 0.0))
    scaled = scaled_momentum(float(group[name]), dampening, power)
    loan.set(group, name, scaled.momentum)
    nesterov = group.get("nesterov", False)
    if "dampening" in group and not nesterov and _has_buffers(loan.optimizer, group):
        loan.set(group, "dampening", scaled.dampening)
        return
    loan.multiply_gradients(group["params"], scaled.gradient)
    if "weight_decay" in group:
        loan.set(group, "weight_decay", group["weight_decay"] * scaled.gradient)


def _has_buffers(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether all parameters that are stepped now have been stepped before."""
    state = optimizer.state
    for parameter in group["params"]:
        if parameter.grad is not None:
            # Not by indexing, which would add an entry.
            known = state.get(parameter)
            if known is None or known.get("momentum_buffer") is None:
                return False
    return True


class _Loan:
    """Changes to one optimizer that last until `give_back`.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        """The optimizer that it changes."""
        self._values: list[tuple[dict[str, Any], str, Any]] = []
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._gradients: list[tuple[Tensor, Tensor, float]] = []

    def set(self, group: dict[str, Any], name: str, value: Any) -> None:
        """Set one value of a parameter group."""
        self._values.append((group, name, group[name]))
        group[name] = value

    def multiply(self, tensor: Tensor, factor: float) -> None:
        """Multiply a tensor in place."""
        self._tensors.append((tensor, tensor.clone()))
        tensor.mul_(factor)

    def multiply_gradients(self, parameters: Sequence[Tensor], factor: float) -> None:
        """Replace the gradients of parameters by multiples; their own tensors stay untouched."""
        own = [parameter for parameter in parameters if parameter.grad is not None]
        gradients = [parameter.grad for parameter in own if parameter.grad is not None]
        if any(gradient.is_sparse for gradient in gradients):
            multiples = [gradient * factor for gradient in gradients]
        else:
            multiples = list(multiplied_all(gradients, factor)) if gradients else []
        for parameter, gradient, multiple in zip(own, gradients, multiples, strict=True):
            self._gradients.append((parameter, gradient, factor))
            parameter.grad = multiple

    def give_back(self) -> None:
        """Undo all changes, the last one first."""
        # A fused step under a GradScaler unscales the gradients that it is given, in place.
        unscaled = getattr(self.optimizer, "grad_scale", None) is not None
        for parameter, gradient, factor in reversed(self._gradients):
            if unscaled and parameter.grad is not None:
                gradient.copy_(parameter.grad / factor)
            parameter.grad = gradient
        for tensor, value in reversed(self._tensors):
            tensor.copy_(value)
        for group, name, value in reversed(self._values):
            group[name] = value
