"""Variables of Keras other than weights, and how replicas agree on them.

Metrics are summed over replicas. Statistics, such as those of BatchNormalization, are averaged by
samples. Counters, such as the state of a seed, are those of replica 0; during a step each replica
uses a seed of its own, or all of them would drop the same units. It takes one small reduction per
step, after which logs, callbacks and checkpoints are the same everywhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from resilin.compat import keras_names
from resilin.engine.base import Engine

SEED_STRIDE = 1_000_003
"""Distance between the seeds of two replicas: more than one replica draws in a step."""


class Agreement:
    """Keeps metrics and untrained variables of a Keras model the same on all replicas."""

    def __init__(self, model: Any, engine: Engine) -> None:
        self._model = model
        self._engine = engine
        weights = {id(variable) for variable in keras_names.weights_of(model)}
        # Without weights of frozen layers, which do not change and may be large.
        self._untrained = [v for v in model.non_trainable_variables if id(v) not in weights]
        self._before: list[Tensor] = []

    def begin_step(self) -> None:
        """Begin a step, before its first micro-batch."""
        engine = self._engine
        if engine.membership.num_replicas == 1:
            return
        self._before = [variable.value.detach().clone() for variable in self._metrics]
        for variable in self._untrained:
            if variable.name == keras_names.SEED:
                with torch.no_grad():
                    variable.value[1] += engine.membership.replica * SEED_STRIDE % 2**30

    def end_step(self, weight: float) -> None:
        """End a step, after its last micro-batch. Collective.

        Args:
            weight: Weight of this replica's part of the step.
        """
        engine = self._engine
        if engine.membership.num_replicas == 1:
            return
        parts = [torch.tensor([weight], dtype=torch.float64)]
        for variable, before in zip(self._metrics, self._before, strict=True):
            parts.append((variable.value.detach() - before).double().reshape(-1))
        for variable in self._untrained:
            value = variable.value.detach().double().reshape(-1)
            share = weight if _is_statistic(variable) else float(engine.membership.replica == 0)
            # A replica without samples may have seen anything: 0 * inf is not 0.
            parts.append(value * share if share else torch.zeros_like(value))
        flat = torch.cat([part.to(parts[-1].device) for part in parts])
        engine.add_up(flat)
        total, offset = float(flat[0]), 1
        with torch.no_grad():
            for variable, before in zip(self._metrics, self._before, strict=True):
                added = flat[offset : offset + before.numel()].reshape(before.shape)
                variable.value.copy_((before.double() + added).to(before.dtype))
                offset += before.numel()
            for variable in self._untrained:
                value = variable.value
                agreed = flat[offset : offset + value.numel()].reshape(value.shape)
                value.copy_(agreed / total if _is_statistic(variable) else agreed)
                offset += value.numel()

    @property
    def _metrics(self) -> list[Any]:
        variables: list[Any] = self._model.metrics_variables
        return variables


def _is_statistic(variable: Any) -> bool:
    return bool(variable.value.is_floating_point())
