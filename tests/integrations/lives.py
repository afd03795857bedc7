"""Programs that are killed with SIGKILL and started again, in processes that cost little.

`python -m tests.integrations.lives MODULE FOLDER NAME...` imports the module once and forks each
life of its programs: with torch and a framework loaded, a life takes a fraction of a second. The
module has `PROGRAMS`, functions by name that get a `Life` and return something for JSON. A program
is also run without kills; both results are printed.

A launcher in small: when a replica dies, the others are killed, and all are started again.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import forked

ROOT = Path(__file__).parents[2]
LIVES = 14
"""A program that is started more often than this does not get on."""
SECONDS = 120.0
"""Longest time of one life."""


class Life:
    """What a program knows of its process."""

    def __init__(self, folder: Path, replica: int, *, disturbed: bool) -> None:
        self.folder = folder
        """Files of the program; the same in all its lives."""
        self.replica = replica
        self._disturbed = disturbed

    def die(self, name: str) -> None:
        """Kills this process, the first time that any life comes here with this name."""
        if not self._disturbed:
            return
        try:
            (self.folder / f"died-{name}").touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    def died(self, name: str) -> bool:
        return (self.folder / f"died-{name}").exists()


def _live(program: Callable[[Life], Any], life: Life, environ: dict[str, str]) -> None:
    """The whole of a forked process."""
    os.environ.update(environ)
    log = os.open(life.folder / f"log-{life.replica}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        told = program(life)
        (life.folder / f"result-{life.replica}").write_text(json.dumps(told))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(
    program: Callable[[Life], Any], folder: Path, replicas: int = 1, *, disturbed: bool = True
) -> Any:
    """Runs a program until all of its replicas have ended well; what replica 0 returned."""
    folder.mkdir(parents=True)
    for life in range(LIVES):
        environ = {"RESILIN_MEMORY_DIR": str(folder / "memory"), "RESILIN_RUN_DIR": "off"}
        if replicas > 1:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            environ |= {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "WORLD_SIZE": str(replicas),
                "LOCAL_WORLD_SIZE": str(replicas),
                "TORCHELASTIC_RUN_ID": "lives",
                "TORCHELASTIC_RESTART_COUNT": str(life),
                "GLOO_SOCKET_IFNAME": "lo",
            }
        present: dict[int, int] = {}
        for replica in range(replicas):
            own = {"RANK": str(replica), "LOCAL_RANK": str(replica)} if replicas > 1 else {}
            if (pid := os.fork()) == 0:
                _live(program, Life(folder, replica, disturbed=disturbed), environ | own)
            present[pid] = replica
        if _wait(present):
            return json.loads((folder / "result-0").read_text())
    logs = "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("log-*")))
    raise RuntimeError(f"{LIVES} lives were not enough: {logs}")


def _wait(present: dict[int, int]) -> bool:
    """Waits for all replicas, or ends them when one fails; whether all ended well."""
    deadline, well = time.monotonic() + SECONDS, True
    while present:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in present:
            del present[pid]
            well = well and status == 0
        if not well or time.monotonic() > deadline:
            well = False
            for other in present:
                os.kill(other, signal.SIGKILL)
                os.waitpid(other, 0)
            present.clear()
        elif not pid:
            time.sleep(0.01)
    return well


def results(module: str, folder: Path, names: Sequence[str], timeout: float) -> dict[str, Any]:
    """Runs programs of a module in a process of their own.

    Returns:
        By name, what they returned `undisturbed` and `killed`, how many `kills` there were, and
        the `log` of the lives of replica 0; or the `error`.
    """
    command = [sys.executable, "-m", "tests.integrations.lives", module, str(folder), *names]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = forked.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr[-5000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def assert_undisturbed(told: dict[str, Any], kills: int) -> None:
    """Compares a program that was killed with its undisturbed run.

    Args:
        told: What `results` has of the program.
        kills: How often it must have been killed; fewer would show nothing.
    """
    assert "error" not in told, told["error"]
    assert told["kills"] == kills, told["log"][-3000:]
    for what, expected in told["undisturbed"].items():
        assert told["killed"][what] == close_to(expected), what


def close_to(value: Any) -> Any:
    """Numbers to 1e-10, everything else as it is."""
    if isinstance(value, float):
        return pytest.approx(value, rel=1e-10, abs=1e-10, nan_ok=True)
    if isinstance(value, list):
        return [close_to(item) for item in value]
    if isinstance(value, dict):
        return {key: close_to(item) for key, item in value.items()}
    return value


def main() -> None:
    module = importlib.import_module(sys.argv[1])
    folder, told = Path(sys.argv[2]), {}
    for name in sys.argv[3:] or module.PROGRAMS:
        program = module.PROGRAMS[name]
        replicas = getattr(program, "replicas", 1)
        try:
            told[name] = {
                "undisturbed": run(program, folder / f"{name}-0", replicas, disturbed=False),
                "killed": run(program, folder / f"{name}-1", replicas),
                "kills": len(list((folder / f"{name}-1").glob("died-*"))),
                "log": (folder / f"{name}-1" / "log-0").read_text(),
            }
        except RuntimeError as error:
            told[name] = {"error": str(error)}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
