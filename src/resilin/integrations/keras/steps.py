"""Training with the torch backend: one micro-batch, and one step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from typing import Any, cast

import keras  # type: ignore[import-untyped]
from torch import Tensor, nn

from resilin.compat import keras_names
from resilin.integrations.keras.optimizer import KerasOptimizer, KerasSchedule, assign, by_name
from resilin.integrations.keras.progress import Progress
from resilin.integrations.keras.refusals import check_mask
from resilin.integrations.keras.variables import Agreement
from resilin.training.loader import AdaptiveDataLoader
from resilin.training.parallel import AdaptiveDataParallel, ScheduleBy
from resilin.training.script.events import record


class _Trained(nn.Module):
    """The model with its loss, so that one forward pass has all that has a gradient."""

    def __init__(self, model: Any, *, masked: bool) -> None:
        super().__init__()
        self.model = model
        self._masked = masked

    def forward(self, x: Any, y: Any, sample_weight: Any) -> tuple[Tensor, Any]:
        model = self.model
        outputs = keras_names.call_in_training(model, x)
        if not self._masked:
            check_mask(outputs)
        return keras_names.loss_of(model, x, y, outputs, sample_weight), outputs

    def state_dict(self, *_: Any, **__: Any) -> Any:
        """All variables of the model, under names that are the same in every process."""
        return by_name(self.model.variables)

    def load_state_dict(self, state_dict: Mapping[str, Any], *_: Any, **__: Any) -> Any:
        """Load what `state_dict` returned."""
        assign(self.model.variables, state_dict)


class Steps:
    """Trains a Keras model step by step.

    Args:
        model: The Keras model, built and compiled.
        schedule_by: Who steps a LearningRateSchedule: `rule`, a clock, or `user` for once per
            optimizer step, as Keras does.
        progress: Progress of the epoch.
        masked: Whether the outputs may have a mask.
        **settings: Arguments of `AdaptiveDataParallel`.
    """

    def __init__(
        self,
        model: Any,
        schedule_by: ScheduleBy,
        progress: Progress,
        *,
        masked: bool,
        **settings: Any,
    ) -> None:
        self._model = model
        self._progress = progress
        self.optimizer = KerasOptimizer.of(model.optimizer, model.trainable_variables)
        """The optimizer of the model, as an optimizer of torch."""
        scheduler = None if self.optimizer.schedule is None else KerasSchedule(self.optimizer)
        self._scheduler = scheduler if schedule_by == "user" else None
        self.parallel = AdaptiveDataParallel(
            _Trained(model, masked=masked),
            self.optimizer,
            scheduler,
            schedule_by="user" if scheduler is None else schedule_by,
            **settings,
        )
        """The model in training."""
        self._agreement = Agreement(model, progress.home.engine)

    def trains(self, variables: list[Any]) -> bool:
        """Whether these are the variables that it trains."""
        mine = self.optimizer.variables
        return [*map(id, mine)] == [*map(id, variables)]

    def check(self) -> None:
        """Check at the start of an epoch that `fit` still trains the same variables.

        Raises:
            ValueError: They have changed.
        """
        if not self.trains(now := self._model.trainable_variables):
            raise ValueError(
                f"fit() began to train {len(self.optimizer.variables)} variables, and "
                f"{len(now)} are trainable now: freeze and unfreeze layers between two calls of "
                "fit(), and not in a callback"
            )

    def epoch(self, loader: AdaptiveDataLoader, begins: Callable[[int], None]) -> Generator[int]:
        """Train for one epoch, or the rest of it.

        Args:
            loader: The data.
            begins: Called with the number of each step before it.

        Yields:
            The number of each step, after it.
        """
        progress, weight = self._progress, 0.0
        # A generator that is left early must end before the next one begins.
        with closing(cast(Generator[Any], iter(loader))) as batches:
            for batch in batches:
                micro = progress.home.micro_batch
                assert micro is not None
                if micro.index == 0:
                    begins(progress.step)
                    self._agreement.begin_step()
                    weight = 0.0
                self._train(batch, micro.weight)
                weight += micro.weight
                if micro.last:
                    self._agreement.end_step(weight)
                    if self._scheduler is not None:
                        self._scheduler.step()
                    progress.step += 1
                    yield progress.step - 1

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
            keras_names.track_loss(model, loss.detach(), weight)
            model.compute_metrics(x, y, outputs, sample_weight=sample_weight)

    def release(self) -> None:
        """Restore the Keras optimizer."""
        self.parallel.release()
        self.optimizer.release()
