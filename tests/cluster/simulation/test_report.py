"""Figures, fairness, and the page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from resilin.cluster.node import Allocation
from resilin.cluster.simulation import gantt, report
from resilin.cluster.simulation.jobs import Stretch
from resilin.cluster.simulation.run import JobResult, Result


def job(id: str, submitted: float, finished: float, *sizes: int) -> JobResult:
    width = (finished - submitted) / len(sizes)
    stretches = tuple(
        Stretch(
            submitted + width * i,
            submitted + width * (i + 1),
            Allocation(kind="gpu", shares=(("n", size),)),
        )
        for i, size in enumerate(sizes)
    )
    served = sum((each.end - each.start) * each.allocation.size for each in stretches)
    return JobResult(id, submitted, submitted, finished, len(sizes) - 1, served, stretches)


RESULT = Result(
    "some", (job("a", 100.0, 200.0, 4), job("b", 150.0, 450.0, 1, 2), job("<c>", 200.0, 220.0, 64)),
    5000.0, 7,
)  # fmt: skip


def test_figures_are_those_of_the_jobs():
    found = report.figures(RESULT)
    assert found.mean == pytest.approx(140.0)
    assert found.median == 100.0
    # Between 100 and 300 seconds at 98 parts of 100.
    assert found.p99 == pytest.approx(296.0)
    assert found.makespan == 350.0
    assert found.restarts == pytest.approx(1 / 3)
    assert found.use == pytest.approx((400 + 150 + 300 + 1280) / 5000)


def test_means_of_figures_are_taken_one_by_one():
    one = report.figures(RESULT)
    other = report.Figures(mean=0, median=0, p99=0, makespan=0, restarts=1, use=0)
    both = report.mean([one, other])
    assert (both.mean, both.makespan, both.restarts) == pytest.approx((70.0, 175.0, 2 / 3))


def test_fairness_compares_jobs_one_by_one():
    found = report.fairness(
        [({"a": 1.0, "b": 2.0}, {"a": 2.0, "b": 2.0}), ({"c": 8.0}, {"c": 2.0})]
    )
    assert found.no_slower == pytest.approx(2 / 3)
    assert found.worst == 4.0
    assert found.typical == pytest.approx(2 ** (1 / 3))
    with pytest.raises(ValueError, match="b is in one of them"):
        report.fairness([({"a": 1.0}, {"a": 1.0, "b": 1.0})])


def test_a_file_that_is_no_summary_is_an_error(tmp_path):
    path = tmp_path / "summary.json"
    path.write_text(json.dumps({"jcts": {"workload-1": {"a": 3}}}))
    assert report.published(path) == {"workload-1": {"a": 3.0}}
    path.write_text(json.dumps({"avgs": 3}))
    with pytest.raises(ValueError, match="must have jcts by workload"):
        report.published(path)


class Reader(HTMLParser):
    """Tags that are open, bars, texts, and whatever would be loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.bars: list[dict[str, str | None]] = []
        self.text: list[str] = []
        self.foreign: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "line", "br"):
            self.open.append(tag)
        self.foreign += [tag] * (tag in ("script", "link", "img", "iframe", "object"))
        self.foreign += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag == "rect" and "x" in dict(attrs):
            self.bars.append(dict(attrs))

    def handle_startendtag(self, tag, attrs):
        assert tag in ("line", "rect")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_whole_and_needs_nothing_from_elsewhere():
    text = gantt.page("Title", ["a <note>"], ("policy", "mean"), [("some", "140")], [("x", RESULT)])
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    assert reader.foreign == []
    assert "url(" not in text
    assert "a <note>" in reader.text
    assert "<c>" in reader.text


def test_bars_lie_where_the_times_are_and_have_the_colour_of_their_size():
    reader = Reader()
    reader.feed(gantt.chart(RESULT))
    at = [(bar["x"], bar["width"], bar["class"]) for bar in reader.bars]
    assert at == [
        ("0.000%", "28.571%", "s2"),
        ("14.286%", "42.857%", "s0"),
        ("57.143%", "42.857%", "s1"),
        ("28.571%", "5.714%", "s6"),
    ]


@pytest.mark.parametrize("hours", [0.01, 0.4, 1.0, 5.0, 17.3, 400.0])
def test_times_are_few_and_round(hours):
    last = JobResult("a", 0.0, 0.0, hours * 3600, 0, 1.0, ())
    labels = re.findall(r">([\d.e-]+) h<", gantt.chart(Result("some", (last,), 1.0, 1)))
    assert 1 < len(labels) <= 6
    assert float(labels[-1]) <= hours
