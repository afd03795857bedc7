"""Who this process is, as the job under test sees it."""

from resilin.training.job import current_job


def num_replicas() -> int:
    return current_job().engine.num_replicas


def replica() -> int:
    return current_job().engine.replica
