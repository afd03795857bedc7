"""Ray Train: the same five lines inside `train_loop_per_worker`.

Nothing of the loop is Ray's or resilin's: `resilin.init_process_group()` finds the group that
`TorchTrainer` has made, and `resilin.engine.ray` knows the workers. What is here connects the rest:
where Ray keeps the run is where resilin keeps its checkpoints, and what resilin knows of a step is
in the metrics that Ray is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from resilin.engine.ray import in_worker
from resilin.telemetry.extras import load
from resilin.telemetry.tensorboard import PREFIX
from resilin.training.report.readout import read_out

__all__ = ["report", "storage"]

_train: Any = load("ray.train", "ray", "resilin.integrations.ray")

FOLDER = "resilin"
"""What resilin's checkpoints are called in the directory of the run."""
_SCHEMES = {"local": "", "s3": "s3://", "gcs": "gs://"}
"""How fsspec calls what pyarrow has, by pyarrow's name, where the path says all there is to say."""


def storage() -> str:
    """Where Ray keeps this run, for `resilin.checkpoint_to`.

    It lies in `storage_path` of the `RunConfig`, under its `name`. A later `fit` with both of them
    goes on from there, at any number of workers.

    Returns:
        A path or an fsspec URL that all workers reach.

    Raises:
        ValueError: This is no worker of Ray Train, or its storage is of a kind that has no URL.
    """
    if not in_worker():
        raise ValueError(
            "storage() was called outside of a worker of Ray Train: call it in "
            "train_loop_per_worker"
        )
    context = _train.get_context().get_storage()
    system = context.storage_filesystem
    if system.type_name not in _SCHEMES:
        raise ValueError(
            f"storage_filesystem ({system.type_name}) must be one of {', '.join(_SCHEMES)}: give "
            "resilin.checkpoint_to a path or an fsspec URL that all workers reach"
        )
    return f"{_SCHEMES[system.type_name]}{context.experiment_fs_path}/{FOLDER}"


def report(
    metrics: Mapping[str, Any] | None = None, *, prefix: str = PREFIX, **kwargs: Any
) -> None:
    """`ray.train.report` with what resilin knows of the last step. Collective, as Ray's is.

    Ray takes one report in each of its looks at the workers, every 2 s: report epochs, not steps.

    Args:
        metrics: Metrics of your own.
        prefix: What the names of resilin's begin with; they are those of
            `resilin.training.report.readout.read_out`.
        **kwargs: More arguments of `ray.train.report`, such as `checkpoint`.

    Raises:
        ValueError: One of your metrics has the name of one of resilin's.
    """
    known = read_out(prefix)
    own = dict(metrics or {})
    if twice := sorted(known.keys() & own.keys()):
        raise ValueError(
            f"metrics has {', '.join(twice)}, which resilin reports as well: take another name, or "
            f"another prefix than {prefix!r}"
        )
    _train.report({**known, **own}, **kwargs)
