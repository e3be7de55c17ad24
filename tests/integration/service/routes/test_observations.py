"""Every answer leaves one observation with its audit row; its own hospital reads, exports and deletes it."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import func, select, text
from sqlalchemy.exc import DatabaseError

from service import expiry, observation
from service.audit import trail
from service.database import Assignment, AuditRow, LookedAt, Observation, ObservedLabel
from service.expiry import expire
from service.identity import keys
from service.observation import Answer, Observed, SeenLabel
from service.observation.review import FEWEST
from tests.helpers.service.api import Api


@pytest.fixture(scope="module")
def running_api(
    start: Callable[[Path], Api],
    tmp_path_factory: pytest.TempPathFactory,
    publish_bright: Callable[[Path], object],
    publish_dark: Callable[[Path], object],
) -> Api:
    root = tmp_path_factory.mktemp("store")
    publish_bright(root)
    publish_dark(root)
    running = start(root)
    for hospital in ("north", "south"):
        assert running.client.put(f"/hospitals/{hospital}", json={"name": hospital}).status_code == 201
    return running


@pytest.fixture
def api(running_api: Api) -> Iterator[Api]:
    """An API without any observation: these tests count them."""
    yield running_api
    with running_api.context.database.write() as session:
        observation.delete_before(session, datetime.now(UTC) + timedelta(hours=1))


def observed_of(api: Api, hospital: str = "north", **query: Any) -> list[dict[str, Any]]:
    answer = api.client.get(f"/hospitals/{hospital}/observations", params=query).raise_for_status()
    found: list[dict[str, Any]] = answer.json()["observations"]
    return found


def an_answer(number: int, hospital: str = "north", **fields: Any) -> Answer:
    values = {"confidence": 0.5} | fields
    seen = Observed(
        *("bright", "sha256:v", "sha256:g", f"sha256:{number}", (16, 16), 0.25, "float32", "CPU"),
        labels=(SeenLabel("bright", values["confidence"], number),),
        locum="1",
    )
    return Answer(seen, hospital, "anonymous", f"request-{number}", "http")


def store_answers(api: Api, answers: list[Answer]) -> None:
    with api.context.database.write() as session:
        observation.append(session, answers)


def test_answer_leaves_what_its_report_says(api: Api, make_nifti: Callable[..., bytes]) -> None:
    volume = np.random.default_rng(1).integers(0, 200, (20, 24, 6)).astype(np.int16)
    scan = make_nifti(volume, np.diag([2.0, 2.0, 3.0, 1.0]))
    fields = {"hospital": "north", "scanner": "CT 2"}
    report = api.segment(scan, name="DOE^JOHN.nii", output="json", model="bright", **fields).json()
    mask = api.segment(scan, **fields)
    assert mask.status_code == 200
    newest, first = observed_of(api)
    assert first["request"] == report["receipt"]["request"]
    assert newest["request"] == mask.headers["locum-request"]
    assert first["version"] == report["receipt"]["model"]["digest"]
    assert first["graph"] == newest["graph"] == report["receipt"]["graph"]
    said = {name: report["labels"]["bright"][name] for name in first["labels"]["bright"]}
    assert first["labels"] == {"bright": said}
    assert (first["model"], first["way"], first["scanner"], first["unlike"]) == ("bright", "http", "CT 2", 0)
    assert first["size"] == list(volume.shape)
    assert first["scan"] == newest["scan"] != report["receipt"]["input_sha256"].removeprefix("sha256:")
    assert "DOE" not in json.dumps(first)
    # Without a hospital it is stored, and belongs to none.
    assert api.segment(scan).status_code == 200
    assert len(observed_of(api)) == 2
    assert observed_of(api, "south") == []


def test_rejected_request_leaves_none(api: Api, make_png: Callable[..., bytes], picture: Any) -> None:
    assert api.segment(b"no scan", hospital="north").status_code == 415
    assert api.segment(make_png(picture), hospital="north", output="nifti").status_code == 422
    assert observed_of(api) == []


def test_answers_at_once_leave_one_row_each(api: Api, make_png: Callable[..., bytes], picture: Any) -> None:
    scan = make_png(picture)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: api.segment(scan, hospital="north"), range(40)))
    requests = [each.headers["locum-request"] for each in answers]
    assert sorted(each["request"] for each in observed_of(api)) == sorted(requests)
    with api.context.database.read() as session:
        found = session.scalars(select(AuditRow.request).where(AuditRow.action == "scan.segmented"))
        assert sorted(set(requests) & set(found)) == sorted(requests)


def test_without_a_row_there_is_no_answer(
    api: Api, make_png: Callable[..., bytes], picture: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both rows are of one transaction: what fails the observation fails the audit row."""

    def fails(*_: Any) -> None:
        raise DatabaseError("no room", None, Exception("no room"))

    with api.context.database.snapshot() as session:
        before = trail.head(session).number
    monkeypatch.setattr(observation, "append", fails)
    assert api.segment(make_png(picture), hospital="north").status_code >= 500
    monkeypatch.undo()
    with api.context.database.snapshot() as session:
        assert [row["action"] for row in trail.rows(session, before + 1)] == []
    assert observed_of(api) == []


