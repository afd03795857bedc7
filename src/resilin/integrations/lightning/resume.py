"""The state of a Trainer in that of the job, and how a fit resumes from it.

A state is kept at four moments, none of which Lightning itself can resume from: before a step;
after the last step of an epoch and before its validation, if there is one, or before
`on_train_epoch_end`; before the first step of the next epoch; and before `on_train_end`. After a
restart, hooks and steps that come after that moment run once; those before it do not run again.

A script may call `fit` more than once. The calls are counted, and a restarted script skips those
that are done: their results are restored, and none of their steps and hooks run.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, TypeGuard

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor

from resilin.compat import lightning_names
from resilin.core._warn import warn
from resilin.integrations.lightning import files, hooks
from resilin.integrations.lightning.means import EpochSums
from resilin.training.bridge.home import Home
from resilin.training.gates.scheduler import LOOSE
from resilin.training.start import start
from resilin.training.state.registry import MODEL
from resilin.training.state.snapshot import split

LOOPS = "lightning"
"""Name of the Trainer's own state in the state of the job."""
FITS = "lightning/fits"
"""Name of the record of the calls of `fit`."""

SUMS = "lightning/sums"
"""Prefix of the names of logged values, among the sums."""

STEPS = "steps"
"""A step of training is next."""
VALIDATION = "validation"
"""The steps of the epoch are done; the validation at its end is next."""
EPOCH_END = "epoch end"
"""The steps of the epoch and its validation, if any, are done."""
TRAIN_END = "train end"
"""All epochs are done; `on_train_end` is next."""
DONE = "done"
"""The fit is over."""

_LARGE = 1024
"""Largest tensor in the record of a completed fit, in numbers."""


class Fits:
    """The calls of `fit` in this job: their number, and records of completed ones."""

    def __init__(self) -> None:
        self.begun = 0
        self._left = 0
        self._records: dict[int, dict[str, Any]] = {}

    @classmethod
    def of(cls, home: Home) -> Fits:
        """The calls of a job."""
        fits = home.job.extensions.setdefault(FITS, cls())
        assert isinstance(fits, Fits)
        home.registry.add(FITS, fits)
        return fits

    def passed(self) -> dict[str, Any] | None:
        """Record of the current call; None unless a later one had begun when the state was kept."""
        return self._records.get(self.begun) if self.begun < self._left else None

    def end(self, record: dict[str, Any]) -> None:
        """End the current call, and keep its record."""
        self._records[self.begun] = record

    def state_dict(self) -> dict[str, Any]:
        """Number of calls, and the records."""
        return {"begun": max(self.begun, self._left), "records": self._records}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self._left, self._records = int(state["begun"]), dict(state["records"])


