"""The controller at work: it asks the backend, takes a step, writes it down, and carries it out.

Requests of users come from other threads; what they change is on disk before they are answered.
The backend is asked without the lock, so that a slow one holds nobody up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from resilin.cluster.backends.base import Backend, BackendError
from resilin.cluster.controller import records as r
from resilin.cluster.controller.journal import Journal
from resilin.cluster.controller.launch import Face, part_to_start
from resilin.cluster.controller.meeting import Meetings
from resilin.cluster.controller.rules import Act, Rules, Start, Stop
from resilin.cluster.controller.state import State
from resilin.cluster.controller.step import step
from resilin.cluster.decision import Policy

REPEAT = 30.0
"""Seconds after which an act that has shown no effect is repeated."""


class Controller:
    """One controller of one cluster.

    Args:
        journal: Its journal.
        backend: Starts and stops parts.
        meetings: Provides the rendezvous store.
        policy: Decides who gets what.
        rules: Limits.
        face: Its address for jobs.
        poll: Seconds between two looks at the backend.
        tell: Called with sentences for the operator, each once for as long as it holds.
    """

    def __init__(
        self,
        journal: Journal,
        backend: Backend,
        meetings: Meetings,
        policy: Policy,
        rules: Rules,
        face: Face,
        *,
        poll: float = 2.0,
        tell: Callable[[str], None] = print,
    ) -> None:
        self.policy = policy
        """Decides who gets what."""
        self.rules = rules
        """Limits."""
        self.troubles: frozenset[str] = frozenset()
        """Sentences that hold at present."""
        self._journal = journal
        self._backend = backend
        self._meetings = meetings
        self._face = face
        self._poll = poll
        self._tell = tell
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._done: dict[tuple[str, str], float] = {}

    @property
    def state(self) -> State:
        """All that is known now."""
        return self._journal.state

    @property
    def token(self) -> str:
        """Token of the cluster."""
        return self._face.token

    def change(self, make: Callable[[State], Sequence[r.Record]], *, sync: bool = True) -> State:
        """Write down what a user wants.

        Args:
            make: From the state to the records; its errors are the caller's.
            sync: Whether it has to survive a power failure.

        Returns:
            The state after it.
        """
        with self._lock:
            state = self._journal.append(make(self._journal.state), sync=sync)
        if sync:
            self._wake.set()
        return state

    def run(self) -> None:
        """Work until `stop` is called."""
        while not self._stopped.is_set():
            self.turn()
            self._wake.wait(self._poll)
            self._wake.clear()

    def stop(self) -> None:
        """Make `run` return; jobs run on."""
        self._stopped.set()
        self._wake.set()

    def turn(self) -> None:
        """Look, think and act once."""
        troubles: list[str] = []
        try:
            self._meetings.ensure(self.state.meeting, self._announce)
            nodes, parts = self._backend.nodes(), self._backend.list()
        except BackendError as error:
            # Nothing is known, so nothing is changed.
            self._report([f"the backend does not answer: {error}"])
            return
        with self._lock:
            taken = step(self.state, nodes, parts, time.time(), self.policy, self.rules)
            sync = any(not isinstance(record, r.Seen) for record in taken.records)
            self._journal.append(taken.records, sync=sync)
            state = self.state
        troubles += taken.troubles
        troubles += [failed for act in taken.acts if (failed := self._try(act, state))]
        self._report(troubles)

    def _announce(self, met: r.Met) -> None:
        with self._lock:
            self._journal.append([met])

    def _try(self, act: Act, state: State) -> str:
        """Carry out an act; returns why that was not possible, else an empty text."""
        try:
            self._do(act, state)
        except BackendError as error:
            return str(error)
        return ""

    def _do(self, act: Act, state: State) -> None:
        """Carry out an act, unless that was done a moment ago."""
        kind = "start" if isinstance(act, Start) else "stop" if act.grace > 0 else "end"
        now = time.monotonic()
        done = self._done.get((act.name, kind))
        if done is not None and (kind == "stop" or now - done < REPEAT):
            return
        if isinstance(act, Stop):
            self._backend.stop(act.name, act.grace)
        else:
            part = part_to_start(state, state.parts[act.name], self._face, self.rules)
            self._backend.start(part)
        self._done[act.name, kind] = now
        if len(self._done) > 2 * len(state.parts) + 1000:
            self._done = {key: at for key, at in self._done.items() if key[0] in state.parts}

    def _report(self, troubles: Sequence[str]) -> None:
        """Tell the operator what was not told before."""
        for text in dict.fromkeys(troubles):
            if text not in self.troubles:
                self._tell(text)
        self.troubles = frozenset(troubles)
