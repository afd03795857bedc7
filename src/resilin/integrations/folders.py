"""What resilin adds to the checkpoint folders of Accelerate and of the Trainer.

Their folders have the model, its optimizer, the scheduler and the scaler. Beside these goes what
they cannot know: clocks, the cursor in the data, the noise, and what the user has registered.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from resilin.telemetry.extras import load
from resilin.training.bridge.carried import CarriedState

_safetensors: Any = load("safetensors.torch", "hf", "resilin.integrations")

STATE_FILE = "resilin.json"
"""What resilin adds to a checkpoint folder of Accelerate or of the Trainer."""
TENSORS_FILE = "resilin.safetensors"
"""The same for tensors, of objects that the user has registered."""
FRAMEWORK = ("model", "optimizer", "scheduler", "scaler")
"""What these folders have anyway."""


def save_state(directory: str, *without: str, write: bool) -> None:
    """Adds to a checkpoint folder what it has to carry. Collective.

    Args:
        directory: The folder, which exists where it is written to.
        *without: More names that the framework saves by itself.
        write: Whether this process writes.
    """
    state = CarriedState({*FRAMEWORK, *without}).state_dict()
    tensors = state.pop("tensors")
    if not write:
        return
    (Path(directory) / STATE_FILE).write_text(json.dumps(state))
    if tensors:
        contents = {name: tensor.contiguous() for name, tensor in tensors.items()}
        _safetensors.save_file(contents, Path(directory) / TENSORS_FILE)


def read_state(directory: str) -> dict[str, Any]:
    """Reads what `save_state` wrote; nothing in it is executed.

    Raises:
        ValueError: The folder has none.
    """
    path = Path(directory) / STATE_FILE
    if not path.is_file():
        raise ValueError(
            f"{directory} has no {STATE_FILE}: it was saved without resilin, and which samples "
            "are done is not known"
        )
    beside = Path(directory) / TENSORS_FILE
    tensors = _safetensors.load_file(beside) if beside.is_file() else {}
    return {**json.loads(path.read_text()), "tensors": tensors}


def load_state(state: dict[str, Any], *without: str) -> None:
    """Makes the job go on from what `read_state` returned, at any number of processes."""
    CarriedState({*FRAMEWORK, *without}).load_state_dict(state)
