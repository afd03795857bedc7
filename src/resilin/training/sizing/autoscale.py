"""Choice of the batch size during training, set up by `autoscale_batch_size`.

Each replica reports the duration of its last step in the ballot, and all learn from the means.
Replica 0 asks the tuner periodically, and sends its choice in a later ballot; all replicas apply it
at the same step. Only a sum has to be the same on two machines.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from resilin.core import events
from resilin.core.fit import StepTime
from resilin.core.plan import BatchBounds, BatchPlan
from resilin.core.profile import StepProfile
from resilin.core.tuner import Decision, Tuner
from resilin.training.job import Job
from resilin.training.sizing.memory_limit import Room

logger = logging.getLogger("resilin")

EVERY = 20
"""Steps between two decisions, once there are enough."""
FIRST = 5
"""Steps at a new number of replicas, or a new batch size, before the first decision."""


class Autoscaler:
    """The tuner of one loader, and its measurements."""

    def __init__(
        self, job: Job, reference: int, bounds: BatchBounds, room: Room | None = None
    ) -> None:
        self._job = job
        self._tuner = Tuner(reference=reference, bounds=bounds)
        self._room = room
        self._profile = StepProfile()
        self._wanted = reference
        self._proposed: Decision | None = None
        self._plan: BatchPlan | None = None
        self._ran: tuple[BatchPlan, float] | None = None
        self._began: float | None = None
        self._since = 0
        self._exploring = False
        self._seconds = 0.0
        self._explored = 0.0
        self._num_replicas = 0
        self.decision: Decision | None = None
        """The last decision of replica 0; None on other replicas."""

    @property
    def settings(self) -> tuple[int, BatchBounds]:
        """Its settings: the reference batch, and the bounds of the user."""
        return self._tuner.reference, self._tuner.bounds

    @property
    def reference(self) -> int:
        """The reference batch."""
        return self._tuner.reference

    @property
    def bounds(self) -> BatchBounds:
        """Bounds of the user, limited to what fits into the memory of this replica."""
        bounds = self._tuner.bounds
        if self._room is None:
            return bounds
        lower, upper = bounds.local_bsz_bounds or (0, self._room.limit)
        return replace(bounds, local_bsz_bounds=(lower, max(lower, min(upper, self._room.limit))))

    @property
    def profile(self) -> StepProfile:
        """Measured step times; the same on all replicas."""
        return self._profile

    @property
    def batch_size(self) -> int:
        """The global batch size now, within what the bounds allow for the present replicas."""
        return nearest(self._tuner.bounds, self._wanted, self._job.engine.membership.num_replicas)

    # Times ---------------------------------------------------------------------------------

    def begin_step(self, plan: BatchPlan) -> None:
        """The loader begins a whole step with this plan; the one before it is over."""
        now = time.perf_counter()
        if self._plan is not None and self._began is not None:
            self._ran = (self._plan, now - self._began)
        self._plan, self._began = plan, now

    def pause(self) -> None:
        """The time until the next step, such as an evaluation, is not part of the last step."""
        self._plan = self._began = None

    # The ballot ----------------------------------------------------------------------------

    def votes(self) -> tuple[float, ...]:
        """Times of the last step, and on replica 0 its choice of a batch size."""
        proposed, explores = 0.0, 0.0
        if self._proposed is not None:
            proposed, explores = float(self._proposed.batch_size), float(self._proposed.explores)
        if self._ran is None:
            return proposed, explores, 0.0, 0.0, 0.0
        trained = self._job.trained
        sync = 0.0 if trained is None else trained.gradient.sync.seconds() or 0.0
        return proposed, explores, 1.0, self._ran[1], sync

    def counted(self, votes: tuple[float, ...]) -> None:
        """Takes up a choice of replica 0, and what all replicas have measured."""
        if not votes:
            return
        proposed, explores, num, seconds, sync = votes
        engine = self._job.engine
        if engine.membership.num_replicas != self._num_replicas:
            self._num_replicas, self._since = engine.membership.num_replicas, 0
        if proposed:
            self._wanted, self._exploring = round(proposed), bool(explores)
            self._proposed = None
            self._since = 0
        if num == engine.membership.num_replicas and self._ran is not None:
            self._learn(self._ran[0], seconds / num, sync / num)
        self._ran = None
        self._since += 1
        if engine.membership.replica == 0 and self._since in (FIRST, EVERY):
            self._since = self._since if self._since < EVERY else FIRST
            self._decide()

    def _learn(self, plan: BatchPlan, seconds: float, sync: float) -> None:
        engine = self._job.engine
        self._seconds += seconds
        self._explored += seconds * self._exploring
        # All that is not waiting for the reduction counts as work on the micro-batches: data,
        # optimizer, and what the loop does besides.
        compute = max(seconds - sync, 1e-9) / plan.steps
        self._profile = self._profile.observe(
            StepTime(
                hosts=engine.membership.num_hosts,
                replicas=engine.membership.num_replicas,
                local_bsz=plan.global_batch_size / plan.replicas / plan.steps,
                accumulation_steps=plan.steps,
                compute_seconds=compute,
                sync_seconds=max(sync, 0.0) if plan.replicas > 1 else None,
            )
        )

    def _decide(self) -> None:
        job, engine = self._job, self._job.engine
        before = self.batch_size
        decision = replace(self._tuner, bounds=self.bounds).decide(
            profile=self._profile,
            noise=None if job.trained is None else job.trained.scaling.sample_noise,
            hosts=engine.membership.num_hosts,
            replicas=engine.membership.num_replicas,
            batch_size=before,
            explored=self._explored / self._seconds if self._seconds else 0.0,
        )
        self.decision = decision
        logger.log(
            logging.INFO if decision.batch_size != before else logging.DEBUG,
            "batch size %d -> %d: %s",
            before,
            decision.batch_size,
            decision.reason,
        )
        job.emit(
            events.DecisionEvent(
                **job.stamp(),
                batch_size_before=before,
                batch_size=decision.batch_size,
                reason=decision.reason,
                candidates=tuple(
                    events.Candidate(
                        batch_size=candidate.global_batch_size,
                        local_bsz=candidate.local_bsz,
                        accumulation_steps=candidate.accumulation_steps,
                        goodput=candidate.goodput,
                    )
                    for candidate in decision.candidates
                ),
            )
        )
        self._exploring = self._exploring and decision.explores
        if decision.batch_size != before:
            self._proposed = decision

    # State ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The batch size and the measurements, for checkpoints; the same on all replicas."""
        return {
            "batch_size": self._wanted,
            "profile": self._profile.state(),
            "seconds": self._seconds,
            "explored": self._explored,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self._wanted = int(state["batch_size"])
        self._profile = StepProfile.from_state(state["profile"])
        self._seconds, self._explored = float(state["seconds"]), float(state["explored"])


def nearest(bounds: BatchBounds, batch_size: int, replicas: int) -> int:
    """The global batch size within the bounds that is nearest to this one.

    Raises:
        PlanError: No batch within the bounds can be split over this many replicas.
    """
    bounds.check_replicas(replicas)
    size = batch_size
    if bounds.local_bsz_bounds is not None:
        lower, upper = bounds.local_bsz_bounds
        size = max(size, lower * replicas)
        if not bounds.gradient_accumulation:
            size = min(size, upper * replicas)
    return size if bounds.max_batch_size is None else min(size, bounds.max_batch_size)
