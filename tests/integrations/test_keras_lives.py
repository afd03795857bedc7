"""Keras programs under SIGKILL: weights, optimizer, history and files of the undisturbed run."""

import os

import pytest

# Before anything imports Keras; without it the file would be skipped where it runs alone.
os.environ.setdefault("KERAS_BACKEND", "torch")
pytest.importorskip("keras")
from tests.integrations import keras_lives
from tests.integrations.lives import assert_undisturbed, results

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lives")
    return results("tests.integrations.keras_lives", folder, (), timeout=380)


@pytest.mark.parametrize("name", keras_lives.PROGRAMS)
def test_a_program_that_is_killed_comes_to_what_it_comes_to_undisturbed(told, name):
    assert_undisturbed(told[name], keras_lives.KILLS[name])
