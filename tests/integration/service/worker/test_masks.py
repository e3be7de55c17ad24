"""A hospital's model by a few masks over HTTP, of a plain model, personal models and a routing space."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import nibabel as nib
import numpy as np
import onnxruntime
import pytest
import torch

from model_store.manifest import (
    GRAPH,
    WEIGHTS,
    Lineage,
    ModelManifest,
    PersonalModelsManifest,
)
from model_store.preprocessing import prepare
from model_store.store import Store
from personalization.networks import build
from personalization.state import from_safetensors
from service.errors import JobCancelled, LeaseLost
from service.jobs import records
from service.jobs.files import JobFolder
from service.worker import masks
from service.worker.runner import run_job
from tests.helpers.service.independent_dice import mean_dice
from tests.helpers.service.joining_federation import drawn_scans
from tests.helpers.service.routing_federation import ORGAN, volume

PLAIN, PERSONAL, SPACE = "plain", "own", "organ"
OPTIONS = {"steps": 30, "folds": 3}
SCANS = drawn_scans(5, "heath")
UNDRAWN = "patient-504.nii.gz"


def publish_beside(root: Path) -> None:
    """A plain model and personal models of the same global model as the space's."""
    store = Store(root)
    shared = store.open("organ.global")
    manifest = shared.manifest
    assert isinstance(manifest, ModelManifest)
    files = {name: shared.read(name) for name in (WEIGHTS, GRAPH)}
    lineage = Lineage(method="fedavg", run="test", sites=("aster", "birch"), rounds=1, seed=0)
    plain = manifest.model_copy(update={"name": PLAIN, "part_of": None, "lineage": lineage, "files": {}})
    made = store.publish(plain, files)
    part = {"part_of": PERSONAL, "files": {}, "lineage": lineage}
    parts = {
        name: store.publish(manifest.model_copy(update={**part, "name": f"{PERSONAL}.{name}"}), files)
        for name in ("global", "aster")
    }
    store.publish(
        PersonalModelsManifest(
            name=PERSONAL,
            task=made.manifest.task,
            lineage=lineage,
            global_model=parts["global"].digest,
            inside={"aster": parts["aster"].digest},
        ),
        {},
    )


