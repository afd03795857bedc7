"""The numbers of the last step, for the logs of whatever framework owns the loop."""

from __future__ import annotations

import math

from resilin.telemetry.tensorboard import PREFIX
from resilin.training.bridge.home import Home


def read_out(prefix: str = PREFIX) -> dict[str, float]:
    """Numbers of the last step; names and meanings are those of `resilin.telemetry`.

    Reading it costs nothing and asks no other replica; all replicas read the same.

    Args:
        prefix: What the names begin with.

    Returns:
        `replicas`, `samples`, `progress`, `scale`, `gain` and `lr_factor`; `batch_size` and
        `accumulation_steps` once this process has made a step, and `noise_scale` once noise was
        measured. Empty before the first step of the job.
    """
    job = Home().job
    trained = job.trained
    if trained is None or not job.clock.steps:
        return {}
    scaled = trained.scaling.last
    values: dict[str, float] = {
        "replicas": job.engine.membership.num_replicas,
        "samples": job.clock.samples,
        "progress": job.clock.progress,
        "scale": scaled.scale,
        "gain": scaled.gain,
        "lr_factor": scaled.factors[0].lr,
    }
    if job.timeline.last_step is not None:
        values["batch_size"], values["accumulation_steps"] = job.timeline.last_step
    noise = trained.scaling.sample_noise
    if noise is not None:
        values["noise_scale"] = noise.phi
    return {f"{prefix}{name}": float(v) for name, v in values.items() if math.isfinite(v)}
