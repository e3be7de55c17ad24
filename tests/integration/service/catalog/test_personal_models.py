"""Personal models (FedBN, FedPer, FedRep) over HTTP: a member gets its own model, others the global one."""

from __future__ import annotations

import io
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from model_store.artefact import Artefact
from model_store.manifest import Lineage, NetworkSpec, PersonalModelsManifest
from model_store.store import Store
from service.database import Hospital
from service.identity import keys
from service.kinds import KINDS
from tests.helpers.service.network_input import file_of

Publish = Callable[..., Artefact]

NETWORK = NetworkSpec(name="threshold", arguments={"slope": 0.5})
# By part: what is brighter than this is marked.
THRESHOLDS = {"global": 90, "aster": 40, "birch": 150}
PIXELS = np.arange(0, 256, 1, dtype=np.uint8).repeat(4).reshape(32, 32)


def publish(root: Path, publish_bright: Publish, name: str, *roles: str) -> None:
    parts = {
        role: publish_bright(
            root,
            f"{name}.{role}",
            at=THRESHOLDS[role],
            part_of=name,
            role="global" if role == "global" else "inside",
            site=None if role == "global" else role,
            network=NETWORK,
        )
        for role in roles
    }
    digests = {role: part.digest for role, part in parts.items()}
    manifest = PersonalModelsManifest(
        name=name,
        task=parts[roles[0]].manifest.task,
        lineage=Lineage(method="fedbn", run="r", sites=("aster", "birch", "cedar"), rounds=2, seed=0),
        global_model=digests.pop("global", None),
        inside=digests,
    )
    Store(root).publish(manifest, {})


@pytest.fixture(scope="module")
def api(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory, publish_bright: Publish) -> Any:
    """`whole` with a global model, `own` without one, `single` with one site; `cedar` exported no model."""
    root = tmp_path_factory.mktemp("store")
    publish(root, publish_bright, "whole", "global", "aster", "birch")
    publish(root, publish_bright, "own", "aster", "birch")
    publish(root, publish_bright, "single", "aster")
    api = start(root)
    for name, site in (("at-aster", "aster"), ("at-cedar", "cedar"), ("outside", None)):
        assert api.client.put(f"/hospitals/{name}", json={"name": name, "site": site}).status_code == 201
    return api


@pytest.mark.parametrize(
    ("asked", "role", "header"),
    [
        ({"model": "whole", "hospital": "at-aster"}, "aster", "member; site=aster"),
        ({"model": "own", "hospital": "at-aster"}, "aster", "member; site=aster"),
        ({"model": "whole", "personalization": "member", "site": "birch"}, "birch", "member; site=birch"),
        ({"model": "own", "personalization": "member", "site": "birch"}, "birch", "member; site=birch"),
        ({"model": "whole", "hospital": "outside"}, "global", "global"),
        ({"model": "whole", "hospital": "at-cedar"}, "global", "global"),
        ({"model": "whole"}, "global", "global"),
    ],
)
def test_segment_returns_the_mask_of_the_site_or_global_model(
    api: Any, asked: dict[str, str], role: str, header: str
) -> None:
    answer = api.segment(file_of(PIXELS, "PNG"), **asked)
    assert answer.status_code == 200, answer.text
    assert answer.headers["locum-personalization"] == header
    mask = np.asarray(Image.open(io.BytesIO(answer.content)))
    np.testing.assert_array_equal(mask != 0, THRESHOLDS[role] < PIXELS)


@pytest.mark.parametrize(
    ("asked", "sites"),
    [
        ({"model": "own", "hospital": "outside"}, ["aster", "birch"]),
        ({"model": "own", "hospital": "at-cedar"}, ["aster", "birch"]),
        ({"model": "own", "personalization": "global"}, ["aster", "birch"]),
        ({"model": "own"}, ["aster", "birch"]),
        # The model of the only site is still that site's own.
        ({"model": "single", "hospital": "outside"}, ["aster"]),
    ],
)
def test_segment_without_a_global_model_is_422_with_the_sites(
    api: Any, asked: dict[str, str], sites: list[str]
) -> None:
    answer = api.segment(file_of(PIXELS, "PNG"), **asked)
    assert answer.status_code == 422
    problem = answer.json()
    assert problem["type"] == "urn:locum:problem:no-global-model"
    assert problem["choices"] == sites
    assert f"'{asked['model']}@1' has no global model, only those of: {', '.join(sites)}" in problem["detail"]


def test_segment_with_a_site_without_a_model_is_404(api: Any) -> None:
    answer = api.segment(file_of(PIXELS, "PNG"), model="own", personalization="member", site="cedar")
    assert (answer.status_code, answer.json()["choices"]) == (404, ["aster", "birch"])


