"""The choice of a reducer: the first class in the list that fits the model.

A new reducer is added to the list.
"""

from __future__ import annotations

import torch.distributed as dist

from resilin.training.gradient.buckets import BucketReducer
from resilin.training.gradient.ddp import DdpReducer
from resilin.training.gradient.fsdp import FsdpReducer
from resilin.training.gradient.local import LocalReducer
from resilin.training.gradient.reducer import Model, Reducer, agree_on_source

REDUCERS: tuple[type[Reducer], ...] = (
    FsdpReducer,
    LocalReducer,
    BucketReducer,
    DdpReducer,
)
"""All reducers, in the order in which they are asked; the last one fits everything."""


def choose(model: Model, group: dist.ProcessGroup | None) -> Reducer:
    """Makes the reducer of a model for these replicas; it is not attached yet.

    Args:
        model: The model.
        group: The replicas; None if there is only this one.
    """
    kind: type = next(kind for kind in REDUCERS if kind.fits(model, group))
    reducer: Reducer = kind(model)
    return reducer


def attached(model: Model, group: dist.ProcessGroup | None, *, joined: bool) -> Reducer:
    """Makes a reducer for replicas that are new to each other. Collective.

    Args:
        model: The model.
        group: The replicas; None if there is only this one.
        joined: Whether this replica was in the job before, and so has its parameters.
    """
    # Members of a live job were healed before they come here: they have the same parameters.
    source: int | None = None
    if group is not None and not (model.live and joined):
        source = agree_on_source(model, group, joined=joined)
    reducer = choose(model, group)
    reducer.attach(group, source=source)
    return reducer
