"""Work items are claimed once, done by a job, and end with references to results or with a reason."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydicom import Dataset

from service.errors import SettingsInvalid
from service.pacs.configuration import PacsServer
from service.worklist import ups
from service.worklist.configuration import WorklistConfiguration, load_worklist
from service.worklist.performer import Performer
from tests.helpers.service.worklist import Origin, running_origin, workitem

ITEM, STUDY, SERIES = "1.2.3.1", "1.2.3.2", "1.2.3.3"
STORED = {
    "StudyInstanceUID": STUDY,
    "SeriesInstanceUID": "1.2.3.9",
    "SOPClassUID": "1.2.840.10008.5.1.4.1.1.66.4",
    "SOPInstanceUID": "1.2.3.9.1",
}
REPORT = {**STORED, "SeriesInstanceUID": "1.2.3.10", "SOPInstanceUID": "1.2.3.10.1"}


@pytest.fixture(scope="module")
def server() -> Iterator[Origin]:
    with running_origin() as found:
        yield found


@pytest.fixture
def origin(server: Origin) -> Origin:
    server.items.clear()
    server.owners.clear()
    server.seen.clear()
    server.down = False
    server.api = Jobs()
    return server


class Jobs:
    """The API: each idempotency key, hence each item, has a job in one state."""

    def __init__(self, **job: Any) -> None:
        self.job: dict[str, Any] = {"id": "a" * 32, "state": "queued", "progress": {}, "reason": None, **job}
        self.result: dict[str, Any] = {**STORED, "report": REPORT}
        self.asked: list[tuple[str, str, Any]] = []
        self.refusal: int | None = None

    def __call__(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        self.asked.append((method, path, body))
        if self.refusal is not None:
            return self.refusal, {"detail": "no"}
        if path.endswith("/result"):
            return 200, self.result
        if method == "DELETE":
            self.job["state"] = "cancelled"
        return (202 if method == "POST" else 200), self.job

    @property
    def made(self) -> list[Any]:
        return [body for method, path, body in self.asked if method == "POST"]


def jobs(origin: Origin, **job: Any) -> Jobs:
    found = Jobs(**job)
    origin.api = found
    return found


def performer(origin: Origin, folder: Path, **values: Any) -> Performer:
    configuration = WorklistConfiguration.model_validate(
        {
            "service": origin.url,
            "worklists": {
                "north": {
                    "pacs": "main",
                    "hospital": "north",
                    "workitems": [{"value": "LIVER", "scheme": "99NORTH", "model": "liver"}],
                }
            },
            **values,
        }
    )
    server = PacsServer.model_validate({"url": origin.url, "hospitals": ["north"], "store": True})
    folder.mkdir(exist_ok=True)
    return Performer(configuration, {"main": server}, folder, threading.Event())


def only(items: Any) -> Dataset:
    (found,) = items
    assert isinstance(found, Dataset)
    return found


def test_item_is_claimed_done_and_completed_with_references(origin: Origin, tmp_path: Path) -> None:
    origin.add(workitem(ITEM, [(STUDY, SERIES)]))
    api, at_work = jobs(origin), performer(origin, tmp_path)
    at_work.look()
    assert origin.state(ITEM) == "IN PROGRESS"
    assert api.made == [
        {
            "hospital": "north",
            "study": STUDY,
            "series": SERIES,
            "model": "liver",
            "output": "dicom-sr",
            "store": True,
        }
    ]
    api.job |= {
        "state": "running",
        "progress": {"window": 3, "windows": 4},
        "status": {"doing": "segmenting"},
    }
    at_work.look()
    progress = only(origin.items[ITEM].ProcedureStepProgressInformationSequence)
    assert (progress.ProcedureStepProgress, progress.ProcedureStepProgressDescription) == (75, "segmenting")
    api.job["state"] = "succeeded"
    at_work.look()
    assert origin.state(ITEM) == "COMPLETED"
    step = only(origin.items[ITEM].UnifiedProcedureStepPerformedProcedureSequence)
    assert only(step.PerformedWorkitemCodeSequence).CodeValue == "LIVER"
    assert only(step.PerformedStationNameCodeSequence).CodeValue == "LOCUM"
    outputs = [
        (each.SeriesInstanceUID, only(each.ReferencedSOPSequence).ReferencedSOPInstanceUID)
        for each in step.OutputInformationSequence
    ]
    assert outputs == [("1.2.3.9", "1.2.3.9.1"), ("1.2.3.10", "1.2.3.10.1")]
    place = only(step.OutputInformationSequence[0].WADORSRetrievalSequence).RetrieveURL
    assert place == f"{origin.url}/studies/{STUDY}/series/1.2.3.9/instances/1.2.3.9.1"
    assert [*tmp_path.iterdir()] == []
    at_work.look()
    assert len(api.made) == 1


def test_failed_job_cancels_the_item_with_its_reason(origin: Origin, tmp_path: Path) -> None:
    origin.add(workitem(ITEM, [(STUDY, SERIES)]))
    api, at_work = jobs(origin), performer(origin, tmp_path)
    at_work.look()
    api.job |= {"state": "failed", "reason": "the guard warns of the scan"}
    at_work.look()
    assert origin.state(ITEM) == "CANCELED"
    progress = only(origin.items[ITEM].ProcedureStepProgressInformationSequence)
    assert progress.ReasonForCancellation == "the guard warns of the scan"
    assert progress.ProcedureStepCancellationDateTime


def test_job_that_a_person_cancels_cancels_the_item(origin: Origin, tmp_path: Path) -> None:
    origin.add(workitem(ITEM, [(STUDY, SERIES)]))
    api, at_work = jobs(origin), performer(origin, tmp_path)
    at_work.look()
    api.job["state"] = "cancelled"
    at_work.look()
    assert origin.state(ITEM) == "CANCELED"


@pytest.mark.parametrize("how", ["ended", "gone", "another's"])
def test_item_that_the_worklist_takes_away_ends_its_job(origin: Origin, tmp_path: Path, how: str) -> None:
    origin.add(workitem(ITEM, [(STUDY, SERIES)]))
    api, at_work = jobs(origin), performer(origin, tmp_path)
    at_work.look()
    if how == "ended":
        origin.items[ITEM].ProcedureStepState = "CANCELED"
    elif how == "gone":
        del origin.items[ITEM]
    else:
        origin.owners[ITEM] = "1.2.3.99"
        api.job |= {"state": "running"}
        api.job["progress"] = {"window": 1, "windows": 2}
    at_work.look()
    assert [path for method, path, _ in api.asked if method == "DELETE"] == [f"/jobs/{'a' * 32}"]
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("item", "said"),
    [
        (workitem(ITEM, [(STUDY, SERIES), (STUDY, "1.2.3.4")]), "found 2"),
        (workitem(ITEM, []), "found 0"),
        (workitem(ITEM, [(STUDY, "")]), "a study without one"),
    ],
    ids=["two", "none", "a study"],
)
def test_item_without_one_series_is_cancelled_with_the_reason(
    origin: Origin, tmp_path: Path, item: Dataset, said: str
) -> None:
    item.ProcedureStepState = "SCHEDULED"
    origin.add(item)
    api = jobs(origin)
    performer(origin, tmp_path).look()
    assert origin.state(ITEM) == "CANCELED"
    assert said in only(origin.items[ITEM].ProcedureStepProgressInformationSequence).ReasonForCancellation
    assert api.made == []


@pytest.mark.parametrize(
    "item",
    [
        workitem(ITEM, [(STUDY, SERIES)], code="SPLEEN"),
        workitem(ITEM, [(STUDY, SERIES)], InputReadinessState="INCOMPLETE"),
        workitem(ITEM, [(STUDY, SERIES)], ProcedureStepState="CANCELED"),
    ],
    ids=["another code", "input incomplete", "cancelled"],
)
def test_other_items_are_left_alone(origin: Origin, tmp_path: Path, item: Dataset) -> None:
    origin.add(item)
    before = origin.state(ITEM)
    performer(origin, tmp_path).look()
    assert origin.state(ITEM) == before
    assert {method for method, _, _ in origin.seen} == {"GET"}


def test_urgent_items_come_first_and_no_more_than_there_is_room_for(origin: Origin, tmp_path: Path) -> None:
    for number, priority in enumerate(["LOW", "MEDIUM", "HIGH"]):
        uid = f"1.2.3.50.{number}"
        origin.add(workitem(uid, [(STUDY, SERIES)], ScheduledProcedureStepPriority=priority))
    performer(origin, tmp_path, most=2).look()
    states = [origin.state(f"1.2.3.50.{number}") for number in range(3)]
    assert states == ["SCHEDULED", "IN PROGRESS", "IN PROGRESS"]


def test_two_performers_do_an_item_once(origin: Origin, tmp_path: Path) -> None:
    origin.add(workitem(ITEM, [(STUDY, SERIES)]))
    api = jobs(origin)
    first, second = (performer(origin, tmp_path / name) for name in ("one", "two"))
    listed = origin.items[ITEM].to_json_dict()
    first.look()
    # The second one saw the item before it was claimed.
    shown = origin._search
    origin._search = lambda query: (200, [listed]) if query["offset"] == ["0"] else (204, None)  # type: ignore[method-assign]
    second.look()
    origin._search = shown  # type: ignore[method-assign]
    assert len(api.made) == 1
    assert [*(tmp_path / "two").iterdir()] == []
    assert origin.state(ITEM) == "IN PROGRESS"


@pytest.mark.parametrize("when", ["before the claim", "after the claim", "claimed by another"])
def test_performer_that_was_killed_goes_on_with_its_item(origin: Origin, tmp_path: Path, when: str) -> None:
    origin.add(workitem(ITEM, [(STUDY, SERIES)]))
    api, killed = jobs(origin), performer(origin, tmp_path)
    api.refusal = 503
    killed.look()
    api.refusal = None
    assert api.made
    api.asked.clear()
    if when == "before the claim":
        origin.items[ITEM].ProcedureStepState = "SCHEDULED"
        del origin.owners[ITEM]
    elif when == "claimed by another":
        origin.owners[ITEM] = "1.2.3.99"
    performer(origin, tmp_path).look()
    assert len(api.made) == (0 if when == "claimed by another" else 1)
    assert origin.state(ITEM) == "IN PROGRESS"
    assert len([*tmp_path.iterdir()]) == (0 if when == "claimed by another" else 1)


def test_worklist_that_does_not_answer_is_asked_again(
    origin: Origin, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    origin.add(workitem(ITEM, [(STUDY, SERIES)]))
    jobs(origin, state="succeeded")
    at_work = performer(origin, tmp_path)
    origin.down = True
    at_work.look()
    at_work.look()
    origin.down = False
    at_work.look()
    assert origin.state(ITEM) == "COMPLETED"
    assert caplog.text.count("answers 503") == 1
    assert not [value for value in (ITEM, STUDY, SERIES, "Planted", "PLANTED") if value in caplog.text]


def test_request_that_the_api_refuses_cancels_the_item(origin: Origin, tmp_path: Path) -> None:
    origin.add(workitem(ITEM, [(STUDY, SERIES)]))
    jobs(origin).refusal = 422
    performer(origin, tmp_path).look()
    assert origin.state(ITEM) == "CANCELED"
    assert "422" in only(origin.items[ITEM].ProcedureStepProgressInformationSequence).ReasonForCancellation


def test_data_sets_are_those_of_the_standard() -> None:
    from datetime import UTC, datetime

    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    done = ups.performed("LOCUM", ("LIVER", "99NORTH"), at, at, [ups.output(STORED, "https://x/rs")])
    said = json.loads(json.dumps(done.to_json_dict()))
    (step,) = said["00741216"]["Value"]
    assert step["00404050"]["Value"] == ["20260102030405.000000+0000"]
    (made,) = step["00404033"]["Value"]
    assert made["0040E020"]["Value"] == ["DICOM"]
    assert made["00081199"]["Value"][0]["00081155"]["Value"] == ["1.2.3.9.1"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"service": "http://api.example"}, "https://"),
        ({"worklists": {}}, "worklists"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_configuration_that_is_wrong_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    content = {
        "service": "https://api.example",
        "worklists": {
            "north": {
                "pacs": "main",
                "hospital": "north",
                "workitems": [{"value": "A", "scheme": "99N", "model": "liver"}],
            }
        },
    }
    path = tmp_path / "worklist.yaml"
    path.write_text(json.dumps({**content, **change}))
    with pytest.raises(SettingsInvalid, match=said):
        load_worklist(path)
