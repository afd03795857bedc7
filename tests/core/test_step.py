"""A step as a value: tables of its rules, and loops that do the calls in any order."""

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilin.core.step import LOST, SKIPPED, Head, Outcome, Part, Reduced, Share, Step, check


def part(number=0, *, weight=2.0, last=True, total=None):
    return Part(number=number, weight=weight, samples=round(weight), last=last, total=total)


def begun(**settings):
    return Step().opened(steps=3, measure=True, seconds=1.0).with_part(part(**settings))


def trained(**settings):
    step = begun(**settings).backward_under_way().reached(0.0)
    return step.without_backward().backward_over()


REDUCED = Reduced(weight=2.0, samples=2)

# Questions ---------------------------------------------------------------------------------------


STATES = {
    "idle": Step(),
    "called": begun(),
    "called, not last": begun(last=False),
    "in its backward pass": begun().backward_under_way().reached(0.0),
    "trained": trained(),
    "trained, not last": trained(last=False),
    "waited": trained(last=False).asked(),
    "complete": trained().reduced(REDUCED),
    "skipped": trained().reduced(SKIPPED),
    "lost": trained().reduced(LOST),
    "left": begun().leaving(),
    "changed": Step().changed(),
    "made": Step().ended(Outcome.COMMITTED, 0),
    "failed": Step().ended(Outcome.FAILED, 0),
}
ANSWERS = {
    "untouched": {"idle", "made", "failed"},
    "pending": {"trained", "trained, not last", "waited", "complete"},
    "complete": {"complete"},
    "stopped": {"skipped", "lost", "left"},
    "lost": {"lost"},
    "failed": {"failed"},
    "called": {"called", "called, not last", "left"},
    "leaves_batch": {
        *("idle", "trained, not last", "waited", "skipped", "lost", "left"),
        *("changed", "made", "failed"),
    },
    "accumulated_by_hand": {
        *("in its backward pass", "trained", "trained, not last", "complete", "skipped", "lost"),
    },
    "empty": {"left", "changed"},
    "reduces": {
        *("called", "in its backward pass", "trained", "complete", "skipped", "lost", "left"),
        "changed",
    },
}


@pytest.mark.parametrize("question", ANSWERS)
def test_each_question_is_true_in_these_states_and_in_no_other(question):
    assert {name for name, step in STATES.items() if getattr(step, question)} == ANSWERS[question]


def test_a_step_is_made_with_the_micro_batch_at_which_it_ended_until_another_one_begins():
    made = trained(number=7).reduced(REDUCED).ended(Outcome.COMMITTED, 7)
    assert made.made_with(7)
    assert not made.made_with(8)
    assert not made.made_with(None)
    assert not made.opened(steps=4, measure=False, seconds=1.0).made_with(7)
    assert not made.passed_over(7).made_with(7)
    assert not Step().ended(Outcome.SKIPPED, 7).made_with(7)
    assert made.dropped().made_with(7)


def test_a_failed_step_is_over_with_the_body_of_the_loop():
    failed = Step().ended(Outcome.FAILED, 7)
    assert failed.dropped().failed
    assert not failed.body_over().failed
    assert failed.body_over().ended_at == 7
    made = Step().ended(Outcome.COMMITTED, 7)
    assert made.body_over() is made


# Weights -----------------------------------------------------------------------------------------


def test_micro_batches_count_when_a_backward_pass_reaches_them_and_once():
    step = trained(last=False).backward_under_way().reached(0.0)
    assert (step.weight, step.samples) == (2.0, 2)
    step = step.without_backward().backward_over().asked()
    step = step.with_part(part(1, weight=3.0))
    assert (step.weight, step.own_weight) == (2.0, 2.0)
    step = step.backward_under_way().reached(5.0)  # a larger call
    assert (step.weight, step.samples, step.part.weight) == (7.0, 7, 5.0)


def test_a_replica_that_leaves_or_has_changed_weighs_nothing():
    share = Share(divisor=4.0, num_gradients=1, seconds=0.5)
    own = trained().head(share, signature=9)
    assert own == Head(2.0, 2.0, 1.0, 0.5, 1.0, 3.0, 4.0, 0.0, 0.0, 9.0)
    for step in (trained().leaving(), trained().changed()):
        head = step.head(share, signature=9)
        assert (head.weight, head.samples, head.divisor) == (0.0, 0.0, 0.0)
        assert head.skips + head.changes == 1


# Refusals ----------------------------------------------------------------------------------------


