"""The autoscaler as state -> state: what was learned, what was chosen, when to decide again.

All replicas hold the same state. Each step, replicas add up their votes: how long the last step
took, and on the leading replica the batch size that it proposes. `observe` turns the state and the
sums into the next state, on all replicas alike. `decide` asks the tuner, on the leading replica;
its decision takes effect when it comes back in the sums of a later step.

Nothing here reads a clock or knows an engine: times, placement and noise are arguments, so a replay
or a simulator runs the same transitions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from resilin.core.fit import StepTime
from resilin.core.noise import Noise
from resilin.core.plan import BatchPlan
from resilin.core.profile import StepProfile
from resilin.core.time_share import TimeSpent
from resilin.core.tuner import Decision, Tuner

EVERY = 20
"""Steps between two decisions, once there are enough."""
FIRST = 5
"""Steps at a new number of replicas, or a new batch size, before the first decision."""


class Votes(NamedTuple):
    """The numbers that one replica adds to the ballot of a step, or the sums over all replicas."""

    batch_size: float
    """The batch size that is proposed, by the leading replica; 0 if none is."""
    explores: float
    """1 if the steps from now on are a trial, as the leading replica knows."""
    measured: float
    """1 if the replica has measured its last step; the sum counts those that have."""
    seconds: float
    """Duration of that step."""
    sync_seconds: float
    """Seconds that the step waited for the reduction of its gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscaleState:
    """The batch size that was chosen, and what was learned so far; the same on all replicas."""

    batch_size: int
    """Global batch size that was chosen. Bounds may not allow it for the present replicas."""
    profile: StepProfile = field(default_factory=StepProfile)
    """Step times."""
    trials: TimeSpent = field(default_factory=TimeSpent)
    """Time that went into trials, of the time that was measured."""
    exploring: bool = False
    """Whether the present steps are a trial."""
    replicas: int = 0
    """Replicas in the last step; 0 before the first one."""
    since: int = 0
    """Steps since the batch size or the replicas have changed, or since a decision."""

    def votes(
        self, proposed: Decision | None, ran: float | None, sync_seconds: float | None, leads: bool
    ) -> Votes:
        """Numbers of one replica in the ballot of a step.

        Args:
            proposed: The decision that is to take effect; None if there is none.
            ran: Duration of the last step; None if it was not measured.
            sync_seconds: How long that step waited for the reduction; None if unknown.
            leads: Whether this is the leading replica.
        """
        explores = self.exploring if proposed is None else proposed.explores
        return Votes(
            batch_size=0.0 if proposed is None else float(proposed.batch_size),
            explores=float(leads and explores),
            measured=float(ran is not None),
            seconds=ran or 0.0,
            sync_seconds=0.0 if ran is None else sync_seconds or 0.0,
        )

    def observe(
        self, sums: Votes, *, ran: BatchPlan | None, hosts: int, replicas: int
    ) -> AutoscaleState:
        """The state after a step whose ballot had these sums.

        Args:
            sums: Votes of all replicas, added up.
            ran: The plan of the step that was measured; None if this replica measured none.
            hosts: Machines that the replicas are on.
            replicas: Data-parallel members.
        """
        # A decision was due at `EVERY`; the next one is that many steps later.
        since = 0 if replicas != self.replicas else self.since if self.since < EVERY else FIRST
        chosen = round(sums.batch_size) if sums.batch_size else self.batch_size
        profile, trials, exploring = self.profile, self.trials, bool(sums.explores)
        if ran is not None and sums.measured == replicas and ran.replicas == replicas:
            seconds = sums.seconds / replicas
            profile = self._learn(ran, seconds, sums.sync_seconds / replicas, hosts)
            trials = trials.add(seconds, spent=seconds * exploring)
        return AutoscaleState(
            batch_size=chosen,
            profile=profile,
            exploring=exploring,
            replicas=replicas,
            trials=trials,
            since=1 if sums.batch_size else since + 1,
        )

    def _learn(self, plan: BatchPlan, seconds: float, sync: float, hosts: int) -> StepProfile:
        # All that is not waiting for the reduction counts as work on the micro-batches: data,
        # optimizer, and what the loop does besides.
        compute = max(seconds - sync, 1e-9) / plan.steps
        time = StepTime(
            hosts=hosts,
            replicas=plan.replicas,
            local_bsz=plan.global_batch_size / plan.replicas / plan.steps,
            accumulation_steps=plan.steps,
            compute_seconds=compute,
            sync_seconds=max(sync, 0.0) if plan.replicas > 1 else None,
        )
        return self.profile.observe(time)

    @property
    def due(self) -> bool:
        """Whether the leading replica decides after this step."""
        return self.since in (FIRST, EVERY)

    def decide(
        self, tuner: Tuner, *, noise: Noise | None, hosts: int, batch_size: int
    ) -> tuple[AutoscaleState, Decision]:
        """Asks the tuner for the next batch size, on the leading replica.

        The others learn from the votes of the next step whether a trial is over.

        Args:
            tuner: Settings, and bounds as they are now.
            noise: Noise of the gradient now; None while it is unknown.
            hosts: Machines that the replicas are on.
            batch_size: The global batch size that is run now.
        """
        decision = tuner.decide(
            profile=self.profile,
            noise=noise,
            hosts=hosts,
            replicas=self.replicas,
            batch_size=batch_size,
            explored=self.trials.share,
        )
        return replace(self, exploring=self.exploring and decision.explores), decision

    def state(self) -> dict[str, Any]:
        """The part that survives a restart, for a checkpoint; JSON-compatible."""
        return {
            "batch_size": self.batch_size,
            "profile": self.profile.state(),
            "seconds": self.trials.seconds,
            "explored": self.trials.spent,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> AutoscaleState:
        """Restores what `state` returned.

        Raises:
            ValueError: A number in it cannot be a measured step.
        """
        return cls(
            batch_size=int(state["batch_size"]),
            profile=StepProfile.from_state(state["profile"]),
            trials=TimeSpent(seconds=float(state["seconds"]), spent=float(state["explored"])),
        )
