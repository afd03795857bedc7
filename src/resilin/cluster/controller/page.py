"""One page: who has what and why, and who had what in the last hours.

It is one HTML document without scripts, and everything in it that comes from users is escaped.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

from resilin.cluster.controller.state import PartRecord, Past, State
from resilin.cluster.controller.views import jobs_view, nodes_view, why_view

HOURS = 3.0
"""Hours that the chart shows, at most."""
WIDTH, ROW = 900, 22
"""Width of the chart and height of one node, in pixels."""
COLOURS = 12
"""Number of colours of jobs."""
STYLE = """
body{font:14px/1.4 system-ui,sans-serif;margin:2em auto;max-width:72em;padding:0 1em;color:#222}
table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.3em .6em;
border-bottom:1px solid #ddd;vertical-align:top}th{font-weight:600}h2{margin-top:1.6em}
.trouble{background:#fff1e0;padding:.5em .8em;border-left:4px solid #d80}
svg{max-width:100%;height:auto}svg text{font:11px system-ui,sans-serif}
@media(prefers-color-scheme:dark){body{background:#16181c;color:#ddd}th,td{border-color:#333}
.trouble{background:#3a2c14}svg text{fill:#ddd}}
"""


def page(state: State, policy: str, now: float, troubles: Iterable[str]) -> str:
    """The page as HTML."""
    parts = state.by_job()
    rows = [
        (
            view,
            why_view(state, state.jobs[view["id"]], parts.get(view["id"], []), now)["text"],
        )
        for view in jobs_view(state)
    ]
    present = [(view, why) for view, why in rows if view["ended"] is None]
    over = [(view, why) for view, why in rows if view["ended"] is not None][-20:][::-1]
    number = 0 if state.decision is None else state.decision.generation
    price = {} if state.decision is None else state.decision.prices
    prices = ", ".join(f"{_(kind)} {value:.3g}" for kind, value in price.items())
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width'><meta http-equiv=refresh content=10>"
        f"<title>{_(state.cluster)}</title><style>{STYLE}</style>"
        f"<h1>Cluster {_(state.cluster)}</h1><p>Policy <b>{_(policy)}</b>, decision {number}"
        f"{f'; price of an accelerator: {prices}' if prices else ''}.</p>"
        + "".join(f"<p class=trouble>{_(text)}</p>" for text in sorted(troubles))
        + "<h2>Jobs</h2>"
        + _table(("job", "phase", "replicas", "nodes", "tenant", "restarts", "why"), present)
        + "<h2>Nodes</h2>"
        + _nodes(nodes_view(state), now)
        + "<h2>The last hours</h2>"
        + _chart(state, now)
        + ("<h2>Ended</h2>" + _table(("job", "phase", "", "", "tenant", "restarts", "why"), over))
        + "</html>"
    )


def _(value: object) -> str:
    return html.escape(str(value))


def _table(header: Sequence[str], rows: Sequence[tuple[dict[str, Any], str]]) -> str:
    if not rows:
        return "<p>None.</p>"
    lines = ["<table><tr>", *(f"<th>{_(name)}" for name in header)]
    for view, why in rows:
        nodes = ", ".join(f"{name} x {count}" for name, count in view["nodes"].items())
        size = f"{view['replicas']} of {view['wanted']}" if view["ended"] is None else ""
        cells = (view["id"], view["phase"], size, nodes, view["tenant"], view["restarts"], why)
        lines += ["<tr>", *(f"<td>{_(cell)}" for cell in cells)]
    return "".join([*lines, "</table>"])


def _nodes(views: Sequence[dict[str, Any]], now: float) -> str:
    lines = ["<table><tr><th>node<th>accelerators<th>used<th>jobs<th>"]
    for view in views:
        used = sum(view["jobs"].values())
        jobs = ", ".join(f"{job} x {count}" for job, count in view["jobs"].items())
        note = ""
        if view["leaves"] is not None:
            left = view["leaves"] - now
            note = f"leaves in {left:.0f} s" if left > 0 else "drained"
        if view["missed"] is not None:
            note = "does not answer"
        total = f"{view['accelerators']} {view['kind']}"
        cells = (view["name"], total, used, jobs, note)
        lines += ["<tr>", *(f"<td>{_(cell)}" for cell in cells)]
    return "".join([*lines, "</table>"])


def _chart(state: State, now: float) -> str:
    """Bars of parts over time, one row for each node."""
    bars: list[PartRecord] = [*state.history, *state.parts.values()]
    began = [bar.began for bar in bars if bar.began is not None]
    if not began:
        return "<p>Nothing has run yet.</p>"
    start = max(min(began), now - 3600 * HOURS)
    scale = (WIDTH - 160) / max(now - start, 1.0)
    nodes = sorted({bar.node for bar in bars} | set(state.nodes))
    colours = {name: index % COLOURS for index, name in enumerate(state.jobs)}
    shapes = []
    for bar in bars:
        end = bar.ended if isinstance(bar, Past) else now
        if bar.began is None or end < start:
            continue
        left = max(bar.began, start)
        x, width = 110 + (left - start) * scale, max(1.0, (end - left) * scale)
        y = nodes.index(bar.node) * ROW
        hue = colours.get(bar.job, 0) * 360 // COLOURS
        shapes.append(
            f"<rect x={x:.1f} y={y + 3} width={width:.1f} height={ROW - 6} "
            f"fill='hsl({hue} 60% 55%)' fill-opacity=.8><title>{_(bar.name)}: {_(bar.job)}, "
            f"{bar.accelerators} on {_(bar.node)}</title></rect>"
        )
        if width > 8 * len(bar.job):
            shapes.append(f"<text x={x + 4:.1f} y={y + 15}>{_(bar.job)}</text>")
    names = [f"<text x=0 y={i * ROW + 15}>{_(name)}</text>" for i, name in enumerate(nodes)]
    height = len(nodes) * ROW + 20
    minutes = (now - start) / 60
    ends = (
        f"<text x=110 y={height - 4}>{minutes:.0f} minutes ago</text>"
        f"<text x={WIDTH - 80} y={height - 4}>now</text>"
    )
    return (
        f"<svg viewBox='0 0 {WIDTH} {height}' width={WIDTH} role=img "
        f"aria-label='parts on each node over time'>{''.join(names + shapes)}{ends}</svg>"
    )
