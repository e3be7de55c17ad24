"""A series of a real Orthanc beside the patient's earlier ones, all read by one version."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from locum.commands.follow_up import lines_of
from model_store.scan import encode_nifti
from service.context import ServiceContext
from service.database import Job
from service.pacs.requests import FollowUp, PacsSubmission, SeriesSegmentation
from service.worker.pacs_follow_up import exceeds
from service.worker.runner import run_job
from tests.helpers.model_store.dicom_files import series, uid
from tests.helpers.service.coded import CODED, VOLUME
from tests.helpers.service.orthanc import Gate, Orthanc
from tests.helpers.service.pacs_jobs import Unqueued
from tests.helpers.service.workplace import Workplace

DAYS = ("20240101", "20240301", "20240601")
_CHANCE = np.random.default_rng(5).random(VOLUME.shape)
VOLUMES = [np.where(share > _CHANCE, 180, 10) for share in (0.5, 0.4, 0.3)]


def visit(number: int, **values: Any) -> dict[str, bytes]:
    """The series of a visit, of one patient."""

    def change(dataset: Any, place: int) -> None:
        dataset.StudyInstanceUID, dataset.SeriesInstanceUID = study(number), of(number)
        dataset.SOPInstanceUID = uid("visit", number, place)
        dataset.file_meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID
        dataset.StudyDate = DAYS[number]
        for keyword, value in values.items():
            setattr(dataset, keyword, value)

    return series(VOLUMES[number].astype(np.int16), change=change)


def study(number: int) -> str:
    return uid("visit", number)


def of(number: int) -> str:
    return uid("visit", number, "series")


@pytest.fixture(autouse=True)
def reset(orthanc: Orthanc, gate: Gate) -> None:
    gate.rule, gate.hold_store, gate.let_pass = (lambda method, path: None), None, 0
    orthanc.clear()
    for number in range(3):
        orthanc.add(visit(number))


@pytest.fixture(scope="module", autouse=True)
def other_version(place: Workplace, publish_bright: Callable[..., Any]) -> None:
    """A second version of `coded`, which answers where none is named; the first one finds more."""
    publish_bright(place.settings.store, name="coded", task=CODED, at=150.0)


def submission(place: Workplace) -> PacsSubmission:
    context: ServiceContext = Unqueued(place)  # type: ignore[assignment]
    return PacsSubmission(context, "main", None, "0" * 32)


def ran(place: Workplace, job_id: str) -> Job:
    run_job(job_id, place.settings)
    return place.job(job_id)


def segmented(place: Workplace, number: int, version: int, output: str = "dicom-seg") -> None:
    asked = {"hospital": "dune", "study": study(number), "series": of(number), "model": f"coded@{version}"}
    made = SeriesSegmentation.model_validate({**asked, "store": True, "output": output})
    job = ran(place, submission(place).segment(made)[0])
    assert job.state == "succeeded", job.reason


def asked(place: Workplace, **fields: Any) -> str:
    body = {"hospital": "dune", "study": study(2), "series": of(2), "model": "coded@2", **fields}
    return submission(place).follow_up(FollowUp.model_validate(body))[0]


def followed(place: Workplace, **fields: Any) -> tuple[dict[str, Any], Job]:
    job = ran(place, asked(place, **fields))
    assert job.state == "succeeded", job.reason
    answer = place.folder(job.id).read_result()
    assert answer is not None
    return json.loads(answer.body), job


def truth(number: int) -> float:
    """mL above 150, at 1 mm3 unless the series says otherwise."""
    import io

    import pydicom

    header = pydicom.dcmread(io.BytesIO(next(iter(visit(number).values()))))
    depths = sorted(
        float(pydicom.dcmread(io.BytesIO(each)).ImagePositionPatient[2]) for each in visit(number).values()
    )
    voxel = float(np.prod(header.PixelSpacing)) * (depths[1] - depths[0]) / 1000
    return float((VOLUMES[number] > 150).sum()) * voxel


def test_earlier_series_with_a_seg_or_sr_are_read_by_one_version(place: Workplace) -> None:
    segmented(place, 0, version=1)
    segmented(place, 1, version=2, output="dicom-sr")
    found, job = followed(place)
    rows = found["series"]
    assert [row["date"] for row in rows] == [*DAYS]
    assert [row["days"] for row in rows] == [-152, -92, 0]
    volumes = [row["labels"]["bright"]["volume_ml"] for row in rows]
    np.testing.assert_allclose(volumes, [truth(number) for number in range(3)], rtol=1e-3)
    for row, volume in zip(rows[:2], volumes, strict=False):
        own = row["labels"]["bright"]
        assert own["change_ml"] == pytest.approx(volumes[2] - volume, abs=2e-4)
        assert own["beyond_spread"] is None
    assert rows[2]["labels"]["bright"]["change_ml"] is None
    # The SEG of the first version, then both of the second one's report.
    assert [[each["kind"] for each in row["figures"]] for row in rows] == [["SEG"], ["SEG", "SR"], []]
    assert [each["made_by"] for row in rows for each in row["figures"]] == ["coded@1", "coded@2", "coded@2"]
    assert [each["same_version"] for row in rows for each in row["figures"]] == [False, True, True]
    assert [[each["name"] for each in row["warnings"]] for row in rows] == [["another-version"], [], []]
    for each in rows[1]["figures"]:
        assert each["volumes"]["bright"] == pytest.approx(volumes[1], abs=1e-3)
    assert job.result == {"earlier": 2, "unread": 0, "figures_of_other_versions": 1}
    # What identifies the patient is in the answer that expires alone.
    shown = repr((job.options, job.progress, job.result, [e.data for e in place.events(job.id)]))
    assert not [value for value in (study(0), of(2), "PLANTED", "2024") if value in shown]
    said = "\n".join(lines_of(found))
    assert "2024-01-01: the SEG in the PACS is by coded@1, another version" in said
    assert f"{volumes[2] - volumes[0]:+.1f} mL" in said


def test_figures_of_another_version_do_not_change_what_is_read(place: Workplace) -> None:
    """The volumes are those that the version finds, whatever the PACS holds."""
    named = [{"study": study(number), "series": of(number)} for number in range(2)]
    without, _ = followed(place, earlier=named)
    segmented(place, 0, version=1)
    beside, _ = followed(place, earlier=named)
    assert [row["labels"] for row in beside["series"]] == [row["labels"] for row in without["series"]]
    assert beside["series"][0]["figures"]
    assert not without["series"][0]["figures"]


def test_spread_of_repeated_scans_says_which_change_is_more(place: Workplace) -> None:
    segmented(place, 0, version=2)
    size = VOLUMES[2].shape[::-1]
    sizes = {"a/1": 4000, "a/2": 4040, "b/1": 3000, "b/2": 3020, "alone/1": 10}
    scans = {}
    for name, voxels in sizes.items():
        image = np.full(np.prod(size), 10, np.int16)
        image[:voxels] = 180
        scans[f"{name}.nii"] = encode_nifti(image.reshape(size), np.eye(4))
    cohort = place.cohort(scans)
    found, _ = followed(place, repeats=cohort)
    spread = found["spread"]
    assert (spread["patients"], spread["scans"]) == (2, 4)
    own = spread["labels"]["bright"]
    # Half the squared differences, over the patients: (0.04^2 / 2 + 0.02^2 / 2) / 2.
    assert own["sd_ml"] == pytest.approx(np.sqrt((0.04**2 + 0.02**2) / 4), rel=1e-3)
    # Student's t of 2 degrees of freedom, by its table.
    assert own["limit_ml"] == pytest.approx(4.3027 * np.sqrt(2) * own["sd_ml"], rel=1e-3)
    change = found["series"][0]["labels"]["bright"]
    assert change["beyond_spread"] is True


@pytest.mark.parametrize(
    ("change", "volume", "beyond"), [(-0.2, 3.0, True), (0.1, 3.0, False), (9.0, 8.1, None), (9.0, 1.4, None)]
)
def test_change_is_judged_near_the_volumes_of_the_spread(
    change: float, volume: float, beyond: bool | None
) -> None:
    own = {"limit_ml": 0.15, "least_ml": 3.0, "most_ml": 4.0}
    assert exceeds(change, volume, own) is beyond


def test_cohort_without_repeats_fails_with_what_to_do(place: Workplace) -> None:
    segmented(place, 0, version=2)
    image = encode_nifti(np.full((32, 32, 9), 10, np.int16), np.eye(4))
    job = ran(place, asked(place, repeats=place.cohort({"a/1.nii": image})))
    assert job.state == "failed"
    assert "no patient with two scans" in str(job.reason)


def test_patient_without_earlier_figures_is_named_as_such(place: Workplace) -> None:
    job = ran(place, asked(place))
    assert job.state == "failed"
    assert "name the earlier series in `earlier`" in str(job.reason)


@pytest.mark.parametrize(
    ("values", "read"),
    [
        ({"PatientBirthDate": "19700101"}, "another birth date"),
        ({"IssuerOfPatientID": "Elsewhere"}, None),
        ({"PatientID": "planted-id"}, "not this patient's"),
    ],
    ids=["birth date", "one issuer unknown", "id in other case"],
)
def test_series_that_may_be_of_another_patient_is_not_read(
    place: Workplace, orthanc: Orthanc, values: dict[str, str], read: str | None
) -> None:
    orthanc.clear()
    orthanc.add(visit(0, **values))
    orthanc.add(visit(2))
    job_id = asked(place, earlier=[{"study": study(0), "series": of(0)}])
    job = ran(place, job_id)
    if job.state == "failed":
        assert read is not None
        assert read in str(job.reason)
        return
    answer = place.folder(job_id).read_result()
    assert answer is not None
    (row, _) = json.loads(answer.body)["series"]
    assert (row["problem"] is None) == (read is None)
    assert read is None or read in row["problem"]
    assert bool(row["labels"]) == (read is None)


def test_later_study_is_no_earlier_one(place: Workplace) -> None:
    job = ran(
        place,
        asked(place, study=study(1), series=of(1), earlier=[{"study": study(2), "series": of(2)}]),
    )
    assert job.state == "failed"
    assert "later study" in str(job.reason)


def test_pacs_that_does_not_answer_postpones_the_job(place: Workplace, gate: Gate) -> None:
    gate.rule = lambda method, path: (503, {}, b"")
    job_id = asked(place, earlier=[{"study": study(0), "series": of(0)}])
    assert ran(place, job_id).state == "queued"


def test_same_request_is_one_job_by_its_key(place: Workplace) -> None:
    context: ServiceContext = Unqueued(place)  # type: ignore[assignment]
    body = {"hospital": "dune", "study": study(2), "series": of(2), "model": "coded@2"}
    jobs = [
        PacsSubmission(context, "main", "once", "0" * 32).follow_up(FollowUp.model_validate(body))
        for _ in range(2)
    ]
    assert jobs[0][0] == jobs[1][0]
    assert [created for _, created in jobs] == [True, False]
