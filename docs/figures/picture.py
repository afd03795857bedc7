"""What every figure shares: its arguments, and a file that comes out the same again."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure


def write(draw: Callable[[], Figure], description: str | None, out: Path) -> None:
    """Writes the picture; the suffix of the path chooses the format."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=out, help="where to write it (%(default)s)")
    out = parser.parse_args().out
    # A fixed salt and no date: the same numbers give the same file, byte for byte.
    mpl.rcParams.update({"svg.hashsalt": "resilin", "font.size": 10})
    metadata = {"Date": None} if out.suffix == ".svg" else None
    draw().savefig(out, facecolor="white", metadata=metadata, dpi=120)