def test_review_is_the_rank_among_the_hospital_s_own(
    api: Api, make_png: Callable[..., bytes], picture: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert api.client.put("/hospitals/east", json={"name": "east"}).status_code == 201
    scan = make_png(picture)
    first = api.segment(scan, hospital="east", output="json").json()
    assert first["labels"]["bright"]["review"] is None
    version, own = first["receipt"]["model"]["digest"], first["labels"]["bright"]["confidence"]
    # Of 39 others 9 are less sure; with the first itself, which is as sure: 9.5 of 40.
    for number in range(39):
        answer = an_answer(number, confidence=own - 0.1 if number < 9 else min(1.0, own + 1e-6))
        seen = Observed(**{**answer.observed.__dict__, "version": version})
        store_answers(api, [Answer(seen, "east", "anonymous", answer.request, "http")])
    monkeypatch.setattr("service.observation.review._LOOK_SECONDS", 0.0)
    again = api.segment(scan, hospital="east", output="json").json()
    assert again["labels"]["bright"]["review"] == pytest.approx(9.5 / 40)
    assert api.segment(scan, hospital="south", output="json").json()["labels"]["bright"]["review"] is None
    assert FEWEST <= 39


def test_scans_of_a_cohort_have_the_rank_of_their_newest_answer(
    api: Api, make_nifti: Callable[..., bytes]
) -> None:
    assert api.client.put("/hospitals/west", json={"name": "west"}).status_code == 201
    place = api.client.post("/hospitals/west/cohorts").headers["location"]
    draw = np.random.default_rng(3)
    scans = [
        make_nifti(draw.integers(0, 200, (16, 16, 4)).astype(np.int16), np.eye(4)) for _ in range(FEWEST + 2)
    ]
    sure = {}
    for number, scan in enumerate(scans):
        report = api.segment(scan, hospital="west", model="bright", output="json").json()
        sure[f"{number}.nii"] = report["labels"]["bright"]["confidence"]
    for name, scan in zip([*sure][:2], scans, strict=False):
        assert api.client.put(f"{place}/scans/{name}", content=scan).status_code == 201
    other = make_nifti(draw.integers(0, 9, (16, 16, 4)).astype(np.int16), np.eye(4))
    assert api.client.put(f"{place}/scans/unanswered.nii", content=other).status_code == 201
    listed = api.client.get(f"{place}/scans").json()["scans"]
    found = {each["name"]: each["review"] for each in listed}
    assert found.pop("unanswered.nii") is None
    for name, rank in found.items():
        others = [each for key, each in sure.items() if key != name]
        assert rank == pytest.approx(np.mean([each < sure[name] for each in others]))
    assert api.client.delete(place).status_code == 204


def test_pages_and_the_table_have_every_row_once(api: Api) -> None:
    store_answers(api, [an_answer(number) for number in range(25)] + [an_answer(99, "south")])
    page = api.client.get("/hospitals/north/observations", params={"limit": 10}).json()
    found = [each["request"] for each in page["observations"]]
    while page["next"]:
        page = api.client.get(
            "/hospitals/north/observations", params={"limit": 10, "after": page["next"]}
        ).json()
        found += [each["request"] for each in page["observations"]]
    assert found == [f"request-{number}" for number in reversed(range(25))]
    table = api.client.get("/hospitals/north/observations.csv")
    assert table.headers["content-type"].startswith("text/csv")
    rows = list(csv.DictReader(io.StringIO(table.text)))
    assert [row["request"] for row in rows] == found
    assert (rows[0]["label"], rows[0]["voxels"], rows[0]["confidence"]) == ("bright", "24", "0.5")
    assert observed_of(api, model="other") == []


def serve(api: Api, digest: str, hospital: str) -> None:
    with api.context.database.write() as session:
        log = select(func.count()).select_from(Assignment).where(Assignment.hospital == hospital)
        own = {"version": 1, "digest": digest, "actor": "ada", "reason": "test", "at": datetime.now(UTC)}
        number = (session.scalar(log) or 0) + 1
        session.add(Assignment(hospital=hospital, model="bright", sequence=number, **own))


def test_work_list_has_the_least_sure_first_and_those_that_were_looked_at_last(api: Api) -> None:
    api.client.put("/hospitals/west", json={"name": "west"}).raise_for_status()
    serve(api, "sha256:v", "west")
    generator = np.random.default_rng(3)
    # One label is always far surer than the other.
    sure, unsure = generator.permutation(40) / 100 + 0.6, generator.permutation(40) / 1000
    for number in range(40):
        answer = an_answer(number, "west")
        labels = (
            SeenLabel("bright", float(sure[number]), 9),
            SeenLabel("dim", float(unsure[number]), 9),
        )
        seen = Observed(**{**answer.observed.__dict__, "labels": labels})
        store_answers(api, [Answer(seen, "west", "anonymous", answer.request, "http")])
    other = an_answer(99, "west", confidence=0.0)
    seen = Observed(**{**other.observed.__dict__, "version": "sha256:old"})
    store_answers(api, [Answer(seen, "west", "anonymous", "of-another-version", "http")])

    def ranks(confidences: Any) -> list[float]:
        return [sum(confidences < own) / 39 for own in confidences]

    least = np.minimum(ranks(sure), ranks(unsure))
    expected = [f"request-{number}" for number in sorted(range(40), key=lambda n: (least[n], -n))]
    found = observed_of(api, "west", order="review", model="bright")
    assert [each["request"] for each in found] == expected
    assert [min(each["review"].values()) for each in found] == pytest.approx(sorted(least))
    assert {each["looked_at"] for each in found} == {None}

    path = f"/hospitals/west/observations/{found[0]['id']}/looked"
    looked = api.client.put(path).raise_for_status().json()
    assert looked["looked_by"] == "anonymous"
    assert datetime.now(UTC) - datetime.fromisoformat(looked["looked_at"]) < timedelta(minutes=5)
    # The first look stays.
    assert api.client.put(path).json() == looked
    again = observed_of(api, "west", order="review", model="bright")
    assert [each["request"] for each in again] == [*expected[1:], expected[0]]
    assert observed_of(api, "west", order="review", model="bright", limit=2) == again[:2]
    assert [each for each in observed_of(api, "west") if each["looked_at"]] == [looked]
    rows = csv.DictReader(io.StringIO(api.client.get("/hospitals/west/observations.csv").text))
    assert {row["request"] for row in rows if row["looked_by"]} == {expected[0]}

    # Another version serves: it has no answers yet.
    serve(api, "sha256:new", "west")
    assert observed_of(api, "west", order="review", model="bright") == []


def test_work_list_names_the_scan_that_is_kept_to_an_operator(
    start: Callable[..., Api],
    tmp_path: Path,
    publish_bright: Callable[[Path], object],
    make_png: Callable[..., bytes],
    picture: Any,
) -> None:
    publish_bright(tmp_path)
    api = start(tmp_path, auth="keys")
    with api.context.database.write() as session:
        made = {role: keys.create(session, role, role, None)[1] for role in ("reader", "operator", "admin")}
    who = {role: {"Authorization": f"Bearer {key}"} for role, key in made.items()}
    api.client.put("/hospitals/north", json={"name": "north"}, headers=who["admin"]).raise_for_status()
    scans = [make_png(picture), make_png(picture // 2)]
    form = {"hospital": "north", "model": "bright"}
    for scan in scans:
        api.client.post("/segment", files={"scan": scan}, data=form, headers=who["reader"]).raise_for_status()

    def kept(role: str) -> list[dict[str, str] | None]:
        query = {"order": "review", "model": "bright"}
        answer = api.client.get("/hospitals/north/observations", params=query, headers=who[role])
        rows = sorted(answer.raise_for_status().json()["observations"], key=lambda each: each["id"])
        return [each["kept"] for each in rows]

    assert kept("operator") == [None, None]
    own = {"headers": who["operator"]}
    place = api.client.post("/hospitals/north/cohorts", **own).headers["location"]
    api.client.put(f"{place}/scans/ann.png", content=scans[1], **own).raise_for_status()
    assert kept("operator") == [None, {"cohort": place.rpartition("/")[2], "scan": "ann.png"}]
    assert kept("reader") == [None, None]
    api.client.delete(place, **own).raise_for_status()
    assert kept("operator") == [None, None]


def test_look_is_of_the_hospital_s_own_answer_and_goes_with_it(api: Api) -> None:
    store_answers(api, [an_answer(1), an_answer(2)])
    (second, first) = observed_of(api)
    for hospital, number, status in (
        ("south", first["id"], 404),
        ("north", second["id"] + 1, 404),
        ("north", 2**64, 422),
        ("north", first["id"], 200),
    ):
        answer = api.client.put(f"/hospitals/{hospital}/observations/{number}/looked")
        assert answer.status_code == status, number
    assert api.client.delete("/hospitals/north/observations").status_code == 204
    with api.context.database.read() as session:
        assert list(session.scalars(select(LookedAt))) == []


def test_few_answers_have_no_rank_and_a_work_list_needs_its_model(api: Api) -> None:
    api.client.put("/hospitals/elm", json={"name": "elm"}).raise_for_status()
    serve(api, "sha256:v", "elm")
    store_answers(api, [an_answer(number, "elm", confidence=number / 10) for number in range(3)])
    found = observed_of(api, "elm", order="review", model="bright")
    assert [(each["request"], each["review"]) for each in found] == [
        (f"request-{number}", {}) for number in (2, 1, 0)
    ]
    for wrong in ("order=review", "order=review&model=bright&after=5", "order=size"):
        assert api.client.get(f"/hospitals/elm/observations?{wrong}").status_code == 422


def test_text_in_the_table_is_no_formula(api: Api) -> None:
    answer = an_answer(1)
    seen = Observed(**{**answer.observed.__dict__, "scanner": "=HYPERLINK(1)"})
    store_answers(api, [Answer(seen, "north", "anonymous", "r", "http")])
    (row,) = csv.DictReader(io.StringIO(api.client.get("/hospitals/north/observations.csv").text))
    assert row["scanner"] == "'=HYPERLINK(1)"


def test_rows_cannot_be_changed_and_expire_or_are_deleted(api: Api) -> None:
    store_answers(api, [an_answer(1), an_answer(2), an_answer(3, "south")])
    database = api.context.database
    for table in ("observation", "observed_label"):
        column = "seconds" if table == "observation" else "voxels"
        with pytest.raises(DatabaseError, match="append-only"), database.write() as session:
            session.execute(text(f"UPDATE {table} SET {column} = 0"))
    expire(database, api.settings)
    assert len(observed_of(api)) == 2
    late = api.settings.model_copy(update={"observation_days": 1e-9})
    assert api.client.delete("/hospitals/south/observations").status_code == 204
    assert (len(observed_of(api)), observed_of(api, "south")) == (2, [])
    expire(database, late)
    assert observed_of(api) == []
    with database.read() as session:
        assert list(session.scalars(select(ObservedLabel))) == []
        assert session.scalars(select(AuditRow.action).where(AuditRow.hospital == "south")).all()[-1] == (
            "observations.deleted"
        )


def test_more_than_a_transaction_deletes_expire(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.observation.rows._AT_ONCE", 3)
    store_answers(api, [an_answer(number) for number in range(8)])
    now = datetime.now(UTC)
    with api.context.database.read() as session:
        assert all(now - at < timedelta(minutes=5) for at in session.scalars(select(Observation.at)))
    expiry._expire_observations(
        api.context.database, api.settings.model_copy(update={"observation_days": 1e-9})
    )
    assert observed_of(api) == []


def test_class_is_observed_with_its_probability(
    api: Api, make_png: Callable[..., bytes], picture: Any
) -> None:
    report = api.classify(make_png(picture), hospital="north", model="dark").json()
    (found,) = observed_of(api, model="dark")
    assert found["labels"].keys() == {report["predicted"]}
    (label,) = found["labels"].values()
    assert label["confidence"] == pytest.approx(report["probabilities"][report["predicted"]])
    assert np.prod(report["shape"]) == label["voxels"]
