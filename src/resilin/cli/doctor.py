"""`resilin doctor`: check whether this machine has what a job needs, with advice for the rest.

All checks run, whatever the first ones find.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict

from resilin.cli import checks, storage, tables
from resilin.cli.finding import Finding, Options
from resilin.core.text import clean
from resilin.engine import environment
from resilin.engine.environment import memory_parent

CHECKS: dict[str, Callable[[Options], Finding]] = {
    "python": checks.python,
    "packages": checks.packages,
    "backends": checks.backends,
    "group": checks.group,
    "memory": storage.memory,
    "leftovers": storage.leftovers,
    "checkpoint": storage.checkpoint,
    "ports": checks.ports,
    "hostname": checks.hostname,
    "store": checks.store,
    "open files": checks.open_files,
}
"""All checks by name, in the order in which they are reported."""


EPILOG = """\
example:
  resilin doctor --checkpoint-dir s3://bucket/job

  ok    python      3.11.9
  ok    packages    torch 2.15.0 (tested: 2.8.0 to 2.15.0), numpy 2.4.6, fsspec 2026.9.0
  warn  open files  at most 1024: data loaders with many workers need more
                    -> ulimit -n 65536
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    ours = argparse.ArgumentParser(
        prog="resilin doctor",
        description="Checks what a job needs on this machine. The exit code is 1 if a check fails.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ours.add_argument(
        "--checkpoint-dir",
        metavar="URL",
        help=f"Directory or URL for checkpoints. Default: ${environment.CHECKPOINT_DIR}.",
    )
    tables.add_json_option(ours)
    return ours


def main(arguments: Sequence[str]) -> int:
    """Print the findings.

    Returns:
        1 if a check failed, else 0.
    """
    args = parser().parse_args(arguments)
    checkpoint_dir = args.checkpoint_dir or os.environ.get(environment.CHECKPOINT_DIR)
    options = Options(checkpoint_dir=checkpoint_dir, memory_parent=memory_parent())
    findings = {name: _run(check, options) for name, check in CHECKS.items()}
    if args.json:
        rows = [{"check": name, **asdict(finding)} for name, finding in findings.items()]
        print(tables.to_json(rows))
    else:
        width = max(map(len, findings))
        for name, finding in findings.items():
            print(f"{finding.verdict:4}  {name:{width}}  {clean(finding.found)}")
            if finding.advice:
                print(f"{'':4}  {'':{width}}  -> {clean(finding.advice)}")
    return int(any(finding.verdict == "fail" for finding in findings.values()))


def _run(check: Callable[[Options], Finding], options: Options) -> Finding:
    try:
        return check(options)
    except (OSError, ImportError) as error:
        return Finding(
            verdict="fail",
            found=f"{type(error).__name__}: {error}",
            advice="fix what the message names, and run resilin doctor again",
        )
