"""The loss that a Trainer of Transformers logs: a mean over the steps since the last log.

The stock loop keeps the sum in memory only: after a resume, its next log covers fewer steps than
that of an undisturbed run. Here the sum, and the step since which it is summed, are parts of the
state of the job, and of checkpoint folders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from resilin.compat import transformers_names
from resilin.training.bridge.home import Home
from resilin.training.state.registry import Registry

LOSSES = "trainer/losses"
"""Name of the sums that each replica has made since the last log."""
MEAN = "trainer"
"""Place of their mean over the replicas among the sums of the job."""
WINDOW = "trainer/window"
"""Name of the part that says since which step they are summed. Folders have it as well."""


class _Window:
    """Counters of the stock loop: at which step it has logged, and what it had summed up to then.

    A checkpoint folder of the stock Trainer has none of them, so that its first log after a resume
    covers fewer steps than that of an undisturbed run.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.begun = False
        self.restored: Mapping[str, Any] | None = None

    def state_dict(self) -> Mapping[str, Any]:
        if self.restored is not None:
            return self.restored
        return transformers_names.counters(self._trainer) if self.begun else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.restored = state or None

    def put_back(self) -> bool:
        """Set the counters; returns whether there were any."""
        state, self.restored = self.restored, None
        if state is not None:
            transformers_names.set_counters(self._trainer, state)
        return state is not None


class _Mean:
    """The mean over the replicas of their summed losses, for another number of them.

    Each replica adds its part of the mean. It is rounded otherwise than the sums themselves, which
    are used wherever the replicas are the same.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.restored: Mapping[str, float] | None = None

    def state_dict(self) -> dict[str, Any]:
        return self.begin_state_dict()()

    def begin_state_dict(self) -> Callable[[], dict[str, Any]]:
        restored = self.restored
        if restored is not None:
            return lambda: {"sums": dict(restored)}
        loss = transformers_names.summed_loss(self._trainer)
        # A copy: the loop resets the sum in place, and this is read later.
        loss = None if loss is None else loss.detach().clone()
        operations = float(self._trainer.current_flos)
        num_replicas = Home().engine.membership.num_replicas
        return lambda: {
            "sums": {
                "loss": 0.0 if loss is None else loss.item() / num_replicas,
                "operations": operations,
            }
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.restored = state["sums"]


class Losses:
    """Losses and operations that one replica has summed since the last log.

    Args:
        trainer: The Trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._restored: Mapping[str, Any] | None = None
        self._mean = _Mean(trainer)
        self._window = _Window(trainer)

    def register(self, registry: Registry) -> None:
        """Make them parts of the state of the job."""
        registry.add(WINDOW, self._window)
        registry.add_own(LOSSES, self)
        first = Home().engine.membership.is_first
        registry.add_summed(MEAN, self._mean, first_replica=first)

    def begin(self) -> None:
        """Note that the loop of the Trainer begins, and with it its counters."""
        self._window.begun = True

    def forget(self) -> None:
        """Drop what was restored."""
        self._restored = self._window.restored = self._mean.restored = None

    def state_dict(self) -> Mapping[str, Any]:
        """The sums of this replica."""
        if self._restored is not None:
            return self._restored
        loss = transformers_names.summed_loss(self._trainer)
        return {
            "loss": torch.zeros(()) if loss is None else loss.detach(),
            "operations": float(self._trainer.current_flos),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Load a state; None if the number of replicas has changed."""
        self._restored = state

    def put_back(self) -> None:
        """Set the sums, if any were restored. Collective: all replicas use their own, or none."""
        state, self._restored = self._restored, None
        mean, self._mean.restored = self._mean.restored, None
        if not self._window.put_back():
            return
        engine, device = Home().engine, self._trainer.args.device
        everyone = engine.gather([state is not None, mean is not None])
        if all(own for own, _ in everyone):
            assert state is not None
            loss, operations = state["loss"].to(device), state["operations"]
        elif all(has_mean for _, has_mean in everyone):
            assert mean is not None
            # One replica has the whole of it, and the log is the mean over all of them.
            share = mean.get("loss", 0.0) * engine.membership.num_replicas
            loss = torch.tensor(share, device=device)
            operations = mean.get("operations", 0.0)
        else:
            transformers_names.restart_log(self._trainer)
            return
        transformers_names.set_sums(self._trainer, loss, operations)
