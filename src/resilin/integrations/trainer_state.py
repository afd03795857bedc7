"""The state of a Trainer of Transformers, as a part of the state of the job.

The stock Trainer keeps its state in checkpoint folders, which are written between two steps. A job
is resumed at any step, with logs half collected and in the middle of an epoch. So the state here
also has the losses since the last log, the state of callbacks, whether the end of an epoch
(evaluation, saving) is still to come, and whether training has stopped.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from resilin.compat import transformers_names
from resilin.integrations.memory import Memory
from resilin.integrations.trainer_progress import ReferenceRun
from resilin.telemetry.extras import load
from resilin.training.bridge.home import Home
from resilin.training.bridge.readout import read_out
from resilin.training.state.registry import Registry

_hf: Any = load("transformers", "hf", "resilin.integrations.transformers")
_callbacks: Any = load("transformers.trainer_callback", "hf", "resilin.integrations.transformers")

_NAME = "trainer"
"""Name of the Trainer's own state in the state of the job."""
_LOSSES = "trainer/losses"
"""Name of the sums that each replica has made since the last log."""
_MEAN = "trainer"
"""Place of their mean over the replicas among the sums of the job."""
WINDOW = "trainer/window"
"""Name of the part that says since which step they are summed. Folders have it as well."""
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
        self._losses = _Losses(trainer)
        self._window = _Window(trainer)
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
        registry.add(WINDOW, self._window)
        registry.add_own(_LOSSES, self._losses)
        home = Home()
        registry.add_summed(_MEAN, self._losses.mean, first_replica=home.engine.membership.is_first)

    @property
    def callbacks(self) -> list[Any]:
        """The callbacks of the Trainer."""
        return list(self._trainer.callback_handler.callbacks)

    def forget(self) -> None:
        """Drop the state of the job: the Trainer resumes from a checkpoint folder of its own."""
        self._restored, self.stopped = None, None
        self._window.restored = self._losses.restored = None
        self._losses.mean.restored = None

    def read_out(self) -> dict[str, float]:
        """Metrics of the last step, also if an earlier process has made it."""
        if Home().last_step is not None:
            self._read_out = read_out()
        return self._read_out

    # Beginning -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin training, before the hooks of all other callbacks."""
        self._begun = self._window.begun = True
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
        if self._window.put_back():
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


class _Losses:
    """Losses and operations that one replica has summed since the last log."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.restored: Mapping[str, Any] | None = None
        self.mean = _Mean(trainer)

    def state_dict(self) -> Mapping[str, Any]:
        if self.restored is not None:
            return self.restored
        loss = transformers_names.summed_loss(self._trainer)
        return {
            "loss": torch.zeros(()) if loss is None else loss.detach(),
            "operations": float(self._trainer.current_flos),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Load a state; None if the number of replicas has changed."""
        self.restored = state

    def put_back(self) -> None:
        """Set the sums. Collective: all replicas use their own ones, or none does."""
        state, self.restored = self.restored, None
        mean, self.mean.restored = self.mean.restored, None
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
