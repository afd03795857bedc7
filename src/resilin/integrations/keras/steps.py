"""Training with the torch backend: one micro-batch, one step, and their state."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from typing import Any, cast

import keras  # type: ignore[import-untyped]
from torch import Tensor, nn

from resilin.integrations.keras.optimizer import KerasOptimizer, KerasSchedule, assign, by_name
from resilin.integrations.keras.refusals import check_mask
from resilin.integrations.keras.variables import Agreement
from resilin.training.job import current_job
from resilin.training.loader import AdaptiveDataLoader
from resilin.training.parallel import AdaptiveDataParallel, ScheduleBy
from resilin.training.watching import record

NAME = "keras"
"""What the state of `fit` is called in that of the job."""
_MEMORIES = {
    "EarlyStopping": ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    "History": ("epoch", "history"),
    "ReduceLROnPlateau": ("wait", "best", "cooldown_counter"),
}
"""What callbacks of Keras remember from epoch to epoch, and must not forget with a process."""


class _Trained(nn.Module):
    """The model with its loss, so that whatever has a gradient is within one forward pass."""

    def __init__(self, model: Any, *, masked: bool) -> None:
        super().__init__()
        self.model = model
        self._masked = masked

    def forward(self, x: Any, y: Any, sample_weight: Any) -> tuple[Tensor, Any]:
        model = self.model
        training = {"training": True} if model._call_has_training_arg else {}
        outputs = model(x, **training)
        if not self._masked:
            check_mask(outputs)
        loss = model._compute_loss(
            x=x, y=y, y_pred=outputs, sample_weight=sample_weight, training=True
        )
        return loss, outputs

    def state_dict(self, *_: Any, **__: Any) -> Any:
        """All variables of the model, under names that do not depend on what was made before."""
        return by_name(self.model.variables)

    def load_state_dict(self, state_dict: Mapping[str, Any], *_: Any, **__: Any) -> Any:
        """Takes over what `state_dict` returned."""
        assign(self.model.variables, state_dict)


class Steps:
    """Trains a Keras model step by step.

    Args:
        model: The Keras model, built and compiled.
        schedule_by: What steps a LearningRateSchedule: `rule`, a clock, or `user` for once per
            optimizer step, as Keras does.
        masked: Whether the outputs may have a mask.
        **settings: Those of `AdaptiveDataParallel`.
    """

    def __init__(
        self, model: Any, schedule_by: ScheduleBy, *, masked: bool, **settings: Any
    ) -> None:
        self._model = model
        self.optimizer = KerasOptimizer.of(model.optimizer, model.trainable_variables)
        """The optimizer of the model, as one of torch."""
        scheduler = None if self.optimizer.schedule is None else KerasSchedule(self.optimizer)
        self._scheduler = scheduler if schedule_by == "user" else None
        self.parallel = AdaptiveDataParallel(
            _Trained(model, masked=masked),
            self.optimizer,
            scheduler,
            schedule_by="user" if scheduler is None else schedule_by,
            **settings,
        )
        """What weighs, reduces and measures the gradient."""
        self._agreement = Agreement(model)
        self.step = 0
        """Steps of the epoch that are done."""
        self.remembered: dict[str, Any] = {}
        """What callbacks remembered in the state that the job goes on from."""
        self.callbacks: list[Any] = []
        """The callbacks of this `fit`: what they remember belongs to the state of the job."""
        current_job().registry.add(NAME, self)

    def epoch(self, loader: AdaptiveDataLoader, begins: Callable[[int], None]) -> Generator[int]:
        """Trains for one epoch, or what is left of it.

        Args:
            loader: The data.
            begins: Is told the number of each step before it.

        Yields:
            The number of each step, behind it.
        """
        weight = 0.0
        try:
            # A generator: left early, it must end before the next one begins.
            with closing(cast(Generator[Any], iter(loader))) as batches:
                for batch in batches:
                    micro = current_job().micro_batch
                    assert micro is not None
                    if micro.index == 0:
                        begins(self.step)
                        self._agreement.begin_step()
                        weight = 0.0
                    self._train(batch, micro.weight)
                    weight += micro.weight
                    if micro.last:
                        self._agreement.end_step(weight)
                        if self._scheduler is not None:
                            self._scheduler.step()
                        self.step += 1
                        yield self.step - 1
        finally:
            self.step = 0

    def _train(self, batch: Any, weight: float) -> None:
        """One micro-batch."""
        model = self._model
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        loss, outputs = self.parallel(x, y, sample_weight)
        record(loss=loss)
        loss.backward()
        self.optimizer.follow()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if weight:
            model._loss_tracker.update_state(loss.detach(), sample_weight=weight)
            model.compute_metrics(x, y, outputs, sample_weight=sample_weight)

    def release(self) -> None:
        """Gives the Keras optimizer back as it was."""
        current_job().registry.remove(NAME)
        self.parallel.release()
        self.optimizer.release()

    # State ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """How far the epoch is, its metrics so far, and what callbacks remember."""
        return {
            "step": self.step,
            "metrics": by_name(self._model.metrics_variables),
            "callbacks": {name: _memory(callback) for name, callback in self._named()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` returned; callbacks get their part by `remind`."""
        self.step = int(state["step"])
        assign(self._model.metrics_variables, state["metrics"])
        self.remembered = dict(state["callbacks"])

    def remind(self) -> None:
        """Gives callbacks what they remembered, once; they forget it when training begins."""
        remembered, self.remembered = self.remembered, {}
        for name, callback in self._named():
            vars(callback).update(remembered.get(name, {}))

    def _named(self) -> Iterator[tuple[str, Any]]:
        known = [callback for callback in self.callbacks if type(callback).__name__ in _MEMORIES]
        for index, callback in enumerate(known):
            yield f"{index}/{type(callback).__name__}", callback


def _memory(callback: Any) -> dict[str, Any]:
    return {name: getattr(callback, name, None) for name in _MEMORIES[type(callback).__name__]}
