"""Learning-rate schedulers of the gated optimizer: they count its steps, or a clock's.

A scheduler that the loop body steps must count optimizer steps, however many micro-batches these
take: its `step` waits while the step is incomplete. That holds for every `LRScheduler` of the
optimizer, made before or after the gate, handed over or not, and for those nested in others.

A scheduler written per step runs at the wrong pace once steps change their worth. Handed to a
clock, it is stepped once per reference step that was completed: not at all after a small step,
several times after a large one, and never past the end of the run.
"""

from __future__ import annotations

import functools
import gc
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from resilin.compat.torch_names import is_initial
from resilin.core import _validate
from resilin.core.clock import CLOCKS, ClockName, scheduler_steps
from resilin.training.gates.patch import Patch
from resilin.training.state.registry import Registry

_MARK = "_resilin_schedulers"
LOOSE = "schedulers"
"""Name of the schedulers that nobody handed over, in the state of the job."""
_MADE = "resilin_steps"
"""Name in a saved state of how often the clock has stepped the scheduler."""


class SchedulerGate:
    """Makes the schedulers of one optimizer wait while a step is incomplete, until `remove`.

    A call in an incomplete step takes effect once, when the step is complete: by the call that
    the body makes for the last micro-batch, or else when the body is over (`settle`). Outside
    the loop body a call steps as always.

    While it stands, a scheduler's class is a subclass of its own with another `step`. Nothing is
    put into the scheduler itself, so its state and its copies have nothing of the gate.

    Args:
        optimizer: Schedulers of this optimizer are held back, and no others.
        waits: Whether the step is incomplete right now.
    """

    def __init__(self, optimizer: Optimizer, waits: Callable[[], bool]) -> None:
        self._optimizer = optimizer
        self._waits = waits
        self._clocked: ClockedScheduler | None = None
        self._by_clock = False
        self._held: dict[LRScheduler, Callable[[], object]] = {}
        self._names: WeakKeyDictionary[LRScheduler, str] = WeakKeyDictionary()
        self._numbers: Counter[str] = Counter()
        self._loose: LooseSchedulers | None = None
        self._patch: Patch | None = Patch(optimizer, {_MARK: self})
        _Watched.install()
        # In an order that the next process of the same script finds, too.
        for scheduler in sorted(schedulers_of(optimizer), key=_content):
            self.add(scheduler)

    def add(self, scheduler: LRScheduler) -> None:
        """Gates a scheduler of this optimizer."""
        if scheduler in self._names:
            return
        kind = type(scheduler).__qualname__
        self._names[scheduler] = f"{kind}/{self._numbers[kind]}"
        self._numbers[kind] += 1
        scheduler.__class__ = _gated(type(scheduler))

    def require(self, scheduler: LRScheduler) -> None:
        """Gates a scheduler that was not found when the gate was made, and shows up now.

        Raises:
            RuntimeError: It is too late: it steps in an incomplete step.
        """
        if self._patch is None or scheduler in self._names:
            return
        if self._waits():
            raise RuntimeError(
                f"this {type(scheduler).__qualname__} would count micro-batches and not steps: it "
                "is a copy, or gc.freeze() had put it aside when the optimizer was given to "
                "resilin. Call gc.unfreeze() before that and gc.freeze() after it, or make the "
                "scheduler after it"
            )
        self.add(scheduler)

    def outermost(self) -> dict[str, LRScheduler]:
        """The schedulers that are not part of another one, by names that a restart keeps."""
        nested = {id(part) for scheduler in self._names for part in _parts(scheduler)}
        return {name: s for s, name in self._names.items() if id(s) not in nested}

    def hand_to(self, clocked: ClockedScheduler | None) -> None:
        """Lets a clock step this scheduler, and nobody else; None leaves all to the loop."""
        self._clocked = clocked
        if clocked is not None:
            clocked.gate = self

    def called(
        self, scheduler: LRScheduler, step: Callable[..., object], *args: Any, **kwargs: Any
    ) -> Any:
        """Called for `scheduler.step(...)`: steps, waits or refuses."""
        if self._by_clock:
            return step(*args, **kwargs)
        if self._clocked is not None and scheduler is self._clocked.scheduler:
            raise RuntimeError(
                f"this scheduler is stepped by the {self._clocked.clock} clock, once per reference "
                "step; remove scheduler.step() from the loop, or pass schedule_by='user'"
            )
        if self._waits():
            self._held[scheduler] = functools.partial(step, *args, **kwargs)
            return None
        self._held.pop(scheduler, None)
        return step(*args, **kwargs)

    def step_by_clock(self, scheduler: LRScheduler) -> None:
        """Steps a scheduler, and those nested in it, whatever the loop is doing."""
        self._by_clock = True
        try:
            scheduler.step()
        finally:
            self._by_clock = False

    def settle(self, *, given_up: bool = False) -> None:
        """Ends a step: what still waits, because the last micro-batch made no call, steps now.

        Args:
            given_up: Whether the step was left incomplete; then nothing counts it.
        """
        held, self._held = self._held, {}
        for step in () if given_up else held.values():
            step()
        if self._loose is not None:
            self._loose.take_part()

    def keep_in(
        self, registry: Registry, handed_over: LRScheduler | None, name: str = LOOSE
    ) -> None:
        """Makes the schedulers that nobody handed over a part of the job's state.

        Args:
            registry: Where the state of the job is registered.
            handed_over: The scheduler whose state the model keeps.
            name: Their name there.
        """
        self._loose = LooseSchedulers(self, self._optimizer, registry, handed_over, name)
        self._loose.take_part()

    def remove(self) -> None:
        """Gives all schedulers their own class back."""
        if self._loose is not None:
            self._loose.leave()
        for scheduler in self._names:
            scheduler.__class__ = type(scheduler).__mro__[1]
        self._names.clear()
        self._held = {}
        if self._patch is not None:
            self._patch.remove()
            self._patch = None
            _Watched.uninstall()


