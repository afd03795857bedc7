"""Joining the process group of a job, under any launcher.

torchrun and every launcher that sets its environment variables (`RANK`, `WORLD_SIZE`,
`MASTER_ADDR`, `MASTER_PORT`) start a job of many processes; a plain `python script.py` is a job of
one, with no group and no server. Nothing is cached here: the members are read from
torch.distributed each time, because they may change between any two steps.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta
from functools import cache

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from resilin.compat.ray_names import in_worker
from resilin.compat.torch_names import rendezvous_from_environment
from resilin.engine import devices, environment, pulse, ray
from resilin.engine.base import Engine
from resilin.engine.copies import Place
from resilin.engine.live.client import Client
from resilin.engine.live.engine import Live
from resilin.engine.live.refusal import refuse_live
from resilin.engine.single import Single
from resilin.engine.torchrun import Torchrun

LAUNCHER_ENV = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that a launcher sets for each of its processes."""
DEFAULT_TIMEOUT = timedelta(minutes=30)
"""Time limit of a collective, after which the job counts as hung."""


def init_process_group(backend: str | None = None, *, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
    """Join the job that this process was launched into.

    Under torchrun or a compatible launcher this initialises torch.distributed; in a single process
    it does nothing, and the job has one replica. Calling it again changes nothing. After
    `torch.distributed.destroy_process_group()` on all replicas it can be called again, equally
    often on each of them.

    Args:
        backend: `nccl`, `gloo` or another one of torch.distributed; None chooses by the device:
            `cpu:gloo,cuda:nccl` if CUDA is available, xla with PyTorch/XLA, else gloo.
        timeout: Time limit of a collective.

    Raises:
        ValueError: Only a part of the launcher's environment is set, or the group that exists
            has another backend than the one asked for.
    """
    if dist.is_initialized():
        if backend is not None and backend not in str(dist.get_backend()):
            raise ValueError(
                f"the process group already exists with backend {dist.get_backend()!r}, but "
                f"{backend!r} was asked for"
            )
        return
    if environment.LIVE in os.environ:
        _refuse_backend(backend)
        pulse.announce()
        pulse.of_this_process()  # its launcher sees from here on that the script has ended
        live_engine().come()
        return
    present = [name for name in LAUNCHER_ENV if name in os.environ]
    if not present:
        return
    if missing := [name for name in LAUNCHER_ENV if name not in os.environ]:
        raise ValueError(
            f"the launcher's environment is incomplete: {', '.join(present)} set, "
            f"{', '.join(missing)} missing; start the job with torchrun, or set none of them"
        )
    pulse.announce()
    kind = devices.here()
    if "LOCAL_RANK" in os.environ:
        kind.choose(int(os.environ["LOCAL_RANK"]))
    if backend is None:
        backend = kind.backend
    store, rank, world_size = rendezvous_from_environment(timeout)
    dist.init_process_group(
        backend,
        store=PrefixStore(_agree_on_name(store, rank, world_size, timeout), store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )


def _agree_on_name(store: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """A name for this group that no earlier group has had, the same on all of its members.

    A store may outlive groups: a process joins again, or torchrun starts new workers on the store
    of the old ones. Under the same name they would find each other's addresses, and connect to the
    dead. So the first member makes up a name, and everybody else signs it; only a name that bears
    one's own signature is not an old one.
    """
    key = "resilin/group"
    if rank == 0:
        name = f"{key}/{uuid.uuid4().hex}"
        store.set(key, name)
        signatures = [store.get(f"{name}/{other}").decode() for other in range(1, world_size)]
        store.set(f"{name}/signed", " ".join(signatures))
        return name
    mine = uuid.uuid4().hex
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        name = str(store.get(key).decode())
        store.set(f"{name}/{rank}", mine)
        if store.check([f"{name}/signed"]) and mine in store.get(f"{name}/signed").decode().split():
            return name
        time.sleep(0.01)
    raise TimeoutError(f"replica {rank} of {world_size} waited {timeout} for the others to join")


def num_launched() -> int:
    """Processes that the launcher has started, also if they have not joined each other yet."""
    if environment.LIVE in os.environ:
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return int(os.environ.get("WORLD_SIZE", "1"))


@cache
def live_engine() -> Live:
    """The engine of this process under `resilin run --live`; it has one connection, and one place.

    Raises:
        ValueError: The launcher's environment is incomplete.
    """
    name = os.environ.get(environment.MEMBER)
    if name is None:
        raise ValueError(
            f"{environment.LIVE} is set and {environment.MEMBER} is missing: start the job with "
            "resilin run --live"
        )
    secret = os.environ.get(environment.LIVE_SECRET)
    known = None if secret is None else bytes.fromhex(secret)
    place = Place.of_this_process(name)
    client = Client(os.environ[environment.LIVE], name, known, member=place.member)
    return Live(client, place)


def _refuse_backend(backend: str | None) -> None:
    """Refuses a group that a lost member would block."""
    asked = backend or devices.here().backend
    if asked not in ("gloo", "cpu:gloo"):
        refuse_live(
            f"a live job has groups of the backend gloo, and this one asks for {asked!r}: a "
            "collective of another backend cannot be given up when a member is lost"
        )


def detect() -> Engine:
    """The engine for the launcher of this process."""
    if environment.LIVE in os.environ:
        return live_engine()
    if in_worker():
        return ray.RayTrain()
    return Torchrun() if all(name in os.environ for name in LAUNCHER_ENV) else Single()
