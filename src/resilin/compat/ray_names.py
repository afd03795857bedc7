"""Ray: the settings of a worker of Ray Train, the storage of its run, and the use of nodes.

Only the functions that ask about nodes import Ray. A process is a worker of Ray Train only if Ray
itself has loaded the module of `CONTEXT`.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from resilin.compat.names import Package

RAY = Package("ray", tested=("2.52.1", "2.60.0"))
"""Ray, and the names of it that resilin uses."""

CONTEXT = "ray.train.v2._internal.execution.context"
"""Module of Ray that holds the settings of this worker. Only Ray itself imports it."""
_HERE = RAY.name(f"{CONTEXT}:_train_context", "recognises a worker of Ray Train")
_GET = RAY.name(f"{CONTEXT}:get_train_context", "knows which worker it is")
_RANK = RAY.name(f"{CONTEXT}:TrainContext.get_world_rank", "knows which worker it is")
_SIZE = RAY.name(f"{CONTEXT}:TrainContext.get_world_size", "knows how many workers there are")
_RUN = RAY.name(
    f"{CONTEXT}:TrainContext.train_run_context", "names the copies in memory", instance=True
)
_STORAGE = RAY.name(
    "ray.train:TrainContext.get_storage", "keeps checkpoints where Ray keeps the run"
)
_STORAGE_CONTEXT = "ray.train.v2._internal.execution.storage:StorageContext"
_FILESYSTEM = RAY.name(
    f"{_STORAGE_CONTEXT}.storage_filesystem", "makes a URL of where the run is", instance=True
)
_PATH = RAY.name(f"{_STORAGE_CONTEXT}.experiment_fs_path", "makes a URL of where the run is")
_AVAILABLE = RAY.name(
    "ray._private.state:available_resources_per_node", "subtracts what others use of a node"
)
_STATE = RAY.name("ray._private.state:state", "asks which nodes are drained")
_DRAINING = RAY.name(
    "ray._private.state:GlobalState.get_draining_nodes", "asks which nodes are drained"
)


class Worker(NamedTuple):
    """Settings of a worker of Ray Train."""

    rank: int
    """Its world rank."""
    size: int
    """Workers in the group."""
    run: str
    """Id of this call of `fit`."""


def check() -> None:
    """Check that the installed Ray has all names; load it.

    Raises:
        MissingNameError: One is gone.
    """
    for name in RAY.names:
        name.find()


def in_worker() -> bool:
    """Whether this process is a worker of Ray Train.

    Raises:
        MissingNameError: Ray keeps it elsewhere.
    """
    module: Any = sys.modules.get(CONTEXT)
    return module is not None and _HERE.of(module) is not None


def this_worker() -> Worker:
    """This worker of Ray Train.

    Raises:
        MissingNameError: Ray keeps it elsewhere.
    """
    context = _GET.of(sys.modules[CONTEXT])()
    run = _RUN.of(context).run_id
    return Worker(int(_RANK.of(context)()), int(_SIZE.of(context)()), str(run))


def storage_of(context: Any) -> tuple[str, str]:
    """Storage of a run of Ray.

    Args:
        context: The return value of `ray.train.get_context()`.

    Returns:
        The kind of the file system, in the words of pyarrow, and the path of the run in it.
    """
    storage = _STORAGE.of(context)()
    return str(_FILESYSTEM.of(storage).type_name), str(_PATH.of(storage))


def available_resources() -> dict[str, dict[str, float]]:
    """Resources of each node that nobody uses, by the id of the node; Ray must be connected.

    Raises:
        MissingNameError: Ray keeps it elsewhere.
    """
    found: dict[str, dict[str, float]] = _AVAILABLE.find()()
    return found


def draining_nodes() -> dict[str, float]:
    """Nodes that are drained, by id, with the time at which each leaves; 0 for at once.

    Raises:
        MissingNameError: Ray keeps it elsewhere.
    """
    found: dict[str, int] = _DRAINING.of(_STATE.find())()
    return {node: milliseconds / 1000 for node, milliseconds in found.items()}
