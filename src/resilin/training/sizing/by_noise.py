"""Batch sizes by the noise: a `NoiseRamp` or a `NoiseCap` in a job.

Replica 0 proposes in the ballot what its measurements say, and all replicas take it up at the same
step: nothing has to come out the same on two machines but a sum.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from resilin.core._warn import warn
from resilin.core.events import DecisionEvent
from resilin.core.noise_cap import NoiseCap
from resilin.core.ramp import CONFIDENCE, NoiseRamp
from resilin.core.rules import WeakEvidenceWarning
from resilin.training.gates.optimizer import name_of
from resilin.training.sizing.context import lower_noise_scale, noise_of

if TYPE_CHECKING:
    from resilin.training.job import Job

logger = logging.getLogger("resilin")


class Ramping:
    """The ramp of one loader, and the size that it has reached.

    Args:
        job: The job.
        ramp: The sizes.
    """

    def __init__(self, job: Job, ramp: NoiseRamp) -> None:
        self._job = job
        self._ramp = ramp
        self._reason = ""
        self.batch_size = ramp.sizes[0]
        """The global batch size now; the same on all replicas."""

    def votes(self) -> tuple[float, ...]:
        """The next size on replica 0 if the noise allows it, else 0."""
        if self._job.engine.membership.replica != 0:
            return (0.0,)
        bound = lower_noise_scale(self._job, self._ramp.confidence)
        size = self._ramp.next(self.batch_size, bound)
        if size == self.batch_size:
            return (0.0,)
        self._reason = f"the noise scale is above {bound:.6g} samples, and so above {size}"
        return (float(size),)

    def counted(self, votes: tuple[float, ...]) -> None:
        """Takes up the size that replica 0 proposes, if it does."""
        if not votes[0]:
            return
        before, self.batch_size = self.batch_size, round(votes[0])
        if self._job.engine.membership.replica != 0:
            return
        logger.info("batch size %d -> %d: %s", before, self.batch_size, self._reason)
        told = self._job.events
        told.emit(
            DecisionEvent(
                **told.stamp(),
                batch_size_before=before,
                batch_size=self.batch_size,
                reason=self._reason,
            )
        )

    def state_dict(self) -> dict[str, Any]:
        """The size that was reached, for checkpoints; the same on all replicas."""
        return {"batch_size": self.batch_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with the size that was reached, or the largest one of the list below it."""
        self.batch_size = self._ramp.resume(int(state["batch_size"]))


class Capping:
    """The cap of one loader.

    Args:
        job: The job.
        reference: The reference batch.
    """

    def __init__(self, job: Job, reference: int) -> None:
        self._job = job
        self._cap = NoiseCap(reference)
        self._warned = False

    def limit(self, offered: int) -> int:
        """The batch size for an offered one; the same on all replicas."""
        return self._cap.limit(offered)

    def begin(self) -> None:
        """The loader begins to train.

        Warns:
            WeakEvidenceWarning: The optimizer is not SGD.
        """
        trained = self._job.trained
        optimizers = () if trained is None else trained.optimizers
        if self._warned or all(type(optimizer).__name__ == "SGD" for optimizer in optimizers):
            return
        self._warned = True
        warn(
            f"noise_cap=True with {name_of(optimizers)}: the cap helps SGD over many epochs; with "
            "Adam on a small language model it lost accuracy",
            WeakEvidenceWarning,
        )

    def votes(self) -> tuple[float, ...]:
        """The noise scale to follow from now on, on replica 0 and if it is another one, else 0."""
        noise = noise_of(self._job)
        if noise is None or self._job.engine.membership.replica != 0:
            return (0.0,)
        if self._cap.phi is None and lower_noise_scale(self._job, CONFIDENCE) is None:
            # The first few measurements may say anything.
            return (0.0,)
        after = self._cap.observe(noise.phi)
        return (0.0 if after is self._cap else after.phi or 0.0,)

    def counted(self, votes: tuple[float, ...]) -> None:
        """Takes up the noise scale that replica 0 says, if it does."""
        if votes[0]:
            self._cap = replace(self._cap, phi=votes[0])

    def state_dict(self) -> dict[str, Any]:
        """The noise scale, for checkpoints; the same on all replicas."""
        return {"phi": self._cap.phi}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self._cap = replace(self._cap, phi=state["phi"])