def matched(
    given: LRScheduler | Sequence[LRScheduler] | None, optimizers: Sequence[Optimizer]
) -> list[LRScheduler | None]:
    """The scheduler of each of these optimizers, of those that the user hands over.

    Args:
        given: One scheduler, several, something that holds them as `schedulers`, or None.
        optimizers: The optimizers.

    Raises:
        ValueError: One belongs to none of the optimizers, or an optimizer has two.
    """
    several: list[Any] = []
    if isinstance(given, LRScheduler):
        several = [given]
    elif given is not None:
        several = list(
            given if isinstance(given, Sequence) else getattr(given, "schedulers", [given])
        )
    if len(optimizers) == len(several) == 1:
        return several
    found: list[LRScheduler | None] = [None] * len(optimizers)
    for scheduler in several:
        number = next((n for n, o in enumerate(optimizers) if scheduler.optimizer is o), None)
        kind = type(scheduler).__qualname__
        if number is None:
            raise ValueError(
                f"lr_scheduler: {kind} belongs to {type(scheduler.optimizer).__name__}, which is "
                "none of the optimizers that were passed"
            )
        if found[number] is not None:
            raise ValueError(
                f"lr_scheduler: {type(found[number]).__qualname__} and {kind} belong to the same "
                f"{type(scheduler.optimizer).__name__}: pass one of them, such as a SequentialLR"
            )
        found[number] = scheduler
    return found


def schedulers_of(optimizer: Optimizer) -> list[LRScheduler]:
    """All living schedulers of an optimizer, nested ones included.

    An optimizer does not know its schedulers, so this looks through all objects: once per gate.
    Where it finds none, and one has left its trace, `gc.freeze` has put it aside.
    """
    found = _living_schedulers(optimizer)
    traced = any("initial_lr" in group for group in optimizer.param_groups)
    if not found and traced and gc.get_freeze_count():
        gc.unfreeze()
        found = _living_schedulers(optimizer)
        gc.freeze()  # as the script wants it
    return found


def _living_schedulers(optimizer: Optimizer) -> list[LRScheduler]:
    kinds = set(_kinds(LRScheduler))
    everything: list[Any] = gc.get_objects()
    # Without a line of Python per object: a process has a million of them. By type() and not
    # isinstance(): that would ask proxies, which may answer with an error.
    found = itertools.compress(everything, map(kinds.__contains__, map(type, everything)))
    return [each for each in found if vars(each).get("optimizer") is optimizer]


