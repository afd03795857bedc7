"""The state of callbacks, module and datamodule, as it would be in a checkpoint of Lightning.

It is taken with `state_dict` and the `on_save_checkpoint` hooks, and restored with their
counterparts, at the moment at which Lightning itself would restore it. The weights of the model are
not copied: where a hook adds them to the checkpoint, their names are kept in their place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import lightning
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from resilin.compat.lightning_names import UNSAVED, call_module_hook, first_hyperparameters
from resilin.core._warn import warn
from resilin.training.state.snapshot import split

_WEIGHT = "resilin/weight"
"""Key of a placeholder for a tensor of the model."""


def take(trainer: Trainer, own: type) -> dict[str, Any]:
    """The state of callbacks, hooks, datamodule and changed hyperparameters.

    Args:
        trainer: The Trainer, in a fit.
        own: Callbacks of this class are left out.
    """
    callbacks = [callback for callback in _callbacks(trainer) if not isinstance(callback, own)]
    states = {callback.state_key: callback.state_dict() for callback in callbacks}
    beside = {
        callback.state_key: {
            name: vars(callback)[name] for name in UNSAVED if name in vars(callback)
        }
        for callback in callbacks
    }
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    # First, for hooks may change the states of callbacks.
    added = _added(trainer, callbacks, states)
    return {
        "callbacks": {key: state for key, state in states.items() if state},
        "beside": {key: state for key, state in beside.items() if state},
        "added": added,
        "datamodule": {} if datamodule is None else dict(datamodule.state_dict()),
        "hparams": [_changed(each) for each in (trainer.lightning_module, datamodule)],
    }


def as_checkpoint(
    state: Mapping[str, Any], trainer: Trainer, weights: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Convert a state to a checkpoint that the Trainer can restore.

    Args:
        state: Result of `take`.
        trainer: The Trainer.
        weights: The tensors of the model.
    """
    checkpoint: dict[str, Any] = {
        "pytorch-lightning_version": lightning.__version__,
        "state_dict": dict(weights),
        "callbacks": state["callbacks"],
        **_restored(state["added"], weights),
    }
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    if datamodule is not None and state["datamodule"]:
        checkpoint[type(datamodule).__qualname__] = state["datamodule"]
    return checkpoint


def give_callbacks(state: Mapping[str, Any], trainer: Trainer) -> None:
    """Restore the states of callbacks."""
    for callback in _callbacks(trainer):
        if callback.state_key in state["callbacks"]:
            callback.load_state_dict(copy.deepcopy(state["callbacks"][callback.state_key]))


def give_rest(state: Mapping[str, Any], trainer: Trainer) -> None:
    """Restore the state that no checkpoint of Lightning carries."""
    for callback in _callbacks(trainer):
        for name, value in state["beside"].get(callback.state_key, {}).items():
            if name in vars(callback):
                setattr(callback, name, value)
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    for each, changed in zip((trainer.lightning_module, datamodule), state["hparams"], strict=True):
        if each is not None and changed:
            each.hparams.update(changed)


def _callbacks(trainer: Trainer) -> list[Any]:
    return list(trainer.callbacks)  # type: ignore[attr-defined]


def _changed(owner: Any) -> dict[str, Any]:
    """Hyperparameters that have changed since they were saved first."""
    if owner is None or not getattr(owner, "hparams", None):
        return {}
    first = first_hyperparameters(owner)
    changed = {
        name: value
        for name, value in dict(owner.hparams).items()
        if name not in first or _differ(first[name], value)
    }
    return _saveable(changed, "the hyperparameter")


def _differ(one: Any, other: Any) -> bool:
    if one is other:
        return False
    try:
        return bool(one != other)
    except (RuntimeError, ValueError):
        # Tensors and arrays have no single answer.
        return True


def _added(trainer: Trainer, callbacks: list[Any], states: dict[str, Any]) -> dict[str, Any]:
    """Entries that `on_save_checkpoint` hooks add to a checkpoint, or replace in it."""
    module = trainer.lightning_module
    hooked = [each for each in (*callbacks, module) if is_overridden("on_save_checkpoint", each)]
    if not hooked:
        return {}
    weights = trainer.strategy.lightning_module_state_dict()
    given: dict[str, Any] = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": lightning.__version__,
        "state_dict": weights,
        "loops": {"fit_loop": trainer.fit_loop.state_dict()},
        "callbacks": states,
        "optimizer_states": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "lr_schedulers": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
    }
    # A copy, so that a hook may remove weights from it.
    checkpoint = {**given, "state_dict": dict(weights)}
    for callback in callbacks:
        callback.on_save_checkpoint(trainer, module, checkpoint)
    call_module_hook(trainer, "on_save_checkpoint", checkpoint)
    added = {key: value for key, value in checkpoint.items() if value is not given.get(key)}
    if _same(added.get("state_dict", weights), weights):
        added.pop("state_dict", None)
    places = {_place(tensor): name for name, tensor in weights.items() if tensor.numel()}

    def named(value: Any) -> Any:
        name = places.get(_place(value)) if isinstance(value, Tensor) else None
        return value if name is None else {_WEIGHT: name}

    return _saveable(_mapped(added, named), "the entry of on_save_checkpoint()")


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(one[name] is other[name] for name in one)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Containers with each of their leaves replaced."""
    if isinstance(value, dict):
        return {key: _mapped(item, function) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, function) for item in value)
    return function(value)


def _restored(value: Any, weights: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if set(value) == {_WEIGHT}:
            return weights[value[_WEIGHT]]
        return {key: _restored(item, weights) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_restored(item, weights) for item in value)
    return value


_warned: set[str] = set()


def _saveable(values: dict[str, Any], what: str) -> dict[str, Any]:
    """Values that a state can hold; warn once about each of the others."""
    return {name: value for name, value in values.items() if _is_saveable(name, value, what)}


def _is_saveable(name: Any, value: Any, what: str) -> bool:
    try:
        split(str(name), value)
    except ValueError as error:
        text = f"{what} {name!r} does not survive the loss of a worker: {error}"
        if text not in _warned:
            _warned.add(text)
            warn(text)
        return False
    return True