class Fit:
    """One call of `fit`: its part of the state of the job, and the state that it resumes from.

    Args:
        trainer: The Trainer, whose processes have joined.
        own: Callbacks of this class are left out.
    """

    def __init__(self, trainer: Trainer, own: type[Callback]) -> None:
        home = self._home = Home()
        start(home.job)
        lightning_names.check_trainer(trainer)
        self._trainer = trainer
        self._own = own
        self._ended = False
        self._fits = Fits.of(home)
        self._fits.begun += 1
        self.phase = STEPS
        """Moment at which a state would be kept now."""
        self.sums = EpochSums(trainer)
        """Values logged in this epoch."""
        self.files = files.WrittenFiles()
        """Checkpoint files."""
        self._left: dict[str, Any] | None = None
        self._weights: dict[str, Tensor] | None = None
        self._limits: tuple[int | None, int] | None = None
        self._stop_later = False
        self.passed = self._fits.passed()
        """Its record, if it is done and a later fit was under way; else None."""
        if self.passed is not None:
            self._weights = home.registry.restored(MODEL)
            if trainer.is_global_zero:
                warn(
                    f"fit number {self._fits.begun} of this script is done and is skipped: its "
                    "model has the newest weights of the job, not those at the end of that fit"
                )
            return
        found = home.registry.restored(LOOPS)
        if found is not None and "phase" not in found:
            raise ValueError(
                f"the state of the job ({', '.join(sorted(found))} of the Trainer) was kept by an "
                "earlier version of resilin, and this one needs to know where in an epoch it was "
                "taken: resume it with that version, or from a checkpoint of Lightning"
            )
        if found is not None and found["fit"] == self._fits.begun:
            self._weights = home.registry.restored(MODEL)
        elif found is not None:
            # The state of an earlier fit, which is done.
            home.registry.remove(LOOPS)
        home.registry.add(LOOPS, self)
        home.registry.add_summed(
            f"{SUMS}/{self._fits.begun}",
            self.sums,
            first_replica=home.engine.membership.process == 0,
        )

    @property
    def number(self) -> int:
        """Number of this call of `fit` in the job, from 1 on."""
        return self._fits.begun

    # The state -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Progress of the loops, logged values, and the states of callbacks and hooks."""
        if self._left is not None:
            return self._left
        trainer = self._trainer
        return {
            "fit": self._fits.begun,
            "phase": self.phase,
            "fit_loop": _loops(trainer, self.phase),
            "should_stop": bool(trainer.should_stop),
            "schedulers": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
            "shown": _shown(trainer),
            "outline": self.sums.outline(),
            "files": self.files.state_dict(),
            **hooks.take(trainer, self._own),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; the Trainer restores it part by part."""
        self._left = dict(state)

    # The start -----------------------------------------------------------------------------

    @property
    def resumes(self) -> bool:
        """Whether the Trainer restores the state of the job."""
        return self._left is not None

    def checkpoint(self) -> dict[str, Any]:
        """The state as a checkpoint, as the Trainer would read it from a file."""
        state = self._left
        assert state is not None
        _take_directories(state, self._trainer)
        return {
            **hooks.as_checkpoint(state, self._trainer, self._weights or {}),
            "epoch": state["fit_loop"]["epoch_progress"]["current"]["completed"],
            "global_step": self._home.clock.steps,
            "loops": {"fit_loop": state["fit_loop"]},
            "lr_schedulers": state["schedulers"],
        }

    def load_weights(self, module: LightningModule) -> None:
        """Load the newest weights of the job into the module, if names and shapes match."""
        if _fits(self._weights, module):
            module.load_state_dict(self._weights)

    def drop_state(self) -> None:
        """Drop the state of the job: a checkpoint of Lightning is newer and is resumed."""
        self._left = self._weights = None

    def before_stage(self) -> None:
        """Restore the rest, before the loops check whether anything is left to do."""
        trainer, loop = self._trainer, self._trainer.fit_loop
        if self.passed is not None:
            hooks.give_callbacks(self.passed, trainer)
            hooks.give_rest(self.passed, trainer)
            _show(trainer, self.passed["shown"])
            loop.load_state_dict(self.passed["fit_loop"])
            # No sanity check in a fit that is done.
            lightning_names.set_restarting(loop.epoch_loop.val_loop, True)
        elif self._left is not None:
            hooks.give_rest(self._left, trainer)
            # No sanity check: the run has started before.
            lightning_names.set_restarting(loop.epoch_loop.val_loop, True)
            if self._left["phase"] == DONE:
                _show(trainer, self._left["shown"])
            if self._left["phase"] in (VALIDATION, EPOCH_END, TRAIN_END):
                # The loops may have reached their limit, but the end of the epoch is still to run.
                self._limits = (loop.max_epochs, loop.epoch_loop.max_steps)
                if loop.max_epochs is not None and loop.max_epochs >= 0:
                    loop.max_epochs += self._left["phase"] == TRAIN_END
                if loop.epoch_loop.max_steps >= 0:
                    loop.epoch_loop.max_steps += 1

    def train_start(self) -> None:
        """Begin training: from here on the state is that of the Trainer."""
        self._weights = None
        if self._left is None:
            self.files.begin(self._trainer)
        else:
            self._resume(self._left)

    def _resume(self, state: dict[str, Any]) -> None:
        trainer, loop = self._trainer, self._trainer.fit_loop
        self.phase, self._left = state["phase"], None
        self.files.load_state_dict(state["files"])
        self.files.begin(trainer)
        self.sums.resume(state["outline"])
        _show(trainer, state["shown"])
        lightning_names.end_restart(loop)
        if self.phase in (TRAIN_END, DONE):
            self._set_limits()
            trainer.should_stop = state["should_stop"]
            self.phase = STEPS if self.phase == DONE else self.phase
            return
        # The epoch has started before, and its counters are restored.
        lightning_names.restart_in_epoch(loop)
        _replace(loop.epoch_loop, "reset", partial(self._enter_epoch, state["should_stop"]))
        _resume_averaging(trainer)

    def _enter_epoch(self, should_stop: bool) -> None:
        """Replacement of the reset of the loop over an epoch, called once."""
        loop = self._trainer.fit_loop.epoch_loop
        _replace(loop, "reset", None)
        self._set_limits()
        if self.phase != VALIDATION:
            self._trainer.should_stop = should_stop
            return
        # The loop reaches the validation on its path for an interrupted one.
        lightning_names.restart_before_validation(loop)
        self._stop_later = should_stop

    def _set_limits(self) -> None:
        if self._limits is not None:
            loop = self._trainer.fit_loop
            (loop.max_epochs, loop.epoch_loop.max_steps), self._limits = self._limits, None

    def validation_start(self) -> None:
        """Note the start of a validation."""
        lightning_names.validation_begun(self._trainer.fit_loop.epoch_loop)
        if self._stop_later:
            self._trainer.should_stop, self._stop_later = True, False

    # The end -------------------------------------------------------------------------------

    def end(self) -> None:
        """End the fit, and save its last state where resilin keeps states."""
        if self._ended:
            return
        self._ended = True
        home = self._home
        self._weights = None
        if self.passed is not None:
            lightning_names.end_restart(self._trainer.fit_loop)
            return
        if self._left is not None:
            lightning_names.end_restart(self._trainer.fit_loop)
        else:
            self.phase = DONE
            if start(home.job).active:
                self._fits.end(_record(self.state_dict()))
        home.end_training()
        home.registry.remove(LOOPS)
        files.end(self._trainer)


# The loops -----------------------------------------------------------------------------------


def _loops(trainer: Trainer, phase: str) -> dict[str, Any]:
    """Counters of the loops; an epoch that still has to end counts as unfinished."""
    state = trainer.fit_loop.state_dict()
    state["state_dict"] = {}
    if phase == EPOCH_END:
        progress = state["epoch_progress"]
        for counter in ("total", "current"):
            progress[counter]["processed"] -= 1
    return state


def _replace(loop: Any, name: str, method: Any) -> None:
    """Replace a method of a loop; None restores it."""
    if method is not None:
        setattr(loop, name, method)
    elif name in loop.__dict__:
        delattr(loop, name)


def _resume_averaging(trainer: Trainer) -> None:
    """Create the scheduler of StochasticWeightAveraging, which it does at the start of an epoch."""
    optimizer = trainer.optimizers[0]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging) and lightning_names.averages_weights(
            callback
        ):
            groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                group.update(settings)
            registry = Home().registry
            if registry.restored(LOOSE) is not None:
                # The callback has restored that scheduler and its counters itself.
                registry.remove(LOOSE)


# Shown values --------------------------------------------------------------------------------


def _shown(trainer: Trainer) -> dict[str, Any]:
    """The newest logged values."""
    found = {}
    for name, values in lightning_names.shown_values(trainer).items():
        tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
        numbers: dict[str, Any] = {
            key: [value, None] for key, value in values.items() if isinstance(value, int | float)
        }
        if tensors:
            device = next(iter(tensors.values())).device
            table = torch.stack([v.detach().to(device, torch.float64) for v in tensors.values()])
            for (key, value), number in zip(tensors.items(), table.tolist(), strict=True):
                numbers[key] = [number, str(value.dtype).removeprefix("torch.")]
        found[name] = numbers
    return found


def _show(trainer: Trainer, shown: Mapping[str, Any]) -> None:
    device = trainer.strategy.root_device
    for name, values in lightning_names.shown_values(trainer).items():
        for key, (value, kind) in shown[name].items():
            known = value
            if kind is not None:
                known = torch.tensor(value, dtype=getattr(torch, kind), device=device)
            values[key] = known


# Records -------------------------------------------------------------------------------------


def _record(state: dict[str, Any]) -> dict[str, Any]:
    """Record of a completed fit, for a restarted script that skips it; without large tensors."""
    record = {key: state[key] for key in ("fit_loop", "shown", "beside", "hparams")}
    callbacks = {key: each for key, each in state["callbacks"].items() if _is_small(each)}
    return copy.deepcopy({**record, "callbacks": callbacks})


def _is_small(state: Any) -> bool:
    return all(math.prod(tensor.shape) <= _LARGE for tensor in split("", state)[1].values())


def _take_directories(state: Mapping[str, Any], trainer: Trainer) -> None:
    """Restore the directory that callbacks have chosen, where the script gives none."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        chosen = state["callbacks"].get(callback.state_key, {}).get("dirpath")
        if chosen is not None and vars(callback).get("dirpath", "") is None:
            callback.dirpath = chosen


def _fits(
    weights: Mapping[str, Tensor] | None, module: LightningModule
) -> TypeGuard[Mapping[str, Tensor]]:
    """Whether weights have the names and shapes of this module."""
    if weights is None:
        return False
    own = module.state_dict()
    return own.keys() == weights.keys() and all(own[n].shape == weights[n].shape for n in own)