def _kinds(kind: type) -> Iterator[type]:
    """A class and all of its subclasses."""
    yield kind
    subclasses: list[type] = kind.__subclasses__()
    for each in subclasses:
        yield from _kinds(each)


def _parts(scheduler: LRScheduler) -> Iterator[object]:
    """Nested schedulers of a scheduler: in its attributes, or in lists of them."""
    for value in vars(scheduler).values():
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def _content(scheduler: LRScheduler) -> tuple[str, str]:
    """Its class and its numbers: what tells it from others, in this process and the next."""
    numbers = {
        name: value
        for name, value in vars(scheduler).items()
        if isinstance(value, str | int | float | list | tuple | dict) and "0x" not in repr(value)
    }
    return type(scheduler).__qualname__, repr(sorted(numbers.items()))


def _gated(kind: type[LRScheduler]) -> type[LRScheduler]:
    """A subclass of a kind of schedulers whose `step` asks the gate of its optimizer."""
    if kind in _subclasses:
        return _subclasses[kind]

    @functools.wraps(kind.step)
    def step(self: LRScheduler, *args: Any, **kwargs: Any) -> Any:
        gate: SchedulerGate | None = vars(self.optimizer).get(_MARK)
        own = functools.partial(kind.step, self)
        # The step that its constructor makes is none of training.
        if gate is None or is_initial(self):
            return own(*args, **kwargs)
        return gate.called(self, own, *args, **kwargs)

    def reduce(self: LRScheduler, protocol: Any) -> Any:
        # A copy, or what is pickled, is of the user's class. Protocol 1 names it in a call that
        # pickle does not compare with the class of the object.
        self.__class__ = kind
        try:
            return self.__reduce_ex__(1)
        finally:
            self.__class__ = subclass

    make: Any = type(kind)
    subclass: type[LRScheduler] = make(
        kind.__name__,
        (kind,),
        {
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            "__doc__": kind.__doc__,
            "__reduce_ex__": reduce,
            "step": step,
        },
    )
    _subclasses[kind] = subclass
    return subclass


_subclasses: dict[type[LRScheduler], type[LRScheduler]] = {}


class _Watched:
    """`LRScheduler.optimizer` while any gate stands: tells the gate of a scheduler that is made.

    Every scheduler's constructor sets this attribute, and there is no other place that all of
    them come by. For an optimizer without a gate it does what an attribute does.
    """

    _gates = 0

    @classmethod
    def install(cls) -> None:
        """One more gate stands."""
        cls._gates += 1
        if cls._gates == 1:
            type.__setattr__(LRScheduler, "optimizer", cls())

    @classmethod
    def uninstall(cls) -> None:
        """One gate fewer stands; with the last one, the class is as it was."""
        cls._gates -= 1
        if cls._gates == 0:
            type.__delattr__(LRScheduler, "optimizer")

    def __get__(self, scheduler: LRScheduler | None, kind: type) -> Any:
        if scheduler is None:
            return self
        try:
            optimizer = vars(scheduler)["optimizer"]
        except KeyError:
            raise AttributeError(f"{kind.__name__!r} object has no attribute 'optimizer'") from None
        gate: SchedulerGate | None = getattr(optimizer, _MARK, None)
        if gate is not None:
            gate.require(scheduler)
        return optimizer

    def __set__(self, scheduler: LRScheduler, optimizer: Any) -> None:
        vars(scheduler)["optimizer"] = optimizer
        gate: SchedulerGate | None = getattr(optimizer, _MARK, None)
        if gate is not None:
            gate.add(scheduler)


