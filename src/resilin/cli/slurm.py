"""`resilin slurm`: an elastic job on Slurm as a job array of one-node jobs.

It needs no controller, no service and no operator: whatever nodes Slurm gives at a moment train
together. `slurm_script` has what is submitted.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from resilin.cli import values
from resilin.cli.errors import user_errors
from resilin.cli.slurm_script import Scripts

JOBS = "resilin-slurm"
"""Directory under the current one in which each job has its own."""
NOTICE = 60
"""Default seconds between the notice and the end of an element."""
TIMEOUT = 60.0
"""Seconds for an answer of `sbatch`."""
OF_RUN = frozenset(
    {
        *("--warm", "--checkpoint-every", "--memory-dir", "--run-dir", "--hang-timeout", "--live"),
        *("--heartbeat", "--membership", "--lease", "--address", "--processes-per-copy"),
        "--left-code",
    }
)
"""Options of `resilin run` that are no option here: a script would be given them."""
EPILOG = """\
example:
  resilin slurm train.py --nodes 1:8 --partition spot --gpus-per-node 4 \\
      --checkpoint-dir /shared/job-17 -- --lr 0.1

Submits an array of 8 jobs of one node each, and a small job for the store through which they find
each other. The training begins with the first node, and continues with those that there are. An
element that Slurm takes away, or whose time limit is near, saves and is queued again. When one of
them has finished the training, the others do not start again.

  scancel 4242_3                                  # one node less, in order
  scontrol update JobId=4242 ArrayTaskThrottle=4  # at most 4 nodes
  scancel 4242                                    # the end, also of the store

