"""The DICOM node between a real Orthanc, which sends and takes, and a real API."""

from __future__ import annotations

import gc
import io
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import highdicom as hd
import pydicom
import pytest
import trustme
import yaml
from pydicom.uid import (
    CTImageStorage,
    DeflatedExplicitVRLittleEndian,
    ExplicitVRLittleEndian,
    JPEG2000Lossless,
)
from pynetdicom import AE
from pynetdicom.sop_class import Verification  # type: ignore[attr-defined]

from benchmarks.harness import forked
from locum.demo.service_process import free_port
from service.database import Hospital
from service.dicom_node.__main__ import run
from service.dicom_node.configuration import load_node
from service.dicom_node.forward import Forwarder
from service.dicom_node.scp import NO_RESOURCES, NOT_UNDERSTOOD, SUCCESS, StorageScp
from service.dicom_node.spool import Spool
from service.identity import keys
from service.settings import Settings
from tests.helpers.service.coded import SERIES, STUDY, VOLUME, coded_series, publish_coded
from tests.helpers.service.orthanc import Orthanc, running_orthanc
from tests.helpers.waiting import wait_for

PATIENCE_SECONDS = 120
# pynetdicom leaves the sockets of associations that were not established to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def node_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def orthanc(tmp_path_factory: pytest.TempPathFactory, node_port: int) -> Iterator[Orthanc]:
    node = ["LOCUM", "127.0.0.1", node_port]
    with running_orthanc(tmp_path_factory.mktemp("orthanc"), "PACS", locum=node) as found:
        yield found


@pytest.fixture(autouse=True)
def emptied(orthanc: Orthanc) -> Iterator[None]:
    orthanc.clear()
    yield
    gc.collect()


@pytest.fixture(scope="module")
def api(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory, publish_bright: Any) -> Any:
    store = tmp_path_factory.mktemp("store")
    publish_coded(store, publish_bright)
    found = start(store, auth="keys")
    from datetime import UTC, datetime

    now = datetime.now(UTC)
    with found.context.database.write() as session:
        session.add(Hospital(id="dune", name="Dune", site=None, created_at=now, updated_at=now))
        session.flush()
        _, found.key = keys.create(session, "node", "reader", "dune")
    return found


@pytest.fixture
def configured(tmp_path: Path, api: Any, orthanc: Orthanc) -> Callable[..., Path]:
    """`configured(**fields)`: the node's file."""
    (tmp_path / "key").write_text(api.key)

    def write(**fields: Any) -> Path:
        path = tmp_path / f"{len([*tmp_path.iterdir()])}.yaml"
        content = {
            "ae_title": "LOCUM",
            "port": 0,
            "service": str(api.client.base_url),
            "senders": {
                "PACS": {"hospital": "dune"},
                "FAR": {"hospital": "dune", "addresses": ["10.0.0.0/8"]},
            },
            "hospitals": {
                "dune": {"model": "coded", "destination": "pacs", "key_file": str(tmp_path / "key")}
            },
            "destinations": {"pacs": {"ae_title": "PACS", "host": "127.0.0.1", "port": orthanc.dicom_port}},
            "settle_seconds": 0.2,
            "retry_seconds": 0.01,
            **fields,
        }
        path.write_text(yaml.safe_dump(content))
        return path

    return write


@contextmanager
def receiving(path: Path, root: Path) -> Iterator[tuple[StorageScp, Spool, Forwarder]]:
    """The parts of a node, of which the forwarder does nothing by itself."""
    node = load_node(path)
    with ExitStack() as stack:
        spool = Spool(root / "queue", node.max_queue_bytes)
        stack.callback(spool.close)
        scp = StorageScp(node, spool)
        stack.callback(scp.close)
        yield scp, spool, Forwarder(node, spool, threading.Event())


def send(
    port: int, files: list[bytes], calling: str = "PACS", called: str = "LOCUM", **more: Any
) -> list[int]:
    """The statuses of C-STORE; none where the association is rejected; -1 where it breaks off."""
    ae = AE(calling)
    ae.add_requested_context(CTImageStorage, [ExplicitVRLittleEndian])
    association = ae.associate("127.0.0.1", port, ae_title=called, **more)
    if not association.is_established:
        return []
    statuses = []
    for content in files:
        try:
            answer = association.send_c_store(pydicom.dcmread(io.BytesIO(content)))
        except RuntimeError:
            statuses.append(-1)
            break
        statuses.append(int(answer.get("Status", -1)))
    if association.is_established:
        association.release()
    return statuses


