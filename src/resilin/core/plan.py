"""Plans: the split of one global batch into micro-batches, for any number of replicas.

A plan is pure arithmetic over (global batch, replicas, local bounds). Every replica
computes the same plan, so nothing has to be sent. Nothing has to be divisible: the sizes sum
to the global batch, differ by at most one among equal replicas, and never exceed the
given maximum. All replicas run the same number of micro-batches. An impossible plan is a
`ValueError` with both values in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from resilin.core import _validate


class PlanError(ValueError):
    """The bounds do not allow splitting this global batch over this many replicas."""


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The split of one global batch: per replica, a list of micro-batch sizes.

    All replicas run the same number of micro-batches, the number that the largest share needs: a
    module whose forward pass has collectives (SyncBatchNorm, tensor parallelism, FSDP) would wait
    forever otherwise. The sizes of one replica differ by at most one, and so do those of equal
    replicas. A replica with fewer samples than micro-batches runs filler batches (size 0). With
    equal replicas each answer is closed-form: nothing grows with the size of the job.
    `steps`, `batch_size` and `gpus` are the names that other accumulation planners use.

    Raises:
        PlanError: The bounds do not allow splitting this batch over this many replicas.
    """

    global_batch_size: int
    """Samples in one optimizer step, over all replicas."""
    replicas: int
    """Data-parallel members that share the batch."""
    max_local_bsz: int | None = None
    """Largest micro-batch that fits on a replica; None sets no limit."""
    min_local_bsz: int = 0
    """Smallest micro-batch worth running; 0 lets a replica go without samples."""
    gradient_accumulation: bool = True
    """Whether a replica may run more than one micro-batch in a step."""
    shares: tuple[int, ...] | None = None
    """Samples of each replica, where they are given, as by the shards that each one reads."""

    _shares: NDArray[np.int64] | None = field(init=False, repr=False, compare=False)
    _steps: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _validate.whole("global_batch_size", self.global_batch_size, at_least=1)
        _validate.whole("replicas", self.replicas, at_least=1)
        _validate.whole("min_local_bsz", self.min_local_bsz, at_least=0)
        if self.max_local_bsz is not None:
            floor = max(1, self.min_local_bsz)
            _validate.whole("max_local_bsz", self.max_local_bsz, at_least=floor)
        self._check_room()
        shares = None if self.shares is None else self._given_shares(self.shares)
        object.__setattr__(self, "_shares", shares)
        object.__setattr__(self, "_steps", self._steps_for(self._largest_share))
        self._check_smallest()

    def _check_room(self) -> None:
        batch, replicas = self.global_batch_size, self.replicas
        if replicas * self.min_local_bsz > batch:
            raise PlanError(
                f"{replicas} replicas cannot be scheduled: replicas ({replicas}) x smallest local "
                f"batch ({self.min_local_bsz}) = {replicas * self.min_local_bsz} exceeds the "
                f"global batch size ({batch}), which allows at most "
                f"{batch // self.min_local_bsz} replicas"
            )
        if self.gradient_accumulation or self.max_local_bsz is None:
            return
        if batch > replicas * self.max_local_bsz:
            raise PlanError(
                f"global batch size ({batch}) exceeds replicas ({replicas}) x largest local batch "
                f"({self.max_local_bsz}) = {replicas * self.max_local_bsz}, and gradient "
                "accumulation is off"
            )

    def _check_smallest(self) -> None:
        share = self.share(self.replicas - 1) if self._shares is None else int(self._shares.min())
        smallest = share // self._steps
        if smallest < self.min_local_bsz:
            raise PlanError(
                f"global batch size ({self.global_batch_size}) over {self.replicas} replicas: a "
                f"share of {share} needs {self._steps} micro-batches under the largest local "
                f"batch ({self.max_local_bsz}), and they would be smaller ({smallest}) than "
                f"the smallest ({self.min_local_bsz})"
            )

    def _steps_for(self, share: int) -> int:
        return 1 if self.max_local_bsz is None else max(1, _ceil_div(share, self.max_local_bsz))

    @property
    def _largest_share(self) -> int:
        if self._shares is None:
            return _ceil_div(self.global_batch_size, self.replicas)
        return int(self._shares.max())

    def _given_shares(self, shares: tuple[int, ...]) -> NDArray[np.int64]:
        if len(shares) != self.replicas or sum(shares) != self.global_batch_size:
            raise ValueError(
                f"shares ({shares}) must be those of {self.replicas} replicas, and sum up to the "
                f"global batch size ({self.global_batch_size})"
            )
        return np.asarray(shares, dtype=np.int64)

    def share(self, replica: int) -> int:
        """Samples that this replica contributes to the global batch."""
        self._check_replica(replica)
        if self._shares is not None:
            return int(self._shares[replica])
        share, extra = divmod(self.global_batch_size, self.replicas)
        return share + (replica < extra)

    def micro_batches(self, replica: int) -> tuple[int, ...]:
        """Sizes of this replica's micro-batches: `steps` of them, on every replica.

        Filler batches (0) come first, where the replica has fewer samples than micro-batches: no
        gradient is there yet that would have to be kept apart from theirs. The others follow,
        largest first.
        """
        size, extra = divmod(self.share(replica), self._steps)
        whole = self._steps - extra
        return (size + 1,) * extra + (size,) * whole if size else (0,) * whole + (1,) * extra

    @property
    def steps(self) -> int:
        """Gradient-accumulation steps: the micro-batches that each replica runs."""
        return self._steps

    @property
    def batch_size(self) -> int:
        """The local batch size: the largest micro-batch of any replica."""
        return _ceil_div(self._largest_share, self._steps)

    @property
    def gpus(self) -> int:
        """The same as `replicas`."""
        return self.replicas

    def _check_replica(self, replica: int) -> None:
        if not 0 <= replica < self.replicas:
            raise ValueError(f"replica ({replica}) must be in [0, {self.replicas})")


