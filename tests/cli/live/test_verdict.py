"""What the exit of a worker means, for each state of the job."""

import signal

import pytest

from resilin.cli.live.verdict import Verdict, judge
from resilin.engine.stop import RESTART

WAITING = {"begun": False, "formed": False, "ever_formed": False}
FORMING = {"begun": True, "formed": False, "ever_formed": False}
TRAINING = {"begun": True, "formed": True, "ever_formed": True}
AGAIN = {"begun": False, "formed": False, "ever_formed": True}
LEFT = 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("code", "finished", "state", "verdict"),
    [
        (0, True, TRAINING, Verdict.FINISHED),
        (0, False, TRAINING, Verdict.EARLY),
        (0, False, WAITING, Verdict.ABSENT),
        (LEFT, False, TRAINING, Verdict.LEFT),
        (128 + signal.SIGUSR1, False, FORMING, Verdict.LEFT),
        (LEFT, False, WAITING, Verdict.ABSENT),
        # Ended by the signal itself, without having said that it leaves.
        (-signal.SIGTERM, False, TRAINING, Verdict.LOST),
        (-signal.SIGKILL, False, TRAINING, Verdict.LOST),
        (-signal.SIGKILL, False, FORMING, Verdict.LOST),
        (-signal.SIGKILL, False, WAITING, Verdict.LOST),
        (1, False, WAITING, Verdict.WRONG),
        (1, False, FORMING, Verdict.WRONG),
        (1, False, TRAINING, Verdict.LOST),
        (1, True, TRAINING, Verdict.LOST),
        (1, False, AGAIN, Verdict.LOST),
        (RESTART, False, TRAINING, Verdict.LOST),
        (RESTART, False, FORMING, Verdict.ANEW),
        (RESTART, False, WAITING, Verdict.ANEW),
    ],
)
def test_the_meaning_of_an_exit(code, finished, state, verdict):
    assert judge(code, finished=finished, **state) is verdict
