import pytest

from resilin.training.gradient.buckets import BucketReducer
from resilin.training.gradient.ddp import DdpReducer

KINDS = {"ddp": DdpReducer, "buckets": BucketReducer}


@pytest.fixture(autouse=True)
def _each_has_a_job(fresh_job):
    """Each test trains a job of its own."""


@pytest.fixture(autouse=True)
def reducer(request, monkeypatch):
    """The class that reduces over several replicas; tests ask for another one by a parameter."""
    kind = KINDS[getattr(request, "param", "ddp")]
    if kind is BucketReducer:
        # Not for live jobs alone: it is asked before that of DDP.
        monkeypatch.setattr(BucketReducer, "fits", DdpReducer.fits)
    return kind