def test_series_that_a_pacs_sends_comes_back_as_a_seg(
    configured: Callable[..., Path], tmp_path: Path, orthanc: Orthanc, node_port: int, caplog: Any
) -> None:
    orthanc.add(coded_series())
    settings = Settings(state_dir=tmp_path / "state", dicom_node=configured(port=node_port))
    stopping = threading.Event()
    thread = threading.Thread(target=run, args=(settings, stopping))
    with caplog.at_level(logging.DEBUG):
        thread.start()
        try:
            with orthanc.rest as rest:
                wait_for(lambda: rest.post("/modalities/locum/echo", json={}).is_success)
                (series,) = rest.get("/series").json()
                rest.post("/modalities/locum/store", json=[series], timeout=60).raise_for_status()
            (stored,) = wait_for(lambda: orthanc.instances("SEG"), patience_s=PATIENCE_SECONDS)
            wait_for(lambda: not [*(tmp_path / "state/dicom-node/ready").iterdir()])
        finally:
            stopping.set()
            thread.join(PATIENCE_SECONDS)
    seg = hd.seg.Segmentation.from_dataset(stored)
    assert seg.StudyInstanceUID == STUDY
    sources = [each.SOPInstanceUID for each in orthanc.instances("CT")]
    assert (seg.get_pixels_by_source_instance(sources, [1]) > 0).sum() == (VOLUME > 100).sum()
    left = [path for path in (tmp_path / "state/dicom-node").rglob("*") if path.is_file()]
    assert [path.name for path in left] == ["lock"]
    logged = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("locum"))
    assert "its segmentation is at pacs" in logged
    assert not [value for value in ("Planted", STUDY, SERIES) if value in caplog.text]


def test_route_may_send_an_rtstruct(
    configured: Callable[..., Path], tmp_path: Path, orthanc: Orthanc
) -> None:
    route = {"model": "plain", "destination": "pacs", "key_file": str(tmp_path / "key")}
    path = configured(settle_seconds=0, hospitals={"dune": {**route, "output": "dicom-rtstruct"}})
    files = [*coded_series().values()]
    with receiving(path, tmp_path) as (scp, _, forwarder):
        assert send(scp.port, files) == [SUCCESS] * len(files)
        wait_for(lambda: not scp.open_series)
        forwarder.complete(scp.open_series)
        assert forwarder.look()
    (stored,) = orthanc.instances("RTSTRUCT")
    assert stored.StudyInstanceUID == STUDY
    assert stored.ROIContourSequence[0].ContourSequence


def test_killed_node_has_every_acknowledged_object(
    configured: Callable[..., Path], tmp_path: Path, orthanc: Orthanc, node_port: int
) -> None:
    environment = {
        **os.environ,
        "LOCUM_STATE_DIR": str(tmp_path / "state"),
        "LOCUM_DICOM_NODE": str(configured(port=node_port, settle_seconds=3600)),
    }
    process = forked.Forked("service.dicom_node", [], tmp_path / "log", environment)
    try:
        files = [*coded_series().values()]
        wait_for(lambda: echoes(node_port), patience_s=PATIENCE_SECONDS)
        assert send(node_port, files) == [SUCCESS] * len(files)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with receiving(configured(), tmp_path / "state") as (_, empty, _):
        assert [*empty.receiving()] == []
    (tmp_path / "state/queue").rename(tmp_path / "unused")
    (tmp_path / "state/dicom-node").rename(tmp_path / "state/queue")
    with receiving(configured(settle_seconds=0), tmp_path / "state") as (_, spool, forwarder):
        forwarder.complete(set())
        (entry,) = spool.ready()
        assert len(entry.objects) == len(files)
        assert forwarder.look()
    assert len(orthanc.instances("SEG")) == 1


def echoes(port: int) -> bool:
    ae = AE("PACS")
    ae.add_requested_context(Verification)
    association = ae.associate("127.0.0.1", port, ae_title="LOCUM")
    if not association.is_established:
        return False
    status = association.send_c_echo().get("Status")
    association.release()
    return bool(status == SUCCESS)


def test_only_configured_senders_are_accepted(configured: Callable[..., Path], tmp_path: Path) -> None:
    one = [next(iter(coded_series().values()))]
    with receiving(configured(), tmp_path) as (scp, spool, _):
        assert send(scp.port, one, calling="OTHER") == []
        assert send(scp.port, one, called="OTHER") == []
        assert send(scp.port, one, calling="FAR") == []
        assert [*spool.receiving()] == []
        assert send(scp.port, one) == [SUCCESS]
        assert len([*spool.receiving()]) == 1


def test_series_of_an_open_association_waits_for_silence(
    configured: Callable[..., Path], tmp_path: Path
) -> None:
    one = pydicom.dcmread(io.BytesIO(next(iter(coded_series().values()))))
    path = configured(settle_seconds=0, silence_seconds=3600)
    with receiving(path, tmp_path) as (scp, spool, forwarder):
        ae = AE("PACS")
        ae.add_requested_context(CTImageStorage, [ExplicitVRLittleEndian])
        association = ae.associate("127.0.0.1", scp.port, ae_title="LOCUM")
        assert association.send_c_store(one).Status == SUCCESS
        assert len(scp.open_series) == 1
        forwarder.complete(scp.open_series)
        assert spool.ready() == []
        association.release()
        wait_for(lambda: not scp.open_series)
        forwarder.complete(scp.open_series)
        assert len(spool.ready()) == 1