@pytest.fixture(scope="module")
def api(start: Callable[..., Any], routing_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    store = shutil.copytree(routing_store, tmp_path_factory.mktemp("copy") / "store")
    publish_beside(store)
    running = start(store)
    running.client.put("/hospitals/dune", json={"name": "dune"})
    return running


def upload(api: Any, drawn: dict[str, tuple[bytes, bytes]], without: tuple[str, ...] = ()) -> str:
    place: str = api.client.post("/hospitals/dune/cohorts").headers["location"]
    for name, (scan, mask) in drawn.items():
        assert api.client.put(f"{place}/scans/{name}", content=scan).status_code == 201
        if name not in without:
            answer = api.client.put(f"{place}/scans/{name}/mask?model=organ", content=mask)
            assert answer.status_code == 201, answer.text
    return place.rpartition("/")[2]


def ask(api: Any, cohort: str, model: str = PLAIN, **body: Any) -> httpx.Response:
    asked = {"cohort": cohort, "model": model, **body}
    answer: httpx.Response = api.client.post("/hospitals/dune/adaptations", json=asked)
    return answer


def finished(api: Any, job: str) -> dict[str, Any]:
    run_job(job, api.settings)
    found: dict[str, Any] = api.client.get(f"/jobs/{job}").json()
    return found


def problem(answer: httpx.Response) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    return answer.status_code, answer.json()["type"].removeprefix("urn:locum:problem:")


@dataclass
class Fitted:
    """The cohort of four scans with masks and one without, and the finished job of the plain model."""

    api: Any
    cohort: str
    job: dict[str, Any]


@pytest.fixture(scope="module")
def fitted(api: Any) -> Fitted:
    cohort = upload(api, SCANS, without=(UNDRAWN,))
    accepted = ask(api, cohort, options=OPTIONS)
    assert accepted.status_code == 202, accepted.text
    return Fitted(api, cohort, finished(api, accepted.json()["id"]))


def test_masks_are_the_preset_of_a_plain_model(fitted: Fitted) -> None:
    job, result = fitted.job, fitted.job["result"]
    assert job["state"] == "succeeded", job["reason"]
    assert (job["options"]["preset"], job["options"]["trains"]) == ("masks", "all")
    assert [epoch["epoch"] for epoch in job["epochs"]] == [1, 2, 3]
    assert len({epoch["loss"] for epoch in job["epochs"]}) == 3
    assert (result["masks"], result["patients"], result["folds"]) == (4, 4, 3)
    dice = result["held_out_dice"]
    assert dice[str(result["weight"])] == max(dice.values()) > dice["0.0"]
    checks = {check["name"]: check for check in job["gate"]["checks"]}
    assert checks["held_out_gain"]["value"] == pytest.approx(result["held_out"]["change"], abs=1e-6)
    assert checks["gain_bound"]["value"] == pytest.approx(result["held_out"]["at_least"], abs=1e-6)
    assert result["held_out"]["patients"] == 4
    assert job["gate"]["passed"], job["gate"]
    assert "On 4 patients, each of whom was held out" in job["gate"]["summary"][0]


def test_the_dice_that_the_gate_states_is_that_of_the_answers(fitted: Fitted, tmp_path: Path) -> None:
    pairs = [
        (fitted.api.segment(scan, model=PLAIN, personalization="global", output="nifti").content, mask)
        for name, (scan, mask) in SCANS.items()
        if name != UNDRAWN
    ]
    stated = fitted.job["result"]["held_out_dice"]["0.0"]
    assert stated == pytest.approx(mean_dice(tmp_path, pairs), abs=1e-6)


def test_candidate_of_masks_is_served_after_its_assignment(fitted: Fitted) -> None:
    api = fitted.api
    artefact = api.store.open("plain.at-dune@1")
    manifest = artefact.manifest
    assert (manifest.hospital, manifest.lineage.method) == ("dune", masks.METHOD)
    assert manifest.lineage.parents == (api.store.open("plain").digest,)
    network = build("unet", **manifest.network.arguments)
    network.load_state_dict(from_safetensors(artefact.read(WEIGHTS)))
    slices = prepare(volume("heath", 504)[0], ORGAN).slices
    session = onnxruntime.InferenceSession(artefact.read(GRAPH))
    (probabilities,) = session.run(["probabilities"], {"image": slices})
    with torch.no_grad():
        expected = torch.softmax(network.eval()(torch.from_numpy(slices.copy())), dim=1)
    np.testing.assert_allclose(probabilities, expected.numpy(), atol=1e-5)
    body = {"version": "plain.at-dune@1", "actor": "ines", "reason": "looked"}
    made = api.client.put("/hospitals/dune/serving/plain", json=body, headers={"If-None-Match": "*"})
    assert made.status_code == 200, made.text
    answer = api.segment(SCANS[UNDRAWN][0], model="plain", hospital="dune", output="json")
    assert answer.headers["locum-personalization"] == "hospital; hospital=dune"


def test_card_of_masks_shows_the_held_out_dice_by_weight(fitted: Fitted) -> None:
    page = fitted.api.client.get(f"/jobs/{fitted.job['id']}/card").text
    for said in ("Held-out masks", "0: the global model", "taken", "each of whom was held out"):
        assert said in page
    assert page.count("data:image/png;base64,") == 2  # the scan without a mask, before and after


@pytest.mark.parametrize("model", [PERSONAL, SPACE])
def test_auto_stands_for_masks_where_the_cohort_has_them(fitted: Fitted, model: str) -> None:
    accepted = ask(fitted.api, fitted.cohort, model)
    assert accepted.json()["options"]["preset"] == "masks"
    fitted.api.client.delete(f"/jobs/{accepted.json()['id']}")


@pytest.mark.parametrize("model", [PERSONAL, SPACE])
def test_masks_of_another_kind_make_the_same_network_from_the_same_global_model(
    fitted: Fitted, model: str
) -> None:
    job = finished(
        fitted.api, ask(fitted.api, fitted.cohort, model, options={"preset": "masks", **OPTIONS}).json()["id"]
    )
    assert job["result"]["held_out_dice"] == fitted.job["result"]["held_out_dice"]
    made, first = (fitted.api.store.open(f"{name}.at-dune") for name in (model, PLAIN))
    assert made.read(WEIGHTS) == first.read(WEIGHTS)


def test_auto_without_enough_masks_says_why_they_are_not_used(api: Any) -> None:
    _, *others = SCANS
    accepted = ask(api, upload(api, SCANS, without=tuple(others)), SPACE)
    assert accepted.json()["options"]["preset"] == "auto"
    (warning,) = accepted.json()["warnings"]
    assert warning.startswith("the masks of the cohort are not used: masks of at least 2 patients")
    none = ask(api, upload(api, SCANS, without=tuple(SCANS)), SPACE)
    assert (none.json()["options"]["preset"], none.json()["warnings"]) == ("auto", [])
    named = ask(api, upload(api, SCANS), SPACE, options={"epochs": 3})
    assert named.json()["options"]["preset"] == "auto"  # what masks do not have
    for answer in (accepted, none, named):
        api.client.delete(f"/jobs/{answer.json()['id']}")


def test_masks_refuse_what_they_cannot_learn_from(api: Any) -> None:
    _, *others = SCANS
    by_masks = {"options": {"preset": "masks"}}
    none = ask(api, upload(api, SCANS, without=tuple(SCANS)), **by_masks)
    assert problem(none) == (422, "masks-missing")
    assert "no scan of the cohort has a mask" in none.json()["detail"]
    few = ask(api, upload(api, SCANS, without=tuple(others)), **by_masks)
    assert problem(few) == (422, "masks-missing")
    assert "found 1 among 1 masks of 1 patients" in few.json()["detail"]
    foreign = ask(api, upload(api, SCANS), options={"preset": "paper"})
    assert problem(foreign) == (422, "not-adaptable")
    assert "models of members to weigh" in foreign.json()["detail"]


def test_masks_of_a_class_that_the_model_does_not_have_are_refused(api: Any) -> None:
    place = api.client.post("/hospitals/dune/cohorts").headers["location"]
    for name, (scan, mask) in drawn_scans(2).items():
        image = nib.Nifti1Image.from_bytes(gzip.decompress(mask))
        other = nib.Nifti1Image(np.asarray(image.dataobj).astype(np.uint8) * 7, image.affine).to_bytes()
        api.client.put(f"{place}/scans/{name}", content=scan)
        assert problem(api.client.put(f"{place}/scans/{name}/mask?model=plain", content=other)) == (
            422,
            "task-error",
        )
        api.client.put(f"{place}/scans/{name}/mask", content=other)
    refused = ask(api, place.rpartition("/")[2], options={"preset": "masks"})
    assert problem(refused) == (422, "mask-mismatch")
    assert "patient-500" in refused.json()["detail"]


@pytest.mark.parametrize("fold", [1, 3])
def test_killed_fit_resumes_to_the_same_weights(
    fitted: Fitted, fold: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    api, dead = fitted.api, []
    job = ask(api, fitted.cohort, options=OPTIONS).json()["id"]
    write = JobFolder.write

    def dies(self: JobFolder, name: str, content: bytes) -> None:
        write(self, name, content)
        if name == JobFolder.CHECKPOINT:
            dead.append(name)
            if len(dead) == fold:
                raise LeaseLost("as if the process were gone")

    with monkeypatch.context() as patched:
        patched.setattr(JobFolder, "write", dies)
        run_job(job, api.settings)
    assert api.client.get(f"/jobs/{job}").json()["state"] == "running"
    with api.context.database.write() as session:
        records.get(session, job).lease_until = records.get(session, job).created_at
    found = finished(api, job)
    assert found["attempt"] == 2
    timeless = {key: value for key, value in found["result"].items() if key != "milliseconds"}
    assert timeless == {k: v for k, v in fitted.job["result"].items() if k != "milliseconds"}
    assert [epoch["epoch"] for epoch in found["epochs"]] == [1, 2, 3]
    first, second = api.store.open("plain.at-dune@1"), api.store.open("plain.at-dune")
    assert second.version > first.version
    assert first.read(WEIGHTS) == second.read(WEIGHTS)


def test_cancelled_fit_publishes_nothing(fitted: Fitted, monkeypatch: pytest.MonkeyPatch) -> None:
    api = fitted.api
    job = ask(api, fitted.cohort, options=OPTIONS).json()["id"]
    before = len(api.store.versions.of("plain.at-dune"))
    fit = masks.fit

    def cancelled(*given: Any, check_cancelled: Callable[[], None], **more: Any) -> Any:
        api.client.delete(f"/jobs/{job}")

        def check() -> None:
            # The heartbeat reads the cancellation within seconds; this asks the record itself.
            if api.client.get(f"/jobs/{job}").json()["state"] == "cancelling":
                raise JobCancelled("cancelled while fitting")
            check_cancelled()

        return fit(*given, check_cancelled=check, **more)

    monkeypatch.setattr(masks, "fit", cancelled)
    found = finished(api, job)
    assert found["state"] == "cancelled"
    assert len(api.store.versions.of("plain.at-dune")) == before


def test_masks_that_teach_nothing_keep_the_global_model(api: Any) -> None:
    """A rate at which the network forgets: no share of the fine-tuned weights is better."""
    cohort = upload(api, drawn_scans(4))
    job = finished(api, ask(api, cohort, options=OPTIONS | {"learning_rate": 1.0}).json()["id"])
    assert (job["state"], job["result"]["weight"]) == ("fell_back", 0.0)
    assert "nothing was better than the global model" in job["reason"]
    assert not job["gate"]["passed"]
    # The card says first what to do, and what Dice is in percent.
    verdict, *others = job["sections"]
    assert verdict["sentences"][:2] == [
        "Nothing has to be done: the global model goes on to answer.",
        "To get a better version, draw masks on more scans, and adapt again.",
    ]
    assert verdict["sentences"][-1].startswith("It can only be made to answer by an override")
    gain = next(row for row in verdict["body"]["rows"] if row["meaning"].startswith("change of Dice"))
    assert (gain["found"], gain["limit"]) == ("+0.0 points", "≥ +1.0 points")
    table = next(each for each in others if each["title"] == "Held-out masks")
    assert all(row["cells"][0].endswith(" %") for row in table["body"]["rows"])
    made, shared = api.store.open("plain.at-dune"), api.store.open("plain")
    assert made.read(WEIGHTS) == shared.read(WEIGHTS)


def test_masks_of_other_scans_are_refused_before_a_fit(api: Any) -> None:
    scans = drawn_scans(4, "aster")
    (one, (first, a)), (other, (second, b)), *_ = scans.items()
    cohort = upload(api, {**scans, one: (first, b), other: (second, a)})
    job = finished(api, ask(api, cohort, options=OPTIONS).json()["id"])
    assert job["state"] == "failed"
    assert "the masks of 2 scans seem to belong to other scans" in job["reason"]
    assert "upload each mask beside its own scan" in job["reason"]
    job = finished(api, ask(api, cohort, options={**OPTIONS, "steps": 2, "unlike": "include"}).json()["id"])
    assert job["state"] in ("succeeded", "fell_back")
    assert any("they are used, by option unlike=include" in warning for warning in job["warnings"])
