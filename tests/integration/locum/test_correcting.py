"""A person edits a mask in the folder of `locum segment`, and sends it home."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from sqlalchemy import select
from typer.testing import CliRunner

from locum import Client
from locum.commands.app import app
from service.database import Job
from service.worker.runner import run_job
from tests.helpers.model_store import dicom_files
from tests.helpers.service.api import Api

Locum = Callable[..., Any]


@pytest.fixture
def locum(api: Api, monkeypatch: pytest.MonkeyPatch) -> Locum:
    """`locum(*arguments)`: run the command in this process, against `api`."""
    monkeypatch.setenv("LOCUM_URL", str(api.client.base_url))
    return lambda *arguments: CliRunner().invoke(app, [str(each) for each in arguments])


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    folder = tmp_path / "scans"
    folder.mkdir()
    for number in range(3):
        voxels = np.random.default_rng(number).integers(0, 255, (40, 40, 4)).astype(np.int16)
        nib.save(nib.Nifti1Image(voxels, np.diag([1.0, 1.0, 2.0, 1.0])), folder / f"case{number}.nii.gz")
    return folder


def test_edited_mask_comes_home_and_unedited_ones_count_as_accepted(
    api: Api, locum: Locum, scans: Path, tmp_path: Path
) -> None:
    masks = tmp_path / "masks"
    asked = ("--model", "organ", "--hospital", "dune", "--out", masks)
    assert locum("segment", scans, *asked).exit_code == 0
    own = masks / "case1-mask.nii.gz"
    image = nib.load(own)
    edited = np.asarray(image.dataobj).copy()
    edited[:3, :3, 0] = 1 - edited[:3, :3, 0]
    nib.save(nib.Nifti1Image(edited, image.affine, image.header), own)
    sent = locum("correct", scans / "case0.nii.gz", scans / "case1.nii.gz", "--masks", masks)
    assert sent.exit_code == 0, sent.output
    assert "case0.nii.gz: accepted" in sent.output
    assert "case1.nii.gz: stored" in sent.output
    report = json.loads((masks / "case2-report.json").read_bytes())
    by_id = ("--hospital", "dune", "--request", report["receipt"]["request"])
    assert locum("correct", *by_id, "--accept").exit_code == 0
    with api.context.database.read() as session:
        job = session.scalars(select(Job.id).where(Job.kind == "correction", Job.state == "queued")).one()
    run_job(job, api.settings)
    shown = locum("corrections", "--hospital", "dune", "--json")
    rows = json.loads(shown.output)
    (changed,) = [row for row in rows if not row["accepted"]]
    assert {row["hospital"] for row in rows} == {"dune"}
    assert (changed["model"], changed["label"], changed["exact"]) == ("organ", "organ", True)
    assert changed["version"].startswith("sha256:")
    assert changed["added_voxels"] + changed["removed_voxels"] == 9
    assert changed["added_ml"] == pytest.approx(changed["added_voxels"] * 2 / 1000)
    assert changed["removed_ml"] == pytest.approx(changed["removed_voxels"] * 2 / 1000)
    assert 0 <= changed["dice"] < 1
    assert changed["surface_dice"] < 1
    table = locum("corrections", "--hospital", "dune").output
    assert "2 answers were right as they were, 1 were corrected" in table
    # What is shown bounds no sum.
    newest = locum("corrections", "--hospital", "dune", "--limit", "1").output
    assert "2 answers were right as they were, 1 were corrected" in newest
    assert "the newest 1 of 3 are shown" in newest
    assert len(newest.splitlines()) == 4
    keeping = ("corrections", "--hospital", "dune", "--keep-answers")
    assert locum(*keeping, "7").exit_code == 2
    chosen = locum(*keeping, "7", "--reason", "no scans", "--actor", "ada")
    assert "dune keeps answered masks for 7 days, in at most 1024 MiB" in chosen.output, chosen.output
    ended = locum(*keeping, "0", "--reason", "no more", "--actor", "ada").output
    assert "keeps no answered masks" in ended
    # Masks leave the hospital for no training that it has not agreed to.
    out = tmp_path / "data"
    saving = ("corrections", "--hospital", "dune", "--model", "organ", "--out", out)
    refused = locum(*saving)
    assert refused.exit_code != 0
    assert not out.exists()
    assert locum("corrections", "--hospital", "dune", "--may-train").exit_code == 0
    assert locum(*saving).exit_code == 0
    np.testing.assert_array_equal(np.asarray(nib.load(out / "labels" / "case1.nii.gz").dataobj), edited)
    assert (out / "images" / "case1.nii.gz").read_bytes() == (scans / "case1.nii.gz").read_bytes()


def test_what_cannot_be_sent_is_named(api: Api, locum: Locum, scans: Path, tmp_path: Path) -> None:
    masks = tmp_path / "other"
    masks.mkdir()
    nib.save(nib.Nifti1Image(np.zeros((40, 40, 4), np.uint8), np.eye(4)), masks / "case0.nii.gz")
    missing = locum("correct", scans / "case0.nii.gz", "--masks", masks)
    assert missing.exit_code == 1
    assert "case0-report.json, as `locum segment` writes it, that says which answer" in missing.output
    unknown = ("--hospital", "dune", "--request", "nowhere")
    assert (
        "no answer of request" in locum("correct", scans / "case0.nii.gz", "--masks", masks, *unknown).output
    )
    assert locum("correct", scans / "case0.nii.gz").exit_code == 2
    with Client(str(api.client.base_url)) as client:
        assert all(each.hospital == "dune" for each in client.corrections("dune", "organ"))


def test_rtstruct_is_saved_and_comes_home_as_a_correction(api: Api, locum: Locum, tmp_path: Path) -> None:
    series, masks, edited = (tmp_path / name for name in ("case7", "masks", "edited"))
    series.mkdir()
    edited.mkdir()
    voxels = np.random.default_rng(4).integers(0, 255, (5, 40, 40)).astype(np.int16)
    for name, content in dicom_files.series(voxels).items():
        (series / name).write_bytes(content)
    asked = ("--model", "organ", "--hospital", "dune", "--out", masks, "--also", "dicom-rtstruct")
    answered = locum("segment", series, *asked)
    assert answered.exit_code == 0, answered.output
    (edited / "case7-mask.dcm").write_bytes((masks / "case7-rtstruct.dcm").read_bytes())
    (edited / "case7-report.json").write_bytes((masks / "case7-report.json").read_bytes())
    sent = locum("correct", series, "--masks", edited)
    assert sent.exit_code == 0, sent.output
    assert "case7: accepted" in sent.output
    (edited / "case7-mask.nii.gz").write_bytes((masks / "case7-mask.nii.gz").read_bytes())
    both = locum("correct", series, "--masks", edited)
    assert "both are the mask case7-mask; leave one of them there" in str(both.exception)


def test_mask_is_kept_where_the_second_file_is_refused(locum: Locum, tmp_path: Path) -> None:
    series, masks = tmp_path / "case8", tmp_path / "masks"
    series.mkdir()
    voxels = np.random.default_rng(5).integers(0, 255, (5, 40, 40)).astype(np.int16)
    for name, content in dicom_files.series(voxels).items():
        (series / name).write_bytes(content)
    asked = ("--model", "organ", "--hospital", "dune", "--out", masks, "--also", "dicom-seg")
    answered = locum("segment", series, *asked)
    assert answered.exit_code == 1
    assert "warning: no dicom-seg:" in answered.output
    assert (masks / "case8-mask.nii.gz").is_file()
    assert (masks / "case8-report.json").is_file()
    assert "no dicom-seg" in (masks / "volumes.csv").read_text()


def test_edited_masks_of_a_pacs_are_looked_for_by_a_query(locum: Locum) -> None:
    place = ("corrections", "--hospital", "dune", "--pacs", "main")
    unknown = locum(*place, "--query", "StudyDate=20261101-20261130")
    assert unknown.exit_code != 0
    assert "main" in f"{unknown.output}{unknown.exception}"
    for query in ((), ("--query", "StudyDate"), ("--query", "StudyDate=")):
        wrong = locum(*place, *query)
        assert wrong.exit_code != 0
        assert "expected ATTRIBUTE=VALUE" in f"{wrong.output}{wrong.exception}"
