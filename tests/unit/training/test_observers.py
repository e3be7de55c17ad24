"""Figures of a run in TensorBoard's files and at an MLflow server."""

from __future__ import annotations

import json
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from model_store.store import Store
from training.config import RunConfig
from training.data.federation import load_federation
from training.engine.history import RoundEntry, Silent, SiteEntry
from training.errors import ConfigurationError
from training.methods.fedavg import FedAvgConfig
from training.observers import MLflow, TensorBoard, WithLogs, scalars_of
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
    with WithLogs(heard, [TensorBoard(tmp_path)]) as observer:
        observer.round_finished(ENTRY)
    assert heard.warnings == []
    found = {
        value.tag: (value.simple_value, event.step)
        for event in events_of(tmp_path)
        for value in event.summary.value
    }
    assert found == {name: (value, 3) for name, value in EXPECTED.items()}


class Server(BaseHTTPRequestHandler):
    """The calls of MLflow's REST interface that are used, with its field names."""

    def do_GET(self):
        url = urlsplit(self.path)
        assert url.path == "/api/2.0/mlflow/experiments/get-by-name"
        name = parse_qs(url.query)["experiment_name"][0]
        if name in self.server.experiments:
            self.reply({"experiment": {"experiment_id": self.server.experiments[name]}})
        else:
            self.reply({"error_code": "RESOURCE_DOES_NOT_EXIST"}, 404)

    def do_POST(self):
        said = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        call = self.path.removeprefix("/api/2.0/mlflow/")
        self.server.calls.append((call, said))
        if call == "experiments/create":
            self.server.experiments[said["name"]] = "7"
            self.reply({"experiment_id": "7"})
        elif call == "runs/search":
            self.reply({"runs": [{"info": {"run_id": run}} for run in self.server.runs]})
        elif call == "runs/create":
            self.server.runs.append("r1")
            self.reply({"run": {"info": {"run_id": "r1"}}})
        else:
            self.reply({})

    def reply(self, content, status=200):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as made:
        made.calls, made.runs, made.experiments = [], [], {}
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def mlflow(server):
    return MLflow(f"http://127.0.0.1:{server.server_port}/", "hearts", "abc", {"method": "fedavg"})


def test_mlflow_gets_the_figures_and_a_resumed_run_goes_on_in_the_same_one(server):
    for _ in range(2):
        heard = Heard()
        with WithLogs(heard, [mlflow(server)]) as observer:
            observer.round_finished(ENTRY)
        assert heard.warnings == []
    calls = [call for call, _ in server.calls]
    assert calls == [
        *("experiments/create", "runs/search", "runs/create", "runs/log-batch", "runs/update"),
        *("runs/search", "runs/log-batch", "runs/update"),
    ]
    (first, _) = [said for call, said in server.calls if call == "runs/log-batch"]
    assert first["run_id"] == "r1"
    assert {m["key"]: (m["value"], m["step"]) for m in first["metrics"]} == {
        name: (value, 3) for name, value in EXPECTED.items()
    }
    assert [said["status"] for call, said in server.calls if call == "runs/update"] == ["FINISHED"] * 2


def test_logs_change_no_digest(server, tmp_path):
    pytest.importorskip("tensorboardX")
    data = load_federation(
        write_federation(tmp_path / "data", ("birch", "cedar"), patients_per_site=2, size=16)
    )
    run = Run(data, "fedavg", FedAvgConfig(width=2, rounds=2, batch_size=4), RunConfig(seed=1))
    digests = []
    for number, logs in enumerate([(), (TensorBoard(tmp_path / "events"), mlflow(server))]):
        heard, store = Heard(), Store(tmp_path / f"store-{number}")
        with WithLogs(heard, logs) as observer:
            execute(run, tmp_path / f"run-{number}", workers=0, store=store, observer=observer)
        assert heard.warnings == []
        digests.append({name: store.open(name).digest for name in store.names()})
    assert digests[0] == digests[1] != {}
    assert "runs/log-batch" in [call for call, _ in server.calls]
    assert any((tmp_path / "events").iterdir())


def test_server_that_is_gone_is_reported_once_and_the_run_goes_on(server):
    log = mlflow(server)
    log._base = "http://127.0.0.1:1/"
    heard = Heard()
    with WithLogs(heard, [log]) as observer:
        for _ in range(3):
            observer.round_finished(ENTRY)
    assert len(heard.rounds) == 3
    assert len(heard.warnings) == 1
    assert "MLflow gets no more figures" in heard.warnings[0]


def test_url_that_is_none_is_rejected():
    with pytest.raises(ConfigurationError, match="expected an http"):
        MLflow("file:///tmp/runs", "hearts", "abc", {})
