"""The dashboard shows what the Prometheus sink exports, all of it, and nothing else."""

import json
import re
from importlib import resources

import pytest

from resilin.telemetry.prometheus import Prometheus
from tests.telemetry.happenings import ALL

BOARD = json.loads((resources.files("resilin.telemetry") / "grafana.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
PANEL_EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
ANNOTATIONS = [item for item in BOARD["annotations"]["list"] if not item.get("builtIn")]
VARIABLES = {variable["name"]: variable for variable in BOARD["templating"]["list"]}
EXPRESSIONS = [
    *PANEL_EXPRESSIONS,
    *(item["expr"] for item in ANNOTATIONS),
    VARIABLES["job"]["query"]["query"],
]
SELECTOR = re.compile(r'(\w+)\{job="\$job"\}')
WORDS = {"clamp_min", "deriv", "rate", "sum", "by", "label_values"}
"""What else may stand in an expression, besides labels."""
LABELS = {"job", "kind", "action", "outcome", "name", "instance"}


@pytest.fixture(scope="module")
def exported():
    """Names of all samples, and the labels of each, after a run with every event."""
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    sink = Prometheus(registry)
    for event in ALL:
        sink(event)
    return {
        sample.name: set(sample.labels)
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def names(expression: str) -> set[str]:
    """All identifiers of an expression, without variables, durations and strings."""
    bare = re.sub(r'"[^"]*"|\[[^]]*\]', " ", expression)
    return set(re.findall(r"[A-Za-z_]\w*", bare))


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_name_is_a_metric_that_is_exported(expression, exported):
    metrics = names(expression) - WORDS - LABELS
    assert metrics
    assert metrics <= set(exported)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_brackets_match(expression):
    opened = []
    for character in re.sub(r'"[^"]*"', "", expression):
        if character in "([{":
            opened.append(character)
        elif character in ")]}":
            assert opened
            assert opened.pop() + character in ("()", "[]", "{}")
    assert not opened


def test_every_exported_metric_is_on_the_board(exported):
    shown = set().union(*map(names, EXPRESSIONS))
    assert set(exported) <= shown


def test_every_expression_is_about_the_chosen_job(exported):
    for expression in [*PANEL_EXPRESSIONS, *(item["expr"] for item in ANNOTATIONS)]:
        assert set(SELECTOR.findall(expression)) == names(expression) - WORDS - LABELS


def test_labels_in_legends_are_those_of_the_metric(exported):
    for panel in PANELS:
        for target in panel["targets"]:
            (metric, *_) = SELECTOR.findall(target["expr"])
            used = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            grouped = set(re.findall(r"by \((\w+)\)", target["expr"]))
            assert used | grouped <= exported[metric]
    for item in ANNOTATIONS:
        (metric,) = SELECTOR.findall(item["expr"])
        assert set(re.findall(r"\{\{(\w+)\}\}", item["titleFormat"])) <= exported[metric]


def test_the_board_can_be_imported_anywhere():
    assert BOARD["id"] is None
    assert BOARD["schemaVersion"] >= 39
    assert VARIABLES["DS_PROMETHEUS"]["type"] == "datasource"
    assert VARIABLES["DS_PROMETHEUS"]["query"] == "prometheus"
    targets = [target for panel in PANELS for target in panel["targets"]]
    for part in [*PANELS, *targets, *ANNOTATIONS, VARIABLES["job"]]:
        assert part["datasource"] == {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}


def test_panels_have_titles_units_and_a_place_of_their_own():
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    taken = set()
    for panel in BOARD["panels"]:
        assert panel["title"]
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells
    for panel in PANELS:
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["description"].endswith(".")
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)


def test_rescales_and_faults_are_marked_at_their_time():
    assert [item["name"] for item in ANNOTATIONS] == ["Rescales", "Faults"]
    for item in ANNOTATIONS:
        # Grafana takes the value for milliseconds.
        assert item["useValueForTime"]
        assert item["expr"].endswith('_timestamp_seconds{job="$job"} * 1000')
