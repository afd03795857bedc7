"""The interface between training and the membership of a job.

It follows the needs of a step: who am I, how many are we, may the step begin, did all of us commit
it, who has state for those that lack it, were we asked to stop. It hides the launcher, and whether
a change of membership means new processes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from resilin.compat.torch_names import default_store, timeout_of
from resilin.core.membership import Membership
from resilin.engine.collectives import Begun, Collectives, Group, Json
from resilin.engine.copies import CopyGroups
from resilin.engine.pulse import Pulse
from resilin.engine.stop import StopRequest
from resilin.engine.watch import LastWords

if TYPE_CHECKING:
    from resilin.engine.live.engine import Live

T = TypeVar("T")

CONTROL_TIMEOUT = timedelta(minutes=10)
"""Time limit for processes that wait for each other outside steps, as after a checkpoint."""
TOGETHER = 30.0
"""Seconds for which a process that leaves the loop waits for the others to leave it, too."""
POLL = 0.02
"""Seconds between two looks whether they do."""

logger = logging.getLogger("resilin")


class Engine:
    """Membership of a job. This base class asks torch.distributed; subclasses know the launcher.

    Members may change between any two steps. All methods that mention "all replicas" or "all
    processes" are collective.
    """

    def __init__(self) -> None:
        self.stop = StopRequest()
        """Whether this replica was asked to stop."""
        self.pulse = Pulse()
        """Published state of this process, for its supervisor."""
        self._generation = 0
        self._membership: Membership | None = None
        self._formed: tuple[int, int] | None = None
        self._world: dist.ProcessGroup | None = None
        self._groups: dict[str, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}
        self._host: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
        self._times_left = 0

    # Who we are ----------------------------------------------------------------------------

    @property
    def membership(self) -> Membership:
        """The current members of the job, as this process sees them.

        It stays the same until `begin_step` returns another one, except for the number of its
        generation, which training raises when it restores state, and before the process group is
        initialised or after it is destroyed: then this process is alone.
        """
        world = dist.group.WORLD
        if self._membership is None or world is not self._world:
            self._world = world
            found = replace(self.find_membership(), generation=self._generation)
            if self._formed is not None:
                found = replace(found, replica=self._formed[0], num_replicas=self._formed[1])
            self._membership = found
        return self._membership

    def form_replicas(self, replica: int, num_replicas: int) -> None:
        """Makes replicas of several processes each, as tensor parallelism needs.

        Called on all processes, before the first step. From then on the data and the batch are
        divided among so many replicas; recovery still counts processes.

        Args:
            replica: The replica that this process is a part of.
            num_replicas: Replicas, each of equally many processes.
        """
        self._formed, self._membership = (replica, num_replicas), None

    def find_membership(self) -> Membership:
        """Asks the launcher who is in the job: for engines to override.

        Asked again only when the process group, or the number of the generation, has changed. That
        number is filled in by `membership`.
        """
        if not dist.is_initialized():
            return Membership()
        process, num_processes = dist.get_rank(), dist.get_world_size()
        return Membership(
            replica=process,
            num_replicas=num_processes,
            process=process,
            num_processes=num_processes,
        )

    @property
    def processes_per_replica(self) -> int:
        """Processes that work on the same data: more than 1 under tensor parallelism."""
        return self.membership.num_processes // self.membership.num_replicas

    @property
    def processes_per_copy(self) -> int:
        """Processes that come and go together: more than 1 in live jobs with a sharded model."""
        return 1

    def copy_groups(self) -> CopyGroups | None:
        """Groups of the copies of a sharded model, where these come and go; None elsewhere."""
        return None

    @property
    def restartable(self) -> bool:
        """Whether a supervisor restarts this process when it dies."""
        return False

    @property
    def exits(self) -> bool:
        """Whether this process exits after the training, as a script does."""
        return True

    @property
    def num_restarts(self) -> int:
        """Number of restarts of this process, as far as known."""
        return 0

    @property
    def log_name(self) -> str:
        """Name of this process among those that write to the event log of the job."""
        return f"replica-{self.membership.process}"

    @property
    def memory_name(self) -> str | None:
        """Name of this job's in-memory copies on a host; None if processes are never restarted."""
        return None

    def raise_generation(self, at_least: int) -> None:
        """Give the current generation a number above that of any earlier state.

        Called when state is restored, with the same number on all replicas.
        """
        if at_least > self._generation:
            self._generation, self._membership = at_least, None

    # A step --------------------------------------------------------------------------------

    def begin_step(self) -> Membership:
        """Called by all replicas before each step: the place where members may join or leave.

        Returns:
            The members that take part in the step. A new generation means that they have changed;
            with engines that start new processes for a change they never do.
        """
        return self.membership

    def all_took_part(self, here: bool) -> bool:
        """Whether the reductions of a step are complete for all that continue with this process.

        Where the loss of one replica can fail them for some processes of a sharded copy of the
        model and not for others, these agree here: none of them makes the step then. Collective.

        Args:
            here: Whether they are complete for this process.
        """
        return here

    def all_committed(self) -> bool:
        """Called when the gradient of a step is complete: whether all replicas took part in it.

        Asked before the optimizer steps. If not, the step fails: nothing of it is kept, and it is
        issued again. All replicas must give the same answer.

        Where a lost replica means new processes, whoever still runs has seen the reduction of the
        step end, so all took part in it.
        """
        return True

    def committed(self) -> None:
        """Called when a step was committed."""

    def stops(self, votes: float) -> bool:
        """Whether the job stops after a step in which so many replicas were asked to.

        Where a lost replica means new processes, one is enough: all stop together.
        """
        return votes > 0

    def require_members(self) -> None:
        """Called before state is kept: raise if this process has lost the others for good.

        The loop body runs on after `optimizer.step`. Whatever it did without the others, such as a
        mean over replicas that was left out, must not be kept.
        """

    # Agreement and state -------------------------------------------------------------------

    def gradient_group(self) -> dist.ProcessGroup | None:
        """The process group in which gradients are reduced.

        Returns:
            The group, always the same one while the membership lasts; None if there is but one
            process.
        """
        return dist.group.WORLD if self.membership.num_processes > 1 else None

    def host_group(self) -> dist.ProcessGroup | None:
        """The process group in which replicas add up tensors on the host, within steps.

        It is the group of the gradients if that takes tensors on the CPU, as gloo and
        `cpu:gloo,cuda:nccl` do. Beside one that does not, such as NCCL alone, it is a gloo group of
        its own with the same time limit: all replicas must ask for it for the first time at the
        same place, and the main thread alone may use it.

        Returns:
            The group, always the same one while the membership lasts; None if there is but one
            replica.
        """
        group = self.gradient_group()
        if group is None:
            return None
        if self._host is None or self._host[0] is not group:
            self._host = (group, _beside(group))
        return self._host[1]

    def group(self, purpose: str) -> Group | None:
        """A gloo group of all replicas for one purpose, apart from that of the gradients.

        Threads that communicate at the same time need a group each. All replicas must ask for
        groups in the same order.

        Returns:
            The group, always the same one while the membership lasts; None if there is but one
            replica.
        """
        if self.membership.num_processes == 1:
            return None
        world = dist.group.WORLD
        assert world is not None
        present = self._groups.get(purpose)
        if present is None or present[0] is not world:
            present = (world, dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT))
            self._groups[purpose] = present
        return present[1]

    def wait(self, work: Begun) -> None:
        """Waits for a collective in the group of the gradients, or in that of the host.

        Raises:
            PeerLost: It cannot end, because a member is lost. Only where this process outlives
                that, see `live`; elsewhere it raises what torch does.
        """
        work.wait()

    def refused(self, error: RuntimeError) -> RuntimeError:
        """The error to raise for a collective of the gradients that its group did not begin.

        Args:
            error: The error of torch.

        Returns:
            `PeerLost` if a member is gone, where this process outlives that; otherwise any other.
        """
        return error

    @property
    def changes(self) -> Live | None:
        """Knows the changes of members; None where each of them restarts this process."""
        return None

    @property
    def live(self) -> bool:
        """Whether this process keeps running when members come or go."""
        return self.changes is not None

    def collectives(self, purpose: str = "control") -> Collectives:
        """Collectives of all processes, in the group of one purpose."""
        return Collectives(self.group(purpose))

    def ask(self, question: Callable[[Collectives], T], *, between_steps: bool = False) -> T:
        """Asks all processes a question outside of steps. Collective.

        Where members are lost without a restart, those that are left are asked again.

        Args:
            question: Asks them; its answer is JSON, the same on all of them.
            between_steps: Whether the script has done nothing since the last step.
        """
        return question(self.collectives())

    def gather(self, value: Json) -> list[Json]:
        """The values of all processes, on all of them. For small values."""
        return self.collectives().gather(value)

    def broadcast(self, value: Json, source: int) -> Json:
        """The value of the process `source`, on all of them. For small values."""
        return self.collectives().broadcast(value, source)

    def add_up(self, tensor: Tensor) -> None:
        """Adds up a tensor over all replicas, in place and in the group of the gradients."""
        group = self.gradient_group()
        if group is not None:
            dist.all_reduce(tensor, group=group)

    # Supervision and the end ---------------------------------------------------------------

    def watch(self, last_words: LastWords) -> None:
        """End this process when its main thread can no longer make progress. Collective.

        Without a supervisor there is nothing to watch.

        Args:
            last_words: Called by another thread before the process is ended, whatever its main
                thread does at that moment.
        """

    def unwatch(self) -> None:
        """Stop watching, if `watch` was called."""

    def all_leave(self, step: int) -> bool:
        """Whether all processes leave the loop here, after this step.

        It is no collective: a process that has gone on does not come, and waits for this one in its
        next step. So each writes down that it is here, and waits until all are, for `TOGETHER` at
        most. Then the first one's word counts, for all.

        Args:
            step: Steps committed.
        """
        me = self.membership
        if me.num_processes == 1:
            return True
        self._times_left += 1
        place = f"resilin/left/{me.generation}/{step}/{self._times_left}"
        deadline = time.monotonic() + TOGETHER
        try:
            store = default_store()
            here = store.add(f"{place}/here", 1)
            while here < me.num_processes and not store.check([f"{place}/word"]):
                if time.monotonic() > deadline or self.stop.asked or self.pulse.missed():
                    break
                time.sleep(POLL)
                here = store.add(f"{place}/here", 0)
            word = "together" if here == me.num_processes else "alone"
            return bool(store.compare_set(f"{place}/word", "", word) == b"together")
        except RuntimeError as error:  # its store is gone, with the process that had it
            logger.debug("nobody can be asked whether they leave the loop: %s", error)
            return False

    def finish(self) -> None:
        """Wait until no process needs another one to complete the training. Collective."""

    def leave(self, *, asked: bool) -> NoReturn:
        """Ends this process after all replicas have agreed to stop.

        Args:
            asked: Whether this replica itself was asked to stop, or follows another one.
        """
        self.stop.leave()


def _beside(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """This group of all processes, or one beside it, for tensors on the CPU."""
    kinds = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]
    if "cpu" in kinds:
        return group
    # With a shorter limit than the gradients have, a job would end for being slow between steps.
    timeout = timeout_of(group, torch.device(kinds[0]))
    made: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    return made
