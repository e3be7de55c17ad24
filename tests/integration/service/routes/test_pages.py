"""Lists over HTTP, page by page: together they are the whole list, each entry once."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from model_store.artefact import Artefact
from model_store.store import Store
from service.database import Cohort, CohortScan, Hospital
from tests.helpers.service.adapted_store import publish_adapted, publish_space
from tests.helpers.service.queued import queued

Publish = Callable[..., Artefact]

HOSPITALS = [f"h{number}" for number in range(7)]


@pytest.fixture(scope="module")
def api(start: Callable[..., Any], publish_bright: Publish, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A space with its parts and an adapted version for most hospitals; cohorts, scans and jobs of one."""
    root = tmp_path_factory.mktemp("store")
    space = publish_space(root, publish_bright)
    for at, hospital in enumerate(HOSPITALS[:5]):
        publish_adapted(root, publish_bright, space, hospital, at)
    publish_bright(root, "bright.at-h0", 70, hospital="h0", role="hospital")
    api = start(root)
    now = datetime.now(UTC)
    with api.context.database.write() as session:
        for name in HOSPITALS:
            session.add(Hospital(id=name, name=name, site=None, created_at=now, updated_at=now))
        session.flush()
        for number in range(5):
            # Two have one time, so that the id decides.
            at = now - timedelta(minutes=number // 2)
            cohort = Cohort(
                id=f"{number:032x}",
                hospital="h0",
                note=None,
                created_at=at,
                expires_at=at + timedelta(days=1),
            )
            session.add(cohort)
        session.flush()
        for number in range(6):
            session.add(
                CohortScan(
                    cohort="0" * 32,
                    name=f"scan-{number}.png",
                    sha256=f"{number:064x}",
                    size=10,
                    format="png",
                    created_at=now,
                )
            )
        for number in range(9):
            made = queued(
                session,
                api.settings,
                kind="adaptation",
                hospital=HOSPITALS[number % 2],
                model="organ",
                parent="",
            )
            made.created_at = now - timedelta(minutes=number // 3)
    return api


def pages(client: httpx.Client, path: str, entries: str, limit: int, **query: Any) -> list[Any]:
    """Follow `next` to the end; no page has more than `limit` entries."""
    found: list[Any] = []
    after: str | None = None
    for _ in range(100):
        cursor = {} if after is None else {"after": after}
        answer = client.get(path, params={**query, **cursor, "limit": limit})
        assert answer.status_code == 200, answer.text
        assert len(answer.json()[entries]) <= limit
        found += answer.json()[entries]
        after = answer.json()["next"]
        if after is None:
            return found
    raise AssertionError("the pages do not end")


@pytest.mark.parametrize(
    ("path", "entries", "count"),
    [
        ("/models", "models", 6),
        ("/models/bright.at-h0", "versions", 2),
        ("/lineage", "versions", 9),
        ("/hospitals", "hospitals", 7),
        ("/jobs", "jobs", 9),
        ("/hospitals/h0/cohorts", "cohorts", 5),
        (f"/hospitals/h0/cohorts/{'0' * 32}/scans", "scans", 6),
    ],
)
@pytest.mark.parametrize("limit", [1, 2, 3, 1000])
def test_pages_together_are_the_whole_list(api: Any, path: str, entries: str, count: int, limit: int) -> None:
    whole = api.client.get(path).json()
    assert whole["next"] is None
    assert len(whole[entries]) == count
    assert pages(api.client, path, entries, limit) == whole[entries]


def test_models_and_lineage_are_filtered_by_hospital(api: Any) -> None:
    client = api.client
    for path, entries in (("/models", "models"), ("/lineage", "versions")):
        everything = client.get(path).json()[entries]
        for query, expected in (
            ({"adapted": "false"}, [each for each in everything if each["hospital"] is None]),
            ({"adapted": "true"}, [each for each in everything if each["hospital"] is not None]),
            ({"hospital": "h3"}, [each for each in everything if each["hospital"] == "h3"]),
            ({"hospital": "h3", "adapted": "false"}, []),
        ):
            assert client.get(path, params=query).json()[entries] == expected
            assert pages(client, path, entries, 1, **query) == expected
        assert {each["hospital"] for each in everything} == {None, *HOSPITALS[:5]}


def test_jobs_of_one_hospital_are_paged_too(api: Any) -> None:
    whole = api.client.get("/jobs", params={"hospital": "h1"}).json()["jobs"]
    assert [job["hospital"] for job in whole] == ["h1"] * 4
    assert pages(api.client, "/jobs", "jobs", 3, hospital="h1") == whole


def test_pages_that_were_begun_end_with_what_was_published_meanwhile(
    api: Any, publish_bright: Publish
) -> None:
    first = api.client.get("/lineage", params={"limit": 2}).json()
    rest = pages(api.client, "/lineage", "versions", 2, after=first["next"])
    store = Store(api.settings.store)
    space = store.open("bright", verify=False)
    added = publish_adapted(Path(store.root), publish_bright, space, "h6", 9)
    later = pages(api.client, "/lineage", "versions", 2, after=first["next"])
    assert later[: len(rest)] == rest
    assert [f"{each['name']}@{each['version']}" for each in later[len(rest) :]] == [str(added)]


@pytest.mark.parametrize(
    ("path", "after", "status"),
    [
        ("/lineage", f"sha256:{'0' * 64}", 422),
        ("/lineage", "brain", 422),
        ("/models", "no/name", 422),
        ("/models/bright.at-h0", "x", 422),
        ("/jobs", "f" * 32, 404),
        ("/jobs", "x", 422),
        ("/hospitals", "a/b", 422),
        ("/hospitals/h0/cohorts", "f" * 32, 404),
        ("/models", "\x00", 422),
    ],
)
def test_unknown_cursor_is_refused(api: Any, path: str, after: str, status: int) -> None:
    answer = api.client.get(path, params={"after": after})
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")


@pytest.mark.parametrize("limit", [0, 1001, "many"])
def test_limit_out_of_bounds_is_refused(api: Any, limit: object) -> None:
    assert api.client.get("/lineage", params={"limit": limit}).status_code == 422
