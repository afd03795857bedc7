"""How often workers are replaced, and a job is started again."""

from resilin.cli.live.verdict import JOB, Budget
from resilin.core.lives import MOST_FRUITLESS, Life

DEAD_AT_ONCE = Life(seconds=1.0, shows=True)


def grown(began, ended):
    return Life(seconds=1.0, shows=True, began=began, ended=ended)


def test_a_limit_of_the_user_is_obeyed_exactly():
    budget = Budget(7, bounds_fruitless=False)
    assert [budget.refusal(0, DEAD_AT_ONCE) for _ in range(7)] == [None] * 7
    assert "7 restarts are used up" in (budget.refusal(0, grown(0, 9)) or "")
    assert "--max-restarts" in (budget.refusal(JOB, None) or "")
    assert (budget.replaced, budget.restarted) == (7, 0)


def test_workers_of_one_device_that_make_no_step_are_given_up_and_others_are_not():
    budget = Budget(1000, bounds_fruitless=True)
    answers = [budget.refusal(1, DEAD_AT_ONCE) for _ in range(MOST_FRUITLESS)]
    assert answers[:-1] == [None] * (MOST_FRUITLESS - 1)
    assert "failed 5 times in a row without making a step" in answers[-1]
    assert budget.refusal(0, DEAD_AT_ONCE) is None


def test_a_step_or_a_request_for_a_restart_is_no_fault_of_the_script():
    budget = Budget(1000, bounds_fruitless=True)
    for start in range(20):
        assert budget.refusal(0, grown(start, start + 1)) is None
        assert budget.refusal(1, None) is None
    assert budget.used == 40


def test_the_job_is_counted_apart_and_a_new_start_clears_its_workers():
    budget = Budget(1000, bounds_fruitless=True)
    for _ in range(MOST_FRUITLESS - 1):
        assert budget.refusal(0, DEAD_AT_ONCE) is None
        assert budget.refusal(JOB, DEAD_AT_ONCE) is None
    assert budget.refusal(0, DEAD_AT_ONCE) is None
    assert "in a row" in (budget.refusal(JOB, DEAD_AT_ONCE) or "")
