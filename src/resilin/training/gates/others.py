"""Optimizers that a job does not know: refused, or warned of, when they step in its loop.

A job has one model and its optimizers: they have its clock, its gradient and its state. Another
optimizer of the same weights would step in the middle of an accumulation, with a part of the
gradient, and lose its state in a restart. Nothing else shows that it exists, so each step of any
optimizer of torch is looked at, until `remove`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from resilin.core._warn import warn
from resilin.training.gates.optimizer import Gate, name_of

if TYPE_CHECKING:
    from resilin.training.data.iteration import Iterations

RECIPE = "the recipe 'Players that take turns' (docs/recipes/two-optimizers.md)"
"""Name of the page that says what to do instead."""
SEVERAL = "the recipe 'Muon and AdamW' (docs/recipes/muon-and-adamw.md)"
"""Name of the page about optimizers that step on one backward pass."""

SECOND_MODEL = (
    "the job has an AdaptiveDataParallel already, and one is all it can train: for players that "
    f"take turns (a GAN, an actor and a critic), put their modules into one nn.Module, as {RECIPE} "
    "shows. To train another model, call release() on the first one, or resilin.reset_job() to "
    "begin another job"
)


class OtherOptimizers:
    """Looks at the steps of all optimizers but those of the job, until `remove`.

    Args:
        gates: The gates of the optimizers that the job knows. What steps within the step of one is
            a part of it, as the base optimizer of a wrapper is.
        containers: Optimizers that only step these.
        parameters: The parameters of the model.
        keeps: Whether the job keeps the state of an optimizer, or keeps no state at all.
        iterations: The micro-batch that the loop body works on.
    """

    def __init__(
        self,
        gates: Sequence[Gate],
        containers: Sequence[Optimizer],
        parameters: Iterable[Tensor],
        keeps: Callable[[Optimizer], bool],
        iterations: Iterations,
    ) -> None:
        self._gates = gates
        self._own = {id(gate.optimizer) for gate in gates} | set(map(id, containers))
        self._parameters = set(parameters)
        self._keeps = keeps
        self._iterations = iterations
        self._known: WeakSet[Optimizer] = WeakSet()
        self._handle = register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) in self._own or optimizer in self._known:
            return
        for gate in self._gates:
            if gate.steps:
                _check_part(gate.optimizer, optimizer)
                return
        kind = type(optimizer).__name__
        for group in optimizer.param_groups:
            if not self._parameters.isdisjoint(group["params"]):
                raise RuntimeError(
                    f"another optimizer ({kind}) steps parameters of the model that is trained "
                    f"with {name_of(gate.optimizer for gate in self._gates)}: it would not wait "
                    "for a gradient that is accumulated, and its state would not be kept. Pass "
                    f"both as a list, AdaptiveDataParallel(model, [optimizer, another]): {SEVERAL}"
                )
        micro = self._iterations.micro_batch
        if micro is None or not micro.training:
            return
        self._known.add(optimizer)
        if not self._keeps(optimizer):
            warn(
                f"another optimizer ({kind}) steps in the loop that trains, and the job does not "
                "keep its state: it is lost when the job resumes, and it steps with each "
                "micro-batch. Register it and what it trains with resilin.register(), and step it "
                f"under `if model.stepped:`, or follow {RECIPE}"
            )

    def remove(self) -> None:
        """Stop looking."""
        self._handle.remove()


def _check_part(whole: Optimizer, part: Optimizer) -> None:
    """Refuses an optimizer that steps others and does not keep their state, at the second step."""
    if type(whole).state_dict is not Optimizer.state_dict:
        return
    if any(parameter not in whole.state for parameter in part.state):
        outer, inner = type(whole).__name__, type(part).__name__
        raise RuntimeError(
            f"{outer} steps {inner}, whose state is not in the state_dict() of {outer}: a restart "
            f"would lose it. Pass the optimizers that it steps as a list, as {SEVERAL} shows, or "
            f"give {outer} a state_dict() and a load_state_dict() that have them all"
        )