def test_object_that_is_no_image_of_its_header_is_rejected(
    configured: Callable[..., Path], tmp_path: Path
) -> None:
    dataset = pydicom.dcmread(io.BytesIO(next(iter(coded_series().values()))))
    del dataset.SeriesInstanceUID
    without = io.BytesIO()
    dataset.save_as(without)
    with receiving(configured(), tmp_path) as (scp, spool, _):
        assert send(scp.port, [without.getvalue()]) == [NOT_UNDERSTOOD]
        assert [*spool.receiving()] == []


def test_object_with_too_many_elements_is_rejected(
    configured: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = next(iter(coded_series().values()))
    monkeypatch.setattr("model_store.scans.dicom.files.MOST_ELEMENTS", 20)
    with receiving(configured(), tmp_path) as (scp, spool, _):
        assert send(scp.port, [content]) == [NOT_UNDERSTOOD]
        assert [*spool.receiving()] == []


def test_full_queue_and_too_long_objects_are_refused(configured: Callable[..., Path], tmp_path: Path) -> None:
    files = [*coded_series().values()]
    size = len(files[0])
    with receiving(configured(max_queue_bytes=3 * size), tmp_path / "full") as (scp, _, _):
        found = send(scp.port, files)
        assert found[:2] == [SUCCESS, SUCCESS]
        assert set(found[3:]) == {NO_RESOURCES}
    long = pydicom.dcmread(io.BytesIO(files[0]))
    long.PixelData = bytes(3 * 2**20)
    content = io.BytesIO()
    long.save_as(content)
    with receiving(configured(max_object_bytes=2**20), tmp_path / "long") as (scp, spool, _):
        assert send(scp.port, [content.getvalue()]) == [-1]
        assert [*spool.receiving()] == []
        # Each object has the limit for itself.
        assert send(scp.port, files) == [SUCCESS] * len(files)


def test_endless_pdu_ends_its_connection_alone(configured: Callable[..., Path], tmp_path: Path) -> None:
    with receiving(configured(), tmp_path) as (scp, _, _):
        with socket.create_connection(("127.0.0.1", scp.port), timeout=30) as connection:
            connection.sendall(struct.pack(">BBL", 1, 0, 2**32 - 1))
            assert connection.recv(1) == b""
        assert echoes(scp.port)


@pytest.mark.parametrize("sent", [b"", b"\x01", bytes(range(200))], ids=["nothing", "a byte", "garbage"])
def test_peers_that_leave_do_not_count_as_associations(
    configured: Callable[..., Path], tmp_path: Path, sent: bytes
) -> None:
    with receiving(configured(idle_seconds=3600, max_associations=2), tmp_path) as (scp, _, _):
        for _ in range(60):
            with socket.create_connection(("127.0.0.1", scp.port), timeout=30) as connection:
                connection.sendall(sent)
        wait_for(lambda: echoes(scp.port))


@pytest.mark.parametrize("broken", ["service", "destinations", "key", "variable"])
def test_series_waits_for_what_does_not_answer_and_is_delivered_once(
    configured: Callable[..., Path], tmp_path: Path, orthanc: Orthanc, broken: str
) -> None:
    nothing = free_port()
    changed: dict[str, Any] = {
        "service": {"service": f"http://127.0.0.1:{nothing}"},
        "destinations": {
            "destinations": {"pacs": {"ae_title": "PACS", "host": "127.0.0.1", "port": nothing}}
        },
        "key": {"hospitals": {"dune": {"model": "coded", "destination": "pacs"}}},
        "variable": {
            "hospitals": {"dune": {"model": "coded", "destination": "pacs", "key_env": "LOCUM_NO_SUCH_KEY"}}
        },
    }[broken]
    with receiving(configured(settle_seconds=0, **changed), tmp_path) as (scp, spool, forwarder):
        send(scp.port, [*coded_series().values()])
        forwarder.complete(set())
        assert forwarder.look()
        assert len(spool.ready()) == 1
    with receiving(configured(), tmp_path) as (_, spool, forwarder):
        (entry,) = spool.ready()
        again = {path.name: path.read_bytes() for path in entry.path.iterdir()}
        assert forwarder.look()
        assert spool.ready() == []
        assert not forwarder.look()
        # As after a kill between the delivery and the deletion.
        entry.path.mkdir()
        for name, content in again.items():
            (entry.path / name).write_bytes(content)
        assert forwarder.look()
        assert spool.ready() == []
    assert len(orthanc.instances("SEG")) == 1


def test_key_may_be_in_a_variable(
    configured: Callable[..., Path], tmp_path: Path, orthanc: Orthanc, api: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("NODE_KEY", api.key)
    route = {"model": "coded", "destination": "pacs", "key_env": "NODE_KEY"}
    with receiving(configured(settle_seconds=0, hospitals={"dune": route}), tmp_path) as (
        scp,
        spool,
        forwarder,
    ):
        send(scp.port, [*coded_series().values()])
        forwarder.complete(set())
        assert forwarder.look()
        assert spool.ready() == []
    assert len(orthanc.instances("SEG")) == 1


def test_series_that_is_no_scan_is_set_aside_with_a_reason(
    configured: Callable[..., Path], tmp_path: Path, caplog: Any
) -> None:
    files = [*coded_series().values()]
    with receiving(configured(settle_seconds=0), tmp_path) as (scp, spool, forwarder):
        send(scp.port, [*files[:3], *files[5:]])
        forwarder.complete(set())
        forwarder.look()
        assert spool.ready() == []
    (reason,) = (tmp_path / "queue/failed").glob("*/reason")
    assert "slices are missing" in reason.read_text() or "slice" in reason.read_text()
    assert STUDY not in reason.read_text() + caplog.text


def test_series_fails_after_the_configured_hours(configured: Callable[..., Path], tmp_path: Path) -> None:
    path = configured(settle_seconds=0, give_up_hours=0, service=f"http://127.0.0.1:{free_port()}")
    with receiving(path, tmp_path) as (scp, spool, forwarder):
        send(scp.port, [next(iter(coded_series().values()))])
        forwarder.complete(set())
        forwarder.look()
        assert spool.ready() == []
    (reason,) = (tmp_path / "queue/failed").glob("*/reason")
    assert "does not answer (ConnectError), 0 h after it was complete" in reason.read_text()


def test_tls_needs_a_certificate_of_the_authority(configured: Callable[..., Path], tmp_path: Path) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    files = {}
    for name, issuer in (("node", authority), ("sender", authority), ("stranger", stranger)):
        made = issuer.issue_cert("127.0.0.1")
        made.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / f"{name}.pem"))
        files[name] = str(tmp_path / f"{name}.pem")
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    tls = {"certificate": files["node"], "ca": str(tmp_path / "ca.pem")}
    one = [next(iter(coded_series().values()))]
    from service.dicom_node.configuration import TlsFiles

    with receiving(configured(tls=tls), tmp_path) as (scp, _, _):

        def contexts(certificate: str | None) -> Any:
            found = TlsFiles(certificate=certificate, ca=tmp_path / "ca.pem")  # type: ignore[arg-type]
            return {"tls_args": (found.client_context(), "127.0.0.1")}

        assert send(scp.port, one, **contexts(files["sender"])) == [SUCCESS]
        assert send(scp.port, one, **contexts(files["stranger"])) == []
        assert send(scp.port, one, **contexts(None)) == []
        assert send(scp.port, one) == []
        with socket.create_connection(("127.0.0.1", scp.port)):
            # A peer that never begins its handshake stops no other.
            assert send(scp.port, one, **contexts(files["sender"])) == [SUCCESS]


