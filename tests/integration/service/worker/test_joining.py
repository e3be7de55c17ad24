"""A hospital joins a cross-attention over HTTP: scans and masks in, a version of its own out."""

from __future__ import annotations

import gzip
import io
import re
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
from numpy.typing import NDArray
from PIL import Image

from model_store.manifest import GRAPH, WEIGHTS, CrossAttentionManifest, ModelManifest
from model_store.preprocessing import prepare
from personalization.networks import FedOapUNet, build
from personalization.state import from_safetensors
from service.errors import AdaptationRejected, LeaseLost
from service.jobs import records
from service.jobs.files import JobFolder
from service.prediction.overlay import COLOURS
from service.worker import cross_attention
from service.worker.attempt import Attempt
from service.worker.runner import run_job
from tests.helpers.service.independent_dice import mean_dice
from tests.helpers.service.joining_federation import TUMOUR, drawn_scans
from tests.helpers.service.routing_federation import volume

SOURCES = ("own", "aster", "birch")
# Enough for a candidate that its gate lets pass, whatever kernels a processor gets.
OPTIONS: dict[str, Any] = {"epochs": 12, "batch_size": 16, "learning_rate": 5e-3}
SCANS = drawn_scans(4)
UNDRAWN = "patient-503.nii.gz"


@dataclass
class Joined:
    """An API, the hospital `dune` with three scans with masks and one without, and its finished job."""

    api: Any
    cohort: str
    job: dict[str, Any]

    def segment(self, **fields: str) -> httpx.Response:
        answer: httpx.Response = self.api.segment(SCANS[UNDRAWN][0], output="json", **fields)
        assert answer.status_code == 200, answer.text
        return answer

    def model(self, reference: str) -> tuple[ModelManifest, FedOapUNet]:
        artefact = self.api.store.open(reference)
        manifest = artefact.manifest
        assert isinstance(manifest, ModelManifest)
        network = build("fedoap", **manifest.network.arguments)
        network.load_state_dict(from_safetensors(artefact.read(WEIGHTS)))
        assert isinstance(network, FedOapUNet)
        return manifest, network.eval()


def slices(patient: int = 503) -> NDArray[np.float32]:
    """What a network sees of a scan; by default of the one without a mask."""
    return prepare(volume("dune", patient)[0], TUMOUR).slices


def upload(api: Any, drawn: dict[str, tuple[bytes, bytes]], without: tuple[str, ...] = ()) -> str:
    place: str = api.client.post("/hospitals/dune/cohorts").headers["location"]
    for name, (scan, mask) in drawn.items():
        assert api.client.put(f"{place}/scans/{name}", content=scan).status_code == 201
        if name not in without:
            answer = api.client.put(f"{place}/scans/{name}/mask?model=tumour", content=mask)
            assert answer.status_code == 201, answer.text
    return place.rpartition("/")[2]


def png(pixels: NDArray[np.uint8]) -> bytes:
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


def ask(api: Any, cohort: str, **body: Any) -> httpx.Response:
    answer: httpx.Response = api.client.post("/hospitals/dune/adaptations", json={"cohort": cohort, **body})
    return answer


def digests(api: Any, cohort: str, *names: str) -> set[str]:
    """The digests of these scans, as a job's warnings have them."""
    listed = api.client.get(f"/hospitals/dune/cohorts/{cohort}/scans").json()["scans"]
    return {scan["sha256"].removeprefix("sha256:")[:12] for scan in listed if scan["name"] in names}


def named(answer: httpx.Response) -> list[str]:
    """The names of the warnings, of an answer in any form."""
    header = answer.headers.get("locum-warning-names", "")
    assert header.isascii()
    return header.split(", ")


def problem(answer: httpx.Response) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    return answer.status_code, answer.json()["type"].removeprefix("urn:locum:problem:")


