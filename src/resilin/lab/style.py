"""Style and output of all figures of the lab.

The colours are those of Okabe and Ito, which colour-blind readers can distinguish. Figures are made
by `figure()` and never through pyplot, so drawing changes no global state. In an SVG the colours
become CSS variables: a page that includes `CSS` shows the same figure on light and dark
backgrounds, with selectable text.
"""

from __future__ import annotations

import io
import os
import re
import warnings
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from resilin.core.text import clean

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#a87a00", "#3f9fd8", "#7f5fc0", "#7a7a7a")
"""Colours of curves, in order of use."""
INK = "#24292f"
"""Text and axes."""
SOFT = "#6e7781"
"""Less prominent elements: notes, and marks other than faults."""
GRID = "#e4e8ec"
"""Grid lines."""
ALARM = "#c8102e"
"""Faults."""

_DARK = ("#4aa8e0", "#ff8a3d", "#35c795", "#e79fc6", "#d9a520", "#86cdf5", "#b39af0", "#a8a8a8")
_VARIABLES = {
    **{colour: f"--curve-{number}" for number, colour in enumerate(PALETTE)},
    INK: "--ink",
    SOFT: "--soft",
    GRID: "--grid",
    ALARM: "--alarm",
}
_DARK_VALUES = (*_DARK, "#e6edf3", "#9aa4ae", "#30363d", "#ff6b6b")


def _root(values: tuple[str, ...]) -> str:
    pairs = zip(_VARIABLES.values(), values, strict=True)
    return ":root{" + ";".join(f"{name}:{value}" for name, value in pairs) + "}"


CSS = (
    f"{_root(tuple(_VARIABLES))}"
    f"@media screen and (prefers-color-scheme:dark){{{_root(_DARK_VALUES)}}}"
    ":root{--font:'DejaVu Sans',Verdana,Helvetica,Arial,sans-serif}"
    "svg *{stroke-linejoin:round;stroke-linecap:butt}"
)
"""Style sheet with the colours that `svg` refers to, for light and for dark screens."""

_RC: Any = {
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.labelsize": 8.5,
    "axes.linewidth": 0.8,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.5,
    # Text stays text: small, sharp and searchable.
    "svg.fonttype": "none",
    "text.color": INK,
    "xtick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.color": SOFT,
    "ytick.labelcolor": INK,
}


def colour(number: int) -> str:
    """The colour of the curve with this number, from 0; they repeat after eight."""
    return PALETTE[number % len(PALETTE)]


def dashes(number: int) -> Any:
    """The line style of the curve with this number, which separates curves of the same colour."""
    return ("-", "--", ":", "-.")[number // len(PALETTE) % 4]


def figure(width: float, height: float) -> Figure:
    """An empty figure with a layout that prevents overlaps.

    Args:
        width: Inches.
        height: Inches.
    """
    with mpl.rc_context(_RC):
        engine = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.07, wspace=0.02, hspace=0.02)
        return Figure(figsize=(width, height), layout=engine)


def panels(figure: Figure, rows: int, columns: int = 1, **kwargs: Any) -> list[Axes]:
    """Add styled axes to a figure, row by row.

    Args:
        figure: The figure.
        rows: Number of rows of axes.
        columns: Number of axes in each row.
        **kwargs: Other arguments of `Figure.subplots`, such as `sharex`.
    """
    with mpl.rc_context(_RC):
        axes: list[Axes] = list(figure.subplots(rows, columns, squeeze=False, **kwargs).flat)
        for ax in axes:
            ax.grid(color=GRID, linewidth=0.7)
            ax.set_axisbelow(True)
            ax.spines[["top", "right"]].set_visible(False)
    return axes


def describe(ax: Axes, *, title: str = "", x: str = "", y: str = "") -> None:
    """Set the title and the labels of axes. A label includes its unit: `goodput (samples/s)`."""
    with mpl.rc_context(_RC):
        if title:
            ax.set_title(title)
        if x:
            ax.set_xlabel(x)
        if y:
            ax.set_ylabel(y)


def legend(ax: Axes, handles: list[Any] | None = None, **kwargs: Any) -> None:
    """Put a legend to the right of the data, or as `kwargs` specify."""
    place = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.02), "borderaxespad": 0.3, **kwargs}
    with mpl.rc_context(_RC):
        if handles is not None:
            place["handles"] = handles
        ax.legend(**place)


def heading(figure: Figure, handles: list[Any]) -> None:
    """Puts one legend for all panels above them."""
    with mpl.rc_context(_RC):
        figure.legend(handles=handles, loc="outside upper left", ncols=min(6, len(handles)))


def plain(text: str, width: int = 36) -> str:
    """A name as a label: on one line, not too long, and never parsed as a formula."""
    text = clean(text)
    text = text if len(text) <= width else f"{text[: width - 3]}..."
    # matplotlib leaves labels with a leading underscore out of legends.
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def save_png(figure: Figure, path: str | os.PathLike[str], *, dpi: int = 144) -> None:
    """Write a figure on a white background; the same figure gives the same bytes."""
    _save(
        figure, path, "png", format="png", dpi=dpi, facecolor="white", metadata={"Software": None}
    )


def svg(figure: Figure, name: str) -> str:
    """An `<svg>` element for a page with `CSS`; it refers to nothing outside of that page.

    Args:
        figure: The figure.
        name: Unique name on the page, which keeps the ids of the element unique.
    """
    text = io.StringIO()
    _save(figure, text, name, format="svg", transparent=True, metadata={"Date": None})
    element = text.getvalue()
    element = element[element.index("<svg") :]
    element = re.sub(r"<(metadata|style)\b.*?</\1>", "", element, flags=re.DOTALL)
    # Within HTML an svg element needs no namespaces, and a page without URLs is easily checked.
    head, rest = element.split(">", 1)
    head = re.sub(r' (xmlns(:\w+)?|version|width|height)="[^"]*"', "", head)
    used = set(re.findall(r"#([\w.]+)", rest))
    rest = re.sub(r' id="([\w.]+)"', lambda m: m[0] if m[1] in used else "", rest)
    rest = re.sub(r'style="[^"]*"', _with_variables, rest)
    # A hundredth of a point is finer than any screen.
    rest = re.sub(r'(?<= d=)"[^"]*"', _rounded, rest)
    return f"{head}>{rest}"


def _save(figure: Figure, where: Any, salt: str, **kwargs: Any) -> None:
    # Ids in an SVG are derived from its content and the salt: reproducible, and unique on the page.
    rc: Any = {**_RC, "svg.hashsalt": f"resilin {salt}"}
    with mpl.rc_context(rc), warnings.catch_warnings():
        # Any script is fine in a page; only a PNG shows boxes for glyphs that DejaVu lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(where, **kwargs)


def _with_variables(match: re.Match[str]) -> str:
    text = match[0].replace("'DejaVu Sans'", "var(--font)")
    return re.sub(r"#[0-9a-f]{6}", lambda m: f"var({_VARIABLES[m[0]]})", text)


def _rounded(match: re.Match[str]) -> str:
    text = re.sub(r"-?\d+\.\d{3,}", lambda m: f"{float(m[0]):.2f}", match[0])
    return " ".join(text.split())