class LooseSchedulers:
    """State of the schedulers that the loop steps and that nobody handed over or registered.

    A job that is restarted makes them again, and their count has to be what it was.

    Args:
        gate: The gate of their optimizer.
        optimizer: That optimizer.
        registry: Where the state of the job is registered.
        handed_over: The scheduler whose state the model keeps.
        name: Their name in the state.
    """

    def __init__(
        self,
        gate: SchedulerGate,
        optimizer: Optimizer,
        registry: Registry,
        handed_over: LRScheduler | None,
        name: str,
    ) -> None:
        self._name = name
        self._gate = gate
        self._optimizer = optimizer
        self._registry = registry
        self._handed_over = handed_over
        self._left: dict[str, LRScheduler] | None = None

    def take_part(self) -> None:
        """Registers this, as soon as there are any."""
        if not self._registry.has(self) and self._present():
            self._registry.add(self._name, self)

    def leave(self) -> None:
        """Gives the name free; those that are there stay in the state until another gate's are."""
        self._left = self._present()
        self._registry.release(self._name)

    def _present(self) -> dict[str, LRScheduler]:
        if self._left is not None:
            return self._left
        return {
            name: scheduler
            for name, scheduler in self._gate.outermost().items()
            if scheduler is not self._handed_over and not self._registry.has(scheduler)
        }

    def state_dict(self) -> dict[str, Any]:
        """Their states by name, and the learning rates that they have set."""
        return {
            "schedulers": {name: s.state_dict() for name, s in self._present().items()},
            "lr": [group["lr"] for group in self._optimizer.param_groups],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` returned, also if they were made after the restore."""
        for name, scheduler in self._present().items():
            if name in state["schedulers"]:
                scheduler.load_state_dict(state["schedulers"][name])
        for group, lr in zip(self._optimizer.param_groups, state["lr"], strict=True):
            # The constructor of a scheduler has set it to its first value.
            if isinstance(group["lr"], Tensor):
                group["lr"].copy_(lr)
            else:
                group["lr"] = lr


class ClockedScheduler:
    """A scheduler whose `step` belongs to a clock while the gate of its optimizer stands."""

    def __init__(self, scheduler: LRScheduler, clock: ClockName) -> None:
        self.scheduler = scheduler
        self.clock: ClockName = clock
        """The clock that steps it."""
        self.gate: SchedulerGate | None = None
        self._made: int | None = None

    @classmethod
    def make(
        cls, schedulers: Sequence[LRScheduler | None], schedule_by: str, rule_clock: ClockName
    ) -> list[ClockedScheduler | None]:
        """Hands schedulers to a clock, unless the user keeps them.

        Args:
            schedulers: The user's scheduler of each optimizer, if there is one.
            schedule_by: `user`, a clock, or `rule` for the clock of the rule.
            rule_clock: That clock.

        Raises:
            ValueError: There is nothing to hand over, or it steps by something else than time.
        """
        _validate.one_of("schedule_by", schedule_by, ("user", "rule", *CLOCKS))
        if schedule_by == "user":
            return [None] * len(schedulers)
        if all(scheduler is None for scheduler in schedulers):
            raise ValueError(f"schedule_by ({schedule_by!r}) needs an lr_scheduler")
        if any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in schedulers):
            raise ValueError(
                f"ReduceLROnPlateau follows a metric and not a clock: schedule_by "
                f"({schedule_by!r}) must be 'user'"
            )
        clock = rule_clock if schedule_by == "rule" else schedule_by
        return [
            None if scheduler is None else cls(scheduler, clock)  # type: ignore[arg-type]
            for scheduler in schedulers
        ]

    def advance(self, before: float, after: float, end: float | None) -> None:
        """Steps the scheduler for the reference steps that an optimizer step has completed.

        Args:
            before: Reading of its clock before the optimizer step.
            after: The reading after it.
            end: Reading at the end of the run, or of the epoch where that is not known: the last
                step may overshoot it, and the schedule ends there. None if neither is known.
        """
        assert self.gate is not None
        limit = float("inf") if end is None else end
        if self._made is None:
            self._made = scheduler_steps(0.0, min(before, limit))
        due = scheduler_steps(0.0, min(after, limit))
        while self._made < due:
            self.gate.step_by_clock(self.scheduler)
            self._made += 1

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own state, and how often the clock has stepped it."""
        return {**self.scheduler.state_dict(), _MADE: self._made}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` returned."""
        own = dict(state)
        self._made = own.pop(_MADE, None)
        self.scheduler.load_state_dict(own)
