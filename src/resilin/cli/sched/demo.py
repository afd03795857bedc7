"""`resilin sched demo`: three jobs share four nodes, one is drained, and one is lost.

The nodes exist by name only: all processes run on this machine. The controller is a process of its
own, as in `resilin sched serve`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from resilin.cli import values
from resilin.cli.errors import user_errors
from resilin.cli.sched import access
from resilin.cluster.backends.base import PartState
from resilin.cluster.backends.local import LocalBackend, backend
from resilin.cluster.controller.client import Client
from resilin.core.text import clean

JOB = Path(__file__).with_name("demo_job.py")
NODES = "node-1=1,node-2=1,node-3=1,node-4=1"
"""Nodes of the demo."""
NAMES = ("first", "second", "third")
"""Jobs of the demo."""
LIMIT = 600.0
"""Seconds that all of it may take."""
PROOF = "each used once"
"""Words of the job that has counted its samples."""
EPILOG = """\
example:
  resilin sched demo

Starts a controller and three small elastic jobs on four nodes that are directories of this machine.
When all of them train, one node is drained and another one is killed with all that runs on it. The
jobs shrink, move and resume, and each of them checks that it has used every sample exactly once per
epoch. It takes about two minutes; the exit code is 1 if a job fails.
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the verb."""
    ours = argparse.ArgumentParser(
        prog="resilin sched demo",
        description="Shows three jobs that share four nodes of this machine.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ours.add_argument(
        "--epochs",
        type=values.count,
        default=3,
        metavar="N",
        help="Epochs of each job (default: %(default)s).",
    )
    ours.add_argument(
        "--state",
        type=Path,
        metavar="DIR",
        help="A new directory for its journal and the output of jobs (default: one that is "
        "removed at the end).",
    )
    return ours


@user_errors
def main(arguments: Sequence[str]) -> int:
    """Run the demo.

    Returns:
        0; 1 if a job failed, or lost or repeated a sample.
    """
    args = parser().parse_args(arguments)
    if args.state is not None:
        args.state.mkdir(parents=True)
        return _run(args.state.absolute(), args.epochs)
    with tempfile.TemporaryDirectory(prefix="resilin-demo-") as name:
        return _run(Path(name), args.epochs)


def _run(state: Path, epochs: int) -> int:
    with _controller(state) as (client, nodes):
        return _show(client, nodes, state, epochs)


def _show(client: Client, nodes: LocalBackend, state: Path, epochs: int) -> int:
    began = time.monotonic()
    told: dict[str, str] = {}

    def tell(text: str) -> None:
        print(f"{time.monotonic() - began:5.0f} s  {text}", flush=True)

    def look() -> None:
        """Print what has changed."""
        for job in client.jobs():
            places = ", ".join(job["nodes"]) or "no node"
            text = f"{job['phase']}, {job['replicas']} of {job['wanted']} replicas on {places}"
            if job["ended"] is not None:
                text = clean(f"{job['phase']}: {job['why']}")
            if told.get(job["id"]) != text:
                told[job["id"]] = text
                tell(f"{job['id']:6}  {text}")

    def wait(until: Callable[[], bool], limit: float) -> None:
        end = time.monotonic() + limit
        while time.monotonic() < end and not until():
            look()
            time.sleep(0.5)

    for number, name in enumerate(NAMES):
        client.submit(_job(state, name, number, epochs))
    tell(f"submitted {', '.join(NAMES)}: four nodes with one accelerator each")
    wait(lambda: all(job["progress"] is not None for job in client.jobs()), 120)
    node = next((name for job in client.jobs() for name in job["nodes"]), "node-1")
    tell(f"draining {node}: its jobs save and leave")
    client.drain(node)
    wait(lambda: not _jobs_on(client, node), 90)
    busiest = max(client.nodes(), key=lambda each: (sum(each["jobs"].values()), each["name"]))
    tell(f"killing {busiest['name']} with all that runs on it")
    nodes.kill_node(busiest["name"])
    wait(lambda: all(job["ended"] is not None for job in client.jobs()), LIMIT)
    look()
    logs = {name: _proof(state, name) for name in NAMES}
    for name, proof in logs.items():
        tell(f"{name:6}  {proof or 'has not shown that each sample was used once'}")
    good = all(logs.values()) and all(job["phase"] == "finished" for job in client.jobs())
    tell("all jobs have finished, and used each sample once" if good else "a job has failed")
    return 0 if good else 1


def _jobs_on(client: Client, node: str) -> bool:
    return any(each["jobs"] for each in client.nodes() if each["name"] == node)


def _job(state: Path, name: str, number: int, epochs: int) -> dict[str, object]:
    # Copies in memory of what is killed would stay: here they end with the demo.
    options = ["--checkpoint-every", "20steps", "--memory-dir", str(state / "memory")]
    script = [str(JOB), "--epochs", str(epochs), "--seed", str(number), "--pause", "0.15"]
    return {
        "name": name,
        "max": 4,
        "launch": {
            "script": script,
            "directory": str(state),
            "python": sys.executable,
            "options": options,
            "environment": {"RESILIN_RUN_DIR": "off", "OMP_NUM_THREADS": "1"},
            "checkpoint_dir": str(state / "checkpoints" / name),
        },
    }


def _proof(state: Path, name: str) -> str:
    """The sentence of the job that has counted its samples; empty if there is none."""
    for path in sorted((state / "logs").glob(f"{name}-g*.log")):
        for line in path.read_text(errors="replace").splitlines():
            if PROOF in line:
                return clean(line)
    return ""


@contextlib.contextmanager
def _controller(state: Path) -> Iterator[tuple[Client, LocalBackend]]:
    """A controller, which ends with all that it has started."""
    command = [sys.executable, "-m", "resilin.cli", "sched", "serve", "--state", str(state)]
    command += ["--option", f"nodes={NODES}", "--poll", "0.3", "--interval", "10", "--grace", "30"]
    log = state / "serve.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, start_new_session=True, env=os.environ
        )
    local: LocalBackend | None = None
    try:
        deadline = time.monotonic() + 120
        while not (state / access.ADDRESS).exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise ValueError(f"the controller did not start: {log.read_text()[-500:]}")
            time.sleep(0.1)
        options = argparse.Namespace(state=state, url=_url(state))
        directory = state / "local"
        cluster = next(p.name for p in directory.iterdir() if p.is_dir() and p.name != "down")
        local = backend(cluster, {"directory": str(directory), "nodes": NODES})
        yield access.client(options), local
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for each in (local, LocalBackend(state / "meeting", "store", ())):
            _end(each)


def _url(state: Path) -> str:
    return str(json.loads((state / access.ADDRESS).read_text())["url"])


def _end(local: LocalBackend | None) -> None:
    """End all parts, and wait until they have."""
    deadline = time.monotonic() + 30
    while local is not None and time.monotonic() < deadline:
        running = [each.name for each in local.list() if each.state is not PartState.ENDED]
        if not running:
            return
        for name in running:
            local.stop(name, 0)
        time.sleep(0.2)