def test_what_a_loop_must_not_do_is_refused():
    with pytest.raises(RuntimeError, match=r"begins without optimizer\.step"):
        trained().reduced(REDUCED).opened(steps=4, measure=False, seconds=1.0)
    with pytest.raises(RuntimeError, match=r"a second time after optimizer\.step"):
        trained(last=False).asked().backward_under_way().reached(0.0)
    with pytest.raises(RuntimeError, match="for a step that is over"):
        Step().backward_under_way().backward_over()
    again = trained().reduced(REDUCED).backward_over()
    with pytest.raises(RuntimeError, match="a second backward pass came after"):
        again.check_reduced_once()
    trained().reduced(REDUCED).check_reduced_once()


def test_ballots_of_other_steps_are_refused():
    own = trained().head(Share(divisor=4.0), signature=9)
    two = Head(*(2 * number for number in own))
    check(own, two, 2)
    for other, text in (
        (two._replace(steps=7.0), "not in the same step"),
        (two._replace(signature=19.0), "requires_grad differs"),
        (two._replace(changes=1.0), "requires_grad differs"),
        (two._replace(divisor=9.0), "different total weights"),
    ):
        with pytest.raises(RuntimeError, match=text):
            check(own, other, 2)
    check(own, two._replace(divisor=9.0, skips=1.0), 2)


# Loops -------------------------------------------------------------------------------------------


@dataclass
class Loop:
    """One replica, whose steps have `sizes` micro-batches, and a loop that does anything."""

    sizes: tuple
    step: Step = field(default_factory=Step)
    at: int = -1
    counted: Counter = field(default_factory=Counter)
    reached: list = field(default_factory=list)
    made: list = field(default_factory=list)

    def next(self):
        """The loader hands out the next micro-batch."""
        if self.index == len(self.sizes) - 1 or self.at < 0:
            if self.step.complete:
                raise RuntimeError("begins without optimizer.step")
            if self.at >= 0:
                self.drop()
                self.step = self.step.body_over().passed_over(self.at)
        self.at += 1

    @property
    def index(self):
        return self.at % len(self.sizes)

    def drop(self):
        if not self.step.untouched:
            self.step = self.step.dropped()
            self.reached.clear()

    def call(self):
        """The model is called with it."""
        if self.at < 0 or self.step.is_in(self.at):
            return
        first = self.step.part is None or self.index == 0
        if first:
            opened = self.step.opened(steps=len(self.made), measure=False, seconds=1.0)
            self.drop()
            self.step = opened
        last = self.index == len(self.sizes) - 1
        self.step = self.step.taken_in() if self.step.fresh else self.step
        self.step = self.step.with_part(part(self.at, weight=self.sizes[self.index], last=last))

    def backward(self):
        before = self.step
        self.step = self.step.backward_under_way()
        if before.part is not None and before.result is None:
            if not before.trained:
                self.reached.append(before.part)
            self.step = self.step.reached(0.0)
        self.step = self.step.without_backward()
        self.step = self.step.backward_over()
        if self.step.part.last:
            self.step.check_reduced_once()
            if self.step.result is None:
                self.step = self.step.reduced(Reduced(weight=self.step.own_weight))

    def make(self):
        """`optimizer.step()`."""
        if self.step.part is None or not self.step.pending:
            raise RuntimeError("no backward pass")
        self.step = self.step.asked()
        if self.step.waited:
            return
        assert self.step.result.weight == sum(each.weight for each in self.reached)
        self.made.append([each.number for each in self.reached])
        self.counted.update(self.made[-1])
        self.reached.clear()
        self.step = self.step.ended(Outcome.COMMITTED, self.at)
        assert self.step.made_with(self.at)

    def zero(self):
        """`optimizer.zero_grad()` leaves a step that is complete."""
        if self.step.complete:
            self.step = self.step.ended(Outcome.SKIPPED, self.at)
            self.reached.clear()


@given(
    st.lists(st.sampled_from((1.0, 2.0, 3.0)), min_size=1, max_size=3),
    st.lists(
        st.sampled_from(("next", "call", "backward", "make", "zero", "next call backward make")),
        max_size=40,
    ),
)
def test_whatever_a_loop_does_each_micro_batch_counts_at_most_once(sizes, calls):
    loop = Loop(tuple(sizes))
    with suppress(RuntimeError):  # what is refused ends the loop
        for name in " ".join(calls).split():
            getattr(loop, name)()
    assert all(count == 1 for count in loop.counted.values())
    for numbers in loop.made:
        # Those of one step, in order, and the last of them among them.
        assert numbers == sorted(numbers)
        assert len({number // len(sizes) for number in numbers}) == 1
        assert numbers[-1] % len(sizes) == len(sizes) - 1
