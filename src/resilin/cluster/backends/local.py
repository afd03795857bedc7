"""Parts as processes of this machine, on nodes that exist by name only.

For one machine with several accelerators, for `resilin sched demo`, and for tests. Nothing is kept
in this process: what runs is in the files of `runner`, one directory for each cluster, so that a
controller that was killed finds its parts again, and two controllers do not touch each other's.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from resilin.cluster.backends import runner
from resilin.cluster.backends.base import BackendError, Part, PartState, PartStatus
from resilin.cluster.node import Node

START_LIMIT = 60.0
"""Seconds within which a runner must have started."""
REMEMBERED = 3600.0
"""Seconds for which a part that has ended is listed."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Names that can be part of a file name."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Variable that gives a part its GPUs, where the node has real ones."""


_F = TypeVar("_F", bound=Callable[..., Any])


def _answers(call: _F) -> _F:
    """Have a call of the backend fail as backends do: a full disk is no error of the caller."""

    @wraps(call)
    def answering(*given: Any, **named: Any) -> Any:
        try:
            return call(*given, **named)
        except OSError as error:
            raise BackendError(f"the files of local parts: {error}") from error

    return cast(_F, answering)


def backend(cluster: str, options: Mapping[str, str]) -> LocalBackend:
    """The backend of `resilin sched serve --backend local`.

    Args:
        cluster: Id of the cluster.
        options: `directory` for the files; `nodes`, such as `a=2,b=2` (default: one node, with the
            GPUs of this machine, or its cores); `kind` of accelerators.

    Raises:
        ValueError: An option is not known, or wrong.
    """
    unknown = sorted(set(options) - {"directory", "nodes", "kind"})
    if unknown:
        raise ValueError(f"option {unknown[0]!r} must be one of directory, nodes, kind")
    gpus = _own_gpus()
    kind = options.get("kind", "gpu" if gpus else "cpu")
    if "nodes" in options:
        nodes = tuple(_node(text, kind) for text in options["nodes"].split(","))
    else:
        count = len(gpus) or len(os.sched_getaffinity(0))
        nodes = (Node(name=os.uname().nodename, accelerators=count, kind=kind),)
    directory = Path(options.get("directory", "~/.local/state/resilin/local")).expanduser()
    return LocalBackend(directory, cluster, nodes, gpus=() if "nodes" in options else gpus)


def _own_gpus(devices: Path = Path("/dev")) -> tuple[str, ...]:
    """The GPUs of this machine that this process may use, as `CUDA_VISIBLE_DEVICES` names them."""
    there = sorted(int(path.name[6:]) for path in devices.glob("nvidia[0-9]*"))
    told = os.environ.get(VISIBLE)
    if told is None or not there:
        return tuple(map(str, there))
    named = [name.strip() for name in told.split(",")]
    # CUDA ends the list at the first one that is none.
    end = next((n for n, name in enumerate(named) if name in ("", "-1")), len(named))
    return tuple(named[:end])


def _node(text: str, kind: str) -> Node:
    name, _, count = text.partition("=")
    if not NAME.fullmatch(name) or not count.isdigit():
        raise ValueError(f"nodes ({text!r}) must be NAME=ACCELERATORS, separated by commas")
    return Node(name=name, accelerators=int(count), kind=kind)


class LocalBackend:
    """Processes of this machine.

    Args:
        directory: For the files of all clusters.
        cluster: Id of this one.
        nodes: The nodes.
        gpus: The accelerators, if they are GPUs of this machine: each part is given its own.
    """

    def __init__(
        self, directory: Path, cluster: str, nodes: tuple[Node, ...], *, gpus: tuple[str, ...] = ()
    ) -> None:
        if not NAME.fullmatch(cluster):
            raise ValueError(f"cluster ({cluster!r}) must be letters, digits, dots and hyphens")
        self._root = directory
        self._parts = directory / cluster
        self._down = directory / "down"
        self._nodes = nodes
        self._gpus = gpus
        for each in (self._parts, self._down):
            each.mkdir(parents=True, exist_ok=True, mode=0o700)

    def detect(self) -> str | None:
        """The reason why it cannot be used here; None if it can."""
        return None if os.name == "posix" else "local parts need signals of POSIX"

    @_answers
    def nodes(self) -> tuple[Node, ...]:
        """Nodes that are up, with the accelerators that other clusters do not use."""
        used: dict[str, int] = {}
        for directory in self._root.iterdir():
            if directory in (self._parts, self._down) or not directory.is_dir():
                continue
            for status in _statuses(directory).values():
                if _is_running(status):
                    used[status["node"]] = used.get(status["node"], 0) + status["accelerators"]
        return tuple(
            Node(
                name=node.name,
                accelerators=max(0, node.accelerators - used.get(node.name, 0)),
                kind=node.kind,
            )
            for node in self._nodes
            if not (self._down / node.name).exists()
        )

    @_answers
    def start(self, part: Part) -> None:
        """Start a part, unless one of this name exists or has existed."""
        name = _checked(part.name)
        if (self._parts / f"{name}.status").exists():
            return
        if (self._down / part.node).exists():
            raise BackendError(f"{name} cannot be started: node {part.node} is down")
        environment = dict(part.environment)
        with self._locked():
            if self._gpus:
                environment[VISIBLE] = self._devices(part)
            described = {
                "node": part.node,
                "accelerators": part.accelerators,
                "command": list(part.command),
                "environment": environment,
                "directory": part.directory,
                "log": part.log,
            }
            runner.write(self._parts / f"{name}.part", described)
            command = [sys.executable, "-I", "-S", runner.__file__, str(self._parts), name]
            try:
                done = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    timeout=START_LIMIT,
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise BackendError(f"{name} cannot be started: {error}") from error
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()[-500:]
            raise BackendError(f"{name} cannot be started: {said or done.returncode}")

    @_answers
    def stop(self, name: str, grace: float) -> None:
        """Ask a part to save and leave within `grace` seconds."""
        status = runner.read(self._parts / f"{_checked(name)}.status")
        if status is None or not _is_running(status):
            return
        place, until = self._parts / f"{name}.stop", time.time() + grace
        with self._locked():
            before = runner.read(place)
            if before is None or until < before["until"]:
                runner.write(place, {"until": until})
        if runner.is_alive(status["runner"], status["runner_start"]):
            return  # it looks at the file
        if grace <= 0:
            runner.kill_tree(status["pid"])
        elif before is None:
            runner.send(status["pid"], signal.SIGUSR1)

    @_answers
    def list(self) -> tuple[PartStatus, ...]:
        """All parts that run, and those that ended in the last hour."""
        found = []
        for name, status in _statuses(self._parts).items():
            if _is_running(status):
                found.append(PartStatus(name=name, state=PartState.RUNNING, node=status["node"]))
                continue
            # It may have ended between the two looks.
            status = runner.read(self._parts / f"{name}.status") or status
            if time.time() - status.get("ended", status["began"]) > REMEMBERED:
                if "ended" not in status:
                    runner.write(
                        self._parts / f"{name}.status",
                        {**status, "ended": time.time(), "code": None, "reason": "lost"},
                    )
                else:
                    continue
            found.append(
                PartStatus(
                    name=name,
                    state=PartState.ENDED,
                    node=status["node"],
                    code=status.get("code"),
                    reason=status.get("reason", "lost"),
                )
            )
        return tuple(found)

    # For tests and the demo: nodes that are lost, and that come back -------------------------

    def kill_node(self, name: str) -> None:
        """Lose a node: kill everything on it at once, and have it down."""
        (self._down / name).touch()
        for status in _statuses(self._parts).values():
            if status["node"] == name and _is_running(status):
                if runner.is_alive(status["runner"], status["runner_start"]):
                    runner.kill_tree(status["runner"])
                runner.kill_tree(status["pid"])

    def revive_node(self, name: str) -> None:
        """Have a node that was lost up again."""
        (self._down / name).unlink(missing_ok=True)

    # -----------------------------------------------------------------------------------------

    def _devices(self, part: Part) -> str:
        """The GPUs of a new part: the first ones that no other part has."""
        taken: set[str] = set()
        for directory in self._root.iterdir():
            for name, status in _statuses(directory).items() if directory.is_dir() else ():
                if status["node"] == part.node and _is_running(status):
                    described = runner.read(directory / f"{name}.part")
                    taken |= set(described["environment"].get(VISIBLE, "").split(","))
        free = [name for name in self._gpus if name not in taken]
        if len(free) < part.accelerators:
            raise BackendError(
                f"{part.name} needs {part.accelerators} GPUs of {part.node}: {len(free)} are free"
            )
        return ",".join(free[: part.accelerators])

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One at a time, over all controllers of this machine."""
        with (self._root / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _checked(name: str) -> str:
    if not NAME.fullmatch(name):
        raise BackendError(f"part {name!r} must be named by letters, digits, dots and hyphens")
    return name


def _statuses(directory: Path) -> dict[str, dict[str, Any]]:
    """The status files of a directory, by the name of the part."""
    read = {path.stem: runner.read(path) for path in sorted(directory.glob("*.status"))}
    return {name: status for name, status in read.items() if status is not None}


def _is_running(status: Mapping[str, Any]) -> bool:
    """Whether the runner, or the process that it has left behind, is alive."""
    if "ended" in status:
        return False
    return runner.is_alive(status["runner"], status["runner_start"]) or runner.is_alive(
        status["pid"], status["start"]
    )
