import math
import re
import struct
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from resilin.core import events
from resilin.lab import report, style
from resilin.lab.curves import averaged, decimate, time_unit
from resilin.lab.panels import progress_panels, time_panels
from resilin.lab.plots import draw
from resilin.lab.summary import summarise
from resilin.telemetry.read import Damage
from resilin.telemetry.run import Run
from tests.telemetry.told import told_run


def run_of(told, name="job-17", **kwargs):
    return Run.from_events(told, name=name, **kwargs)


class Page(HTMLParser):
    """The tags of a page, checked for being closed in order, and its text."""

    VOID = ("meta", "br", "!doctype")

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.open, self.words = [], [], [], []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    assert report.write_report([run_of(told_run())], path) == [path]
    return path.read_text()


def test_the_page_is_whole_and_refers_to_nothing_outside(page):
    parsed = Page(page)
    assert "script" not in parsed.tags
    assert re.findall(r"https?:|url\((?!#)|@import|<link|<img|src=", page) == []
    references = [value for name, value in parsed.attributes if name in ("href", "xlink:href")]
    assert references
    assert all(value.startswith("#") for value in references)
    ids = [value for name, value in parsed.attributes if name == "id"]
    assert len(set(ids)) == len(ids)
    assert {value[1:] for value in references} <= set(ids)


def test_the_page_shows_every_quantity_with_its_unit(page):
    text = Page(page).text
    for label in (
        "batch size (samples)",
        "replicas (number)",
        "gain (reference steps per step)",
        "efficiency (%)",
        "learning rate (no unit)",
        "goodput (reference samples/s)",
        "loss (as recorded)",
        "accuracy (as recorded)",
        "time since the start (s)",
        "progress (reference steps)",
    ):
        assert label in text
    assert " rescale " in text
    assert " fault " in text


def test_the_page_tells_what_happened(page):
    text = Page(page).text
    assert "worker_lost on replica 1: killed by SIGKILL" in text
    assert "2 -> 1 replicas after 10 s: resumed from memory" in text
    assert "batch 100 -> 200: it learns faster" in text
    assert "completed (reference steps) 160.5 of 400" in text
    assert "batch size (samples) 100 to 200" in text


