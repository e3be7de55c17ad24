"""A real browser (Chromium) before a real service, shared by the tests of the page."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.harness.chromium import CHROMIUM, launch
from locum.demo.service_process import free_port, running_service
from model_store.manifest import GRAPH, WEIGHTS, Lineage, ModelManifest, NetworkSpec
from model_store.store import Store
from model_store.task import Normalisation, Task
from service.database import Database
from service.jobs import records
from service.settings import Settings
from tests.helpers.service.queued import queued
from tests.helpers.service.routing_federation import outside_scans
from tests.integration.service.conftest import joining_store, routing_store  # noqa: F401

LAPTOP = {"width": 1280, "height": 800}


@dataclass(frozen=True)
class Service:
    """A running service with an outside hospital `dune`, a member `aster`, and three models.

    `organ` is a routing space, `tumour` a cross-attention, and `retina` has labels that overlap. `proxied` is
    the service's address behind a proxy.
    """

    client: httpx.Client
    scans: dict[str, Path]
    store: Path
    state: Path
    proxied: str | None = None

    def cohort(self, **scans: bytes) -> str:
        """The path of a new cohort of `dune` with these scans."""
        made = self.client.post("/hospitals/dune/cohorts").raise_for_status().headers["location"]
        for name, content in scans.items():
            self.client.put(f"{made}/scans/{name}", content=content).raise_for_status()
        return str(made)

    def finished_job(
        self, *, model: str = "organ", epochs: Sequence[dict[str, Any]] = (), **fields: Any
    ) -> str:
        """The id of a job of `dune`, put into the database with these fields and the data of its epochs."""
        settings = Settings(store=self.store, state_dir=self.state)
        parent = Store(self.store).open(model, verify=False).digest
        with Database(settings.resolved_database_url).write() as session:
            asked = {"kind": "adaptation", "hospital": "dune", "model": model, "parent": parent}
            job = queued(session, settings, **asked)
            for data in epochs:
                records.append_event(session, job, "epoch", data)
            for name, value in {"state": "succeeded", **fields}.items():
                setattr(job, name, value)
            return job.id

    @property
    def address(self) -> str:
        """Where a browser finds the page."""
        return self.proxied or str(self.client.base_url)


@pytest.fixture(scope="session")
def service(
    routing_store: Path,  # noqa: F811
    joining_store: Path,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Service]:
    root = tmp_path_factory.mktemp("page")
    for trained in (routing_store, joining_store):
        shutil.copytree(trained, root / "store", dirs_exist_ok=True)
    publish_retina(Store(root / "store"))
    scans = {}
    for name, content in outside_scans(4).items():
        scans[name] = root / name
        scans[name].write_bytes(content)
    with running_service(root / "store", root / "state", free_port()) as client:
        for hospital, site in (("dune", None), ("aster", "aster")):
            body = {"name": hospital.capitalize()} | ({"site": site} if site else {})
            client.put(f"/hospitals/{hospital}", json=body).raise_for_status()
        yield Service(client, scans, root / "store", root / "state")


@pytest.fixture
def store(service: Service) -> Iterator[Store]:
    """The service's store. What a test publishes in it is withdrawn afterwards, since others count models."""
    store = Store(service.store)
    before = set(store.versions.names())
    yield store
    for name in set(store.versions.names()) - before:
        store.withdraw(name, actor="test", reason="It was published for one test.")


def shows_all_sections(page: Any, service: Service, job_id: str) -> list[str | None]:
    """Compare the open job and its card with the sections that the service sends. Returns their forms."""
    sections = service.client.get(f"/jobs/{job_id}").json()["sections"]
    shown = page.get_by_role("region", name="Job", exact=True)
    shown.locator("details").evaluate_all("all => all.forEach(each => { each.open = true; })")
    read = " ".join(shown.inner_text().split())
    card = " ".join(unescape(re.sub("<[^>]*>", " ", service.client.get(f"/jobs/{job_id}/card").text)).split())
    for section in sections:
        for said in (section["title"], *section["sentences"], *section["reasons"]):
            assert " ".join(said.split()) in read, said
            assert " ".join(said.split()) in card, said
    return [section["body"] and section["body"]["form"] for section in sections]


def publish_retina(store: Store) -> None:
    """Publish a model that finds a disc above the value 100, and its cup above 200."""
    task = Task(
        name="retina",
        labels={"disc": (1, 2), "cup": (2,)},
        normalisation=Normalisation(method="none"),
        size=(32, 32),
        colour="luminance",
    )
    lineage = Lineage(method="by-hand", run="test", sites=(), rounds=0, seed=0)
    network = NetworkSpec(name="threshold", arguments={"at": 100})
    metrics = {
        **{"val_dice": 0.75, "val_n": 5.0, "val_dice/cup": 0.5, "val_n/cup": 2.0},
        **{"test_dice": 0.625, "test_n": 1.0, "loss": 0.25},
    }
    manifest = ModelManifest(name="retina", task=task, network=network, lineage=lineage, metrics=metrics)
    store.publish(manifest, {WEIGHTS: b"none", GRAPH: _nested_graph()})


def _nested_graph() -> bytes:
    """The onnx file of a network with the logits 0, (x - 100) / 2 and x - 150."""
    from onnx import TensorProto, helper

    weights = helper.make_tensor("w", TensorProto.FLOAT, [3, 1, 1, 1], [0.0, 0.5, 1.0])
    bias = helper.make_tensor("b", TensorProto.FLOAT, [3], [0.0, -50.0, -150.0])
    nodes = [
        helper.make_node("Conv", ["image", "w", "b"], ["logits"], kernel_shape=[1, 1]),
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
    ]
    graph = helper.make_graph(
        nodes,
        "nested",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["B", 1, "H", "W"])],
        [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["B", 3, "H", "W"])],
        [weights, bias],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    content: bytes = model.SerializeToString()
    return content


# One per module, not per session: while Playwright runs, no other test of the process can run an event loop.
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="THE PAGE IS NOT TESTED: no playwright")
    if CHROMIUM is None:
        pytest.skip(
            "THE PAGE IS NOT TESTED: no Chromium; `make test-web` installs it, or LOCUM_CHROMIUM names it"
        )
    with playwright.sync_playwright() as running:
        opened = launch(running)
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any, service: Service) -> Iterator[Any]:
    """A page of the service, at a laptop's size. It may cause no error and load nothing from elsewhere."""
    # Chromium notes a conflict as an error, which the page shows to the person.
    with opened_page(browser, service.address, expected=("status of 409", "status of 412")) as opened:
        yield opened


@contextmanager
def opened_page(browser: Any, address: str, *, expected: tuple[str, ...], **device: Any) -> Iterator[Any]:
    """A page of a browser of its own, which may cause only errors with these words.

    `device` are arguments of Playwright's `new_context`.
    """
    context = browser.new_context(**{"viewport": LAPTOP, **device})
    # A wait ends when what it waits for comes: only a busy machine needs the whole of it.
    context.set_default_timeout(90_000)
    opened = context.new_page()
    complaints: list[str] = []

    def note(line: Any) -> None:
        if line.type == "error" and not any(words in line.text for words in expected):
            complaints.append(line.text)

    opened.on("console", note)
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("request", lambda sent: _is_own(sent.url, address) or complaints.append(f"loads {sent.url}"))
    try:
        opened.goto(address)
        yield opened
    finally:
        # After a failed test, too: a page that stays open follows its job, and its API waits for it to stop.
        context.close()
    assert complaints == []


def _is_own(address: str, service: str) -> bool:
    return address.startswith((service, "blob:", "data:"))
