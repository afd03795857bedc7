"""A report about one or several runs: a single HTML file.

The file is self-contained: style, charts (as SVG) and tables. It loads nothing, runs no script and
follows the reader's choice of a light or dark screen. Text from elsewhere is escaped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path

from resilin.core.events import CheckpointEvent, DecisionEvent, Event, FaultEvent, RescaleEvent
from resilin.core.text import clean
from resilin.lab import style
from resilin.lab.panels import Panel, origin, progress_panels, time_panels
from resilin.lab.plots import draw
from resilin.lab.summary import Summary, summarise
from resilin.telemetry.run import Run
from resilin.telemetry.wording import describe, span

MOST_EVENTS = 400
"""Largest number of rows in the table of events of a run."""

_PAGE_CSS = """
:root{--paper:#ffffff;--card:#f6f8fa;color-scheme:light dark}
@media screen and (prefers-color-scheme:dark){:root{--paper:#0d1117;--card:#161b22}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:74rem;padding:1.5rem 1.2rem 4rem;background:var(--paper);
color:var(--ink);font:15px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}
h1{font-size:1.5rem;margin:0 0 .2rem}h2{font-size:1.1rem;margin:2.2rem 0 .6rem}
p{margin:.3rem 0}.soft{color:var(--soft)}
.note{border-left:3px solid var(--alarm);padding-left:.7rem}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.87rem;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .8rem;text-align:left;vertical-align:top;border-bottom:1px solid var(--grid)}
thead th{border-bottom:2px solid var(--soft);white-space:nowrap}
tbody th{font-weight:normal;color:var(--soft);white-space:nowrap}
td{overflow-wrap:anywhere}td.n{white-space:nowrap}
.fault{color:var(--alarm);font-weight:600}
.key{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.4em}
figure{margin:0;padding:.8rem;background:var(--card);border-radius:8px}
figure svg{display:block;width:100%;height:auto}
@media print{body{max-width:none}figure{break-inside:avoid}}
"""


def write_report(
    runs: Sequence[Run],
    out: str | os.PathLike[str] | None,
    *,
    png: str | os.PathLike[str] | None = None,
) -> list[Path]:
    """Write a report.

    Args:
        runs: The runs.
        out: The HTML file; None writes none.
        png: A directory for the charts as PNG files, created if missing; None writes none.

    Returns:
        The files that were written.

    Raises:
        ValueError: No runs, or none of them has a step.
        OSError: A file cannot be written.
    """
    if not runs:
        raise ValueError("a report needs at least one run")
    if not any(len(run.steps) for run in runs):
        names = ", ".join(run.name for run in runs)
        raise ValueError(f"{names}: no step has been reported yet, so there is nothing to draw")
    if out is not None and not Path(out).parent.is_dir():
        # Checked before the charts are drawn, which takes a while.
        raise FileNotFoundError(f"there is no directory {Path(out).parent} to write {out} to")
    over_time, over_progress = time_panels(runs), progress_panels(runs)
    written: list[Path] = []
    if out is not None:
        path = Path(out)
        path.write_text(page(runs, over_time, over_progress), encoding="utf-8")
        written.append(path)
    if png is not None:
        folder = Path(png)
        folder.mkdir(parents=True, exist_ok=True)
        pictures: dict[str, Sequence[Panel]] = {"overview": over_time}
        pictures |= {panel.name: [panel] for panel in (*over_time, *over_progress)}
        for name, panels in pictures.items():
            written.append(folder / f"{name}.png")
            style.save_png(draw(panels, runs), written[-1])
    return written


def page(runs: Sequence[Run], over_time: Sequence[Panel], over_progress: Sequence[Panel]) -> str:
    """The HTML of a report.

    Args:
        runs: The runs.
        over_time: Panels with a time axis.
        over_progress: Panels over reference steps.
    """
    summaries = [summarise(run) for run in runs]
    title = ", ".join(clean(_title(summary)) for summary in summaries)
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    versions = "; ".join(dict.fromkeys(filter(None, (summary.software for summary in summaries))))
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>resilin report: {escape(title)}</title>",
        f"<style>{style.CSS}{_PAGE_CSS}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">resilin report, made {made}. {escape(clean(versions))}</p>',
        *(_damage(run) for run in runs if run.damage),
        "<h2>Summary</h2>",
        _summary_table(summaries),
        "<h2>Over time</h2>",
        f"<figure>{style.svg(draw(over_time, runs), 'time')}</figure>",
    ]
    if over_progress:
        parts += [
            "<h2>Over progress</h2>",
            '<p class="soft">Progress counts reference steps, whatever the batch size of a step. '
            "Of repeated steps, the last execution counts.</p>",
            f"<figure>{style.svg(draw(over_progress, runs), 'progress')}</figure>",
        ]
    for run in runs:
        of = f" of {escape(clean(run.name))}" if len(runs) > 1 else ""
        parts += [f"<h2>Events{of}</h2>", _event_table(run)]
    parts.append("</body></html>\n")
    return "\n".join(parts)


def _title(summary: Summary) -> str:
    """Script and start of a run; the name of its directory if one of them is unknown."""
    if not summary.script or summary.began is None:
        return summary.name
    try:
        began = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(summary.began))
    except (OverflowError, ValueError, OSError):  # a log may hold any number as a time
        return summary.name
    return f"{Path(summary.script).name}, {began}"


def _summary_table(summaries: Sequence[Summary]) -> str:
    rows = [dict(summary.rows()) for summary in summaries]
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(
        f"<th>{_key(number) if len(rows) > 1 else ''}{escape(clean(summary.name))}</th>"
        for number, summary in enumerate(summaries)
    )
    body = "".join(
        f"<tr><th>{escape(clean(name))}</th>"
        + "".join(f"<td>{escape(clean(row.get(name, '-')))}</td>" for row in rows)
        + "</tr>"
        for name in names
    )
    return (
        f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _key(number: int) -> str:
    place = number % len(style.PALETTE)
    return f'<span class="key" style="background:var(--curve-{place})"></span>'


def notable(run: Run) -> list[Event]:
    """The events of the table: changes and faults, in order of time."""
    found: list[Event] = [*run.rescales, *run.faults]
    found += [checkpoint for checkpoint in run.checkpoints if checkpoint.action == "failed"]
    found += [choice for choice in run.decisions if choice.batch_size != choice.batch_size_before]
    return sorted(found, key=lambda event: event.time)


def _event_table(run: Run) -> str:
    events = notable(run)
    if not events:
        return '<p class="soft">Nothing changed and nothing failed.</p>'
    chosen = _most_telling(events)
    began = origin(run)
    rows = "".join(
        f'<tr><td class="n">{escape(span(event.time - began))}</td>'
        f'<td class="n">{event.step:,}</td><td class="n">{event.generation:,}</td>'
        f'<td class="n{" fault" * _is_bad(event)}">{escape(event.name)}</td>'
        f"<td>{escape(clean(describe(event)))}</td></tr>"
        for event in chosen
    )
    left = len(events) - len(chosen)
    more = f'<p class="soft">{left:,} more are in the event log.</p>' if left else ""
    return (
        '<div class="scroll"><table><thead><tr><th>time since the start</th><th>step</th>'
        "<th>generation</th><th>event</th><th>description</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div>{more}"
    )


def _most_telling(events: Sequence[Event]) -> Sequence[Event]:
    """At most `MOST_EVENTS` events: decisions are dropped first, then the oldest events."""
    if len(events) <= MOST_EVENTS:
        return events
    rank = {FaultEvent: 0, CheckpointEvent: 0, RescaleEvent: 1, DecisionEvent: 2}
    order = sorted(range(len(events)), key=lambda i: (rank.get(type(events[i]), 3), -i))
    return [events[i] for i in sorted(order[:MOST_EVENTS])]


def _is_bad(event: Event) -> bool:
    return isinstance(event, FaultEvent | CheckpointEvent)


def _damage(run: Run) -> str:
    first = escape(clean(str(run.damage[0])))
    return (
        f'<p class="note">{len(run.damage):,} lines of the event log of {escape(clean(run.name))} '
        f"could not be read and were skipped. The first: {first}</p>"
    )