Everything that is no option of this command is an argument of the script; what follows -- is one in
any case. The current directory and --checkpoint-dir have to be the same on all nodes.
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    ours = argparse.ArgumentParser(
        prog="resilin slurm",
        usage="resilin slurm SCRIPT --nodes MIN:MAX --checkpoint-dir URL [options] [--] ...",
        description="Submits an elastic job to Slurm: a job array of one-node jobs that join the "
        "training when they start, and leave it when Slurm takes their node.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    ours.add_argument("script", metavar="SCRIPT", help="The training script.")
    ours.add_argument(
        "--nodes",
        type=_nodes,
        required=True,
        metavar="MIN:MAX",
        help="Fewest nodes with which the job trains, and most.",
    )
    ours.add_argument(
        "--checkpoint-dir",
        required=True,
        metavar="URL",
        help="Directory for checkpoints, on all nodes: a path or an fsspec URL. A job that is "
        "submitted again resumes from it.",
    )
    ours.add_argument("--name", metavar="NAME", help="Name of the job (default: the script's).")
    ours.add_argument("--partition", metavar="P", help="Partition, such as one for spot nodes.")
    ours.add_argument("--account", metavar="A", help="Account that is charged.")
    ours.add_argument("--qos", metavar="Q", help="Quality of service.")
    ours.add_argument("--time", metavar="T", help="Time limit of an element, as sbatch takes it.")
    ours.add_argument(
        "--gpus-per-node",
        type=_gpus,
        metavar="[KIND:]N",
        help="GPUs of each node. Default: the whole node, whatever it has.",
    )
    ours.add_argument(
        "--nproc",
        metavar="N|gpu|cpu|auto",
        help="Workers on each node (default: one for each GPU, or 1).",
    )
    ours.add_argument(
        "--notice",
        type=values.count,
        default=NOTICE,
        metavar="SECONDS",
        help="How long before its time limit an element saves and leaves (default: %(default)s).",
    )
    ours.add_argument("--run", default="", metavar="ARGS", help="More options of resilin run.")
    ours.add_argument("--sbatch", default="", metavar="ARGS", help="More options of sbatch.")
    store = ours.add_argument_group("store", "Where the nodes find each other.")
    store.add_argument(
        "--store-partition",
        metavar="P",
        help="Partition of the job that runs the store: one in which jobs are not displaced "
        "(default: that of the site).",
    )
    store.add_argument(
        "--rdzv-endpoint",
        metavar="HOST:PORT",
        help="A store that runs already (resilin store, on a machine that stays up).",
    )
    ours.add_argument(
        "--dry-run", action="store_true", help="Print the batch scripts, and submit nothing."
    )
    return ours


@user_errors
def main(arguments: Sequence[str]) -> int:
    """Submit the job, or print its scripts.

    Returns:
        0; 1 if Slurm refuses it.
    """
    ours = parser()
    mine, theirs = list(arguments), []
    if "--" in mine:
        theirs = mine[mine.index("--") + 1 :]
        mine = mine[: mine.index("--")]
    args, rest = ours.parse_known_args(mine)
    for stray in rest:
        if stray.partition("=")[0] in OF_RUN:
            ours.error(
                f"{stray} is an option of resilin run: write it in quotes after --run=, or after "
                f"-- if the script has an option of that name"
            )
    if args.rdzv_endpoint and args.store_partition:
        ours.error(
            f"--store-partition ({args.store_partition}) is for a store that is yet to be started: "
            f"it cannot be combined with --rdzv-endpoint ({args.rdzv_endpoint})"
        )
    if args.rdzv_endpoint and not re.fullmatch(r"[^:\s]+:\d+", args.rdzv_endpoint):
        ours.error(f"--rdzv-endpoint ({args.rdzv_endpoint}) must be HOST:PORT")
    if not Path(args.script).is_file():
        raise ValueError(f"{args.script}: there is no such script")
    scripts = _scripts(args, [*rest, *theirs])
    if args.dry_run:
        for name, text in (("store", scripts.meeting()), ("part", scripts.part())):
            if text is not None:
                print(f"# {name}.sh\n{text}")
        return 0
    _submit(scripts)
    return 0


def _scripts(args: argparse.Namespace, script_arguments: Sequence[str]) -> Scripts:
    name = args.name or re.sub(r"[^\w.-]", "-", Path(args.script).stem)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    python = [sys.executable, "-m", "resilin.cli"]
    count = args.gpus_per_node.rpartition(":")[2] if args.gpus_per_node else None
    each: str | None = args.nproc or count
    workers = ["--nproc", each] if each else []
    common = {key: value for key in ("account", "qos") if (value := getattr(args, key))}
    options = {key: value for key in ("partition", "time") if (value := getattr(args, key))}
    signal = {"signal": f"B:USR1@{args.notice}"}
    gpus = {"gres": f"gpu:{args.gpus_per_node}"} if count else {}
    at = {"partition": args.store_partition} if args.store_partition else {}
    has_store = args.rdzv_endpoint is None
    checkpoints = args.checkpoint_dir
    if "://" not in checkpoints:
        checkpoints = str(Path(checkpoints).resolve())
    return Scripts(
        name=name,
        directory=str(Path(JOBS, f"{name}-{stamp}").resolve()),
        nodes=args.nodes,
        run=[*python, "run", *workers, "--checkpoint-dir", checkpoints, *shlex.split(args.run)],
        script=[args.script, *script_arguments],
        part_options={**common, **options, **gpus, **signal},
        part_more=[*([] if count else ["--exclusive"]), *shlex.split(args.sbatch)],
        store=[*python, "store", "--host", "0.0.0.0", "--port", "0"] if has_store else [],
        # It is told well before its time limit, for the others to leave first.
        store_options={**common, **at, "cpus-per-task": "1", "signal": "B:USR1@120"},
        endpoint=args.rdzv_endpoint,
    )


def _submit(scripts: Scripts) -> None:
    directory = Path(scripts.directory)
    directory.mkdir(parents=True)
    after = []
    store = scripts.meeting()
    if store is not None:
        number = _sbatch(directory / "store.sh", store, [])
        print(f"store: job {number}")
        # Nodes do not wait for a store that is itself in the queue.
        after = [f"--dependency=after:{number}"]
    number = _sbatch(directory / "part.sh", scripts.part(), after)
    (directory / "array.new").write_text(f"{number}\n", encoding="utf-8")
    (directory / "array.new").rename(directory / "array")
    least, most = scripts.nodes
    print(f"training: job array {number}, {least} to {most} nodes; squeue --jobs={number}")
    print(f"scripts and logs: {directory}")


def _sbatch(path: Path, text: str, arguments: Sequence[str]) -> str:
    """Submit a script; the id of its job."""
    path.write_text(text, encoding="utf-8")
    command = ["sbatch", "--parsable", *arguments, str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except FileNotFoundError:
        raise ValueError("no sbatch on the path: this machine has no commands of Slurm") from None
    except subprocess.TimeoutExpired:
        raise ValueError(f"sbatch gave no answer in {TIMEOUT:.0f} s") from None
    if done.returncode:
        raise ValueError(f"sbatch refused {path}: {' '.join(done.stderr.split())}")
    return done.stdout.strip().partition(";")[0]


def _nodes(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    found = values.count(least), values.count(most or least)
    if found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"{text!r} has more nodes at least than at most")
    return found


def _gpus(text: str) -> str:
    kind, _, number = text.rpartition(":")
    values.count(number)
    if kind and not re.fullmatch(r"[\w.-]+", kind):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GPUs such as 4 or a100:4")
    return text
