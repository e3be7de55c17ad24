"""Figures of a run in TensorBoard's files and in a store of MLflow."""

from __future__ import annotations

import struct
import sys
from dataclasses import replace

import pytest

from model_store.store import Store
from training.choices.fedavg import FedAvgConfig
from training.config import RunConfig
from training.data.federation import load_federation
from training.engine.history import RoundEntry, Silent, SiteEntry
from training.errors import ConfigurationError
from training.observers import MLflow, TensorBoard, WithLogs, few_notes, scalars_of
from training.phantom import write_federation
from training.run import Run, execute

ENTRY = RoundEntry(
    "train",
    2,
    5,
    1.5,
    {"birch": SiteEntry(3.0, {"loss": 0.25}, {"weights": 8, "metrics": 8}, {"weights": 8}, (), 1.0)},
    {"cedar": "late"},
)
EXPECTED = {
    "train/seconds": 1.5,
    "train/sites/dropped": 1.0,
    "train/loss/birch": 0.25,
    "train/bytes/sent/birch": 16.0,
    "train/bytes/received/birch": 8.0,
}


class Heard(Silent):
    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.rounds: list[RoundEntry] = []

    def round_finished(self, entry):
        self.rounds.append(entry)

    def warning(self, message):
        self.warnings.append(message)


def test_figures_of_a_round_have_the_names_that_people_look_for():
    assert scalars_of(ENTRY) == EXPECTED


def test_scores_of_a_round_have_the_patients_that_they_rest_on():
    part = SiteEntry(3.0, {"loss": 0.25, "personal_val_dice": 0.5}, {}, {}, (), 1.0)
    entry = RoundEntry(
        "train", 2, 5, 1.5, {"birch": part, "cedar": SiteEntry(1.0, {"loss": 1.0}, {}, {}, (), 1.0)}
    )
    found = scalars_of(entry, {"birch": 2, "cedar": 5})
    assert found["train/val_patients/birch"] == 2.0
    assert "train/val_patients/cedar" not in found
    assert few_notes({"birch": 2, "cedar": 5, "dill": 0}) == {
        "locum.few_patients/birch": "birch validates on 2 patients: its scores say little of other patients",
        "locum.few_patients/dill": "dill validates on training patients: its scores say little of other "
        "patients",
    }


def events_of(folder):
    """Read an event file by its own format: length, checksum, protobuf, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    (file,) = folder.glob("events.*")
    content, at = file.read_bytes(), 0
    while at < len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        yield Event.FromString(content[at + 12 : at + 12 + length])
        at += 12 + length + 4


def test_tensorboard_file_has_the_figures(tmp_path):
    pytest.importorskip("tensorboardX")
    heard = Heard()
    with WithLogs(heard, [TensorBoard(tmp_path, {"few": "on 2 patients"})]) as observer:
        observer.round_finished(ENTRY)
    assert heard.warnings == []
    values = [(event.step, value) for event in events_of(tmp_path) for value in event.summary.value]
    found = {value.tag: (value.simple_value, step) for step, value in values if not value.HasField("tensor")}
    assert found == {name: (value, 3) for name, value in EXPECTED.items()}
    (text,) = [value.tensor.string_val[0] for _, value in values if value.HasField("tensor")]
    assert text == b"on 2 patients"


@pytest.fixture
def uri(tmp_path, monkeypatch):
    """A store of MLflow runs in a folder: no process, no migration."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return (tmp_path / "mlflow").as_uri()


def mlflow(uri):
    return MLflow(uri, "hearts", "abc", {"method": "fedavg", "locum.few_patients/birch": "2 patients"})


@pytest.mark.process  # importing MLflow asks uname for the processor
def test_mlflow_has_the_figures_and_a_resumed_run_goes_on_in_the_same_one(uri):
    for entry in (ENTRY, replace(ENTRY, round=3)):
        heard = Heard()
        with WithLogs(heard, [mlflow(uri)]) as observer:
            observer.round_finished(entry)
        assert heard.warnings == []
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("hearts").experiment_id])
    assert (run.info.run_name, run.info.status, run.data.tags["method"]) == ("abc", "FINISHED", "fedavg")
    assert run.data.tags["locum.few_patients/birch"] == "2 patients"
    assert run.data.metrics == EXPECTED
    for name, value in EXPECTED.items():
        history = client.get_metric_history(run.info.run_id, name)
        assert sorted((each.step, each.value) for each in history) == [(3, value), (4, value)]


@pytest.mark.process  # importing MLflow asks uname for the processor
def test_mlflow_takes_the_scores_of_many_labels_of_any_name(uri):
    metrics = {f"test_dice/größe ({index}): +": 0.5 for index in range(1200)}
    entry = RoundEntry("test", 0, 1, 1.0, {"birch": SiteEntry(1.0, metrics, {}, {}, (), 1.0)})
    heard = Heard()
    with WithLogs(heard, [mlflow(uri)]) as observer:
        observer.round_finished(entry)
    assert heard.warnings == []
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("hearts").experiment_id])
    assert run.data.metrics["test/test_dice/größe _7__ _/birch"] == 0.5
    assert len([name for name in run.data.metrics if "größe" in name]) == 1200


@pytest.mark.process  # importing MLflow asks uname for the processor
def test_mlflow_run_that_failed_is_killed(uri):
    observer = WithLogs(Heard(), [mlflow(uri)]).__enter__()
    observer.round_finished(ENTRY)
    observer.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("hearts").experiment_id])
    assert run.info.status == "KILLED"


@pytest.mark.process  # importing MLflow asks uname for the processor
def test_logs_change_no_digest(uri, tmp_path):
    pytest.importorskip("tensorboardX")
    data = load_federation(
        write_federation(tmp_path / "data", ("birch", "cedar"), patients_per_site=2, size=16)
    )
    run = Run(
        data,
        "fedavg",
        FedAvgConfig(width=2, rounds=2, batch_size=4, aggregation="uniform"),
        RunConfig(seed=1),
    )
    digests = []
    for number, logs in enumerate([(), (TensorBoard(tmp_path / "events"), mlflow(uri))]):
        heard, store = Heard(), Store(tmp_path / f"store-{number}")
        with WithLogs(heard, logs) as observer:
            execute(run, tmp_path / f"run-{number}", workers=0, store=store, observer=observer)
        assert heard.warnings == []
        digests.append({name: store.open(name).digest for name in store.versions.names()})
    assert digests[0] == digests[1] != {}
    assert any((tmp_path / "events").iterdir())
    assert any((tmp_path / "mlflow").glob("*/*/metrics/train/loss/*"))


@pytest.mark.process  # importing MLflow asks uname for the processor
def test_server_that_is_gone_is_reported_once_and_the_run_goes_on():
    pytest.importorskip("mlflow")
    heard = Heard()
    with WithLogs(heard, [mlflow("http://127.0.0.1:1/")]) as observer:
        for _ in range(3):
            observer.round_finished(ENTRY)
    assert len(heard.rounds) == 3
    assert len(heard.warnings) == 1
    assert "MLflow gets no more figures" in heard.warnings[0]


@pytest.mark.process  # importing MLflow asks uname for the processor
def test_uri_that_mlflow_does_not_know_is_rejected():
    pytest.importorskip("mlflow")
    with pytest.raises(ConfigurationError, match="unsupported URI 'ftp://runs'"):
        MLflow("ftp://runs", "hearts", "abc", {})


def test_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow.tracking", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'locum\[mlflow\]'"):
        MLflow("http://127.0.0.1:1", "hearts", "abc", {})
