"""Each sink with the real package behind it, and what was written read back."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from resilin.telemetry.opentelemetry import OpenTelemetry
from resilin.telemetry.prometheus import Prometheus
from resilin.telemetry.scalars import SCALARS, scalars, words
from resilin.telemetry.tensorboard import TensorBoard, write_scalars
from resilin.telemetry.wandb import WandB
from tests.telemetry.happenings import ALL, BEGAN, FAULT, METRICS, START, step

CURVES = {name for event in ALL for name in scalars(event)}


def tell(sink) -> None:
    for event in ALL:
        sink(event)


# TensorBoard -----------------------------------------------------------------------------------


@pytest.fixture
def board(tmp_path):
    """A writer, and what reads the same directory."""
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def read():
        writer.close()
        found = accumulator.EventAccumulator(str(tmp_path), size_guidance={"tensors": 0})
        found.Reload()
        return found

    writer = tensorboard.SummaryWriter(tmp_path)
    yield writer, read
    writer.close()


def test_tensorboard_has_a_curve_for_each_number(board):
    writer, read = board
    tell(TensorBoard(writer))
    found = read()
    assert set(found.Tags()["scalars"]) == {f"resilin/{name}" for name in CURVES}
    points = found.Scalars("resilin/loss")
    assert [(point.step, point.value) for point in points] == [(1, 2.0), (2, 1.0), (4, 0.5)]
    assert [point.wall_time for point in points] == [BEGAN + 1, BEGAN + 2, BEGAN + 4]


def test_tensorboard_has_a_text_for_what_a_person_asks_about(board):
    writer, read = board
    tell(TensorBoard(writer, prefix="job7/"))
    found = read()
    tag = "job7/fault/text_summary"
    (text,) = found.Tensors(tag)
    assert text.step == 3
    assert text.tensor_proto.string_val[0].decode() == words(FAULT)
    texts = {tag.split("/")[1] for tag in found.Tags()["tensors"]}
    assert texts == {"start", "rescale", "fault", "decision", "checkpoint"}


def test_scalars_can_be_written_without_an_event(board):
    writer, read = board
    write_scalars(writer, {"gain": 1.25}, 8, "model/")
    (point,) = read().Scalars("model/gain")
    assert (point.step, point.value) == (8, 1.25)


def test_tensorboard_shows_a_step_once_that_is_made_again_after_a_restart(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def life(*events):
        opened = []

        def open_writer(first):
            writer = tensorboard.SummaryWriter(tmp_path, purge_step=first, filename_suffix=suffix)
            opened.append((first, writer))
            return writer

        suffix = f".{len(list(tmp_path.iterdir()))}"
        sink = TensorBoard(open_writer)
        for event in events:
            sink(event)
        for _, writer in opened:
            writer.close()
        return [first for first, _ in opened]

    # The job was at step 6, and resumes at step 4; a replica that only has a fault opens nothing.
    assert life(*(step(n, loss=1.0) for n in range(1, 7))) == [1]
    assert life(FAULT) == []
    assert life(replace(START, step=4), *(step(n, loss=2.0) for n in range(5, 9))) == [5]
    found = accumulator.EventAccumulator(str(tmp_path))
    found.Reload()
    points = [(point.step, point.value) for point in found.Scalars("resilin/loss")]
    assert points == [(n, 1.0) for n in range(1, 5)] + [(n, 2.0) for n in range(5, 9)]


def test_a_function_that_opens_no_writer_is_an_error():
    with pytest.raises(ValueError, match="which is no SummaryWriter"):
        TensorBoard(lambda first: None)(step(1))


def test_tensorboard_wants_a_writer():
    with pytest.raises(ValueError, match=r"writer \(None\) must be a SummaryWriter"):
        TensorBoard(None)


# Prometheus ------------------------------------------------------------------------------------


def exported(registry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    parser = pytest.importorskip("prometheus_client.parser")
    from prometheus_client import generate_latest

    families = parser.text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, tuple(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@pytest.fixture
def registry():
    return pytest.importorskip("prometheus_client").CollectorRegistry()


def test_prometheus_has_the_last_numbers_and_the_counts(registry):
    tell(Prometheus(registry))
    found = exported(registry)
    assert {f"resilin_{name}" for name in SCALARS} <= {name for name, _ in found}
    assert found["resilin_loss", ()] == 0.5
    assert found["resilin_replicas", ()] == 4
    assert found["resilin_metric", (("name", "top@5"),)] == 0.9
    assert found["resilin_metric", (("name", "validation/accuracy"),)] == 0.8
    assert found["resilin_last_fault_timestamp_seconds", (("kind", "out_of_memory"),)] == BEGAN + 3
    assert found["resilin_last_rescale_timestamp_seconds", ()] == BEGAN
    assert found["resilin_steps_total", ()] == 4  # one of them was not told of
    assert found["resilin_rescales_total", ()] == 1
    assert found["resilin_faults_total", (("kind", "out_of_memory"),)] == 1
    actions = {
        labels[0][1] for name, labels in found if name == "resilin_checkpoints_total" and labels
    }
    assert actions == {"saved", "loaded", "failed"}
    assert found["resilin_decisions_total", (("outcome", "changed"),)] == 1


def test_prometheus_has_no_number_that_nobody_measured(registry):
    sink = Prometheus(registry)
    assert set(exported(registry)) == {("resilin_steps_total", ()), ("resilin_rescales_total", ())}
    sink(START)
    assert ("resilin_replicas", ()) in exported(registry)
    assert ("resilin_loss", ()) not in exported(registry)


def test_two_prometheus_sinks_need_two_prefixes(registry):
    Prometheus(registry)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        Prometheus(registry)
    tell(Prometheus(registry, prefix="other_"))
    assert exported(registry)["other_loss", ()] == 0.5


def test_prometheus_opens_no_port_and_uses_the_default_registry(monkeypatch):
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    monkeypatch.setattr(client, "REGISTRY", registry)
    monkeypatch.setattr("socket.socket.bind", lambda *_: pytest.fail("a port was opened"))
    tell(Prometheus())
    assert ("resilin_loss", ()) in exported(registry)


# OpenTelemetry ---------------------------------------------------------------------------------


@pytest.fixture
def metered():
    """A meter, and what it has recorded: numbers by name and attributes."""
    export = pytest.importorskip("opentelemetry.sdk.metrics.export")
    from opentelemetry.sdk.metrics import MeterProvider

    reader = export.InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])

    def read():
        data = reader.get_metrics_data()
        metrics = data.resource_metrics[0].scope_metrics[0].metrics
        units = {metric.name: metric.unit for metric in metrics}
        values = {
            (metric.name, frozenset(point.attributes.items())): point.value
            for metric in metrics
            for point in metric.data.data_points
        }
        return values, units

    yield provider.get_meter("test"), read
    provider.shutdown()


def test_opentelemetry_has_gauges_and_counters(metered):
    meter, read = metered
    tell(OpenTelemetry(meter, {"job": "seven"}))
    values, units = read()
    job = ("job", "seven")
    assert {f"resilin.{name}" for name in SCALARS} <= set(units)
    assert values["resilin.loss", frozenset({job})] == 0.5
    assert values["resilin.metric", frozenset({job, ("name", "top@5")})] == 0.9
    assert values["resilin.steps", frozenset({job})] == 4
    assert values["resilin.rescales", frozenset({job})] == 1
    assert values["resilin.faults", frozenset({job, ("kind", "out_of_memory")})] == 1
    assert units["resilin.step_seconds"] == "s"
    assert units["resilin.checkpoint_bytes"] == "By"


def test_opentelemetry_exports_only_what_was_told(metered):
    meter, read = metered
    OpenTelemetry(meter)(METRICS)
    values, _ = read()
    assert values == {("resilin.metric", frozenset({("name", "validation/accuracy")})): 0.8}


def test_opentelemetry_works_before_a_provider_is_set_up():
    metrics = pytest.importorskip("opentelemetry.metrics")
    tell(OpenTelemetry(metrics.get_meter("early")))


def test_opentelemetry_wants_a_meter():
    with pytest.raises(ValueError, match=r"meter \(None\) must be a Meter"):
        OpenTelemetry(None)


# MLflow ----------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A client of a store in files."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow = pytest.importorskip("mlflow")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    yield mlflow.MlflowClient()
    mlflow.end_run()
    mlflow.set_tracking_uri(before)


def all_runs(client) -> list:
    return client.search_runs([found.experiment_id for found in client.search_experiments()])


def test_mlflow_without_a_run_is_an_error_and_starts_none(store):
    from resilin.telemetry.mlflow import MLflow

    with pytest.raises(ValueError, match="no MLflow run is active"):
        MLflow()
    assert all_runs(store) == []


def test_mlflow_has_a_history_for_each_number(store):
    import mlflow

    from resilin.telemetry.mlflow import MLflow

    with mlflow.start_run() as run:
        tell(MLflow())
    (found,) = all_runs(store)
    allowed = {name.replace("@", "_") for name in CURVES}
    assert set(found.data.metrics) == {f"resilin/{name}" for name in allowed}
    history = store.get_metric_history(run.info.run_id, "resilin/loss")
    points = [(point.step, point.value, point.timestamp) for point in history]
    assert points == [(n, 2 / n, (BEGAN + n) * 1000) for n in (1, 2, 4)]
    assert found.data.tags["resilin.last_fault"] == f"step 3: {words(FAULT)}"


def test_mlflow_logs_to_a_run_that_is_not_active(store):
    from resilin.telemetry.mlflow import MLflow

    run = store.create_run("0")
    MLflow(run.info.run_id, store, prefix="")(step(1, metrics={"../a//b:c": 1.0, "x" * 300: 2.0}))
    metrics = store.get_run(run.info.run_id).data.metrics
    assert metrics["_/a/_/b_c"] == 1.0
    assert metrics["x" * 240] == 2.0


def test_mlflow_knows_at_once_that_a_run_does_not_exist(store):
    from mlflow.exceptions import MlflowException

    from resilin.telemetry.mlflow import MLflow

    with pytest.raises(MlflowException, match="not found"):
        MLflow("0123456789abcdef0123456789abcdef", store)


# Weights & Biases ------------------------------------------------------------------------------


def test_wandb_without_a_run_is_an_error():
    with pytest.raises(ValueError, match=r"run is None: call wandb.init\(\)"):
        WandB(None)


@pytest.mark.processes
def test_wandb_and_the_script_lose_nothing_to_each_other(tmp_path):
    pytest.importorskip("wandb")
    # W&B has threads, a service process and hooks at exit: it gets a process of its own.
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("wandb_runs.py"), tmp_path],
        capture_output=True,
        text=True,
        timeout=90,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
