"""Progress of the calls of `fit`: which of them are over, and where in its epoch the last one is.

A script that is started again calls `fit` as often as before. Calls that were over in the state
that the job resumes from are skipped, with all their side effects; the one that was under way
resumes; later ones run as usual. The code between two calls runs again, before the state is loaded:
it may freeze, compile again, or set a learning rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import keras  # type: ignore[import-untyped]

from resilin.core._warn import warn
from resilin.engine.collectives import State
from resilin.integrations.keras.files import POSITION, appending, position
from resilin.integrations.keras.optimizer import assign, by_name
from resilin.integrations.memory import Memory
from resilin.training.bridge.home import Home
from resilin.training.state.shards import all_whole
from resilin.training.state.snapshot import join, split

NAME = "keras"
"""Name of the state of `fit` in the state of the job."""


class Progress:
    """The calls of `fit` of one job, as a part of its state.

    Args:
        model: The Keras model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.home = Home()
        """The job that it belongs to."""
        self.calls = 0
        """Calls of `fit` that the script has begun."""
        self.epochs = 0
        """Epochs of these calls."""
        self.step = 0
        """Steps of the epoch that are done."""
        self.in_epoch = False
        """Whether an epoch has begun, and not ended."""
        self._fit = 0
        self._begun = False
        self._histories: list[dict[str, Any]] = []
        self._history: Any = None
        self._memories: dict[int, Memory] = {}
        self._named: dict[str, Any] = {}
        self._writers: set[str] = set()
        self._written: dict[str, Any] = {}
        self._restored: Mapping[str, Any] | None = None
        self.home.registry.add(NAME, self)

    # The calls -----------------------------------------------------------------------------

    def call(self, num_epochs: int) -> tuple[int, int]:
        """Begin a call of `fit`.

        Args:
            num_epochs: Number of its epochs.

        Returns:
            Its number, and the number of epochs of earlier calls.
        """
        number, first = self.calls, self.epochs
        self.calls += 1
        self.epochs += num_epochs
        return number, first

    def is_over(self, number: int) -> bool:
        """Whether a later call was under way in the state that the job resumes from."""
        return self._restored is not None and number < self._restored["fit"]

    def skip(self, number: int) -> Any:
        """Skip a call: the model gets the newest weights and its History.

        Args:
            number: The number of the call.
        """
        assert self._restored is not None
        weights = self.home.registry.restored("model")
        if weights is not None:
            assign(self._model.variables, weights)
        history = keras.callbacks.History()
        history.set_model(self._model)
        vars(history).update(self._restored["histories"][number])
        self._model.history = history
        return history

    # The callbacks -------------------------------------------------------------------------

    def watch(self, callbacks: Iterable[Any], is_writer: Callable[[Any], bool]) -> None:
        """Note the state of callbacks before training changes them.

        Args:
            callbacks: Callbacks of all replicas, in the same order everywhere.
            is_writer: Whether a callback runs in the first replica alone.
        """
        model, optimizer = self._model, self._model.optimizer
        kept = [model, optimizer, *model.variables, *optimizer.variables]
        without = frozenset(map(id, kept))
        self._named = {
            f"{index}/{type(callback).__name__}": callback
            for index, callback in enumerate(callbacks)
        }
        self._writers = {name for name, callback in self._named.items() if is_writer(callback)}
        for callback in self._named.values():
            known = self._memories.get(id(callback))
            if known is None or known.thing is not callback:
                self._memories[id(callback)] = Memory(callback, without)

    @contextmanager
    def beginning(self, number: int, history: Any) -> Iterator[bool]:
        """Surround the hooks at the start of a call.

        These are `on_train_begin` and, in a call that resumes within an epoch, `on_epoch_begin`.
        Callbacks open files and progress bars in them, which no state can hold. Everything else
        that the hooks do is already in the state, and is undone: changes of weights, optimizer,
        metrics, and the state of callbacks.

        Args:
            number: The number of the call.
            history: Its History.

        Yields:
            Whether the call resumes.
        """
        restored, self._history, self._fit = self._restored, history, number
        self.step, self.in_epoch = 0, False
        if restored is None or restored["fit"] != number or not restored["begun"]:
            self._restored = None
            yield False
        else:
            self.step, self.in_epoch = int(restored["step"]), bool(restored["in_epoch"])
            self._histories = list(restored["histories"])
            kept = [*self._model.variables, *self._model.optimizer.variables]
            values = [variable.value.detach().clone() for variable in kept]
            with ExitStack() as files:
                for name, callback in self._mine():
                    known = restored["callbacks"].get(name, {}).get(POSITION)
                    files.enter_context(appending(callback, known))
                yield True
            for variable, value in zip(kept, values, strict=True):
                variable.assign(value)
            self._put_back(restored)
            self._restored = None
        self._begun = True
        self.share()

    def _put_back(self, restored: Mapping[str, Any]) -> None:
        assign(self._model.metrics_variables, restored["metrics"])
        remembered = restored["callbacks"]
        for name, callback in self._mine():
            if name in remembered:
                self._memories[id(callback)].give(remembered[name], type(callback).__name__)
            else:
                warn(
                    f"callback {name} is not in the state that the job resumes from: it starts "
                    "from its initial state"
                )
        for name in remembered.keys() - self._named.keys():
            warn(f"the job resumes from a state with callback {name}, which fit() was not given")

    def ended(self) -> None:
        """End the call, and keep its History."""
        self._histories.append({"epoch": self._history.epoch, "history": self._history.history})
        self._fit, self._begun = self._fit + 1, False
        self._named = {}

    def share(self) -> None:
        """Share the state of callbacks that run in one replica. Collective."""
        engine = self.home.engine
        if engine.membership.num_replicas == 1 or not self._writers:
            return
        mine = {n: self._take(n) for n in self._writers} if engine.membership.replica == 0 else None
        peers = engine.collectives()
        tree, tensors = split("callbacks", mine)
        received = peers.broadcast_state(State(tree, all_whole(tensors)), source=0)
        self._written = join(received.tree, received.tensors)

    def _mine(self) -> list[tuple[str, Any]]:
        first = self.home.engine.membership.replica == 0
        return [pair for pair in self._named.items() if first or pair[0] not in self._writers]

    def _take(self, name: str) -> dict[str, Any]:
        callback = self._named[name]
        taken = self._memories[id(callback)].take()
        length = position(callback)
        return taken if length is None else {**taken, POSITION: length}

    def _remembered(self) -> dict[str, Any]:
        shared = self._written if self.home.engine.membership.num_replicas > 1 else {}
        return {name: shared[name] if name in shared else self._take(name) for name in self._named}

    # State ---------------------------------------------------------------------------------

    def state_dict(self) -> Mapping[str, Any]:
        """Number and position of the call, its metrics, and the state of callbacks."""
        if self._restored is not None:
            # Nothing has been done since.
            return self._restored
        return {
            "fit": self._fit,
            "begun": self._begun,
            "step": self.step,
            "in_epoch": self.in_epoch,
            "metrics": by_name(self._model.metrics_variables) if self._begun else {},
            "callbacks": self._remembered() if self._begun else {},
            "histories": self._histories,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; it is restored when its call of `fit` comes.

        Raises:
            ValueError: It does not say which call was under way.
        """
        if "fit" not in state:
            raise ValueError(
                "the state was kept by resilin 0.1, which did not say which call of fit() was "
                "under way: finish this run with that version"
            )
        self._restored = state
