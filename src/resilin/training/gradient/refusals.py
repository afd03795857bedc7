"""Sentences with which the gradient of a step refuses what a loop does."""

from __future__ import annotations

BY_HAND = (
    "optimizer.step() was not called between two micro-batches of a step: accumulation by hand? "
    "The model accumulates them, and divides by their number itself: a loss that the loop divides, "
    "too, is divided twice. Take the division out, and call optimizer.step() after each backward "
    "pass, which waits where it has to"
)
CHANGED = (
    "the gradient was changed after its backward pass and before optimizer.step(); where a step is "
    "accumulated that would be in the middle of it, so it is refused everywhere: call "
    "model.clip_grad_norm_() instead of torch.nn.utils.clip_grad_norm_(), and make other changes "
    "within `with model.change_gradient() as complete:`"
)
CHANGED_BETWEEN = (
    "the gradient was changed in the middle of an accumulation, before the other micro-batches of "
    "the step were added; call model.clip_grad_norm_() instead of "
    "torch.nn.utils.clip_grad_norm_(), and zero_grad() of the optimizer or of the whole model, "
    "which wait"
)
FAILED = (
    "a backward pass in the middle of a step failed, and a part of its gradient is in .grad; the "
    "step cannot be completed: let the error end the loop, or surround the loop's body with "
    "loader.retry_smaller() if memory ran out"
)
WEIGHTLESS = "the weights of a step's micro-batches add up to 0"
LEFT = (
    "a step was begun and left without optimizer.step(); its gradient is dropped, and its samples "
    "do not count"
)
NOT_ZEROED = (
    "a step begins on the gradient of the step before, which optimizer.zero_grad() has not removed "
    "since optimizer.step(): it would be added to the new one; call zero_grad() once per step"
)
EVALUATION = (
    "the model trains on a batch of an evaluation: when this loop over the loader began, "
    "model.training was False or gradients were disabled, and now neither is so. Call "
    "model.train() before the loop that trains, not in it"
)
LEFT_BY_ANOTHER = (
    "another replica left the last micro-batch of a step without a backward pass: no replica makes "
    "this step, and its samples do not count"
)
NO_FORWARD = (
    "this process has left a micro-batch without a forward pass: with a sharded model each pass is "
    "collective, and the others would wait for it; call the model on every micro-batch, also where "
    "its loss is not used"
)
NOT_REDUCED = (
    "a backward pass ended, and no sharded gradient was reduced: set_requires_gradient_sync(False) "
    "between forward and backward cannot be honoured, because micro-batches are weighed as they "
    "are reduced; leave it out"
)
BARE = (
    "a backward pass reached a sharded module that was not called through AdaptiveDataParallel in "
    "training mode: the weight of its gradient is unknown; call the model itself, after "
    "model.train()"
)


def not_reduced_by_ddp(missing: str) -> str:
    """The refusal of a step whose last backward pass DDP did not reduce.

    Args:
        missing: Words about the parameters that have no gradient.
    """
    return (
        "the backward pass of a step's last micro-batch has ended, and not all trained parameters "
        f"had a gradient in it ({missing}): with several replicas, pass "
        "find_unused_parameters=True to AdaptiveDataParallel where a loss does not use all of "
        "them. torch.autograd.grad() through the model counts as a backward pass: compute a "
        "gradient penalty with model.module"
    )


def not_its_turn(optimizer: str) -> str:
    """The refusal of an optimizer that steps in the turn of others."""
    return (
        f"{optimizer} steps in a step that model.turn() has given to other optimizers: give it the "
        "turn, or leave out its step()"
    )


def not_all_stepped(*optimizers: str) -> str:
    """The warning of a step that was made with some of the optimizers."""
    return (
        f"a step is over, and {', '.join(optimizers)} has not stepped in it: its gradient is "
        "dropped, and the step counts. Where that is meant, say in each step whose turn it is: "
        "model.turn(optimizer)"
    )


def unused_at_last(name: str) -> str:
    """The refusal of a step under HSDP whose last micro-batch leaves out a unit.

    Args:
        name: Class of the module.
    """
    return (
        f"{name} had a gradient in earlier micro-batches of the step and has none in the last one: "
        "HSDP adds up its copies with the last one; use every sharded module in each micro-batch, "
        "or call set_reduce_scatter_unused_params(True) on the sharded model"
    )


def no_backward(returned: str) -> str:
    """The refusal of a step without a gradient.

    Args:
        returned: Type of the model's output, if no tensor in it requires a gradient.
    """
    text = (
        "optimizer.step() came without a backward pass through the AdaptiveDataParallel model in "
        "training mode; is the bare module being called, or model.eval() on?"
    )
    if returned:
        text += (
            f" The model returned an object of type {returned}, in which no tensor that requires a "
            "gradient was found: tensors are looked for in containers and dataclasses"
        )
    return text
