"""The end of a loop that is left before it is over: what it has made is saved.

`break` and `return` close the loop over epochs, and the state is saved there. A loop that is left
in another way, as by `sys.exit()`, or of which nobody says when it is over, is saved when the
script has ended, if that has not failed and the model is as the last pass has left it. A step that
is under way is not in it. No process waits for one that has gone on: see `Engine.all_leave`.
"""

from __future__ import annotations

import logging
import os
import sys

import torch
from torch import Tensor

from resilin.compat.python_names import at_end_of_script
from resilin.core.hang import Phase
from resilin.training import hints
from resilin.training.gradient.sharding import is_sharded
from resilin.training.job import Job, current_job
from resilin.training.records import Left

logger = logging.getLogger("resilin")

_registered: list[int] = []
"""Processes that save at the end of their script; a child that was forked does not."""


def finish(job: Job) -> None:
    """Reports that the training is over."""
    hints.finish(job)
    job.engine.pulse.beat(Phase.DONE, job.clock.steps)


def pass_is_over(job: Job) -> None:
    """Remembers what a pass that trains has left, to see later whether that was changed."""
    if job.recovery is not None and job.recovery.listening:
        job.left = Left(job.engine.membership.num_processes, _sample(job))


def leave(job: Job, *, at_end: bool = False) -> None:
    """Saves the state of a loop that was left, if all replicas have left it after this step.

    Args:
        job: The job.
        at_end: Whether the script has ended since, and may have changed the model for its own ends.
    """
    recovery, engine, steps = job.recovery, job.engine, job.clock.steps
    if recovery is None or not recovery.listening or sys.is_finalizing():
        return
    engine.pulse.beat(Phase.BETWEEN, steps)
    if (reason := _unsound(job, at_end=at_end)) is not None:
        logger.warning("the loop was left after step %d, which is not saved: %s", steps, reason)
        return
    if not engine.all_leave(steps):
        logger.warning(
            "replica %d of %d has left the loop after step %d, and the others have not: it saves "
            "nothing. All must leave it after the same step: let one decide, as with "
            "resilin.on_one_replica",
            engine.membership.replica,
            engine.membership.num_replicas,
            steps,
        )
        return
    if job.trained is not None:
        job.trained.end_body()
    if recovery.leave():
        engine.pulse.saved()
    finish(job)


def save_at_end() -> None:
    """Has the state saved when the script ends, where no loop over epochs has done that."""
    if os.getpid() not in _registered:
        _registered.append(os.getpid())
        at_end_of_script(_at_end)


def _at_end() -> None:
    job = current_job()
    _leave_at_end(job)
    # What is still open is closed by the interpreter, when modules are gone.
    job.iterations.end_all()


def _leave_at_end(job: Job) -> None:
    error = getattr(sys, "last_value", None)
    failed = error is not None and not isinstance(error, KeyboardInterrupt)
    if os.getpid() != _registered[-1] or failed or job.engine.stop.insisted:
        return
    # A script that has made no step, or has no loader of resilin, may have done anything else.
    if job.left is None or job.timeline.last_step is None:
        return
    try:
        leave(job, at_end=True)
    except Exception:
        logger.exception("step %d was not saved at the end of the script", job.clock.steps)


def _unsound(job: Job, *, at_end: bool) -> str | None:
    """The reason why the state is not that of the last committed step; None if it is."""
    left, now = job.left, job.engine.membership.num_processes
    if job.torn:
        return "its optimizer was interrupted in the next one"
    if left is None:
        return None
    if left.num_processes != now and not job.engine.live:
        return f"{left.num_processes} processes have made it, and {now} is left of their group"
    if at_end and not _same(left.sample, _sample(job)):
        return "the model was changed since; resilin.remaining_epochs_until saves where it is left"
    return None


def _sample(job: Job) -> list[Tensor]:
    """A few numbers of each tensor of the model, still on their devices: nobody waits for them."""
    if job.trained is None:
        return []
    module = job.model.module
    tensors = [t.detach() for t in (*module.parameters(), *module.buffers()) if t.numel()]
    own = [t.to_local() if is_sharded(t) else t for t in tensors]
    return [t.reshape(-1)[:: max(1, t.numel() // 4)].clone() for t in own]


def _same(before: list[Tensor], now: list[Tensor]) -> bool:
    """Whether these are the same bits, of the same kind and on the same devices."""
    if [(t.dtype, t.device) for t in before] != [(t.dtype, t.device) for t in now]:
        return False
    pairs = zip(before, now, strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
