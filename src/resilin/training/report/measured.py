"""`Measured`: what a job learns about its own speed for a scheduler, on each process alone.

Step times by kind of accelerator, the time that changes of its replicas have cost, and the length
of its epochs. It looks at the clock of the host twice in a step, and reads nothing from the device.
Replicas do not exchange it: each step ends on all of them at about the same time. It is part of the
state of the job, so that a restarted job, and whoever becomes replica 0, has it.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from resilin.core import time_share
from resilin.core.answer import Menu, read_menu
from resilin.core.fit import StepTime
from resilin.core.hints_json import Fields
from resilin.core.membership import Membership
from resilin.core.plan import BatchPlan
from resilin.core.profile import StepProfile
from resilin.core.text import clean
from resilin.engine import environment
from resilin.engine.base import Engine

logger = logging.getLogger("resilin")

SHARE = 0.002
"""Part of the time that may be spent on keeping step times."""
ALLOWANCE = 0.02
"""Seconds of it that are free, so that the first steps are all measured."""
CHANGES = 5
"""Changes of the replicas whose median is the usual one."""


class _Last(NamedTuple):
    """The last step that was committed."""

    time: float
    """Unix time of its end, in seconds."""
    generation: int
    """Generation that has committed it."""
    usual: float
    """Usual seconds of a step then."""
    launch: str | None
    """Launch of the job that has committed it; see `Engine.memory_name`."""


class Measured:
    """Measurements of one job on this process.

    Args:
        engine: Who is in the job.
        kind: Kind of accelerator that this process runs on.
    """

    def __init__(self, engine: Engine, kind: str) -> None:
        self.kind = kind
        """Kind of accelerator that this process runs on."""
        self.profiles: dict[str, StepProfile] = {}
        """Step times, by kind of accelerator."""
        self.changes: tuple[float, ...] = ()
        """Seconds without training of the last changes of the replicas, oldest first."""
        self.epochs: tuple[int, float] | None = None
        """Epochs that are complete, and the progress after them; None before the first one."""
        self.menu: Menu = {}
        """Sizes that the scheduler has on offer, as it has said last."""
        self.num_here = 0
        """Steps that were measured since the replicas have changed."""
        self._engine = engine
        self._plan: BatchPlan | None = None
        self._began: float | None = None
        self._last: _Last | None = None
        self._made = time.perf_counter()
        self._spent = 0.0

    @property
    def profile(self) -> StepProfile:
        """Step times on the present kind of accelerator."""
        return self.profiles.get(self.kind, StepProfile())

    @property
    def generation(self) -> int | None:
        """Generation that has committed the last step; None before the first one."""
        return None if self._last is None else self._last.generation

    @property
    def rescale_seconds(self) -> float | None:
        """Usual time without training when replicas change; None before the first change."""
        return statistics.median(self.changes) if self.changes else None

    # Steps ---------------------------------------------------------------------------------

    def step_begins(self, sync_seconds: float | None) -> None:
        """A step begins; if the one before it was committed, it is measured.

        Args:
            sync_seconds: How long the newest step that is known waited for its reduction.
        """
        now, plan = time.perf_counter(), self._plan
        if plan is not None and self._began is not None and self._may_observe(now):
            self._observe(plan, now - self._began, sync_seconds or 0.0)
            self._spent += time.perf_counter() - now
        self._plan, self._began = None, now

    def _may_observe(self, now: float) -> bool:
        """Whether there is time for it: of short steps, some are enough."""
        return time_share.is_within(self._spent, now - self._made, SHARE, free=ALLOWANCE)

    def pause(self) -> None:
        """The time until the next step is not part of the last one."""
        self._plan = self._began = None

    def committed(self, plan: BatchPlan, usual: float) -> None:
        """A step was committed.

        Args:
            plan: How it was split.
            usual: Usual seconds of a step; infinite while unknown.
        """
        me, now, last = self._engine.membership, time.time(), self._last
        self._plan = plan
        if last is not None and last.generation != me.generation:
            self._changed(now, last)
        usual = usual if usual < 1e9 else last.usual if last is not None else 0.0
        self._last = _Last(now, me.generation, usual, self._engine.memory_name)

    def epoch_over(self, epoch: int, progress: float) -> None:
        """An epoch of the data is over, and with it the step times that belong together.

        Args:
            epoch: Epochs that were complete before.
            progress: Progress of the job now.
        """
        self.pause()
        self.epochs = (epoch + 1, progress)

    def _observe(self, plan: BatchPlan, seconds: float, sync: float) -> None:
        me = self._engine.membership
        if plan.replicas != me.num_replicas or seconds <= 0:
            return
        sync = min(max(sync, 0.0), seconds) if me.num_replicas > 1 else 0.0
        step = StepTime(
            # A replica under tensor parallelism may be on several hosts.
            hosts=min(me.num_hosts, me.num_replicas),
            replicas=me.num_replicas,
            local_bsz=plan.global_batch_size / plan.replicas / plan.steps,
            accumulation_steps=plan.steps,
            # As for the autoscaler, all that is not waiting is work on the micro-batches.
            compute_seconds=max(seconds - sync, 1e-9) / plan.steps,
            sync_seconds=sync if me.num_replicas > 1 else None,
        )
        self.profiles[self.kind] = self.profile.observe(step)
        self.num_here += 1

    def _changed(self, now: float, last: _Last) -> None:
        """Takes in that the first step after a change was committed."""
        gap = now - last.time
        launch, reformed = self._engine.memory_name, self._engine.membership.reformed
        if not reformed and (launch is None or launch != last.launch):
            # The job was started again: it may have waited for machines in between.
            gap = min(gap, launch_age(self._engine))
        self.changes = (*self.changes, max(0.0, gap - last.usual))[-CHANGES:]
        self.num_here = 0

    # State ---------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The state, for checkpoints; JSON-compatible."""
        return {
            "profiles": {kind: profile.state() for kind, profile in self.profiles.items()},
            "changes": list(self.changes),
            "epochs": self.epochs and list(self.epochs),
            "menu": {kind: [list(pair) for pair in offers] for kind, offers in self.menu.items()},
            "last": self._last and list(self._last),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`.

        Raises:
            ValueError, TypeError, KeyError: It is not such a state.
        """
        profiles = {
            str(kind): StepProfile.from_state(each) for kind, each in state["profiles"].items()
        }
        changes = tuple(map(float, state["changes"]))
        epochs, last = state["epochs"], state["last"]
        menu = read_menu(Fields(state), "menu")
        self.epochs = None if epochs is None else (int(epochs[0]), float(epochs[1]))
        self._last = None if last is None else _Last(*last)
        self.profiles, self.changes, self.menu, self.num_here = profiles, changes, menu, 0
        self.pause()

    def restore(self, state: Any) -> None:
        """The same for a state that may be of another version: training does not depend on it."""
        try:
            self.load(state)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            logger.warning("measurements for the scheduler start again: %s", clean(str(error), 200))


def plan_of(samples: int, steps: int, membership: Membership) -> BatchPlan:
    """The plan of a step whose loader is not resilin's, as far as it is known.

    Args:
        samples: Samples in the step, over all replicas.
        steps: Micro-batches that each replica ran.
        membership: Who took part in it.
    """
    replicas = membership.num_replicas
    most = max(1, -(-samples // (replicas * max(1, steps))))
    return BatchPlan(samples, replicas, max_local_bsz=most)


def launch_age(engine: Engine) -> float:
    """Seconds since the launcher of this process was started, or the process if it has none."""
    agent = os.environ.get(environment.AGENT, os.getppid())
    pid = agent if engine.restartable else os.getpid()
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, AttributeError, ValueError, IndexError):
        return time.monotonic() - _LOADED  # not Linux: since this process has loaded resilin


_LOADED = time.monotonic()
