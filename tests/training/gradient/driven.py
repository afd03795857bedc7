"""Steps of a module that a test drives itself: without a loader, an optimizer and a clock."""

from resilin.core.step import Outcome, Part, Step
from resilin.training.ballot import Ballot
from resilin.training.gradient.exchange import Exchange
from resilin.training.gradient.gradient import Gradient
from resilin.training.gradient.norms import GroupNorms
from resilin.training.gradient.parameters import Parameters
from resilin.training.gradient.reducer import Model
from resilin.training.gradient.timing import SyncTimer
from resilin.training.step import Steps


def model_of(net, **settings):
    """What a reducer is told of a module."""
    parameters = Parameters(net)
    return Model(
        module=net,
        parameters=parameters,
        norms=norms_of(net),
        exchange=Exchange(Ballot([]), parameters, SyncTimer("cpu")),
        options={},
        **settings,
    )


def norms_of(net):
    return GroupNorms([{"params": list(net.parameters())}], net.parameters())


class Driven(Steps):
    """One step after another, as far as they concern the gradient."""

    def __init__(self, net, engine, options=None, voters=()):
        norms = norms_of(net)
        self.optimizers = ()
        self.ballot = Ballot(voters, engine.wait)
        self.gradient = Gradient(
            net, norms, options or {}, engine, self.ballot, backward_begins=self._backward_begins
        )
        self.now = self.gradient.exchange

    @property
    def shared(self):
        return self.step.result is not None or self.gradient.shared

    def begin(self, part: Part, opened: Step | None) -> None:
        self._begin(part, opened)

    def call(self, *args, **kwargs):
        return self.gradient.forward(args, kwargs)

    def leave(self) -> None:
        self._leave_replicas()

    def end(self) -> None:
        self._end(Outcome.COMMITTED, None)
