"""Frozen parameters, as part of the state of the job.

A loop that unfreezes a layer once, as in `if epoch == 5`, does not repeat it when it resumes in a
later epoch. So the changes of the loop are restored with the rest of the state. If the script
freezes other parameters before wrapping the model than it did when the state was captured, it was
changed on purpose, and nothing is restored.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

logger = logging.getLogger("resilin")


class Frozen:
    """Keeps and restores `requires_grad` of the parameters of a module.

    Args:
        module: The module, with those parameters frozen that the script freezes at its start.
    """

    def __init__(self, module: nn.Module) -> None:
        # Looked up once, not for each copy of the state: a wrapped module gets no other ones.
        self._named = list(module.named_parameters())
        self._at_start = self._now()

    def _now(self) -> list[str]:
        return [name for name, p in self._named if not p.requires_grad]

    def state_dict(self) -> dict[str, Any]:
        """Names of the parameters that are frozen: when the model was wrapped, and now."""
        return {"at_start": self._at_start, "now": self._now()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Repeat the changes of the loop, if the script starts as it did then."""
        if list(state["at_start"]) != self._at_start:
            logger.info(
                "the script freezes %d parameters at its start, and froze %d when the state was "
                "kept: requires_grad stays as the script sets it",
                len(self._at_start),
                len(state["at_start"]),
            )
            return
        frozen = set(state["now"])
        for name, parameter in self._named:
            if parameter.requires_grad == (name in frozen):
                parameter.requires_grad_(name not in frozen)
