"""The script that `resilin run` starts: it runs one case after the other, as often as it takes.

    resilin run --warm --nproc 4 tests/fuzz/worker.py FOLDER

`FOLDER/cases` has one folder for each case, with its record and its script. All workers agree
through a store of the driver on which case is next, and in which life it is. Workers that the life
has no use for wait for the next case. When a worker is killed, the agent starts all of them again,
and they go on with the case that was under way.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import runpy
import shutil
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

import resilin
from tests.fuzz import hooks
from tests.fuzz.program import Case

EXTRA_LIVES = 3
"""Lives that a case may have beyond its kills before it counts as a restart loop."""


def end(path: Path, how: str) -> None:
    """Says how a case has ended; the driver, which waits for the file, finds it whole."""
    (path / "ending").write_text(how)
    (path / "ending").replace(path / "done")


def decide(folder: Path) -> dict[str, Any] | None:
    """Which case is next, and which life of it; None if all are done."""
    # A twin comes before the case that is compared with it.
    for path in sorted(
        (folder / "cases").iterdir(), key=lambda path: (path.name[:4], -len(path.name))
    ):
        if (path / "done").exists():
            continue
        case = Case.from_json((path / "case.json").read_text())
        life = len(list(path.glob("life-*")))
        killed = path / f"killed-{life - 1}"
        failed = list(path.glob(f"error-{life - 1}-*"))
        if (failed and not killed.exists()) or life > len(case.kills) + EXTRA_LIVES:
            end(path, "error" if failed else "restart loop")
            continue
        if killed.exists() and killed.read_text().endswith("-wipe"):
            shutil.rmtree(path / "memory", ignore_errors=True)
        (path / "memory").mkdir(exist_ok=True)
        (path / f"life-{life}").write_text(str(case.world(life)))
        return {"path": str(path), "life": life, "world": case.world(life)}
    return None


def run(path: Path, life: int, world: int, rank: int) -> None:
    """Runs one life of a case to its end; does not return if it fails."""
    case = Case.from_json((path / "case.json").read_text())
    os.environ.update(
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=os.environ["FUZZ_PORT"],
        TORCHELASTIC_USE_AGENT_STORE="True",
        RESILIN_MEMORY_DIR=str(path / "memory"),
    )
    kill = None
    if life < len(case.kills) and case.kills[life].replica % world == rank:
        kill = case.kills[life]
    hooks.plan = hooks.Plan(path, life, rank, kill)
    try:
        hooks.plan.start()
        runpy.run_path(str(path / "script.py"), run_name="__main__")
        hooks.plan.end()
    except SystemExit:
        hooks.plan.end()
        if not (path / f"left-{life}").exists():
            raise
    except BaseException as error:
        hooks.plan.end()
        if not (path / f"killed-{life}").exists():
            text = "".join(traceback.format_exception(error))
            record = {"type": type(error).__name__, "message": str(error), "traceback": text}
            record["time"] = time.time()
            (path / f"error-{life}-{rank}.tmp").write_text(json.dumps(record))
            (path / f"error-{life}-{rank}.tmp").rename(path / f"error-{life}-{rank}")
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def main() -> None:
    folder = Path(sys.argv[1])
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    rank = int(os.environ["RANK"])
    store = dist.TCPStore(
        "127.0.0.1", int(os.environ["FUZZ_PORT"]), is_master=False, timeout=timedelta(hours=2)
    )
    life_of_all = f"fuzz/{os.environ['FUZZ_LAUNCH']}/{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    number = 0
    while True:
        key = f"{life_of_all}/{number}"
        if rank == 0:
            store.set(key, json.dumps(decide(folder)))
        task = json.loads(store.get(key))
        if task is None:
            break
        if rank < task["world"]:
            run(Path(task["path"]), task["life"], task["world"], rank)
            store.set(f"{key}/{rank}", "done")
            for other in range(task["world"]):
                store.get(f"{key}/{other}")
            if (Path(task["path"]) / f"left-{task['life']}").exists():
                # The script has ended: so does its process, which the agent starts again. One that
                # lived on would hold its state in memory against the next life.
                sys.exit(1)
            resilin.reset_job()
            if dist.is_initialized():
                dist.destroy_process_group()
            # Workers of the next case are forks: one that finds what is left of this group among
            # its garbage would wait there for threads that it does not have, or crash.
            gc.collect()
            if rank == 0:
                end(Path(task["path"]), "ran")
        number += 1
    with contextlib.suppress(Exception):
        sys.stdout.flush()


if __name__ == "__main__":
    main()
