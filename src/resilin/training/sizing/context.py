"""What sizing asks of the model that its job trains, and the protocols of its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from resilin.core.noise import Noise
from resilin.core.ramp import lower_phi
from resilin.training.ballot import Voter
from resilin.training.state.registry import Stateful

if TYPE_CHECKING:
    from resilin.training.job import Job


def tokens_per_step(job: Job) -> float | None:
    """Tokens in one reference step, if the model was told."""
    return None if job.trained is None else job.trained.scaling.reference.tokens_per_step


def noise_of(job: Job) -> Noise | None:
    """The noise of the gradient, per sample; None until it was measured."""
    return None if job.trained is None else job.trained.scaling.sample_noise


def lower_noise_scale(job: Job, confidence: float) -> float | None:
    """The lower bound of the noise scale at this confidence, in samples, if it is known."""
    if job.trained is None:
        return None
    scaling = job.trained.scaling
    phi = lower_phi(scaling.estimates.averages.groups or (), confidence)
    return None if phi is None else phi / scaling.reference.per_sample()


class SizePart(Voter, Stateful, Protocol):
    """A part of the batch sizes of a loader that votes and has state."""


class KeptSizes(Protocol):
    """The part of a loader's batch sizes that survives a new loader, or a restart of the job."""

    chosen: int | str | None
    """The batch size that the loop has set, or in words what else it has set."""
    sizes: object
    """The `BatchSizes` of the loader that has trained before."""
