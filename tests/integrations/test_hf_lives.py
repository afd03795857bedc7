"""The Trainer and Accelerate under SIGKILL: weights, logs and rates of the undisturbed run."""

import pytest

pytest.importorskip("transformers")
from tests.integrations import hf_lives
from tests.integrations.lives import assert_undisturbed, results

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lives")
    return results("tests.integrations.hf_lives", folder, (), timeout=380)


@pytest.mark.parametrize("name", hf_lives.PROGRAMS)
def test_a_program_that_is_killed_comes_to_what_it_comes_to_undisturbed(told, name):
    assert_undisturbed(told[name], hf_lives.KILLS[name])
