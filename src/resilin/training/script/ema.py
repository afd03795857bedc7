"""`EMA`: an exponential moving average of the weights, which follows the clock of the job.

With a varying batch size, steps are no measure of time: an average that decays once per step would
reach back further or less far with each change. Here the decay is per reference step, and a step
that is worth k of them decays by `decay ** k`. The average moves where the clock does, in the one
place where a step is committed, so it never sees a micro-batch or a step that was skipped or lost.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Literal

import torch
from torch import Tensor, nn

from resilin.compat.torch_names import copy_all, interpolate_all, uncompiled
from resilin.core import _validate
from resilin.core.clock import CLOCKS, Clock, ClockName, Reference
from resilin.training.parallel import AdaptiveDataParallel
from resilin.training.state.meshes import is_split
from resilin.training.state.registry import MODEL

Decay = float | Callable[[float], float]
"""Decay per reference step: a number, or a function of the reference steps done so far."""


class EMA:
    """An exponential moving average of the weights of a model.

    It is updated once per optimizer step, on all replicas alike, and is part of the state of the
    job: it survives restarts, changes of the number of replicas and, in a live job, the loss of
    members. A step that is worth k reference steps decays by `decay ** k`. At the reference batch
    this is the average that `torch.optim.swa_utils.AveragedModel` computes with
    `get_ema_multi_avg_fn(decay)`: it begins with the weights after the first step.

    Weights in float16 or bfloat16 are averaged in float32, because small changes would be rounded
    away. Sharded weights (DTensors) are averaged shard by shard. Create it after the model was
    wrapped and before the first step, in every run of the script.

    Args:
        model: The model that is trained.
        decay: Decay per reference step, from 0 to below 1. A function gets the reference steps
            done so far and returns it: `lambda t: min(0.999, (1 + t) / (10 + t))` begins with a
            short memory.
        clock: Clock that counts reference steps; `rule` takes that of the scaling rule.
        buffers: Whether floating-point buffers, such as the statistics of BatchNorm, are averaged
            too. If not, `applied()` leaves the buffers of the model as they are. Buffers of
            replicas may differ, and their averages do then, too.
        name: Name in the state of the job; another one for a second average.

    Raises:
        ValueError: The model is not the `AdaptiveDataParallel` that the job trains, the decay or
            the clock is out of range, or the name is taken.
    """

    def __init__(
        self,
        model: AdaptiveDataParallel,
        decay: Decay = 0.999,
        *,
        clock: ClockName | Literal["rule"] = "rule",
        buffers: bool = False,
        name: str = "ema",
    ) -> None:
        if not isinstance(model, AdaptiveDataParallel):
            raise ValueError(
                f"model ({type(model).__name__}) must be an AdaptiveDataParallel: wrap the model "
                "first, and average the wrapped one"
            )
        if model.job.model is not model:
            raise ValueError("the model was released: the job does not train it any more")
        if not callable(decay):
            _checked(decay)
        _validate.one_of("clock", clock, (*CLOCKS, "rule"))
        if clock == "tokens" and model.tokens_per_step is None:
            raise ValueError("clock (tokens) needs tokens_per_step= of the AdaptiveDataParallel")
        self.decay = decay
        self.clock: ClockName = model.rule.clock if clock == "rule" else clock
        """The clock that counts reference steps."""
        self._model = model
        self._module = uncompiled(model.module)
        _reshard(self._module)
        # The objects that the optimizer steps: a sharded module shows others during its passes.
        self._weights: dict[str, Tensor] = dict(self._module.named_parameters())
        if buffers:
            self._weights |= dict(self._module.named_buffers())
        self._averages = {key: _average_of(weight) for key, weight in self._weights.items()}
        self._begun = False
        self._own: dict[str, Tensor] | None = None
        model.add_average(name, self, self)

    # Following the steps ---------------------------------------------------------------------

    @torch.no_grad()
    def follow(self, before: Clock, after: Clock, reference: Reference) -> None:
        """Take in the weights after a step. Called once for each step that is made.

        Args:
            before: The clock before the step.
            after: The clock after it.
            reference: The reference run, in whose steps clocks are read.
        """
        if not self._begun:
            self._restart()
            self._begun = True
            return
        reading = before.read(self.clock, reference)
        decay = _checked(self.decay(reading)) if callable(self.decay) else self.decay
        share = 1 - decay ** (after.read(self.clock, reference) - reading)
        averages: list[Tensor] = []
        weights: list[Tensor] = []
        for key, average in self._averages.items():
            own = _local(self._weights[key])
            if average.is_floating_point() or average.is_complex():
                averages.append(_local(average))
                weights.append(own.to(average.dtype))
            else:
                average.copy_(own)
        interpolate_all(averages, weights, share)

    def _restart(self) -> None:
        _copy(self._weights.values(), self._averages.values())

    # Using it --------------------------------------------------------------------------------

    @property
    def is_applied(self) -> bool:
        """Whether the model has the averaged weights now, in place of its own."""
        return self._own is not None

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the averaged weights within this block, to evaluate or to export it.

        The state of the job still has the model's own weights: a checkpoint that is saved in the
        block, or a replica that joins, gets these. `model.module.state_dict()` has the averaged
        ones. Call it on all replicas. It needs memory for one more copy of the weights.

        Raises:
            RuntimeError: The block begins within itself or another one, or the model is trained
                within it.
        """
        if self._model.has_averaged_weights:
            raise RuntimeError("the model has averaged weights already: leave that block first")
        registry = self._model.job.registry
        if not self._begun:
            with torch.no_grad():
                self._restart()
        self._enter()
        module = registry.exchange(MODEL, _OwnWeights(self))
        try:
            yield
        finally:
            registry.exchange(MODEL, module)
            self._leave()

    @torch.no_grad()
    def _enter(self) -> None:
        _reshard(self._module)
        self._own = {key: weight.detach().clone() for key, weight in self._weights.items()}
        _copy(self._averages.values(), self._weights.values())

    @torch.no_grad()
    def _leave(self) -> None:
        assert self._own is not None
        # A sharded module may still have whole averaged weights, from its last forward pass.
        _reshard(self._module)
        _copy(self._own.values(), self._weights.values())
        self._own = None

    # State -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The averages by the names of the weights, and whether there was a step."""
        return {"begun": self._begun, "averages": dict(self._averages)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: It has the averages of other weights.
        """
        averages = state["averages"]
        if differing := sorted(set(averages) ^ set(self._averages)):
            where = "in the state" if differing[0] in averages else "in the model"
            raise ValueError(
                f"the state has averages of {len(averages)} weights, and the model has "
                f"{len(self._averages)}: {differing[0]} is only {where}; buffers= must be what it "
                "was, and so must the model"
            )
        _copy([averages[key] for key in self._averages], self._averages.values())
        self._begun = bool(state["begun"])
        if self._own is not None:
            _copy(self._averages.values(), self._weights.values())


class _OwnWeights:
    """The state of the model while it has the averaged weights: that with its own ones.

    Args:
        ema: The average that is applied.
    """

    def __init__(self, ema: EMA) -> None:
        self._ema = ema

    def state_dict(self) -> dict[str, Any]:
        self._ema._leave()
        state: dict[str, Any] = self._ema._model.module.state_dict()
        for key, value in state.items():
            # The weights of the model are averages again before anybody reads these.
            state[key] = value.detach().clone() if isinstance(value, Tensor) else deepcopy(value)
        self._ema._enter()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._ema._leave()
        self._ema._model.module.load_state_dict(state)
        self._ema._enter()


def _checked(decay: float) -> float:
    _validate.real("decay", decay, at_least=0)
    if decay >= 1:
        raise ValueError(f"decay ({decay}) must be below 1: at 1 the average would never move")
    return decay


def _average_of(weight: Tensor) -> Tensor:
    """A tensor for the average of a weight, split as the weight is."""
    low = weight.dtype in (torch.float16, torch.bfloat16)
    copied: Tensor = weight.detach().clone()
    return copied.to(torch.float32) if low else copied


def _local(tensor: Any) -> Tensor:
    """The part of a tensor that this process has."""
    part: Tensor = tensor.detach().to_local() if is_split(tensor) else tensor.detach()
    return part


def _copy(sources: Iterable[Tensor], targets: Iterable[Tensor]) -> None:
    copy_all([_local(each) for each in targets], [_local(each) for each in sources])


def _reshard(module: nn.Module) -> None:
    """Give up the whole weights that a sharded module keeps after a forward pass."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        for each in module.modules():
            if isinstance(each, fsdp.FSDPModule):
                each.reshard()
