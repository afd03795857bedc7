"""Makes the picture of the trace lab's page from two runs that really happened.

One is on machines that come and go as on a public spot market, each with one process; the other is
on one process with the same seed. What is drawn is in their events.

    python docs/figures/front.py --trace gcp_spot_tpuv2.csv  # minutes; writes docs/assets/front.png
    python docs/figures/front.py --runs ELASTIC FIXED        # from runs that were made before
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from resilin.lab import style
from resilin.lab.curves import averaged
from resilin.lab.summary import whole_batches
from resilin.telemetry.run import Run

HERE = Path(__file__).parent
JOB = HERE / "front_job.py"


def make_runs(directory: Path, trace: Path, speed: float, epochs: int) -> tuple[Path, Path]:
    """Trains along the market, and on one process; returns where their events are."""
    elastic, fixed = directory / "elastic", directory / "fixed"
    market = ["--processes", "--max-replicas", "3", "--speed", f"{speed}", "--end", "repeat"]
    job = [str(JOB), "--epochs", f"{epochs}"]
    _resilin("replay", str(trace), *market, "--run-dir", str(elastic), *job)
    _resilin("run", "--nproc", "1", "--run-dir", str(fixed), *job, "--fixed")
    return elastic, fixed


def _resilin(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "resilin.cli", *arguments], check=True, timeout=1800)


def draw(elastic: Run, fixed: Run, out: Path) -> None:
    """Replicas, batch size and loss, over progress: where both runs can be compared."""
    figure = style.figure(9, 5.2)
    replicas, batch, loss = style.panels(figure, 3, sharex=True, height_ratios=[1, 1, 1.8])
    # The short last batch of an epoch is left out: it says nothing of the machines.
    kept = elastic.kept() & whole_batches(elastic)
    progress = elastic.steps.progress[kept]
    for ax, values, name in (
        (replicas, elastic.steps.replicas[kept], "replicas (number)"),
        (batch, elastic.steps.batch_size[kept], "batch (samples)"),
    ):
        ax.step(progress, values, where="post", color=style.colour(0), linewidth=1.6)
        ax.set_ylim(bottom=0)
        style.describe(ax, y=name)
    replicas.yaxis.get_major_locator().set_params(integer=True)
    for number, (run, label) in enumerate(
        ((elastic, "machines come and go"), (fixed, "one fixed machine"))
    ):
        done = run.kept()
        x, y = averaged(run.steps.progress[done], run.steps.loss[done], bins=120)
        loss.plot(x, y, color=style.colour(number), linewidth=1.6, label=label)
    loss.set_ylim(bottom=0)
    style.describe(loss, x="progress (reference steps)", y="loss (cross-entropy)")
    style.legend(loss, loc="upper right", bbox_to_anchor=(1.0, 1.0))
    style.save_png(figure, out)
    last = [run.steps.loss[run.kept()][-200:] for run in (elastic, fixed)]
    print("final loss:", *(f"{np.nanmean(values):.4f}" for values in last))
    print("generations:", len(np.unique(elastic.steps.generation)))


def main() -> None:
    """Makes the runs unless they are given, and draws them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--trace", type=Path, help="a capacity trace")
    what.add_argument("--runs", type=Path, nargs=2, metavar=("ELASTIC", "FIXED"))
    parser.add_argument("--speed", type=float, default=300, help="of the trace (%(default)s)")
    parser.add_argument("--epochs", type=int, default=120, help="length of both (%(default)s)")
    parser.add_argument("--out", type=Path, default=HERE.parent / "assets" / "front.png")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        runs = args.runs or make_runs(Path(scratch), args.trace, args.speed, args.epochs)
        draw(Run.load(runs[0]), Run.load(runs[1]), args.out)


if __name__ == "__main__":
    main()
