"""torchrun's agent: methods that resilin wraps, and state of workers and rendezvous.

Apart from `torch_names`, because loading it takes a while and only the command line needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed.launcher.api as launcher
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from resilin.compat.torch_names import TORCH

_AGENT = "torch.distributed.elastic.agent.server.local_elastic_agent:LocalElasticAgent"
_HOOKS = tuple(
    TORCH.name(f"{_AGENT}.{method}", use)
    for method, use in {
        "_rendezvous": "meets again when an agent is lost while ranks are assigned",
        "_assign_worker_ranks": "reports which machines joined and left",
        "_start_workers": "watches the workers",
        "_monitor_workers": "reports failures and ends workers that hang",
        "_restart_workers": "reports restarts",
    }.items()
)
_GROUP = TORCH.name(f"{_AGENT}._worker_group", "reports what was started", instance=True)
_RESTARTS = TORCH.name(
    f"{_AGENT}._remaining_restarts", "gives up a job that cannot succeed", instance=True
)
_PROCESSES = TORCH.name(
    f"{_AGENT}._pcontext", "knows which workers ended well before the others", instance=True
)
_MULTIPROCESSING = "torch.distributed.elastic.multiprocessing.api"
_HANDLERS = TORCH.name(
    f"{_MULTIPROCESSING}:SubprocessContext.subprocess_handlers",
    "reads the exit code of a worker",
    instance=True,
)
_RESULTS = TORCH.name(
    f"{_MULTIPROCESSING}:MultiprocessContext._return_values",
    "knows that the script of a warm worker has ended",
    instance=True,
)
_STARTED = TORCH.name(
    f"{_MULTIPROCESSING}:MultiprocessContext._pc",
    "reads the exit code of a warm worker",
    instance=True,
)
_STATE = TORCH.name(
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous:"
    "DynamicRendezvousHandler._state_holder",
    "knows that an agent has left while the workers start",
    instance=True,
)
_LAUNCHER = TORCH.name(
    "torch.distributed.launcher.api:LocalElasticAgent", "starts resilin's agent in place of torch's"
)
_CONFIG = TORCH.name(
    "torch.distributed.run:config_from_args", "starts a job with the options of torchrun"
)
_PARSER = TORCH.name("torch.distributed.run:get_args_parser", "takes the options of torchrun")
for _name in (*_HOOKS, _LAUNCHER, _CONFIG, _PARSER):
    _name.find()


_agents: list[LocalElasticAgent] = []
"""Kept as long as the process: a timer of the rendezvous that is collected by its own thread prints
an error, since a thread cannot join itself."""


class WrappedAgent(LocalElasticAgent):
    """torch's agent, whose private methods are wrapped by public ones.

    Each `around_` method is given the method of torch's agent as its first argument, and by default
    calls it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in (_GROUP, _RESTARTS, _PROCESSES):
            name.of(self)
        _agents.append(self)

    @property
    def spec(self) -> WorkerSpec:
        """Specification of the workers."""
        return self._worker_group.spec

    @property
    def remaining_restarts(self) -> int:
        """Restarts that are left."""
        return self._remaining_restarts

    @remaining_restarts.setter
    def remaining_restarts(self, number: int) -> None:
        self._remaining_restarts = number

    def restart_workers(self, group: WorkerGroup) -> None:
        """Restart the workers without a report."""
        super()._restart_workers(group)

    def exit_code(self, local_rank: int) -> int | None:
        """The exit code of a worker; None while it has none, or where torch keeps it elsewhere.

        torch does not report workers that succeeded before all of them have.
        """
        processes = self._pcontext
        handlers = getattr(processes, _HANDLERS.attribute, None)
        if handlers is not None:
            code: int | None = handlers[local_rank].proc.poll()
            return code
        if local_rank in getattr(processes, _RESULTS.attribute, {}):
            return 0  # its script has ended; its process waits for those of the others
        started = getattr(processes, _STARTED.attribute, None)
        return None if started is None else started.processes[local_rank].exitcode

    # Wrapped -------------------------------------------------------------------------------

    def around_rendezvous(self, stock: Callable[..., None], group: WorkerGroup) -> None:
        """Join the rendezvous with the other agents."""
        stock(group)

    def around_ranks(
        self, stock: Callable[..., list[Worker]], store: Any, rank: int, size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Assign ranks to the workers, together with the other agents."""
        return stock(store, rank, size, spec)

    def around_start(
        self, stock: Callable[..., dict[int, Any]], group: WorkerGroup
    ) -> dict[int, Any]:
        """Start the workers."""
        return stock(group)

    def around_monitor(self, stock: Callable[..., RunResult], group: WorkerGroup) -> RunResult:
        """Check the state of the workers."""
        return stock(group)

    def around_restart(self, stock: Callable[..., None], group: WorkerGroup) -> None:
        """Restart the workers."""
        stock(group)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self.around_rendezvous(super()._rendezvous, worker_group)

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        stock = super()._assign_worker_ranks
        return self.around_ranks(stock, store, group_rank, group_world_size, spec)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        return self.around_start(super()._start_workers, worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return self.around_monitor(super()._monitor_workers, worker_group)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self.around_restart(super()._restart_workers, worker_group)


def rendezvous_members(handler: Any) -> tuple[int, int] | None:
    """Numbers of agents in a rendezvous and of those waiting to join; None if unknown.

    torch queries its own rendezvous each time it checks the workers, which keeps this up to date.
    Other kinds of rendezvous do not have it.
    """
    holder = getattr(handler, _STATE.attribute, None)
    if holder is None:
        return None
    return len(holder.state.participants), len(holder.state.wait_list)


def use_agent(make: Callable[..., Any]) -> None:
    """Replace the class of agent of torch's launcher, which has no option for it."""
    vars(launcher)[_LAUNCHER.attribute] = make
