"""Parts that cost nothing: a shell script in place of Python, which leaves when it is asked."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from resilin.cluster.controller.learn import PART

SCRIPT = """#!/bin/sh
# Its last argument is a folder: it finishes when there is a file "finish", fails with "fail".
for folder; do :; done
trap 'exit 138' USR1
while [ ! -e "$folder/finish" ]; do
    [ -e "$folder/fail" ] && exit 1
    sleep 0.05
done
"""


def launch(folder: Path, name: str, **wishes: Any) -> dict[str, Any]:
    """A submission of such a job."""
    folder.mkdir(exist_ok=True, parents=True)
    shell = folder / "part.sh"
    if not shell.exists():
        shell.write_text(SCRIPT)
        shell.chmod(0o755)
    return {
        "name": name,
        **wishes,
        "launch": {"script": ["x", str(folder)], "directory": str(folder), "python": str(shell)},
    }


def statuses(directory: Path) -> dict[str, dict[str, Any]]:
    """All parts that have ever run, as their runners have written them down."""
    return {path.stem: json.loads(path.read_text()) for path in directory.rglob("*.status")}


def assert_never_twice(directory: Path, capacity: dict[str, int]) -> None:
    """No two lives of a job at once, no two parts of it on a node, no node too full."""
    parts = statuses(directory)
    times = sorted({each["began"] for each in parts.values()})
    for time in times:
        alive = {
            name: each
            for name, each in parts.items()
            if each["began"] <= time < each.get("ended", float("inf"))
        }
        lives: dict[str, set[str]] = defaultdict(set)
        used: dict[str, int] = defaultdict(int)
        places = []
        for name, each in alive.items():
            job, life, _ = PART.fullmatch(name).groups()
            lives[job].add(life)
            used[each["node"]] += each["accelerators"]
            places.append((job, each["node"]))
        assert all(len(its) == 1 for its in lives.values()), f"two lives at once: {dict(lives)}"
        assert len(places) == len(set(places)), f"two parts of a job on one node: {places}"
        over = {node: count for node, count in used.items() if count > capacity[node]}
        assert not over, f"too full: {over}"
