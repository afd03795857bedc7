"""The screen of `resilin top`: one run at one moment.

A `View` is a rich renderable of a `Status`. It fits a terminal of 80 by 24; additional space is
used for histories and events. Text from elsewhere (names, reasons, details) is shown as plain text:
markup and control characters in it have no effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions, OverflowMethod, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from resilin.core.text import clean
from resilin.telemetry.history import History
from resilin.telemetry.status import State, Status
from resilin.telemetry.wording import ago, amount, describe, extent, span

BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
"""Eighths of a character, for histories."""
ASCII_BLOCKS = "_.-=+*%#"
"""Replacements for terminals that can only show ASCII."""

_STATE_STYLES: dict[State, str] = {
    "waiting": "yellow",
    "running": "green",
    "silent": "yellow",
    "hung": "bold red",
    "stopped": "yellow",
    "gave up": "bold red",
    "ended": "yellow",
    "finished": "cyan",
}
_EVENT_STYLES = {"rescale": "yellow", "fault": "bold red", "decision": "cyan", "checkpoint": "blue"}
_FIXED_LINES = 16
"""Lines of the screen that are not events or metrics."""


class View:
    """A run on one screen.

    Args:
        status: State of the run.
        now: The current time, which relative times refer to.
        height: Lines of the terminal; None shows a fixed number of events.
        note: Text at the bottom, such as the number of unreadable lines.
    """

    def __init__(
        self, status: Status, now: float, *, height: int | None = None, note: str = ""
    ) -> None:
        self._status = status
        self._now = now
        self._height = height
        self._note = note

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the view for this console."""
        status, width, ascii_only = self._status, options.max_width, options.ascii_only
        overflow: OverflowMethod = "crop" if ascii_only else "ellipsis"
        rule = Rule(characters="-" if ascii_only else "\u2500", style="dim")
        yield self._header(width)
        if status.last is None:
            yield Text(
                "waiting for events: a job writes them with `resilin run --run-dir`, or with "
                "`resilin.events_to` in its script",
                style="yellow",
            )
            return
        yield _line(_what(status), "dim", overflow)
        yield rule
        yield self._numbers(overflow)
        yield rule
        yield self._progress()
        yield from self._histories(width, ascii_only)
        metrics = self._metrics(overflow)
        if metrics is not None:
            yield metrics
        yield rule
        room = 8 if self._height is None else self._height - _FIXED_LINES
        room -= (metrics is not None) + bool(self._note)
        yield from self._events(max(1, room), overflow)
        if self._note:
            yield _line(self._note, "yellow", overflow)

    def _header(self, width: int) -> RenderableType:
        status, now = self._status, self._now
        state = status.state(now)
        words: str = state
        if status.last is not None and status.began is not None:
            words = {
                "waiting": "waiting",
                "running": f"running for {span(now - status.began)}",
                "silent": f"silent for {span(now - status.last)}",
                "hung": f"hung {span(now - status.last)} ago",
                "stopped": f"stopped after {span(status.last - status.began)}",
                "gave up": f"gave up after {span(status.last - status.began)}",
                "ended": f"ended early after {span(status.last - status.began)}",
                "finished": f"finished after {span(status.last - status.began)}",
            }[state]
        name = clean(status.name)
        room = max(8, width - len(words) - 15)
        grid = Table.grid(expand=True)
        grid.add_column()
        grid.add_column(justify="right")
        left = Text.assemble(("resilin top  ", "dim"), (_short(name, room), "bold"))
        grid.add_row(left, Text(words, f"bold {_STATE_STYLES[state]}"))
        return grid

    def _numbers(self, overflow: OverflowMethod) -> RenderableType:
        status = self._status
        start, step = status.start, status.step
        replicas = step.replicas if step else start.replicas if start else None
        left = [("replicas", _replicas(status, replicas))]
        right = [("goodput", f"{amount(status.goodput)} reference samples/s")]
        right.append(("throughput", f"{amount(status.throughput)} samples/s"))
        if step is None:
            return _columns(left, right, overflow)
        reference = start.reference if start and start.reference else None
        split = f"{step.replicas} x {step.local_bsz} x {step.accumulation_steps}"
        even = step.replicas * step.local_bsz * step.accumulation_steps == step.batch_size
        left += [
            ("batch", f"{amount(step.batch_size)} {'=' if even else 'in'} {split}"),
            ("scale", amount(step.scale) + (f" (reference {reference:,})" if reference else "")),
            ("gain", amount(step.gain)),
            ("learning rate", _rate(step.lr, step.lr_factor)),
            ("epoch", _epoch(status, step.epoch)),
            ("at risk", _at_risk(status.at_risk)),
        ]
        efficiency = status.efficiency
        right += [
            ("efficiency", "-" if efficiency is None else f"{100 * efficiency:.3g}%"),
            ("noise scale", f"{amount(status.noise_scale)} samples"),
            ("step", f"{amount(step.step)}, {span(step.seconds)} each"),
            ("samples", amount(step.samples)),
        ]
        return _columns(left, right, overflow)

    def _progress(self) -> RenderableType:
        status = self._status
        done, fraction, start = status.steps_done, status.fraction, status.start
        grid = Table.grid(expand=True, padding=(0, 1))
        grid.add_column(width=13, no_wrap=True)
        if fraction is None or start is None or start.total_steps is None:
            words = f"{amount(done)} reference steps of an unknown total"
            grid.add_column()
            grid.add_row(Text("progress", "dim"), Text(words))
            return grid
        left = status.seconds_left
        words = f"{amount(done)} of {amount(start.total_steps)} reference steps"
        if left is not None:
            words += f", {span(left)} left"
        grid.add_column(ratio=1)
        grid.add_column(justify="right", no_wrap=True)
        bar = ProgressBar(total=1.0, completed=fraction, complete_style="green")
        grid.add_row(Text(f"{100 * fraction:5.1f}% done", "bold"), bar, Text(words))
        return grid

    def _histories(self, width: int, ascii_only: bool) -> Iterable[RenderableType]:
        status = self._status
        rows: list[tuple[str, History, str]] = [
            ("batch size", status.batch, "samples"),
            ("goodput", status.goodput_history, "/s"),
            ("loss", status.losses, ""),
        ]
        room = max(10, width - 14 - 26)
        for name, history, unit in rows:
            values = history.means(room)
            words = f"{extent(values)} {unit}" if values else "not recorded"
            grid = Table.grid(expand=True, padding=(0, 1))
            grid.add_column(width=13, no_wrap=True)
            grid.add_column(ratio=1, no_wrap=True)
            grid.add_column(justify="right", no_wrap=True)
            blocks = ASCII_BLOCKS if ascii_only else BLOCKS
            drawn = Text(sparkline(values, blocks), "green" if name == "goodput" else "cyan")
            grid.add_row(Text(name, "dim"), drawn, Text(words.rstrip(), "dim"))
            yield grid

    def _metrics(self, overflow: OverflowMethod) -> RenderableType | None:
        status = self._status
        pairs = [("loss", status.loss)] if status.loss is not None else []
        pairs += list(status.metrics.items())
        if not pairs:
            return None
        text = Text(no_wrap=True, overflow=overflow)
        text.append("last".ljust(14), "dim")
        for name, value in pairs:
            text.append(f"{clean(name)} ", "dim")
            text.append(f"{amount(value)}   ", "bold")
        return text

    def _events(self, room: int, overflow: OverflowMethod) -> Iterable[RenderableType]:
        last = self._status.last_events(room)
        if not last:
            yield Text("no rescale, fault, decision or checkpoint yet", "dim")
            return
        grid = Table.grid(expand=True, padding=(0, 1))
        grid.add_column(width=13, no_wrap=True)
        grid.add_column(width=10, no_wrap=True)
        grid.add_column(ratio=1, no_wrap=True, overflow=overflow)
        for event in reversed(last):
            when = Text(ago(self._now - event.time), "dim")
            kind = Text(event.name, _EVENT_STYLES.get(event.name, ""))
            grid.add_row(when, kind, Text(clean(describe(event))))
        yield grid


