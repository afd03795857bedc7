"""Ray Train: the same five lines inside `train_loop_per_worker`.

The loop is the user's: `resilin.init_process_group()` finds the process group of `TorchTrainer`,
and `resilin.engine.ray` knows the workers. This module adds two functions: `storage` keeps
checkpoints of resilin where Ray keeps the run, and `report` reports metrics of resilin to Ray.
A third one, `run_live`, runs a function on actors of Ray without Ray Train, and restarts nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from resilin.compat import ray_names
from resilin.integrations.ray_live import run_live
from resilin.telemetry.extras import load
from resilin.telemetry.tensorboard import PREFIX
from resilin.training.bridge.readout import read_out

__all__ = ["report", "run_live", "storage"]

_train: Any = load("ray.train", "ray", "resilin.integrations.ray")
ray_names.check()

FOLDER = "resilin"
"""Name of the directory of resilin's checkpoints, in the directory of the run."""
_SCHEMES = {"local": "", "s3": "s3://", "gcs": "gs://"}
"""Scheme of fsspec for each file system of pyarrow whose path is all that it takes."""


def storage() -> str:
    """Directory in which Ray keeps this run, for `resilin.checkpoint_to`.

    It is in `storage_path` of the `RunConfig`, under its `name`. A later `fit` with the same two
    resumes from there, at any number of workers.

    Returns:
        A path or an fsspec URL that all workers reach.

    Raises:
        ValueError: This process is not a worker of Ray Train, or its storage has no URL.
    """
    if not ray_names.in_worker():
        raise ValueError(
            "storage() was called outside of a worker of Ray Train: call it in "
            "train_loop_per_worker"
        )
    system, path = ray_names.storage_of(_train.get_context())
    if system not in _SCHEMES:
        raise ValueError(
            f"storage_filesystem ({system}) must be one of {', '.join(_SCHEMES)}: give "
            "resilin.checkpoint_to a path or an fsspec URL that all workers reach"
        )
    return f"{_SCHEMES[system]}{path}/{FOLDER}"


def report(
    metrics: Mapping[str, Any] | None = None, *, prefix: str = PREFIX, **kwargs: Any
) -> None:
    """Call `ray.train.report` with the metrics of the last step added. Collective, as Ray's is.

    Ray accepts one report every 2 s, when it polls the workers: report epochs, not steps.

    Args:
        metrics: Metrics of your own.
        prefix: Prefix of resilin's metrics, which are those of
            `resilin.training.bridge.readout.read_out`.
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