def test_colours_follow_the_screen_of_the_reader(page):
    assert "prefers-color-scheme:dark" in page
    (figures,) = [re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    assert len(figures) == 2
    for figure in figures:
        assert re.findall(r"#[0-9a-fA-F]{6}\b", figure) == []
    names = set(re.findall(r"var\((--[\w-]+)\)", page))
    assert names
    assert all(f"{name}:" in page for name in names)


def test_words_of_others_are_escaped():
    nasty = "<script>alert('x')</script>&\"\x1b[31m\x00"
    told = [replace(e, script=nasty) if e.name == "start" else e for e in told_run()]
    told += [
        events.FaultEvent(time=1200.0, step=1, kind=nasty, detail=nasty),
        events.MetricsEvent(time=1200.0, step=1, values={nasty: 1.0, "$x_": 2.0, "_y": 3.0}),
    ]
    runs = [run_of(told, name=nasty)] * 2
    html = report.page(runs, time_panels(runs)[-3:], [])
    parsed = Page(html)
    assert "script" not in parsed.tags
    assert "\x1b" not in html
    assert "\x00" not in html
    assert "<script>alert('x')</script>" in parsed.text


def test_several_runs_share_the_pictures(tmp_path):
    runs = [run_of(told_run(began=1000.0 * i, seed=i), name=f"run {i}") for i in range(1, 11)]
    html = report.page(runs, time_panels(runs)[:2], progress_panels(runs)[:1])
    text = Page(html).text
    assert all(f"run {i}" in text for i in range(1, 11))
    assert html.count('class="key"') == 10
    # Ten curves, eight colours: the last two differ from the first two by their dashes.
    assert style.colour(8) == style.colour(0)
    assert style.dashes(8) != style.dashes(0)


def test_damage_is_named():
    run = run_of(told_run(), damage=[Damage("events-replica-0.jsonl", 7, "<not> JSON")])
    text = Page(report.page([run], time_panels([run])[:1], [])).text
    assert "1 lines of the event log of job-17 could not be read" in text
    assert "events-replica-0.jsonl, line 7: <not> JSON" in text


def test_a_page_with_thousands_of_events_stays_readable():
    told = told_run()
    told += [
        events.DecisionEvent(
            time=1000.0 + i, step=i, batch_size_before=1, batch_size=2, reason=f"number {i}"
        )
        for i in range(3000)
    ]
    run = run_of(sorted(told, key=lambda event: event.time))
    html = report.page([run], time_panels([run])[:1], [])
    assert "worker_lost" in html
    assert f"{3000 + 3 - report.MOST_EVENTS:,} more are in the event log" in html


def test_pictures_are_png_files_that_are_not_blank(tmp_path, monkeypatch):
    run = run_of(told_run())
    monkeypatch.setattr(report, "time_panels", lambda runs: time_panels(runs)[:2])
    monkeypatch.setattr(report, "progress_panels", lambda runs: progress_panels(runs)[:1])
    written = report.write_report([run], None, png=tmp_path / "deep" / "png")
    names = {path.stem for path in written}
    assert names == {"overview", "batch-size", "replicas", "loss-by-progress"}
    for path in written:
        data = path.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", data[16:24])
        assert width >= 700
        assert height >= 400
        assert len(data) > 10_000


def test_nothing_overlaps_in_a_picture():
    """No label of the figure lies over another one, or over the curves of a panel."""
    run = run_of(told_run())
    figure = draw(time_panels([run]), [run])
    style.svg(figure, "laid out")
    renderer = figure._get_renderer()
    boxes = [ax.get_tightbbox(renderer, for_layout_only=False) for ax in figure.axes]
    boxes += [legend.get_window_extent(renderer) for legend in figure.legends]
    for i, one in enumerate(boxes):
        assert not [other for other in boxes[:i] if one.overlaps(other)]
        assert figure.bbox.containsx(one.x0)
        assert figure.bbox.containsx(one.x1)
        assert figure.bbox.containsy(one.y0)
        assert figure.bbox.containsy(one.y1)
    for ax in figure.axes:
        assert re.search(r"\(.+\)$", ax.get_ylabel())


def test_the_same_run_gives_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        run = run_of(told_run())
        style.save_png(draw(time_panels([run])[:2], [run]), tmp_path / f"{name}.png")
        (tmp_path / f"{name}.svg").write_text(style.svg(draw(time_panels([run])[:2], [run]), "x"))
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.svg").read_text() == (tmp_path / "b.svg").read_text()


def test_a_report_without_steps_says_so(tmp_path):
    with pytest.raises(ValueError, match="empty: no step has been reported yet"):
        report.write_report([run_of([], name="empty")], tmp_path / "x.html")
    with pytest.raises(ValueError, match="at least one run"):
        report.write_report([], tmp_path / "x.html")


# Numbers -----------------------------------------------------------------------------------------


def test_the_summary_counts_what_happened():
    summary = summarise(run_of(told_run()))
    assert (summary.steps, summary.samples) == (120, 39 * 100 + 81 * 200)
    assert (summary.replicas, summary.batch_size) == ((1, 2), (100, 200))
    assert (summary.generations, summary.rescales, summary.faults) == (2, 1, 1)
    assert summary.paused_seconds == 10
    assert summary.seconds == 130
    assert summary.goodput == pytest.approx(160.5 * 100 / 130)
    assert summary.throughput == pytest.approx(20100 / 130)
    assert summary.metrics == {"accuracy": 0.75}
    assert summary.checkpoints_saved == 1
    assert summary.repeated_steps == 0


def test_starts_without_a_step_are_counted():
    told = told_run()
    assert "starts without a step" not in dict(summarise(run_of(told)).rows())
    told += [
        events.FaultEvent(
            time=1200.0 + n, step=120, kind="worker_lost", detail="", without_step=n < 2
        )
        for n in range(3)
    ]
    summary = summarise(run_of(told))
    assert (summary.faults, summary.starts_without_step) == (4, 2)
    assert dict(summary.rows())["starts without a step"] == "2"


def test_steps_that_were_made_again_are_counted():
    told = told_run()
    back = [replace(event, step=event.step - 25) if event.generation else event for event in told]
    assert summarise(run_of(back)).repeated_steps == 25


def test_a_run_by_samples_is_as_long_as_its_samples():
    told = [
        replace(e, rule="linear", clock="samples") if e.name == "start" else e for e in told_run()
    ]
    summary = summarise(run_of(told))
    assert (summary.steps_done, summary.progress) == (201, 160.5)


def test_a_run_without_anything_has_a_summary():
    summary = summarise(run_of([]))
    assert (summary.steps, summary.loss, summary.goodput) == (0, None, None)
    assert all(value for _, value in summary.rows())


def test_absurd_numbers_make_a_report(tmp_path):
    base = [event for event in told_run() if event.name == "step"]
    odd = [math.inf, -math.inf, math.nan, 1e308, -1e308, 0.0]
    told = [told_run()[0]]
    for i, event in enumerate(base[:60]):
        names = ("progress", "scale", "gain", "lr", "sqr_norm", "trace", "loss")
        told.append(replace(event, **{names[i % 7]: odd[i % 6]}))
    told.append(replace(base[61], batch_size=10**400, samples=10**400, step=10**400))
    run = run_of(told)
    report.write_report([run], tmp_path / "odd.html")
    assert summarise(run).as_dict()["steps"] >= 0


def test_thinning_keeps_every_spike():
    x = np.arange(1_000_000.0)
    y = np.sin(x / 1e5)
    y[123_456], y[765_432] = 50.0, -50.0
    y[500_000] = np.nan
    px, py = decimate(x, y)
    assert len(px) <= 2100
    assert (np.nanmax(py), np.nanmin(py)) == (50.0, -50.0)
    assert px[py == 50.0] == [123_456]
    assert np.isnan(py).sum() == 1
    assert (np.diff(px) > 0).all()
    assert (px[0], px[-1]) == (0, 999_999)


def test_averages_are_weighted_and_interrupted_only_where_something_ended():
    x = np.r_[np.linspace(0, 40, 400), np.linspace(60, 100, 400)]
    y = np.where(np.arange(800) % 2, 1.0, 4.0)
    weights = np.where(np.arange(800) % 2, 2.0, 1.0)
    px, py = averaged(x, y, weights=weights, bins=50)
    assert np.mean(py) == pytest.approx(2.0, abs=0.05)
    assert not ((px > 42) & (px < 58)).any()
    px, py = averaged(x, y, weights=weights, ends=np.array([40.0, 100.0]), bins=50)
    assert px[np.isnan(py)] == pytest.approx([43.0])


def test_curves_are_interrupted_where_nothing_was_trained():
    run = run_of(told_run())
    for panel in time_panels([run]):
        for curve in panel.curves(run):
            pause = (curve.x >= 1060) & (curve.x < 1070)
            if panel.name != "metric-0":
                assert np.isnan(curve.y[pause]).sum() >= 1
                assert len(curve.x) == len(curve.y)


def test_the_remainder_of_an_epoch_is_no_batch_size():
    told = [
        replace(event, batch_size=37, scale=1.0)
        if event.step == 30 and event.name == "step"
        else event
        for event in told_run()
    ]
    assert summarise(run_of(told)).batch_size == (100, 200)
    (batch,) = time_panels([run_of(told)])[0].curves(run_of(told))
    assert np.nanmin(batch.y) == 100


def test_time_axes_have_a_sensible_unit():
    assert [time_unit(t).name for t in (0, 170, 600, 7100, 7300, 2e5)] == [
        "s",
        "s",
        "min",
        "min",
        "h",
        "d",
    ]


@pytest.mark.parametrize(("kind", "said"), [("gave_up", "gave up"), ("stopped", "stopped")])
def test_a_run_that_was_given_up_says_so_and_that_is_no_fault(kind, said):
    told = told_run()
    before = summarise(run_of(told))
    assert before.ended == ""
    last = max(event.time for event in told)
    end = events.FaultEvent(
        time=last + 1, step=120, generation=1, kind=kind, detail="after 3 restarts"
    )
    after = summarise(run_of([*told, end]))
    assert after.ended == f"{said} after 3 restarts"
    assert after.faults == before.faults
    assert ("ended", after.ended) in after.rows()
    again = replace([each for each in told if each.name == "step"][-1], time=last + 2)
    assert summarise(run_of([*told, end, again])).ended == ""


def test_a_time_that_no_calendar_has_leaves_the_name_of_the_run():
    told = [replace(event, time=event.time * 1e300) for event in told_run()]
    assert report._title(summarise(run_of(told, name="run"))) == "run"