@pytest.fixture(scope="module")
def api(start: Callable[..., Any], joining_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    store = shutil.copytree(joining_store, tmp_path_factory.mktemp("copy") / "store")
    running = start(store)
    for name in ("dune", "north"):
        running.client.put(f"/hospitals/{name}", json={"name": name})
    return running


@pytest.fixture(scope="module")
def joined(api: Any) -> Joined:
    cohort = upload(api, SCANS, without=(UNDRAWN,))
    accepted = ask(api, cohort, options=OPTIONS)
    assert accepted.status_code == 202, accepted.text
    assert accepted.json()["options"]["loss"] == "perturbed"
    run_job(accepted.json()["id"], api.settings)
    return Joined(api, cohort, api.client.get(accepted.headers["location"]).json())


def test_joining_job_reports_every_epoch_gate_dice_and_attention(joined: Joined) -> None:
    job, result = joined.job, joined.job["result"]
    assert job["state"] == "succeeded", job["reason"]
    assert [check for check in job["gate"]["checks"] if not check["passed"]] == []
    assert [epoch["epoch"] for epoch in job["epochs"]] == list(range(OPTIONS["epochs"] + 1))
    assert result["best_epoch"] > 0
    by_epoch = [epoch["dice"] for epoch in job["epochs"]]
    assert result["zero_shot_dice"] == by_epoch[0]
    assert result["validation_dice"] == max(by_epoch) == by_epoch[result["best_epoch"]]
    assert (result["scans"], result["masks"]) == (4, 3)
    assert (result["train_patients"], result["validation_patients"]) == (2, 1)
    checks = {check["name"]: check["value"] for check in job["gate"]["checks"]}
    assert checks["validation_dice"] == result["validation_dice"]
    assert checks["dice_gain"] == pytest.approx(max(by_epoch) - by_epoch[0])
    _, network = joined.model("tumour.at-dune@1")
    with torch.no_grad():
        shares = [network.segment(torch.from_numpy(slices(patient).copy()))[1] for patient in range(500, 504)]
    assert result["attention"] == pytest.approx(
        dict(zip(SOURCES, torch.cat(shares).mean(dim=0).tolist(), strict=True)), abs=1e-5
    )
    assert len({*result["attention"].values()}) == 3


def test_the_dice_that_the_gate_states_is_that_of_the_answers(joined: Joined, tmp_path: Path) -> None:
    """The joined model and the shared one, on the patients that chose the epoch."""
    stated = {
        ("tumour.at-dune@1", "auto"): joined.job["result"]["validation_dice"],
        ("tumour", "global"): joined.job["result"]["zero_shot_dice"],
    }
    drawn = {name: pair for name, pair in SCANS.items() if name != UNDRAWN}
    chose = {
        name
        for name, (_, mask) in drawn.items()
        if nib.Nifti1Image.from_bytes(gzip.decompress(mask)).get_fdata().any()
    }
    for (model, whose), dice in stated.items():
        answers = {
            name: joined.api.segment(drawn[name][0], model=model, personalization=whose) for name in chose
        }
        assert {answer.status_code for answer in answers.values()} == {200}
        found = {name: mean_dice(tmp_path, [(answers[name].content, drawn[name][1])]) for name in chose}
        chose = {name for name, value in found.items() if abs(value - dice) < 1e-6}
    # A job does not say which patient it held out; both models have the stated Dice on the same one.
    assert chose
    assert len({*stated.values()}) == 2


def test_running_job_shows_the_masks_of_each_epoch_until_its_end(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cohort = upload(api, SCANS, without=(UNDRAWN,))
    job = ask(api, cohort, options=OPTIONS | {"epochs": 2}).json()["id"]
    shown: list[httpx.Response] = []

    def set_stage(attempt: Attempt, stage: str, **more: Any) -> None:
        noted(attempt, stage, **more)
        if more.get("preview"):
            shown.append(api.client.get(f"/jobs/{job}/preview"))

    noted = Attempt.set_stage
    monkeypatch.setattr(Attempt, "set_stage", set_stage)
    run_job(job, api.settings)
    assert [(answer.status_code, answer.headers["content-type"]) for answer in shown] == [
        (200, "image/png")
    ] * 3
    assert len({answer.content for answer in shown}) == 3
    last = np.asarray(Image.open(io.BytesIO(shown[-1].content)))
    assert (last == COLOURS[0]).all(axis=-1).sum() > 50  # the contour of the first class
    assert problem(api.client.get(f"/jobs/{job}/preview")) == (404, "no-preview")


def test_joined_candidate_graph_returns_probabilities_and_attention(joined: Joined) -> None:
    manifest, network = joined.model("tumour.at-dune@1")
    parent = joined.api.store.open("tumour")
    assert (manifest.hospital, manifest.lineage.method) == ("dune", cross_attention.METHOD)
    assert (manifest.lineage.parents, manifest.sources) == ((parent.digest,), SOURCES)
    assert isinstance(parent.manifest, CrossAttentionManifest)
    _, shared = joined.model("tumour.global")
    for name in ("bank_key", "bank_value", "bank_present"):
        assert torch.equal(network.state_dict()[name], shared.state_dict()[name])
    session = onnxruntime.InferenceSession(joined.api.store.open("tumour.at-dune@1").read(GRAPH))
    probabilities, attention = session.run(["probabilities", "attention"], {"image": slices()})
    with torch.no_grad():
        logits, mass = network.segment(torch.from_numpy(slices().copy()))
    np.testing.assert_allclose(probabilities[:, 1], torch.sigmoid(logits[:, 0]).numpy(), atol=1e-5)
    np.testing.assert_allclose(attention, mass.numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("asked", "part", "header"),
    [
        ({"personalization": "global"}, "tumour.global", "global"),
        ({"personalization": "member", "site": "birch"}, "tumour.birch", "member; site=birch"),
    ],
)
def test_segment_with_each_part_reports_its_attention(
    joined: Joined, asked: dict[str, str], part: str, header: str
) -> None:
    answer = joined.segment(model="tumour", **asked)
    _, network = joined.model(part)
    with torch.no_grad():
        expected = network.segment(torch.from_numpy(slices().copy()))[1].mean(dim=0)
    found = answer.json()
    assert tuple(found["attention"]) == SOURCES
    np.testing.assert_allclose(list(found["attention"].values()), expected.numpy(), atol=1e-5)
    # A member does not attend to its own entry in the bank.
    assert (found["attention"]["birch"] == 0) == (part == "tumour.birch")
    assert found["receipt"]["network"]["name"].startswith(part)
    assert answer.headers["locum-personalization"] == header
    warned = [warning for warning in found["warnings"] if warning.startswith("zero-shot")]
    assert len(warned) == (header == "global")
    assert answer.headers["locum-warnings"] == str(len(found["warnings"]))
    assert ("zero-shot" in named(answer)) == (header == "global")


@pytest.mark.parametrize("asked", [{"personalization": "global"}, {"hospital": "north"}])
def test_zero_shot_answer_carries_a_warning_in_every_output(api: Any, asked: dict[str, str]) -> None:
    """North is no member, and nothing of its own is assigned to it: `auto` is zero-shot."""
    scan = SCANS[UNDRAWN][0]
    told = api.segment(scan, output="json", model="tumour", **asked).json()["warnings"]
    (sentence,) = (warning for warning in told if warning.startswith("zero-shot: "))
    for said in (
        "No part of the model has learned from this hospital",
        "a Dice of 0.07",
        "Do not rely on this mask",
        "draw them on the page, under Draw, or send them with `locum adapt --masks`",
    ):
        assert said in sentence
    for output in ({}, {"output": "nifti"}, {"output": "overlay"}, {"output": "json"}):
        answer = api.segment(scan, model="tumour", **output, **asked)
        assert answer.status_code == 200, answer.text
        assert answer.headers["locum-personalization"] == "global"
        assert answer.headers["locum-warnings"] == str(len(told))
        assert named(answer)[0] == "zero-shot"
    assert ("scan-unlike-task" in named(answer)) == (len(told) > 1)


def test_guard_warnings_share_one_name_next_to_zero_shot(api: Any, make_png: Callable[..., bytes]) -> None:
    """Training had volumes. A PNG is answered as one, which has no room for a sentence."""
    pixels = np.random.default_rng(2).integers(0, 255, (96, 96), np.uint8)
    answer = api.segment(make_png(pixels), model="tumour", personalization="global", guard="warn")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "image/png")
    assert int(answer.headers["locum-warnings"]) > 1
    assert named(answer) == ["zero-shot", "scan-unlike-task"]


def test_joined_candidate_is_assigned_and_rolled_back(joined: Joined) -> None:
    serving = "/hospitals/dune/serving/tumour"
    body = {"version": "tumour.at-dune@1", "actor": "ines", "reason": "looked at all of them"}
    made = joined.api.client.put(serving, json={**body, "version": "tumour@1"}, headers={"If-Match": '"0"'})
    assert made.status_code == 200, made.text
    made = joined.api.client.put(serving, json=body, headers={"If-Match": made.headers["etag"]})
    assert (made.status_code, made.json()["override"]) == (200, False), made.text
    answer = joined.segment(model="tumour", hospital="dune")
    assert answer.headers["locum-personalization"] == "hospital; hospital=dune"
    assert tuple(answer.json()["attention"]) == SOURCES
    assert not any(warning.startswith("zero-shot") for warning in answer.json()["warnings"])
    assert "zero-shot" not in named(answer)
    other = joined.api.client.put("/hospitals/north/serving/tumour", json=body, headers={"If-Match": '"0"'})
    assert problem(other) == (409, "adapted-to-another")
    why = {"actor": "ines", "reason": "a second look"}
    back = joined.api.client.post(f"{serving}/rollback", json=why, headers={"If-Match": made.headers["etag"]})
    assert back.status_code == 200, back.text
    answer = joined.segment(model="tumour", hospital="dune")
    assert answer.headers["locum-personalization"] == "global"
    assert "zero-shot" in named(answer)


def test_joining_card_shows_curves_gate_attention_and_pictures(joined: Joined) -> None:
    page = joined.api.client.get(f"/jobs/{joined.job['id']}/card").text
    for said in (
        "Attention by source",
        "birch",
        "validation dice",
        "zero-shot",
        "Dice</h3>",
        "by 1 validation patient with a target",
    ):
        assert said in page
    for share in joined.job["result"]["attention"].values():
        assert f"{share:.1%}" in page
    # The two scans that were not learned from, before and after, and the mask of the one that has one.
    assert page.count("data:image/png;base64,") == 5
    assert "scan 1, drawn" in page
    assert "then the candidate, and the mask where one was drawn" in page
    assert "this hospital sent none" not in page


@pytest.mark.parametrize("checkpoint", [2, 9], ids=["of the first epoch", "of the last"])
def test_killed_joining_job_resumes_to_the_same_weights(
    joined: Joined, checkpoint: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    api, dead = joined.api, []
    job = ask(api, joined.cohort, options=OPTIONS).json()["id"]
    write = JobFolder.write

    def dies(self: JobFolder, name: str, content: bytes) -> None:
        write(self, name, content)
        dead.append(name)
        # Before the event of the epoch.
        if len(dead) == checkpoint:
            raise LeaseLost("as if the process were gone")

    with monkeypatch.context() as patched:
        patched.setattr(JobFolder, "write", dies)
        run_job(job, api.settings)
    assert api.client.get(f"/jobs/{job}").json()["state"] == "running"
    with api.context.database.write() as session:
        records.get(session, job).lease_until = records.get(session, job).created_at
    run_job(job, api.settings)
    found = api.client.get(f"/jobs/{job}").json()
    assert (found["attempt"], found["result"]) == (2, joined.job["result"])
    assert [epoch["epoch"] for epoch in found["epochs"]] == list(range(OPTIONS["epochs"] + 1))
    first, second = api.store.open("tumour.at-dune@1"), api.store.open("tumour.at-dune")
    assert second.version > first.version
    assert first.read(WEIGHTS) == second.read(WEIGHTS)
    assert first.read(GRAPH) == second.read(GRAPH)


def test_joining_without_masks_of_two_patients_is_422(api: Any) -> None:
    drawn = drawn_scans(2)
    one, two = drawn
    assert problem(ask(api, upload(api, drawn, without=(one, two)))) == (422, "masks-missing")
    few = ask(api, upload(api, drawn, without=(two,)))
    assert problem(few) == (422, "masks-missing")
    assert "found 1 among 1 masks of 1 patients" in few.json()["detail"]
    # Two scans of one patient, told by the task's rule.
    twice = {f"patient-7-{name}": files for name, files in drawn.items()}
    assert problem(ask(api, upload(api, twice))) == (422, "masks-missing")
    nameless = ask(api, upload(api, {f"x-{name}": files for name, files in drawn.items()}))
    assert problem(nameless) == (422, "masks-missing")
    assert re.match("scan [0-9a-f]{12}: no patient in the name", nameless.json()["detail"])
    sent = api.client.post("/hospitals/dune/adaptations", files=[("scans", drawn[one][0])])
    assert problem(sent) == (422, "masks-missing")


def test_joining_by_a_member_of_the_federation_is_422(api: Any) -> None:
    api.client.put("/hospitals/aster-clinic", json={"name": "aster", "site": "aster"})
    place = api.client.post("/hospitals/aster-clinic/cohorts").headers["location"]
    for name, (scan, mask) in drawn_scans(2).items():
        api.client.put(f"{place}/scans/{name}", content=scan)
        api.client.put(f"{place}/scans/{name}/mask", content=mask)
    asked = {"cohort": place.rpartition("/")[2]}
    refused = api.client.post("/hospitals/aster-clinic/adaptations", json=asked)
    assert problem(refused) == (422, "member-cannot-join")
    assert "site 'aster' of the federation that trained 'tumour@1'" in refused.json()["detail"]


def test_joining_options_reach_the_patient_split(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, int]] = []

    def stops(_drawn: Any, _digests: Any, _task: Any, share: float, seed: int) -> None:
        asked.append((share, seed))
        raise AdaptationRejected("seen enough")

    monkeypatch.setattr(cross_attention, "split_by_patient", stops)
    options = {"validation": 0.4, "seed": 7}
    run_job(ask(api, upload(api, drawn_scans(2)), options=options).json()["id"], api.settings)
    assert asked == [(0.4, 7)]


def test_joining_ignores_a_target_lost_in_resizing_with_a_warning(api: Any) -> None:
    """What is left of masks counts: two patients have a target, of which the network sees one."""
    pixels = np.random.default_rng(0).integers(0, 255, (128, 128)).astype(np.uint8)
    speck = np.zeros_like(pixels)
    speck[64, 64] = 1  # between the 32x32 that are taken
    small = {"patient-600.png": (png(pixels), png(speck))}
    # Noise is unlike the task.
    included = {"unlike": "include"}
    job = ask(api, upload(api, {**drawn_scans(1), **small}), options=included).json()["id"]
    run_job(job, api.settings)
    found = api.client.get(f"/jobs/{job}").json()
    assert found["state"] == "failed"
    assert "found 1 among 2 masks of 2 patients" in found["reason"]
    *_, warning = found["warnings"]
    (digest,) = digests(api, found["cohort"], "patient-600.png")
    assert warning.startswith(f"of the target of 1 mask, first scan {digest}, nothing is left")


def test_joining_counts_one_scan_under_two_names_as_one_patient(api: Any) -> None:
    drawn = drawn_scans(2)
    twice = next(iter(drawn))
    drawn["patient-900.nii.gz"] = drawn[twice]
    job = ask(api, upload(api, drawn), options={"epochs": 1, "validation": 0.5}).json()["id"]
    run_job(job, api.settings)
    found = api.client.get(f"/jobs/{job}").json()
    assert (found["result"]["train_patients"], found["result"]["validation_patients"]) == (1, 1)
    (digest,) = digests(api, found["cohort"], twice, "patient-900.nii.gz")
    said = f"2 scans with masks are the same bytes as another, first 2 times scan {digest}: counted"
    assert any(said in warning for warning in found["warnings"])
    same = {twice: drawn[twice], "patient-900.nii.gz": drawn[twice]}
    assert problem(ask(api, upload(api, same))) == (422, "masks-missing")


def test_joining_with_a_mask_of_another_task_is_422(api: Any) -> None:
    place = api.client.post("/hospitals/dune/cohorts").headers["location"]
    (name, (scan, mask)), *_ = drawn_scans(1).items()
    image = nib.Nifti1Image.from_bytes(gzip.decompress(mask))
    other = nib.Nifti1Image(np.asarray(image.dataobj).astype(np.uint8) * 3, image.affine)
    content = io.BytesIO(other.to_bytes()).getvalue()
    api.client.put(f"{place}/scans/{name}", content=scan)
    where = f"{place}/scans/{name}/mask"
    assert problem(api.client.put(f"{where}?model=tumour", content=content)) == (422, "task-error")
    assert api.client.put(where, content=content).json()["values"] == [0, 3]
    refused = ask(api, place.rpartition("/")[2])
    assert problem(refused) == (422, "mask-mismatch")
    assert name in refused.json()["detail"]


def test_joining_rejects_foreign_options_and_scan_personalization(api: Any) -> None:
    answer = ask(api, "0" * 32, options={"router": "direct"})
    assert problem(answer) == (422, "invalid-request")
    assert answer.json()["errors"][0]["field"] == "body.options.router"
    scan = api.segment(SCANS[UNDRAWN][0], model="tumour", personalization="scan")
    assert problem(scan) == (422, "not-adaptable")
