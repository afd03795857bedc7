"""torchrun, and every launcher that sets its environment variables.

A change of membership, or the loss of any worker, means new processes for all: torchrun's agents
stop the remaining workers, repeat the rendezvous, and start new ones. So a step ends for all or for
none, and state comes from the host's memory, from another replica, or from a checkpoint.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from functools import partial
from typing import NoReturn

from resilin.core.membership import Membership
from resilin.engine import environment, pulse
from resilin.engine.base import Engine
from resilin.engine.processes import process_gone, process_start
from resilin.engine.stop import RESTART
from resilin.engine.watch import LastWords, Peer, Watch, abandon

RUN_ID = "TORCHELASTIC_RUN_ID"
"""Set by torchrun's agents; the `--rdzv-id` of the job."""
SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Seconds between an agent's SIGTERM and its SIGKILL, for agents that read this variable."""
NO_RUN_ID = "none"
"""torchrun's name for a job without an id."""
AGENT_SECONDS = 0.5
"""Seconds that a replica that follows others waits for its own agent to stop it.

An agent that is about to restart its workers because others joined stops them within its monitor
interval, and then the exit of a worker does not count as a failure.
"""


class Torchrun(Engine):
    """Workers of torchrun's agents."""

    def __init__(self) -> None:
        super().__init__()
        self._parent = os.getppid()
        self._agent = int(os.environ.get(environment.AGENT, self._parent))
        self._agent_start = process_start(self._agent)
        self.pulse = pulse.of_this_process()
        self._watch: Watch | None = None

    def find_membership(self) -> Membership:
        """Hosts are agents; each worker of an agent is a replica."""
        host, local = (int(os.environ.get(name, "0")) for name in ("GROUP_RANK", "LOCAL_RANK"))
        # A launcher may say the number and not how many there are.
        return replace(
            super().find_membership(),
            host=host,
            num_hosts=max(host + 1, int(os.environ.get("GROUP_WORLD_SIZE", "1"))),
            local_process=local,
            num_local_processes=max(local + 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))),
        )

    @property
    def restartable(self) -> bool:
        """Whether there is an agent."""
        return RUN_ID in os.environ

    @property
    def num_restarts(self) -> int:
        """Number of restarts by the agent because of a failure."""
        return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

    @property
    def memory_name(self) -> str | None:
        """The id of the run, or of the agent if the run has none."""
        if not self.restartable:
            return None
        run_id = os.environ[RUN_ID]
        return f"agent-{self._agent}" if run_id == NO_RUN_ID else run_id

    @property
    def grace(self) -> float:
        """Seconds within which a worker that was asked to stop has to exit."""
        return 0.6 * float(os.environ.get(SHUTDOWN_TIMEOUT, "30"))

    def orphaned(self) -> bool:
        """Whether the agent is gone, so that this worker is no longer supervised."""
        if not self.restartable:
            return False
        if os.getppid() != self._parent:
            return True
        return self._agent != self._parent and process_gone(self._agent, self._agent_start)

    def watch(self, last_words: LastWords) -> None:
        """Watch the agent and the other workers of this host."""
        if not self.restartable or self._watch is not None:
            return
        host, me = self.membership.host, Peer(os.getpid(), process_start(os.getpid()))
        everyone = self.gather([host, *me])
        peers = [Peer(pid, start) for where, pid, start in everyone if where == host]
        peers.remove(me)
        self._watch = Watch(self, peers, partial(abandon, self.stop, last_words))

    def unwatch(self) -> None:
        """Stop watching."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def leave(self, *, asked: bool) -> NoReturn:
        """Ends this worker.

        A worker that follows others asks to be restarted with those that stay. One whose machine is
        taken away, according to a poller or SIGUSR1, ends its agent too, which would otherwise
        restart it here.
        """
        if not asked:
            deadline = time.monotonic() + AGENT_SECONDS
            while time.monotonic() < deadline and not self.stop.asked:
                time.sleep(0.02)
            raise SystemExit(self.stop.exit_code if self.stop.asked else RESTART)
        if self.restartable and not self.orphaned() and self.stop.signal != signal.SIGTERM:
            os.kill(self._agent, signal.SIGTERM)
        self.stop.leave()