def test_personal_models_are_listed_with_their_parts(api: Any) -> None:
    listed = {model["name"]: model for model in api.client.get("/models").json()["models"]}
    assert list(listed) == ["own", "single", "whole"]
    assert {model["kind"] for model in listed.values()} == {"personal-models"}
    assert listed["own"]["sites"] == ["aster", "birch", "cedar"]
    # Ditto, pFedMe and FedSoup publish a global model beside the members' own, FedPer none.
    assert listed["own"]["personalizations"] == ["auto", "member"]
    assert (listed["own"]["adaptable"], listed["own"]["summary"]) == (False, KINDS["personal-models"].summary)
    assert (listed["own"]["masks"], listed["whole"]["masks"]) == ("none", "required")
    assert listed["whole"]["personalizations"] == ["auto", "hospital", "member", "global"]
    parts = {name: api.client.get(f"/models/{name}/versions/1").json()["parts"] for name in ("own", "whole")}
    assert [part["role"] for part in parts["own"]] == ["aster", "birch"]
    assert [part["reference"] for part in parts["whole"]] == [
        "whole.global@1",
        "whole.aster@1",
        "whole.birch@1",
    ]


def test_adapting_personal_models_without_a_global_one_is_422(api: Any) -> None:
    body = {"scans": ("scan", file_of(PIXELS, "PNG"))}
    job = api.client.post("/hospitals/outside/adaptations", files=body, data={"model": "own"})
    scan = api.segment(file_of(PIXELS, "PNG"), model="own", personalization="scan")
    for answer in (job, scan):
        assert (answer.status_code, answer.json()["type"]) == (422, "urn:locum:problem:not-adaptable")
        assert "'own@1' is of kind personal-models" in answer.json()["detail"]
    # What can be adapted is named, with the command that makes it.
    assert "a routing-space: a global model" in job.json()["detail"]
    # With a global model, by masks alone: a form has no place for them.
    whole = api.client.post("/hospitals/outside/adaptations", files=body, data={"model": "whole"})
    assert (whole.status_code, whole.json()["type"]) == (422, "urn:locum:problem:masks-missing")


def test_key_of_another_hospital_is_answered_by_a_members_model_once_it_is_shared(
    start: Callable[..., Any], tmp_path: Path, publish_bright: Publish
) -> None:
    publish(tmp_path, publish_bright, "whole", "global", "aster", "birch")
    api = start(tmp_path, auth="keys")
    now = datetime.now(UTC)
    with api.context.database.write() as session:
        for name, site in (("at-birch", "birch"), ("outside", None)):
            session.add(Hospital(id=name, name=name, site=site, created_at=now, updated_at=now))
    with api.context.database.write() as session:
        secrets = {name: keys.create(session, name, "admin", name)[1] for name in ("at-birch", "outside")}

    def ask(who: str, **fields: str) -> httpx.Response:
        scan = {"scan": ("scan", file_of(PIXELS, "PNG"))}
        headers = {"Authorization": f"Bearer {secrets[who]}"}
        answer: httpx.Response = api.client.post("/segment", files=scan, data=fields, headers=headers)
        return answer

    asked = {"model": "whole", "personalization": "member", "site": "birch"}
    assert ask("at-birch", **asked).headers["locum-personalization"] == "member; site=birch"
    for more in ({}, {"hospital": "outside"}):
        refused = ask("outside", **asked, **more)
        assert (refused.status_code, refused.json()["type"]) == (403, "urn:locum:problem:site-not-shared")
        assert refused.json()["choices"] == []
    described = ("/models/whole.birch", "/models/whole.birch/versions/1")

    def read(who: str, path: str) -> int:
        headers = {"Authorization": f"Bearer {secrets[who]}"}
        status: int = api.client.get(path, headers=headers).status_code
        return status

    # Its manifest describes birch's patients.
    assert [read("outside", path) for path in described] == [404, 404]
    assert [read("at-birch", path) for path in described] == [200, 200]
    assert read("outside", "/models/whole.global") == read("outside", "/models/whole") == 200
    # Its own default is the global model, and a part of the composite is not offered.
    assert ask("outside", model="whole").headers["locum-personalization"] == "global"
    assert ask("outside", model="whole.birch@1").status_code == 422
    shared = api.client.put(
        "/hospitals/at-birch",
        json={"name": "at-birch", "site": "birch", "shares_model": True},
        headers={"Authorization": f"Bearer {secrets['at-birch']}"},
    )
    assert shared.status_code == 200
    assert [read("outside", path) for path in described] == [200, 200]
    assert ask("outside", **asked).headers["locum-personalization"] == "member; site=birch"
