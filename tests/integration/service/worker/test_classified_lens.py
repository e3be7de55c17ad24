"""A lens is fitted to a hospital for a classifier that the members practised, and for no other."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import typer
from numpy.typing import NDArray
from PIL import Image
from typer.testing import CliRunner

from model_store.lens import lens_of
from model_store.manifest import GRAPH
from model_store.store import Store
from personalization.dose import FILE, Playbook, Practice
from service.catalog.ways import ways_of
from service.inference.classification import classify
from service.inference.pipeline import Stopwatch, read
from service.inference.sessions import GraphSession
from service.settings import scan_limits
from service.worker.runner import run_job
from tests.helpers.service.workplace import Workplace, opened
from training.federate import federate

app = typer.Typer()
app.command()(federate)

SITES = ("ash", "elm", "fir")
SIDE = 24
TASK = f"name: bright\nkind: classification\nclass_names: [left, right]\nsize: [{SIDE}, {SIDE}]\n"
CONFIG = "method: {width: 4, rounds: 4, batch_size: 8}\nrun: {seed: 4}\n"


def picture(label: int, draw: np.random.Generator) -> NDArray[np.uint8]:
    """A bright body on black with a brighter spot in its left or right half."""
    rows, columns = np.mgrid[:SIDE, :SIDE]
    body = np.hypot(rows - SIDE / 2 + 0.5, columns - SIDE / 2 + 0.5) < SIDE * 0.42
    centre = SIDE * (0.35, 0.65)[label] + draw.normal(0, 0.5)
    spot = np.hypot(rows - SIDE / 2, columns - centre) < SIDE * 0.12
    pixels = 90 * body + 110 * spot + draw.normal(20, 8, (SIDE, SIDE))
    return np.asarray(np.clip(pixels, 0, 255), dtype=np.uint8)


def png(pixels: NDArray[np.uint8]) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    """A federation of three hospitals that practised, and the same without."""
    root = tmp_path_factory.mktemp("spots")
    draw = np.random.default_rng(0)
    for site in SITES:
        for number in range(20):
            folder = root / "data" / site / ("left", "right")[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"p{number}.png").write_bytes(png(picture(number % 2, draw)))
    (root / "data" / "task.yaml").write_text(TASK)
    (root / "config.yaml").write_text(CONFIG)
    command = [
        "--method",
        "fedavg",
        "--data",
        root / "data",
        "--config",
        root / "config.yaml",
        "--workers",
        0,
    ]
    command += ["--out", root / "store", "--consent", "all", "--playbook"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.command.DEFAULT", Practice(severities=(0.0,)))
        patch.setattr("training.report.write_site_pages", lambda result, folder: {})
        done = CliRunner().invoke(app, [*map(str, command)])
    assert done.exit_code == 0, done.output
    store = Store(root / "store")
    made = store.open("bright")
    files = {name: made.read(name) for name in made.manifest.files if name != FILE}
    store.publish(made.manifest.model_copy(update={"name": "unpractised", "files": {}, "version": 1}), files)
    with opened(tmp_path_factory.mktemp("state"), root / "store") as found:
        yield found


def inverted(count: int) -> tuple[list[bytes], list[int]]:
    draw = np.random.default_rng(7)
    return [png(255 - picture(number % 2, draw)) for number in range(count)], [n % 2 for n in range(count)]


def adapted(place: Workplace, model: str, scans: list[bytes]) -> Any:
    parent = place.store.open(model)
    cohort = place.cohort({f"p{number}.png": scan for number, scan in enumerate(scans)})
    options = {"preset": "auto", "unlike": "include"}
    job = place.adaptation(cohort, model=model, parent=parent.digest, options=options)
    run_job(job, place.settings)
    return place.job(job)


def right(place: Workplace, version: Any, scans: list[bytes], labels: list[int]) -> float:
    """Share of the scans that the service classifies right."""
    manifest = version.manifest
    limits = scan_limits(place.settings, manifest.task)
    session = GraphSession(manifest.files[GRAPH].sha256, version.read(GRAPH), threads=1, device="cpu")
    found = []
    for scan in scans:
        reading = read(scan, manifest, limits, Stopwatch(), lens=lens_of(version))
        found.append(int(classify(reading, manifest, session, Stopwatch()).mean.argmax()))
    return float(np.mean(np.array(found) == labels))


def test_members_practise_a_classifier_by_balanced_accuracy(place: Workplace) -> None:
    playbook = Playbook.model_validate_json(place.store.open("bright").read(FILE))
    assert playbook.members == SITES
    assert playbook.targets.share == 0
    assert playbook.by_shift is not None
    assert playbook.by_shift.lensed
    assert all(-1 <= low <= high <= 1 for _, low, high in playbook.by_shift.members.values())


def test_inverted_scans_are_classified_through_the_lens_of_a_practised_classifier(place: Workplace) -> None:
    scans, labels = inverted(24)
    parent = place.store.open("bright")
    assert "auto" in (ways_of(place.store, parent).presets or ())
    job = adapted(place, "bright", scans)
    checks = {check["name"]: check for check in job.gate["checks"]}
    assert all(checks[name]["passed"] for name in ("lens_left", "lens_licence", "practised", "class_lost"))
    record = Playbook.model_validate_json(parent.read(FILE)).by_shift
    assert record is not None
    assert checks["practice_lost"]["value"] == record.lost
    assert job.candidate_digest is not None
    version = place.store.by_digest(job.candidate_digest)
    lens = lens_of(version)
    assert lens is not None
    assert lens.negated
    before, after = (right(place, each, scans, labels) for each in (parent, version))
    assert after > before + 0.2


def test_a_classifier_that_nobody_practised_is_left_alone(place: Workplace) -> None:
    assert not ways_of(place.store, place.store.open("unpractised")).presets
