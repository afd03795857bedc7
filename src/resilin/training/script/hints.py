"""`hints`: what a cluster scheduler needs to know of this job, as JSON."""

from __future__ import annotations

from typing import Any

from resilin.core import _validate
from resilin.core.fit import fit
from resilin.core.hints import JobHints
from resilin.training.job import current_job


def hints(max_replicas: int = 64) -> dict[str, Any]:
    """Speed of this job with other numbers of replicas. Works on any replica.

    `resilin.core.hints.JobHints.from_json` reads it, without torch.

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
    observed = autoscaler.profile.observations()
    clock, engine = job.timeline.clock, job.engine
    told = JobHints(
        hosts=engine.membership.num_hosts,
        replicas=engine.membership.num_replicas,
        reference=autoscaler.reference,
        batch_size=autoscaler.batch_size,
        bounds=autoscaler.bounds,
        steps=clock.steps,
        samples=clock.samples,
        progress=clock.progress,
        total=job.timeline.total_steps,
        noise=None if job.trained is None else job.trained.scaling.sample_noise,
        throughput=fit(observed).model if observed else None,
    )
    return told.with_speedup(max_replicas).to_json()
