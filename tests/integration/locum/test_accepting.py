"""`locum accept`: a folder of scans and one of masks become a report, a decision and an assignment."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from locum.client import Client
from locum.commands.app import app
from service.worker.runner import run_job
from tests.helpers.service.api import Api

Locum = Callable[..., Any]
ASKED = "labels:\n  bright:\n    least_dice: {least}\n    largest_bias_share: 0.2\n"


@pytest.fixture(scope="module")
def bright(start: Callable[..., Api], tmp_path_factory: pytest.TempPathFactory, publish_bright: Any) -> Api:
    store = tmp_path_factory.mktemp("bright") / "store"
    publish_bright(store)
    api = start(store)
    api.client.put("/hospitals/north", json={"name": "north"})
    return api


@pytest.fixture
def locum(bright: Api, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Locum:
    """`locum(*arguments)` in this process, in an empty folder; jobs run before they are followed."""
    monkeypatch.setenv("LOCUM_URL", str(bright.client.base_url))
    monkeypatch.chdir(tmp_path)
    events = Client.events

    def after(self: Client, job: str, *given: Any, **named: Any) -> Iterator[Any]:
        run_job(job, bright.settings)
        return events(self, job, *given, **named)

    monkeypatch.setattr(Client, "events", after)
    return lambda *arguments: CliRunner().invoke(app, [str(each) for each in arguments])


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Twelve images with masks, and two without."""
    scans, masks = tmp_path / "scans", tmp_path / "masks"
    for folder in (scans, masks):
        folder.mkdir()
    for number in range(14):
        pixels = np.random.default_rng(number).integers(0, 90, (32, 32), np.uint8)
        pixels[8:24, 8 : 24 + number % 3] = 200
        Image.fromarray(pixels).save(scans / f"case{number}.png")
        mask = np.zeros_like(pixels)
        mask[8:24, 8:24] = 1
        if number < 12:
            Image.fromarray(mask).save(masks / f"case{number}.png")
    return scans, masks


def test_acceptance_prints_one_object_and_keeps_both_files(
    locum: Locum, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "acceptance.yaml").write_text(ASKED.format(least=0.5), encoding="utf-8")
    scans, masks = folders
    asked = ("--hospital", "north", "--scans", scans, "--masks", masks, "--actor", "mara")
    shown = locum("accept", "bright", *asked, "--json", "-o", tmp_path / "out")
    assert shown.exit_code == 0, shown.output + shown.stderr
    report = json.loads(shown.stdout)
    assert (report["model"], report["version"], report["hospital"]) == ("bright", "bright@1", "north")
    assert (report["verdict"], report["n"], report["without_masks"]) == ("met", 12, 2)
    own = report["labels"]["bright"]
    # A third of the answers is right, and a third each has 16 and 32 of 256 pixels too many.
    dice = [512 / (512 + 16 * (number % 3)) for number in range(12)]
    assert own["dice"] == pytest.approx(np.mean(dice), abs=1e-6)
    assert own["lower_bound"] < own["dice"]
    assert {"surface_dice", "hd95", "missed", "bias_ml", "limits", "n"} <= own.keys()
    document = json.loads((tmp_path / "out" / "acceptance.json").read_bytes())
    assert document["digest"] == report["digest"]
    assert "Acceptance of bright@1" in (tmp_path / "out" / "acceptance.html").read_text(encoding="utf-8")


def test_acceptance_that_is_demanded_is_approved_by_another_person(
    locum: Locum, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    scans, masks = folders
    by = ("--reason", "our rule", "--actor", "ines")
    assert "demanded by ines" in locum("acceptances", "-H", "north", "--demand", *by).output
    refused = locum("assign", "bright@1", "-H", "north", *by)
    assert "expected one of 'bright@1' in float32, none was approved" in str(refused.exception)
    (tmp_path / "strict.yaml").write_text(ASKED.format(least=0.999), encoding="utf-8")
    asked = ("-H", "north", "--scans", scans, "--masks", masks, "--actor", "mara")
    failed = locum("accept", "bright@1", *asked, "--thresholds", tmp_path / "strict.yaml")
    assert failed.exit_code == 1
    assert "✗ bright: lower bound of the mean Dice" in failed.stdout
    job = failed.stdout.split("locum approve ")[1].split()[0]
    assert "thresholds are not met" in str(locum("approve", job, *by).exception)
    same = locum("approve", job, "--override", "--reason", "so be it", "--actor", "mara")
    assert "can be the same person" in str(same.exception)
    approved = locum("approve", job, "--override", *by)
    assert "accepted AGAINST the verdict by ines, measured by mara" in approved.output
    assert locum("assign", "bright@1", "-H", "north", *by).exit_code == 0
    assert "accepted AGAINST" in locum("acceptances", "-H", "north").output
    today = datetime.now(UTC).date()
    assert (
        locum("report", "-H", "north", "--from", today, "--to", today, "-o", tmp_path / "period").exit_code
        == 0
    )
    (page,) = (tmp_path / "period").glob("*.html")
    assert "accepted, against the verdict" in page.read_text()
    locum("acceptances", "-H", "north", "--no-demand", *by)


def test_wrong_files_are_named(locum: Locum, folders: tuple[Path, Path], tmp_path: Path) -> None:
    scans, _ = folders
    asked = ("accept", "bright", "-H", "north")
    assert "--scans DIR" in str(locum(*asked).exception)
    asked = (*asked, "--scans", scans)
    assert "expected masks of some scans" in str(locum(*asked).exception)
    (tmp_path / "acceptance.yaml").write_text("- liver", encoding="utf-8")
    assert "acceptance.yaml: expected `labels`" in str(locum(*asked).exception)
    (tmp_path / "acceptance.yaml").write_text("labels: {", encoding="utf-8")
    assert "acceptance.yaml: cannot be read" in str(locum(*asked).exception)