def sparkline(values: Sequence[float], blocks: str = BLOCKS) -> str:
    """A row of block characters whose heights follow the values."""
    if not values:
        return ""
    low, high = min(values), max(values)
    if low == high:
        return blocks[0] * len(values)
    top = len(blocks) - 1
    # Halves, because the range of huge values of both signs can exceed the largest float.
    heights = ((value / 2 - low / 2) / (high / 2 - low / 2) for value in values)
    return "".join(blocks[round(top * height)] for height in heights)


def _what(status: Status) -> str:
    start = status.start
    if start is None:
        return "the job has not reported its script yet"
    parts = [start.script or "?", f"{start.optimizer}, {start.rule}"]
    if start.replays:
        parts.append(f"replays {start.replays}")
    return "  |  ".join(parts)


def _replicas(status: Status, replicas: int | None) -> str:
    hosts = status.start.hosts if status.start else None
    words = "-" if replicas is None else f"{replicas:,}"
    if hosts is not None:
        words += f" on {hosts} host" + "s" * (hosts != 1)
    return f"{words}, generation {status.generation}"


def _at_risk(steps: int | None) -> str:
    """The cost of a lost worker, as text."""
    if not steps:
        return "-" if steps is None else "no completed step"
    return f"{amount(steps)} completed step{'s' if steps > 1 else ''}"


def _epoch(status: Status, epoch: int) -> str:
    start = status.start
    if start is None or not start.total_steps or not start.steps_per_epoch:
        return f"{epoch + 1:,}"
    return f"{epoch + 1:,} of {amount(start.total_steps / start.steps_per_epoch)}"


def _rate(lr: float | None, factor: float) -> str:
    if lr is None:
        return f"factor {amount(factor)}"
    return f"{amount(lr * factor)} = {amount(lr)} x {amount(factor)}"


def _columns(
    left: list[tuple[str, str]], right: list[tuple[str, str]], overflow: OverflowMethod
) -> RenderableType:
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(width=13, no_wrap=True)
    grid.add_column(ratio=1, no_wrap=True, overflow=overflow)
    grid.add_column(width=11, no_wrap=True)
    grid.add_column(ratio=1, no_wrap=True, overflow=overflow)
    left += [("", "")] * (len(right) - len(left))
    right += [("", "")] * (len(left) - len(right))
    for (name, value), (other, its) in zip(left, right, strict=True):
        grid.add_row(Text(name, "dim"), Text(value, "bold"), Text(other, "dim"), Text(its, "bold"))
    return grid


def _line(text: str, style: str, overflow: OverflowMethod) -> Text:
    return Text(clean(text), style, no_wrap=True, overflow=overflow)


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else f"...{text[3 - width :]}"
