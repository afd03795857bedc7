"""The marker ``world_size``, which runs a test in processes. How that is done: ``world.py``.

    @pytest.mark.world_size(2)
    def test_sum():
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 2

Each rank is a pytest of its own, hence fixtures are set up in every rank, and nowhere else. A test
that forms a second group has to give it a ``PrefixStore``: torch leaves the addresses of the first
in the store. Hypothesis has to be told to ``derandomize``: ranks have to draw the same examples.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from collections.abc import Generator, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests import examples, world

DEADLINE = pytest.StashKey[float]()
ALSO = pytest.StashKey[tuple[str, ...]]()
PATH = pytest.StashKey[Path]()
CROWD = 200_000
"""Objects above which those that there are no longer count."""
MARKER = (
    "world_size(n, init=True): run the test in n gloo processes with a torch thread each, and,"
    " unless init is False, with the process group initialised before the fixtures are set up."
)

PARTS = ("torch", "docs", "benchmarks", "clusters", "torture", "frameworks", "jobs", "mutations")
NIGHTLY = "nightly(part): left out of the gate, and run by this part of `.ci/nightly`."
PROCESSES = "processes: starts programs or servers; `.ci/quick` leaves it out."

TESTS = Path(__file__).parent
FIRST = (
    "cli/test_slurm.py",
    "training/state/test_recovery.py",
    "training/gradient/test_replicas.py",
    "training/test_torchrun.py",
    "training/gradient/test_norms.py",
    "training/test_exactness.py",
    "integrations/test_hf_lives.py",
    "training/test_host_reads.py",
    "cli/test_warm.py",
    "training/gates/test_scheduler.py",
    "training/report/test_hints.py",
    "integrations/test_keras_lives.py",
    "training/data/test_stream_loops.py",
    "training/data/test_passes.py",
    "training/gradient/test_fsdp.py",
    "engine/live/test_forming.py",
    "integrations/test_lightning_recovery.py",
    "training/test_parallel.py",
    "training/gradient/test_buckets.py",
    "cli/live/test_machines.py",
    "training/live/test_live_training.py",
    "training/data/test_streams.py",
    "cli/live/test_workers.py",
    "cluster/controller/test_unreliable.py",
    "cli/live/test_launcher.py",
    "training/live/test_live_streams.py",
    "cli/live/test_etcd.py",
    "integrations/test_transformers.py",
    "integrations/test_keras.py",
    "cluster/backends/test_kubernetes.py",
    "cli/test_hang.py",
)
"""Files that take longest, longest first. Where two workers take files in turn, one of these at the
end would leave the other worker with nothing to do."""

SHARDED = (
    "training/gradient/test_fsdp.py",
    "training/gradient/test_fsdp_loops.py",
    "training/gradient/test_fsdp_refusals.py",
    "training/gradient/test_shared_buffers.py",
    "training/live/test_live_sharded.py",
    "training/test_sharded_restarts.py",
)
"""Files about sharded models, which are refused before torch 2.13 (`test_compat.py`)."""


def version_of_torch() -> tuple[int, ...]:
    """Its first two numbers; none where it is not installed, as for the tests of the core."""
    try:
        return tuple(map(int, re.findall(r"\d+", metadata.version("torch"))[:2]))
    except metadata.PackageNotFoundError:
        return ()


collect_ignore = [*SHARDED] if () < version_of_torch() < (2, 13) else []


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let processes that the test starts receive SIGINT, as those of a terminal do.

    A shell without job control starts its background processes with SIGINT ignored, and all their
    descendants inherit that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def pytest_configure(config: pytest.Config) -> None:
    examples.load_profile()
    config.addinivalue_line("markers", MARKER)
    config.addinivalue_line("markers", NIGHTLY)
    config.addinivalue_line("markers", PROCESSES)
    # Jobs write down what happens where a test asks for it, and nowhere else.
    os.environ.setdefault("RESILIN_RUN_DIR", "off")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("nightly"):
            if mark.args or mark.kwargs.get("part") not in PARTS:
                told = f"{item.nodeid}: mark.nightly takes part=, one of {PARTS}"
                raise pytest.UsageError(told)
    places = {TESTS / name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish(session: pytest.Session) -> None:
    # All of them are looked at, so that a wrong marker is an error before anything is run.
    worlds = [item for item in session.items if world.world_of(item)]
    if session.config.option.collectonly:
        return
    # A million objects that all tests have in common: none of them has to be looked at again.
    gc.collect()
    gc.freeze()
    if worlds:
        world.start_fork_server()
    if any("counted" in getattr(item, "fixturenames", ()) for item in session.items):
        from tests.counted import device

        if device.compiler() is not None:
            device.build()  # here, since it is no test's time that it takes


def pytest_unconfigure() -> None:
    if not world.in_rank():
        world.stop_fork_server()


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    item.stash[DEADLINE] = world.deadline_for(settings.timeout)
    return world.in_rank() or None  # ranks need no timer: the session has an eye on them


def forget_loaded() -> None:
    """Take the frameworks that a file has loaded out of what later files look through.

    They have millions of objects, and every model looks through all objects for its schedulers.
    """
    if len(gc.get_objects()) > CROWD:
        gc.unfreeze()  # what was in use the last time, and is not any more
        gc.collect()
        gc.freeze()


def preload(item: pytest.Item) -> None:
    """Have what processes of the tests of a file import, its `PRELOAD`, in the fork server."""
    also = getattr(item.getparent(pytest.Module).obj, "PRELOAD", ())
    if also != item.config.stash.get(ALSO, ()):
        item.config.stash[ALSO] = also
        world.stop_fork_server()
        world.start_fork_server(also)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # Not when a file ends: pytest still holds what its last test has made, and what is frozen is
    # never collected.
    if not world.in_rank() and item.config.stash.get(PATH, None) != item.path:
        item.config.stash[PATH] = item.path
        forget_loaded()
        preload(item)
    if world.world_of(item):
        item.fixturenames = ["tmp_path"]  # all the others are for the ranks to set up


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None]:
    """What outlives its test is that test's fault, not that of the next one."""
    yield
    if world.in_rank():
        return
    left = [name for name in world.LAUNCHER if os.environ.pop(name, None) is not None]
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        left.append("the default process group")
    if left:
        pytest.fail(f"the test has left to the tests after it: {', '.join(left)}")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    __tracebackhide__ = True
    asked = world.world_of(pyfuncitem)
    if asked is None:
        return None
    scratch = pyfuncitem.funcargs["tmp_path"]
    world.run_world(pyfuncitem, asked, scratch, pyfuncitem.stash.get(DEADLINE, None))
    return True


@pytest.fixture
def shared_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that is the same for all ranks of a world."""
    if world.in_rank():
        return Path(os.environ[world.RANK_ENV])
    return tmp_path_factory.mktemp("shared")


@pytest.fixture
def counted() -> Any:
    """The device that counts reads; the test needs a process of its own, `world_size(1)`."""
    from tests.counted import device

    assert world.in_rank(), "a process that has loaded this device keeps it: use world_size(1)"
    if device.compiler() is None:
        pytest.skip("no C++ compiler: neither CXX nor g++ is there to build the counting device")
    return device.load()


@pytest.fixture
def fresh_job() -> Iterator[None]:
    """A job of the test's own. Where most tests train one, the directory asks for it."""
    import resilin

    resilin.reset_job()
    yield
    resilin.reset_job()


@pytest.fixture
def every_step_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step goes by untold, however long the machine takes to tell of one."""
    from resilin.training.report import recorder

    monkeypatch.setattr(recorder, "ALLOWANCE", float("inf"))
