"""Options of DistributedDataParallel, where its place is taken by buckets of our own."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from resilin.training.gradient.reducer import Model

_MB = 2**20
_USUAL = 25
"""Size of a bucket in MB, as that of DDP."""
_HONOURED = {"bucket_cap_mb", "broadcast_buffers", "forward_sync_buffers", "init_sync"}
_WITHOUT_MEANING = {
    "batched_grad_copy",
    "check_reduction",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "lazy_bucket_allocation",
    "skip_all_reduce_unused_params",
}
"""They choose how DDP does what is done here in one way."""
_WITHOUT_EFFECT = {"dim": 0, "static_graph": False}
"""Values of other options that change nothing; None does not either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketOptions:
    """Wishes of a user, by the options."""

    bucket_bytes: int
    """Size at which a bucket is full."""
    buffers: bool
    """Whether the buffers of replica 0 are those of all, in each step."""
    init_sync: bool
    """Whether replicas of a new job take the parameters of replica 0."""
    init_buffers: bool
    """Whether buffers are among them."""

    @classmethod
    def of(cls, model: Model) -> BucketOptions:
        """Reads the options.

        Raises:
            ValueError: One of them cannot be followed where replicas may come and go.
        """
        options = model.options
        for name, value in options.items():
            if name not in _HONOURED | _WITHOUT_MEANING:
                _check(name, value, model)
        cap = options.get("bucket_cap_mb")
        cap = _USUAL if cap is None else cap
        if cap < 0:
            raise ValueError(f"bucket_cap_mb ({cap}) must be at least 0")
        old, new = options.get("broadcast_buffers"), options.get("forward_sync_buffers")
        # As in torch: the newer name wins, and leaves buffers at the beginning alone.
        old = True if old is None else bool(old)
        return cls(
            bucket_bytes=int(cap * _MB),
            buffers=old if new is None else bool(new),
            init_sync=bool(options.get("init_sync", True)),
            init_buffers=old if new is None else True,
        )


def _check(name: str, value: object, model: Model) -> None:
    """Refuses an option whose value would change something."""
    if value is None or (name in _WITHOUT_EFFECT and value == _WITHOUT_EFFECT[name]):
        return
    here = {p.device for p in model.parameters.all}
    if name == "device_ids" and isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if name in {"device_ids", "output_device"} and {_device(value, model)} == here:
        return  # where the module is anyway
    must = _WITHOUT_EFFECT.get(name)
    raise ValueError(
        f"{name} ({value}) must be {must} in a live job: DistributedDataParallel could follow it, "
        "but cannot give up waiting for a replica that is gone"
    )


def _device(value: object, model: Model) -> torch.device | None:
    """The device that an option of DDP names; None if it names none."""
    if isinstance(value, int):
        kind = next((p.device.type for p in model.parameters.all), "cpu")
        return torch.device(kind, value)
    return torch.device(value) if isinstance(value, str | torch.device) else None
