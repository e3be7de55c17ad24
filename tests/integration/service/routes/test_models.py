"""`/models` over HTTP, on a real store."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import pytest

from model_store.artefact import Artefact
from model_store.manifest import GRAPH, ImportedWeights, Lineage, NetworkSpec, RoutingSpaceManifest
from model_store.store import Store
from service.database import Hospital, Role
from service.identity import keys
from tests.helpers.service.adapted_store import FIRST, publish_adapted, publish_space

Publish = Callable[..., Artefact]

NETWORK = NetworkSpec(name="threshold", arguments={"slope": 0.5})


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory, publish_bright: Publish) -> Artefact:
    """A store with a routing space `tumour` (sites aster, birch), and two versions of `bright`."""
    root = tmp_path_factory.mktemp("store")
    parts = {
        role: publish_bright(root, f"tumour.{role}", at=at, part_of="tumour", role="inside", network=NETWORK)
        for role, at in (("global", 90), ("aster", 91), ("birch", 92))
    }
    bright = publish_bright(root, "bright")
    publish_bright(root, "bright", at=80)
    manifest = RoutingSpaceManifest(
        name="tumour",
        task=bright.manifest.task,
        global_model=parts["global"].digest,
        inside={site: parts[site].digest for site in ("aster", "birch")},
        lineage=Lineage(method="iop-fl", run="r", sites=("aster", "birch"), rounds=3, seed=0),
    )
    return Store(root).publish(manifest, {})


@pytest.fixture(scope="module")
def root(space: Artefact) -> Path:
    return space.path.parents[1]


@pytest.fixture(scope="module")
def api(start: Callable[..., Any], root: Path) -> Any:
    return start(root)


def test_models_list_offered_models_without_parts(api: Any, space: Artefact) -> None:
    answer = api.client.get("/models").json()
    assert answer["unreadable"] == []
    assert [model["name"] for model in answer["models"]] == ["bright", "tumour"]
    bright, tumour = answer["models"]
    assert (bright["kind"], bright["latest"]["version"], bright["labels"]) == ("model", 2, ["bright"])
    assert bright["answers"] == "/segment"
    assert (tumour["kind"], tumour["sites"]) == ("routing-space", ["aster", "birch"])
    assert tumour["latest"]["digest"] == space.digest


def test_models_list_a_classifier_with_its_route_and_classes(
    start: Callable[..., Any], tmp_path: Path, publish_dark: Any
) -> None:
    publish_dark(tmp_path)
    (dark,) = start(tmp_path).client.get("/models").json()["models"]
    assert (dark["answers"], dark["labels"]) == ("/classify", ["dark", "bright"])
    assert (dark["adaptable"], dark["masks"], dark["summary"]) == (False, "none", "answers as it is")


def test_model_lists_its_versions(api: Any) -> None:
    answer = api.client.get("/models/bright").json()
    assert [version["version"] for version in answer["versions"]] == [1, 2]
    assert answer["latest"] == answer["versions"][1]
    assert answer["part_of"] is None
    assert api.client.get("/models/tumour.aster").json()["part_of"] == "tumour"


def test_version_shows_lineage_parts_and_descendants(api: Any, space: Artefact) -> None:
    answer = api.client.get("/models/tumour/versions/1").json()
    assert answer["digest"] == space.digest
    assert answer["manifest"]["lineage"]["method"] == "iop-fl"
    assert {part["role"]: part["reference"] for part in answer["parts"]} == {
        "global": "tumour.global@1",
        "aster": "tumour.aster@1",
        "birch": "tumour.birch@1",
    }
    part = api.client.get("/models/tumour.birch/versions/1").json()
    assert part["descendants"] == ["tumour@1"]
    assert part["manifest"]["network"]["arguments"] == {"slope": 0.5}


@pytest.mark.parametrize("path", ["/models/heart", "/models/bright/versions/9", "/models/heart/versions/1"])
def test_absent_model_or_version_is_a_404_problem(api: Any, path: str) -> None:
    answer = api.client.get(path)
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["type"] == "urn:locum:problem:artefact-not-found"


@pytest.mark.parametrize(
    "path", ["/models/..%2Fetc", "/models/bright/versions/zero", "/models/bright/versions/0"]
)
def test_invalid_model_name_is_a_problem(api: Any, path: str) -> None:
    answer = api.client.get(path)
    assert answer.status_code in (404, 422)
    assert answer.headers["content-type"] == "application/problem+json"


def test_withdrawal_is_shown_at_once_and_flags_descendants(
    start: Callable[..., Any], publish_bright: Publish, tmp_path: Path
) -> None:
    first = publish_bright(tmp_path)
    second = publish_bright(tmp_path, at=80)
    child = Lineage(method="by-hand", run="t", sites=(), rounds=0, seed=0, parents=(second.digest,))
    publish_bright(
        tmp_path, "child", at=70, lineage=child, network=NetworkSpec(name="threshold", arguments={})
    )
    client = start(tmp_path).client
    assert client.get("/models/bright").json()["latest"]["version"] == 2
    Store(tmp_path).withdraw("bright@2", actor="ada", reason="trained on the wrong labels")
    answer = client.get("/models/bright").json()
    assert answer["latest"]["digest"] == first.digest
    assert [version["withdrawn"] and version["withdrawn"]["reason"] for version in answer["versions"]] == [
        None,
        "trained on the wrong labels",
    ]
    assert client.get("/models/child").json()["versions"][0]["flagged"] == ["bright@2"]
    # Its manifest can still be read: history keeps its answers.
    assert client.get("/models/bright/versions/2").json()["withdrawn"]["actor"] == "ada"
    Store(tmp_path).withdraw("bright@1", actor="ada", reason="so was this")
    assert client.get("/models/bright").json()["latest"] is None


def test_lineage_lists_what_each_version_was_made_from(
    start: Callable[..., Any], publish_bright: Publish, tmp_path: Path
) -> None:
    space = publish_space(tmp_path, publish_bright)
    child = publish_adapted(tmp_path, publish_bright, space, "north", FIRST)
    lost = Lineage(method="by-hand", run="t", sites=(), rounds=0, seed=0, parents=(f"sha256:{'0' * 64}",))
    publish_bright(tmp_path, "orphan", at=70, lineage=lost, network=NETWORK)
    began = ImportedWeights(file="w.pth", sha256=f"sha256:{'1' * 64}", origin="eyes 1.2", licence="MIT")
    publish_bright(tmp_path, "eyes", at=75, lineage=lost.model_copy(update={"weights": began}))
    client = start(tmp_path).client
    found = {f"{each['name']}@{each['version']}": each for each in client.get("/lineage").json()["versions"]}
    assert set(found) == {
        "bright@1",
        "bright.global@1",
        "bright.aster@1",
        "bright.at-north@1",
        "orphan@1",
        "eyes@1",
    }
    assert (found["bright@1"]["parents"], found["bright@1"]["kind"]) == ([], "routing-space")
    assert found["bright@1"]["parts"] == ["bright.global@1", "bright.aster@1"]
    assert found["bright.aster@1"]["part_of"] == "bright"
    assert found[str(child)]["parents"] == ["bright@1"]
    assert (found[str(child)]["hospital"], found[str(child)]["method"]) == ("north", "iop-fl-routing")
    assert found["orphan@1"]["parents"] == [f"sha256:{'0' * 64}"]
    assert found["orphan@1"]["weights"] is None
    assert found["eyes@1"]["weights"] == f"eyes 1.2; licence MIT; sha256:{'1' * 64}"
    assert all(each["withdrawn"] is None and each["flagged"] == [] for each in found.values())
    Store(tmp_path).withdraw("bright@1", actor="ada", reason="trained on the wrong labels")
    found = {each["name"]: each for each in client.get("/lineage").json()["versions"]}
    assert found["bright"]["withdrawn"]["reason"] == "trained on the wrong labels"
    assert found["bright.at-north"]["flagged"] == ["bright@1"]


def test_lineage_leaves_an_unreadable_version_out(
    start: Callable[..., Any], publish_bright: Publish, tmp_path: Path
) -> None:
    publish_bright(tmp_path)
    (publish_bright(tmp_path, "broken", at=80).path / "manifest.json").write_text("{")
    (found,) = start(tmp_path).client.get("/lineage").json()["versions"]
    assert found["name"] == "bright"


REPORT = b"<!doctype html><p>curves of every member</p>"


@pytest.fixture(scope="module")
def reported(
    start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory, publish_bright: Publish
) -> tuple[Any, dict[str, str]]:
    """`bright@1` with a report and `bright@2` without one; a key per role for all hospitals, and `narrow`, an
    operator's of one hospital.
    """
    root = tmp_path_factory.mktemp("store")
    Store(root).attach_report(publish_bright(root), REPORT)
    publish_bright(root, at=80)
    api = start(root, auth="keys")
    made: dict[str, str] = {}
    with api.context.database.write() as session:
        now = datetime.now(UTC)
        session.add(Hospital(id="north", name="North", site=None, created_at=now, updated_at=now))
        session.flush()
        for role in get_args(Role):
            made[role] = keys.create(session, role, role, None)[1]
        made["narrow"] = keys.create(session, "narrow", "admin", "north")[1]
    return api, made


@pytest.mark.parametrize(
    ("key", "status"),
    [
        ("reader", 403),
        ("operator", 200),
        ("approver", 200),
        ("admin", 200),
        ("federation", 200),
        ("narrow", 404),
    ],
)
def test_report_is_for_operators_of_all_hospitals(
    reported: tuple[Any, dict[str, str]], key: str, status: int
) -> None:
    api, made = reported
    sent = {"Authorization": f"Bearer {made[key]}"}
    answer = api.client.get("/models/bright/versions/1/report", headers=sent)
    assert answer.status_code == status
    first, second = api.client.get("/lineage", headers=sent).json()["versions"]
    # The listing offers it to those that may read it.
    assert first["report"] is (status == 200)
    assert second["report"] is False
    if status == 200:
        assert answer.content == REPORT
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert answer.headers["cache-control"] == "no-store"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src" not in policy
        missing = api.client.get("/models/bright/versions/2/report", headers=sent)
        assert (missing.status_code, "has no report" in missing.json()["detail"]) == (404, True)


def test_models_are_listed_despite_a_damaged_file(
    start: Callable[..., Any], publish_bright: Publish, tmp_path: Path
) -> None:
    (publish_bright(tmp_path).path / GRAPH).unlink()
    assert [m["name"] for m in start(tmp_path).client.get("/models").json()["models"]] == ["bright"]


def test_model_published_after_start_is_listed(
    start: Callable[..., Any], publish_bright: Publish, tmp_path: Path
) -> None:
    client = start(tmp_path / "not-there-yet").client
    assert client.get("/models").json() == {"models": [], "unreadable": [], "next": None}
    publish_bright(tmp_path / "not-there-yet")
    assert [model["name"] for model in client.get("/models").json()["models"]] == ["bright"]


def test_unreadable_version_is_503_with_the_reason(
    start: Callable[..., Any], publish_bright: Publish, tmp_path: Path
) -> None:
    publish_bright(tmp_path, "bright")
    publish_bright(tmp_path, "bright", at=80)
    (tmp_path / "bright" / "2.withdrawn.json").write_text("{")
    api = start(tmp_path)
    assert api.client.get("/models/bright/versions/1").status_code == 200
    answer = api.client.get("/models/bright/versions/2")
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:locum:problem:artefact-damaged")
    assert "its tombstone 2.withdrawn.json cannot be read" in answer.json()["detail"]
    assert api.client.get("/models/bright/versions/3").status_code == 404
