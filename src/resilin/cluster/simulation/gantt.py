"""One page about simulations: their table, and a chart of who had what when.

The page is one file: no scripts, no fonts and no pictures from elsewhere. Bars are placed in
percent of the width while letters keep their size, so it can be read on a phone and on a desk.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from resilin.cluster.simulation.run import Result

ROW = 13
"""Height of the row of a job, in pixels."""
AXIS = 18
"""Height of the line of times."""
SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Sizes that begin a colour."""
_LIGHT = ("#c7e3f4", "#8ec7e6", "#4aa3d1", "#1f7fb5", "#0b5a8c", "#6a3d9a", "#b3246b")
_DARK = ("#1d4e6b", "#27709a", "#2f93c8", "#58b4e5", "#9ad4f5", "#b79be0", "#ef7fb5")
_CSS = """
:root{--paper:#fff;--ink:#1f2328;--soft:#59636e;--grid:#d1d9e0;--card:#f6f8fa;COLOURS
color-scheme:light dark}
@media screen and (prefers-color-scheme:dark){:root{--paper:#0d1117;--ink:#e6edf3;--soft:#9aa4ae;
--grid:#30363d;--card:#161b22;DARKER}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:76rem;padding:1.2rem 1rem 3rem;background:var(--paper);
color:var(--ink);font:15px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}
h1{font-size:1.4rem;margin:0 0 .4rem}p{margin:.4rem 0}.soft{color:var(--soft)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.87rem;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .6rem;text-align:right;border-bottom:1px solid var(--grid);white-space:nowrap}
th:first-child,td:first-child{text-align:left}
thead th{border-bottom:2px solid var(--soft)}
details{margin:1rem 0;padding:.6rem .8rem;background:var(--card);border-radius:8px}
summary{cursor:pointer;font-weight:600}
.chart{display:grid;grid-template-columns:6.4rem minmax(0,1fr);margin-top:.5rem}
svg{display:block;width:100%}
svg text{font-size:10px;fill:var(--soft)}
line{stroke:var(--grid)}line.wait{stroke:var(--soft);stroke-dasharray:2 2}
.key{display:inline-block;white-space:nowrap;margin-right:.8rem;font-size:.85rem}
.key svg{display:inline-block;width:.8rem;height:.8rem;vertical-align:-.1rem;margin-right:.25rem}
"""


def page(
    title: str,
    notes: Sequence[str],
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    charts: Sequence[tuple[str, Result]],
) -> str:
    """The page as HTML.

    Args:
        title: Heading.
        notes: Paragraphs below it.
        header: Names of the columns of the table.
        rows: Cells of the table.
        charts: Heading and result of each chart; the first one is open.
    """
    table = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>{escape(title)}</title><style>{_style()}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        *(f'<p class="soft">{escape(note)}</p>' for note in notes),
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{table}</tbody></table>',
        f"</div><p>{_legend()}</p>",
    ]
    for index, (heading, result) in enumerate(charts):
        is_open = " open" if index == 0 else ""
        parts.append(f"<details{is_open}><summary>{escape(heading)}</summary>{chart(result)}")
        parts.append("</details>")
    return "".join([*parts, "</body></html>\n"])


def chart(result: Result) -> str:
    """Rows of jobs over time: a bar for each allocation, coloured by its size."""
    first = min(job.submitted for job in result.jobs)
    last = max(job.finished for job in result.jobs)
    height = AXIS + ROW * len(result.jobs)
    span = max(last - first, 1.0)

    def at(time: float) -> str:
        return f"{100 * (time - first) / span:.3f}%"

    names, marks = [], []
    for hours in _ticks(span / 3600):
        x = at(first + hours * 3600)
        marks.append(f'<line x1="{x}" x2="{x}" y1="{AXIS}" y2="{height}"/>')
        # A label near the right edge would be cut: it is on the left of its line.
        side = 'dx="-2" text-anchor="end"' if hours * 3600 > 0.85 * span else 'dx="2"'
        marks.append(f'<text x="{x}" {side} y="11">{hours:g} h</text>')
    for index, job in enumerate(result.jobs):
        top = AXIS + ROW * index
        names.append(f'<text x="0" y="{top + 10}">{escape(_short(job.id))}</text>')
        marks.append(
            f'<line class="wait" x1="{at(job.submitted)}" x2="{at(job.finished)}" '
            f'y1="{top + ROW / 2:g}" y2="{top + ROW / 2:g}"/>'
        )
        for stretch in job.stretches:
            width = 100 * (stretch.end - stretch.start) / span
            size = stretch.allocation.size
            marks.append(
                f'<rect class="s{_colour(size)}" x="{at(stretch.start)}" y="{top + 1}" '
                f'width="{width:.3f}%" height="{ROW - 2}">'
                f"<title>{escape(job.id)}: {size} from {_hours(stretch.start - first)} to "
                f"{_hours(stretch.end - first)}</title></rect>"
            )
    label = f"{len(result.jobs)} jobs under {result.policy} over {span / 3600:.1f} hours"
    return (
        f'<div class="chart"><svg height="{height}" aria-hidden="true">{"".join(names)}</svg>'
        f'<svg height="{height}" role="img" aria-label="{escape(label)}">{"".join(marks)}</svg>'
        "</div>"
    )


def _ticks(hours: float) -> list[float]:
    """Round times, at most five of them, so that their labels fit a narrow screen."""
    step = next(
        unit * 10.0**power
        for power in range(-3, 9)
        for unit in (1, 2, 5)
        if unit * 10.0**power * 5 > hours
    )
    return [index * step for index in range(int(hours / step) + 1)]


def _colour(size: int) -> int:
    """Number of the colour of a size."""
    return max(index for index, least in enumerate(SIZES) if size >= least)


def _short(name: str) -> str:
    return name if len(name) <= 16 else f"{name[:15]}\u2026"


def _hours(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60}:{minutes % 60:02}"


def _legend() -> str:
    ends = [*(str(size - 1) for size in SIZES[1:]), ""]
    keys = []
    for index, (least, most) in enumerate(zip(SIZES, ends, strict=True)):
        text = f"{least}" if str(least) == most else f"{least} to {most}" if most else f"{least}+"
        square = f'<svg><rect class="s{index}" width="100%" height="100%"/></svg>'
        keys.append(f'<span class="key">{square}{text}</span>')
    return "Accelerators: " + "".join(keys) + '<span class="key">dashed: waits</span>'


def _style() -> str:
    """The style sheet, with the colours of sizes on light and on dark screens."""

    def colours(values: Sequence[str]) -> str:
        return "".join(f"--s{index}:{value};" for index, value in enumerate(values))

    fills = "".join(f".s{index}{{fill:var(--s{index})}}" for index in range(len(SIZES)))
    return _CSS.replace("COLOURS", colours(_LIGHT)).replace("DARKER", colours(_DARK)) + fills
