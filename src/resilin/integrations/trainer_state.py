"""The state of a Trainer of Transformers, as a part of the state of the job.

The stock Trainer keeps its state in checkpoint folders, which are written when no step is under
way. A job is resumed at any step, with logs half collected and an epoch that has no end yet. So
this also keeps the losses since the last log, what callbacks remember, whether the end of an epoch
(evaluation, saving) is still to come, and whether training has stopped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from resilin.integrations.memory import Memory
from resilin.telemetry.extras import load
from resilin.training.bridge.readout import read_out
from resilin.training.job import Job, current_job

_hf: Any = load("transformers", "hf", "resilin.integrations.transformers")
_callbacks: Any = load("transformers.trainer_callback", "hf", "resilin.integrations.transformers")

_NAME = "trainer"
"""What the Trainer's own state is called in the state of the job."""
_LOSSES = "trainer/losses"
"""The same for what each replica has summed since the last log."""
TRAINER_PARTS = (_NAME,)
"""Parts that the Trainer's own checkpoint folders have already."""
_COUNTED = (
    "_total_loss_scalar",
    "_globalstep_last_logged",
    "_initial_global_step",
    "_step_lr",
    "_grad_norm",
)
"""Attributes of the Trainer that it sets when training begins, and must not lose."""


class TrainerPart:
    """What a Trainer must not forget.

    Args:
        trainer: The Trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.epochs_over = 0
        """Epochs that are over, with their evaluation."""
        self.stopped: float | None = None
        """Reference steps that were to be made when training came to its end; None before that.

        Infinity if a callback has stopped it early: it is over however long it was to be."""
        self._begun = False
        self._restored: Mapping[str, Any] | None = None
        self._losses = _Losses(trainer)
        self._groups: list[dict[str, Any]] | None = None
        self._evaluates = False
        self._read_out: dict[str, float] = {}
        kept = frozenset(map(id, (trainer, trainer.model, trainer.optimizer, trainer.args)))
        self._memories = {
            f"{index}/{type(callback).__name__}": _memory(callback, kept)
            for index, callback in enumerate(trainer.callback_handler.callbacks)
            if _has_memory(callback)
        }

    def register(self, job: Job) -> None:
        """Makes it a part of the state of the job."""
        job.registry.add(_NAME, self)
        job.registry.add_own(_LOSSES, self._losses)

    def forget(self) -> None:
        """The Trainer goes on from a checkpoint folder of its own, and not from the job's state."""
        self._restored, self.stopped = None, None
        self._losses.restored = None

    def read_out(self) -> dict[str, float]:
        """What resilin knows of the last step, also if an earlier process has made it."""
        if current_job().timeline.last_step is not None:
            self._read_out = read_out()
        return self._read_out

    # Beginning -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Called when training begins, before the callbacks of the user."""
        self._begun = True
        if self._restored is not None:
            # What hooks of callbacks do to it was done before the state was kept.
            groups = self._trainer.optimizer.param_groups
            self._groups = [{k: v for k, v in group.items() if k != "params"} for group in groups]
            # The start was evaluated before the state was kept.
            self._evaluates = self._trainer.args.eval_on_start
            self._trainer.args.eval_on_start = False

    def put_back(self) -> None:
        """Called after the hooks with which training begins: what they have reset is put back."""
        restored, self._restored = self._restored, None
        if restored is None:
            self._losses.restored = None
            return
        trainer = self._trainer
        self._read_out = restored["read_out"]
        for name, value in restored["counted"].items():
            setattr(trainer, name, value)
        self._losses.put_back()
        for name, memory in self._memories.items():
            if name in restored["callbacks"]:
                memory.give(restored["callbacks"][name], name.partition("/")[2])
        if self._groups is not None:
            for group, values in zip(trainer.optimizer.param_groups, self._groups, strict=True):
                group.update(values)
            self._groups = None
            trainer.args.eval_on_start = self._evaluates

    # State ---------------------------------------------------------------------------------

    def state_dict(self) -> Mapping[str, Any]:
        """The TrainerState, and what is not in it."""
        if self._restored is not None:
            return self._restored
        trainer = self._trainer
        return {
            **dataclasses.asdict(trainer.state),
            "epochs_over": self.epochs_over,
            "stopped": self.stopped,
            "read_out": self.read_out(),
            "counted": {n: getattr(trainer, n) for n in _COUNTED} if self._begun else {},
            "callbacks": {name: memory.take() for name, memory in self._memories.items()}
            if self._begun
            else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` returned.

        Raises:
            ValueError: It does not say whether an epoch has ended.
        """
        if "epochs_over" not in state:
            raise ValueError(
                "the state was kept by resilin 0.1, which did not say whether the last epoch was "
                "evaluated: finish this run with that version, or resume from a checkpoint folder"
            )
        self.epochs_over, self.stopped = int(state["epochs_over"]), state["stopped"]
        names = {field.name for field in dataclasses.fields(_hf.TrainerState)}
        self._trainer.state = _hf.TrainerState(**{n: v for n, v in state.items() if n in names})
        self._restored = state if state["counted"] else None


class _Losses:
    """What one replica has summed since the last log: its own part of losses and operations."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.restored: Mapping[str, Any] | None = None

    def state_dict(self) -> Mapping[str, Any]:
        if self.restored is not None:
            return self.restored
        loss = getattr(self._trainer, "_tr_loss", None)
        return {
            "loss": torch.zeros(()) if loss is None else loss.detach(),
            "operations": float(self._trainer.current_flos),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """None if the number of replicas has changed: the next log is of the steps since."""
        self.restored = state

    def put_back(self) -> None:
        state, self.restored = self.restored, None
        trainer = self._trainer
        if state is None:
            trainer._globalstep_last_logged = trainer.state.global_step
        else:
            trainer._tr_loss = state["loss"].to(trainer.args.device)
            trainer.current_flos = state["operations"]


class _Exported:
    """The memory of a callback that says itself what its state is."""

    def __init__(self, callback: Any) -> None:
        self._callback = callback

    def take(self) -> dict[str, Any]:
        return dict(self._callback.state()["attributes"])

    def give(self, taken: Mapping[str, Any], path: str) -> None:
        for name, value in taken.items():
            setattr(self._callback, name, value)


def _memory(callback: Any, kept: frozenset[int]) -> _Exported | Memory:
    if isinstance(callback, _callbacks.ExportableState):
        return _Exported(callback)
    return Memory(callback, kept)


def _has_memory(callback: Any) -> bool:
    """Whether a callback has a memory; those of Transformers know themselves how they begin."""
    own = type(callback).__module__.partition(".")[0] not in ("transformers", "resilin")
    return own or isinstance(callback, _callbacks.ExportableState)
