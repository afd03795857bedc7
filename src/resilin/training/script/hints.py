"""`hints`: what a cluster scheduler needs to know of this job, as JSON.

A scheduler that divides machines among jobs asks each of them what it would make of more, or of
fewer. The answer is small and complete: with the fitted numbers, `resilin.core.goodput` computes it
for any placement, without torch and without this job.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from resilin.core import _validate
from resilin.core.fit import fit
from resilin.core.goodput import best_goodput
from resilin.core.plan import BatchBounds
from resilin.core.throughput import ThroughputModel
from resilin.training.job import current_job

VERSION = 1
"""Version of the form. Fields may be added; a change that misleads a reader raises it."""


def hints(max_replicas: int = 64) -> dict[str, Any]:
    """Speed of this job with other numbers of replicas. Works on any replica.

    Args:
        max_replicas: Largest number of replicas in the speedup, at powers of two.

    Returns:
        A dict that `json.dumps` takes. `version`; `placement` (hosts, replicas); `batch`
        (reference, current, max_batch_size, local_bsz_bounds, gradient_accumulation); `progress`
        (steps, samples, progress in reference steps, total if known); `noise` (sqr_norm, and
        trace per sample) or None; `throughput` (the fields of
        `resilin.core.throughput.ThroughputModel`) or None while no step was measured; `speedup`
        (replicas, and best goodput over that of one replica on one host; 0 where the bounds
        allow no plan) or None without a throughput.

    Raises:
        ValueError: No loader of the job chooses its batch size; `autoscale_batch_size` makes one.
    """
    _validate.whole("max_replicas", max_replicas, at_least=1)
    job = current_job()
    autoscaler = job.autoscaler
    if autoscaler is None:
        raise ValueError(
            "there is nothing to tell before an AdaptiveDataLoader with autoscale_batch_size() has "
            "begun to train"
        )
    noise = None if job.trained is None else job.trained.scaling.sample_noise
    bounds: BatchBounds = autoscaler.bounds
    observed = autoscaler.profile.observations()
    model = fit(observed).model if observed else None
    return {
        "version": VERSION,
        "placement": {
            "hosts": job.engine.membership.num_hosts,
            "replicas": job.engine.membership.num_replicas,
        },
        "batch": {
            "reference": autoscaler.reference,
            "current": autoscaler.batch_size,
            "max_batch_size": bounds.max_batch_size,
            "local_bsz_bounds": bounds.local_bsz_bounds and list(bounds.local_bsz_bounds),
            "gradient_accumulation": bounds.gradient_accumulation,
        },
        "progress": {
            "steps": job.clock.steps,
            "samples": job.clock.samples,
            "progress": job.clock.progress,
            "total": job.total_steps,
        },
        "noise": None if noise is None else asdict(noise),
        "throughput": None if model is None else asdict(model),
        "speedup": None if model is None else _speedup(model, noise, autoscaler, max_replicas),
    }


def _speedup(
    model: ThroughputModel, noise: Any, autoscaler: Any, max_replicas: int
) -> dict[str, list[float]]:
    job = current_job()
    replicas = 2 ** np.arange(int(np.log2(max_replicas)) + 1)
    # Hosts as full as they are now.
    per_host = -(-job.engine.membership.num_replicas // job.engine.membership.num_hosts)
    hosts = -(-replicas // per_host)
    values = best_goodput(model, noise, autoscaler.reference, autoscaler.bounds, hosts, replicas)
    base = values[0] if values[0] > 0 else 1.0
    return {"replicas": replicas.tolist(), "speedup": (values / base).tolist()}
