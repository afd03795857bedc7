import pytest


@pytest.fixture(autouse=True)
def fresh_job():
    """Each test trains a job of its own."""
    import resilin

    resilin.reset_job()
    yield
    resilin.reset_job()
