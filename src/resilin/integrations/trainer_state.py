"""The state of a Trainer of Transformers, as a part of the state of the job.

The stock Trainer keeps its state in checkpoint folders, which are written between two steps. A job
is resumed at any step, with logs half collected and in the middle of an epoch. So the state here
also has the losses since the last log, the state of callbacks, whether the end of an epoch
(evaluation, saving) is still to come, and whether training has stopped.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from resilin.integrations.memory import Memory
from resilin.integrations.trainer_losses import Losses
from resilin.integrations.trainer_progress import ReferenceRun
from resilin.telemetry.extras import load
from resilin.training.bridge.home import Home
from resilin.training.bridge.readout import read_out
from resilin.training.state.registry import Registry

_hf: Any = load("transformers", "hf", "resilin.integrations.transformers")
_callbacks: Any = load("transformers.trainer_callback", "hf", "resilin.integrations.transformers")

_NAME = "trainer"
"""Name of the Trainer's own state in the state of the job."""
TRAINER_PARTS = (_NAME,)
"""Parts that the Trainer's own checkpoint folders have already."""
_STEP_LR, _GRAD_NORM = "_step_lr", "_grad_norm"
"""Names of two numbers of the last step, among those that the Trainer counts."""


class TrainerPart:
    """The state of one run of a Trainer.

    Args:
        trainer: The Trainer.
        run: The reference run that it was configured for.
    """

    def __init__(self, trainer: Any, run: ReferenceRun) -> None:
        self._trainer = trainer
        self.run = run
        """The reference run that the Trainer was configured for."""
        self.resumes = False
        """Whether the run resumes from the state of the job, and not from a checkpoint folder."""
        self.end_is_due = False
        """Whether the steps of an epoch are done, and its evaluation is still to come."""
        self.step_lr: float | None = None
        """Learning rate of the last step."""
        self.grad_norm: Any = None
        """Gradient norm of the last step."""
        self.epochs_over = 0
        """Epochs that are over, with their evaluation."""
        self.stopped: float | None = None
        """Length of the run in reference steps when training ended; None before that.

        Infinity if a callback has stopped it early: it does not resume, however long the run is."""
        self._begun = False
        self._restored: Mapping[str, Any] | None = None
        self._losses = Losses(trainer)
        self._groups: list[dict[str, Any]] | None = None
        self._evaluates = False
        self._read_out: dict[str, float] = {}
        kept = frozenset(map(id, (trainer, trainer.model, trainer.optimizer, trainer.args)))
        self._memories = {
            f"{index}/{type(callback).__name__}": _memory(callback, kept)
            for index, callback in enumerate(trainer.callback_handler.callbacks)
            if _has_memory(callback)
        }

    def register(self, registry: Registry) -> None:
        """Make it a part of the state of the job."""
        registry.add(_NAME, self)
        self._losses.register(registry)

    @property
    def callbacks(self) -> list[Any]:
        """The callbacks of the Trainer."""
        return list(self._trainer.callback_handler.callbacks)

    def forget(self) -> None:
        """Drop the state of the job: the Trainer resumes from a checkpoint folder of its own."""
        self._restored, self.stopped = None, None
        self._losses.forget()

    def read_out(self) -> dict[str, float]:
        """Metrics of the last step, also if an earlier process has made it."""
        if Home().last_step is not None:
            self._read_out = read_out()
        return self._read_out

    # Beginning -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin training, before the hooks of all other callbacks."""
        self._begun = True
        self._losses.begin()
        if self._restored is not None:
            # The hooks of callbacks had changed them before the state was kept, and will again.
            groups = self._trainer.optimizer.param_groups
            self._groups = [{k: v for k, v in group.items() if k != "params"} for group in groups]
            # The start was evaluated before the state was kept.
            self._evaluates = self._trainer.args.eval_on_start
            self._trainer.args.eval_on_start = False

    def put_back(self) -> None:
        """Restore what the hooks at the start of training have reset. Call it after them."""
        restored, self._restored = self._restored, None
        trainer = self._trainer
        self._losses.put_back()
        if restored is None:
            return
        self._read_out = restored["read_out"]
        counted = restored["counted"]
        self.step_lr, self.grad_norm = counted[_STEP_LR], counted[_GRAD_NORM]
        for name, memory in self._memories.items():
            if name in restored["callbacks"]:
                memory.give(restored["callbacks"][name], name.partition("/")[2])
        if self._groups is not None:
            for group, values in zip(trainer.optimizer.param_groups, self._groups, strict=True):
                group.update(values)
            self._groups = None
            trainer.args.eval_on_start = self._evaluates

    def end(self) -> None:
        """Note that training has ended, and whether that was early."""
        self.put_back()
        if self.stopped is None or self.stopped < self.run.steps:
            early = self.run.steps - self.run.done > 1e-6
            self.stopped = math.inf if early else self.run.steps

    # State ---------------------------------------------------------------------------------

    def state_dict(self) -> Mapping[str, Any]:
        """The TrainerState, and the state that the Trainer keeps elsewhere."""
        if self._restored is not None:
            return self._restored
        trainer = self._trainer
        own = {_STEP_LR: self.step_lr, _GRAD_NORM: self.grad_norm}
        return {
            **dataclasses.asdict(trainer.state),
            "epochs_over": self.epochs_over,
            "stopped": self.stopped,
            "read_out": self.read_out(),
            "counted": own if self._begun else {},
            "callbacks": {name: memory.take() for name, memory in self._memories.items()}
            if self._begun
            else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned.

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


class _Exported:
    """The memory of a callback that exports its state itself."""

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
    """Whether the state of a callback is kept; callbacks of Transformers reset themselves."""
    own = type(callback).__module__.partition(".")[0] not in ("transformers", "resilin")
    return own or isinstance(callback, _callbacks.ExportableState)
