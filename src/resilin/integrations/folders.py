"""Files that resilin adds to the checkpoint folders of Accelerate and of the Trainer.

Their folders have the model, its optimizer, the scheduler and the scaler. The added files have the
rest: clocks, the cursor in the data, the noise, and objects that the user has registered.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from resilin.telemetry.extras import load
from resilin.training.bridge.carried import CarriedState

_safetensors: Any = load("safetensors.torch", "hf", "resilin.integrations")

STATE_FILE = "resilin.json"
"""File with the state of the job, without tensors."""
TENSORS_FILE = "resilin.safetensors"
"""File with tensors of objects that the user has registered."""


def save_state(directory: str, *without: str, write: bool) -> None:
    """Add the state of the job to a checkpoint folder. Collective.

    Args:
        directory: The folder, which exists on the process that writes.
        *without: More parts that the framework already saves.
        write: Whether this process writes.
    """
    state = CarriedState(*without).state_dict()
    tensors = state.pop("tensors")
    if not write:
        return
    (Path(directory) / STATE_FILE).write_text(json.dumps(state))
    if tensors:
        contents = {name: tensor.contiguous() for name, tensor in tensors.items()}
        _safetensors.save_file(contents, Path(directory) / TENSORS_FILE)


def read_state(directory: str) -> dict[str, Any]:
    """Read what `save_state` wrote; nothing in it is executed.

    Raises:
        ValueError: The folder has no such file.
    """
    path = Path(directory) / STATE_FILE
    if not path.is_file():
        raise ValueError(
            f"{directory} has no {STATE_FILE}: it was saved without resilin, so the samples "
            "that are done are not known"
        )
    beside = Path(directory) / TENSORS_FILE
    tensors = _safetensors.load_file(beside) if beside.is_file() else {}
    return {**json.loads(path.read_text()), "tensors": tensors}


def load_state(state: dict[str, Any], *without: str) -> None:
    """Make the job resume from what `read_state` returned, at any number of processes."""
    CarriedState(*without).load_state_dict(state)
