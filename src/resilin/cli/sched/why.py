"""`resilin sched why`: why a job has its size, or waits."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from resilin.cli import tables
from resilin.cli.errors import user_errors
from resilin.cli.sched import access
from resilin.core.text import clean

EPILOG = """\
example:
  resilin sched why train-1

The value is what one more accelerator is worth to this job, the price what it is worth to the
others: a job grows where its value is above the price.
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the verb."""
    ours = argparse.ArgumentParser(
        prog="resilin sched why",
        description="Says why a job has its size, or waits.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ours.add_argument("job", metavar="JOB", help="Id of the job.")
    access.add_connection(ours)
    tables.add_json_option(ours)
    return ours


@user_errors
def main(arguments: Sequence[str]) -> int:
    """Print the reason.

    Returns:
        0; 1 if there is no such job, or the controller does not answer.
    """
    args = parser().parse_args(arguments)
    told = access.client(args).why(args.job)
    if args.json:
        print(tables.to_json(told))
        return 0
    print(clean(f"{told['id']} ({told['phase']}, {told['size']} replicas): {told['text']}"))
    if told.get("value") is not None and told.get("price") is not None:
        sign = ">" if told["value"] > told["price"] else "<="
        print(f"value {told['value']:.4g} {sign} price {told['price']:.4g}")
    return 0