@dataclass(frozen=True, slots=True)
class BatchBounds:
    """Bounds set by the user: a limit on the global batch and limits on each micro-batch.

    Examples:
        >>> bounds = BatchBounds(max_batch_size=1000, local_bsz_bounds=(100, 200))
        >>> bounds.max_replicas
        10
        >>> bounds.plan(700, replicas=3).micro_batches(0)
        (117, 117)
    """

    max_batch_size: int | None = None
    """Upper limit of the global batch size; None sets no limit."""
    local_bsz_bounds: tuple[int, int] | None = None
    """Smallest and largest micro-batch on any replica; None sets no limit.

    A smallest of 0 lets replicas go without samples when there are too few of them.
    """
    gradient_accumulation: bool = True
    """Whether a replica may run more than one micro-batch in a step."""

    def __post_init__(self) -> None:
        if self.max_batch_size is not None:
            _validate.whole("max_batch_size", self.max_batch_size, at_least=1)
        if self.local_bsz_bounds is not None:
            try:
                lower, upper = self.local_bsz_bounds
            except (TypeError, ValueError):
                raise ValueError(
                    f"local_bsz_bounds ({self.local_bsz_bounds!r}) must be a pair (lower, upper)"
                ) from None
            _validate.whole("lower bound of local_bsz_bounds", lower, at_least=0)
            if _validate.whole("upper bound of local_bsz_bounds", upper, at_least=1) < lower:
                raise ValueError(
                    f"lower bound of local_bsz_bounds ({lower}) must be at most its upper bound "
                    f"({upper})"
                )
            if self.max_batch_size is not None and self.max_batch_size < lower:
                raise ValueError(
                    f"max_batch_size ({self.max_batch_size}) must be at least the lower bound of "
                    f"local_bsz_bounds ({lower})"
                )

    @property
    def max_replicas(self) -> int | None:
        """Largest number of replicas that any allowed batch can occupy; None without a limit."""
        lower = self.local_bsz_bounds[0] if self.local_bsz_bounds else 0
        if self.max_batch_size is None or not lower:
            return None
        return self.max_batch_size // lower

    def check_replicas(self, replicas: int) -> None:
        """Raises if no allowed global batch can be split over this many replicas.

        Raises:
            PlanError: `replicas` times the lower bound exceeds `max_batch_size`.
        """
        _validate.whole("replicas", replicas, at_least=1)
        if self.max_replicas is None or replicas <= self.max_replicas:
            return
        assert self.local_bsz_bounds is not None
        lower = self.local_bsz_bounds[0]
        raise PlanError(
            f"{replicas} replicas cannot be scheduled: the lower bound of local_bsz_bounds "
            f"({lower}) x replicas ({replicas}) = {lower * replicas} exceeds max_batch_size "
            f"({self.max_batch_size}), which allows at most {self.max_replicas} replicas"
        )

    def nearest(self, batch_size: int, replicas: int) -> int:
        """The global batch size within the bounds that is nearest to this one.

        Raises:
            PlanError: No batch within the bounds can be split over this many replicas.
        """
        self.check_replicas(replicas)
        size = batch_size
        if self.local_bsz_bounds is not None:
            lower, upper = self.local_bsz_bounds
            size = max(size, lower * replicas)
            if not self.gradient_accumulation:
                size = min(size, upper * replicas)
        return size if self.max_batch_size is None else min(size, self.max_batch_size)

    def plan(self, global_batch_size: int, replicas: int) -> BatchPlan:
        """Splits one global batch within these bounds.

        Args:
            global_batch_size: Samples in the step, over all replicas.
            replicas: Data-parallel members.

        Raises:
            PlanError: The batch, or the number of replicas, is not possible within the bounds.
        """
        self.check_replicas(replicas)
        if self.max_batch_size is not None and global_batch_size > self.max_batch_size:
            raise PlanError(
                f"global batch size ({global_batch_size}) exceeds max_batch_size "
                f"({self.max_batch_size})"
            )
        lower, upper = self.local_bsz_bounds or (0, None)
        return BatchPlan(
            global_batch_size,
            replicas,
            max_local_bsz=upper,
            min_local_bsz=lower,
            gradient_accumulation=self.gradient_accumulation,
        )

    def possible_replicas(self, global_batch_size: int, among: Iterable[int]) -> list[int]:
        """The replica counts in `among` over which this global batch can be split."""
        return [count for count in among if self._try_plan(global_batch_size, count)[0] is not None]

    def table(self, global_batch_size: int, among: Iterable[int]) -> str:
        """The table `replicas -> local batch x accumulation` for one global batch, as text."""
        lines = ["replicas  local batch x accumulation"]
        for count in among:
            plan, reason = self._try_plan(global_batch_size, count)
            text = reason if plan is None else f"{plan.batch_size} x {plan.steps}"
            lines.append(f"{count:>8}  {text}")
        return "\n".join(lines)

    def _try_plan(self, global_batch_size: int, replicas: int) -> tuple[BatchPlan | None, str]:
        try:
            return self.plan(global_batch_size, replicas), ""
        except PlanError as error:
            return None, f"not possible: {error}"
