"""What Keras keeps in variables besides the weights, and how replicas agree on it.

Metrics add up over replicas. Statistics, such as those of BatchNormalization, are averaged by
samples. Whatever counts, such as the state of a seed, is that of replica 0; while a step runs,
each replica draws from a seed of its own, lest all of them drop the same units. All of it takes one
small reduction per step, behind which logs, callbacks and checkpoints are the same everywhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from resilin.training.job import current_job

SEED_STRIDE = 1_000_003
"""Distance between the seeds of two replicas: more than what one draws in a step."""
_SEED = "seed_generator_state"


class Agreement:
    """Keeps metrics and untrained variables of a Keras model the same on all replicas."""

    def __init__(self, model: Any) -> None:
        self._model = model
        weights = {id(v) for layer in model._flatten_layers() for v in layer._trainable_variables}
        # Not those of frozen layers, which stay as they are and may be large.
        self._untrained = [v for v in model.non_trainable_variables if id(v) not in weights]
        self._before: list[Tensor] = []

    def begin_step(self) -> None:
        """Called before the first micro-batch of a step."""
        engine = current_job().engine
        if engine.membership.num_replicas == 1:
            return
        self._before = [variable.value.detach().clone() for variable in self._metrics]
        for variable in self._untrained:
            if variable.name == _SEED:
                with torch.no_grad():
                    variable.value[1] += engine.membership.replica * SEED_STRIDE % 2**30

    def end_step(self, weight: float) -> None:
        """Called behind the last one.

        Args:
            weight: What this replica's part of the step weighs.
        """
        engine = current_job().engine
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
