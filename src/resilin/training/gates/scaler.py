"""The gate around a GradScaler: unscaling and updating wait for the last micro-batch too."""

from __future__ import annotations

from types import FrameType
from typing import TYPE_CHECKING, Any

from torch.amp import GradScaler
from torch.optim import Optimizer

from resilin.compat.python_names import frame_of_caller
from resilin.compat.torch_names import scale_of
from resilin.engine.devices import Fetched
from resilin.training.gates.patch import Patch

if TYPE_CHECKING:
    from resilin.training.step import Steps

_FRAMES = 8
"""Most frames between `GradScaler.step` and whoever asks: wrappers of schedulers and of ours."""


def calling_scaler() -> bool:
    """Whether an enabled GradScaler is stepping the optimizer right now.

    Unscaling leaves no other trace that could be checked: it changes gradients without raising
    their version.
    """
    frame: FrameType | None = frame_of_caller()
    for _ in range(_FRAMES):
        if frame is None:
            return False
        if frame.f_code is GradScaler.step.__code__:
            return bool(frame.f_locals["self"].is_enabled())
        frame = frame.f_back
    return False


class ScalerGate:
    """Holds back `unscale_`, `step` and `update` of a scaler while a step is accumulated.

    A scaler of several optimizers is held back for the gated ones only, except for `update`,
    which concerns them all.
    """

    def __init__(self, scaler: GradScaler, steps: Steps) -> None:
        self.scaler = scaler
        own = {name: getattr(scaler, name) for name in ("unscale_", "step", "update")}
        waited = False

        def number_of(target: Optimizer) -> int | None:
            return next((n for n, each in enumerate(steps.optimizers) if each is target), None)

        def unscale_(target: Optimizer) -> None:
            number = number_of(target)
            if number is None:
                own["unscale_"](target)
            elif not steps.step_waits(number):
                with steps.gradient.changing():
                    own["unscale_"](target)

        def step(target: Optimizer, *args: Any, **kwargs: Any) -> Any:
            nonlocal waited
            number = number_of(target)
            if number is None:
                return own["step"](target, *args, **kwargs)
            waited = steps.step_waits(number)
            if waited:
                return None
            result = own["step"](target, *args, **kwargs)
            # If the gradient was not finite, the optimizer was never called.
            steps.skip_turn(number)
            return result

        def update(*args: Any, **kwargs: Any) -> None:
            if steps.step.failed:
                # It is issued again: neither its scale nor what it has unscaled counts.
                own["update"](scaler.get_scale())
            elif not waited:
                own["update"](*args, **kwargs)

        self._patch = Patch(scaler, {"unscale_": unscale_, "step": step, "update": update})

    def scale(self) -> Fetched | None:
        """The factor on all gradients until they are unscaled; None for 1.

        `get_scale` would make the host wait for the device.
        """
        scale = scale_of(self.scaler) if self.scaler.is_enabled() else None
        # A copy: the scaler updates its own in place.
        return None if scale is None else Fetched(scale.detach().reshape(1).clone())

    def remove(self) -> None:
        """Gives the scaler its own methods back."""
        self._patch.remove()
