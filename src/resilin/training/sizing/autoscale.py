"""Choice of the batch size during training, set up by `autoscale_batch_size`.

Each replica says in the ballot how long its last step took, and all learn from the means. Replica 0
asks the tuner now and then, and proposes its choice in a later ballot; all replicas take it up at
the same step. Nothing has to come out the same on two machines but a sum. What is learned and when
to decide is in `resilin.core.autoscale`; here are the clock, the engine and the log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from resilin.core import events, time_share
from resilin.core.autoscale import FIRST, AutoscaleState, Votes
from resilin.core.plan import BatchBounds, BatchPlan
from resilin.core.profile import StepProfile
from resilin.core.tuner import Decision, Tuner
from resilin.training.sizing.context import noise_of
from resilin.training.sizing.memory_limit import SharedLimit

if TYPE_CHECKING:
    from resilin.training.job import Job

logger = logging.getLogger("resilin")

SHARE = 0.005
"""Part of the time of replica 0 that decisions may take."""
ALLOWANCE = 0.5
"""Seconds that are free, so that short runs decide as often as they can."""


class Autoscaler:
    """The tuner of one loader, and what it has learned.

    Args:
        job: The job.
        reference: The reference batch.
        bounds: What the user allows.
        memory: The largest micro-batch that fits.
    """

    def __init__(self, job: Job, reference: int, bounds: BatchBounds, memory: SharedLimit) -> None:
        self._job = job
        self._tuner = Tuner(reference=reference, bounds=bounds)
        self._memory = memory
        self._state = AutoscaleState(batch_size=reference)
        self._proposed: Decision | None = None
        self._plan: BatchPlan | None = None
        self._ran: tuple[BatchPlan, float] | None = None
        self._began: float | None = None
        self._made = time.perf_counter()
        self._deciding = 0.0
        self.decision: Decision | None = None
        """The last decision of replica 0; None on other replicas."""

    @property
    def settings(self) -> tuple[int, BatchBounds]:
        """The settings it was made with: the reference batch, and the bounds of the user."""
        return self._tuner.reference, self._tuner.bounds

    @property
    def reference(self) -> int:
        """The reference batch."""
        return self._tuner.reference

    @property
    def bounds(self) -> BatchBounds:
        """Bounds that the user allows and that fit into memory."""
        bounds, fits = self._tuner.bounds, self._memory.limit
        if fits is None:
            return bounds
        lower, upper = bounds.local_bsz_bounds or (0, fits)
        return replace(bounds, local_bsz_bounds=(lower, max(lower, min(upper, fits))))

    @property
    def profile(self) -> StepProfile:
        """Step times seen so far; the same on all replicas."""
        return self._state.profile

    @property
    def batch_size(self) -> int:
        """The global batch size now, within what the bounds allow for the present replicas."""
        replicas = self._job.engine.membership.num_replicas
        return self._tuner.bounds.nearest(self._state.batch_size, replicas)

    # Times ---------------------------------------------------------------------------------

    def begin_step(self, plan: BatchPlan) -> None:
        """The loader begins a whole step with this plan; the one before it is over."""
        now = time.perf_counter()
        if self._plan is not None and self._began is not None:
            self._ran = (self._plan, now - self._began)
        self._plan, self._began = plan, now

    def pause(self) -> None:
        """The time until the next step, as of an evaluation, is not a part of the last one."""
        self._plan = self._began = None

    # The ballot ----------------------------------------------------------------------------

    def votes(self) -> tuple[float, ...]:
        """Times of the last step, and on replica 0 the batch size it proposes."""
        trained = self._job.trained
        return self._state.votes(
            self._proposed,
            None if self._ran is None else self._ran[1],
            None if self._ran is None or trained is None else trained.gradient.sync.seconds(),
            leads=self._job.engine.membership.replica == 0,
        )

    def counted(self, votes: tuple[float, ...]) -> None:
        """Takes up a choice of replica 0, and the times that all replicas have measured."""
        sums, engine = Votes(*votes), self._job.engine
        if sums.batch_size:
            self._proposed = None
        self._state = self._state.observe(
            sums,
            ran=None if self._ran is None else self._ran[0],
            hosts=engine.membership.num_hosts,
            replicas=engine.membership.num_replicas,
        )
        self._ran = None
        if engine.membership.replica == 0 and self._state.due and self._may_decide():
            began = time.perf_counter()
            self._decide()
            self._deciding += time.perf_counter() - began

    def _may_decide(self) -> bool:
        """Whether there is time for a decision; there always is after a change."""
        elapsed = time.perf_counter() - self._made
        within = time_share.is_within(self._deciding, elapsed, SHARE, free=ALLOWANCE)
        return within or self._state.since <= FIRST

    def _decide(self) -> None:
        before = self.batch_size
        self._state, decision = self._state.decide(
            replace(self._tuner, bounds=self.bounds),
            noise=noise_of(self._job),
            hosts=self._job.engine.membership.num_hosts,
            batch_size=before,
        )
        self.decision = decision
        changes = decision.batch_size != before
        # `resilin top` and the report show all decisions; on a terminal they would bury the rest.
        logger.debug("batch size %d -> %d: %s", before, decision.batch_size, decision.reason)
        told = self._job.events
        told.emit(
            events.DecisionEvent(
                **told.stamp(),
                batch_size_before=before,
                batch_size=decision.batch_size,
                reason=decision.reason,
                candidates=decision.candidates,
            )
        )
        if changes:
            self._proposed = decision

    # State ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The batch size and what was learned, for checkpoints; the same on all replicas."""
        return self._state.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self._state = AutoscaleState.from_state(state)