def test_compressed_syntaxes_are_accepted(configured: Callable[..., Path], tmp_path: Path) -> None:
    with receiving(configured(), tmp_path) as (scp, _, _):
        ae = AE("PACS")
        ae.add_requested_context(CTImageStorage, [JPEG2000Lossless])
        association = ae.associate("127.0.0.1", scp.port, ae_title="LOCUM")
        (context,) = association.accepted_contexts
        assert context.transfer_syntax == [JPEG2000Lossless]
        association.release()


def test_deflated_syntax_is_not_accepted(configured: Callable[..., Path], tmp_path: Path) -> None:
    with receiving(configured(), tmp_path) as (scp, _, _):
        ae = AE("PACS")
        ae.add_requested_context(CTImageStorage, [DeflatedExplicitVRLittleEndian])
        ae.add_requested_context(CTImageStorage, [ExplicitVRLittleEndian])
        association = ae.associate("127.0.0.1", scp.port, ae_title="LOCUM")
        (context,) = association.accepted_contexts
        assert context.transfer_syntax == [ExplicitVRLittleEndian]
        association.release()


def test_missing_configuration_is_one_line(tmp_path: Path) -> None:
    environment = {**os.environ, "LOCUM_STATE_DIR": str(tmp_path)}
    environment.pop("LOCUM_DICOM_NODE", None)
    done = subprocess.run(
        [sys.executable, "-m", "service.dicom_node"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.strip().splitlines() == [
        "locum: LOCUM_DICOM_NODE: expected the node's configuration (YAML), found none"
    ]
