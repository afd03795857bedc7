import pytest


@pytest.fixture(autouse=True)
def _each_has_a_job(fresh_job):
    """Each test trains a job of its own."""
