"""Adaptation of models that see volumes: every kind of job over HTTP, and one scan by its own statistics."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest

from model_store.manifest import GRAPH, WEIGHTS
from model_store.scans.channels import packed
from service.adaptation import scan_requests
from service.viewers.info import describe
from service.worker.answered_scans import AnsweredScans
from service.worker.runner import run_job
from tests.helpers.service.independent_dice import mean_dice
from tests.helpers.service.volume_federation import nifti, publish_volumes, scans, volume

NEAR, FAR = scans(4), scans(4, blur=1.2)


@pytest.fixture(scope="module")
def api(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    store = tmp_path_factory.mktemp("volumes") / "store"
    publish_volumes(store)
    running = start(store)
    running.client.put("/hospitals/dune", json={"name": "dune"})
    return running


def upload(api: Any, files: Mapping[str, tuple[bytes, bytes]], model: str = "", without: str = "") -> str:
    """A cohort of scans; with `model` their masks too, but of the scan `without`."""
    place: str = api.client.post("/hospitals/dune/cohorts").headers["location"]
    for name, (scan, mask) in files.items():
        answer = api.client.put(f"{place}/scans/{name}", content=scan)
        assert answer.status_code == 201, answer.text
        if model and name != without:
            answer = api.client.put(f"{place}/scans/{name}/mask?model={model}", content=mask)
            assert answer.status_code == 201, answer.text
    return place.rpartition("/")[2]


def adapted(api: Any, cohort: str, model: str, **options: Any) -> dict[str, Any]:
    asked = {"cohort": cohort, "model": model, "options": options}
    answer = api.client.post("/hospitals/dune/adaptations", json=asked)
    assert answer.status_code == 202, answer.text
    return finished(api, answer.json()["id"])


def finished(api: Any, job: str) -> dict[str, Any]:
    run_job(job, api.settings)
    found: dict[str, Any] = api.client.get(f"/jobs/{job}").json()
    return found


def mask_of(answer: Any) -> Any:
    assert answer.status_code == 200, answer.text
    return np.asarray(nib.Nifti1Image.from_bytes(gzip.decompress(answer.content)).dataobj)


def dice(one: Any, other: Any) -> float:
    return float(2 * ((one > 0) & (other > 0)).sum() / ((one > 0).sum() + (other > 0).sum()))


@pytest.fixture(scope="module")
def far(api: Any) -> str:
    """A cohort behind a scanner that blurs."""
    return upload(api, FAR)


def test_auto_moves_the_statistics_of_volumes_and_is_assigned_and_rolled_back(api: Any, far: str) -> None:
    job = adapted(api, far, "balls", unlike="include")
    assert job["state"] == "succeeded", job["reason"]
    assert job["gate"]["passed"], job["gate"]
    dose = job["result"]["dose"]
    assert dose["shift"] > 1.5
    assert dose["doses"][0] > dose["doses"][1] > 0
    card = api.client.get(f"/jobs/{job['id']}/card").text
    assert card.count("data:image/png;base64,") == 8  # four scans before and after
    candidate = api.store.open("balls.at-dune@1").manifest
    assert candidate.statistics is not None
    assert candidate.statistics.count == 8 + 4  # its members' scans and these
    place = "/hospitals/dune/serving/balls"
    body = {"version": "balls.at-dune@1", "actor": "ines", "reason": "looked"}
    made = api.client.put(place, json=body, headers={"If-None-Match": "*"})
    assert made.status_code == 200, made.text
    scan, drawn = (nifti(each) for each in volume(900, blur=1.2))
    asked = {"model": "balls", "output": "nifti"}
    own = api.segment(scan, hospital="dune", **asked)
    truth = nib.Nifti1Image.from_bytes(drawn).get_fdata()
    assert own.headers["locum-personalization"] == "hospital; hospital=dune"
    # The guard of the members' model warns of this scanner; the hospital's own model knows it, since a person
    # said that it is the hospital's.
    everyone = api.segment(scan, personalization="global", **asked)
    assert "scan-unlike-task" in everyone.headers["locum-warning-names"]
    assert "scan-unlike-task" not in own.headers.get("locum-warning-names", "")
    before, after = dice(mask_of(everyone), truth), dice(mask_of(own), truth)
    assert after > before > 0.3
    undo = {"actor": "ines", "reason": "it was the scanner"}
    back = api.client.post(f"{place}/rollback", json=undo, headers={"If-Match": made.headers["etag"]})
    assert back.status_code == 200, back.text
    assert np.array_equal(mask_of(api.segment(scan, hospital="dune", **asked)), mask_of(everyone))


def inverted(name: str) -> bytes:
    """A scan of `NEAR` in negative."""
    voxels = np.asarray(nib.Nifti1Image.from_bytes(NEAR[name][0]).dataobj)
    return nifti((300 - voxels).astype(np.int16))


@pytest.mark.parametrize("by_masks", [False, True], ids=["without-masks", "by-masks"])
def test_a_scan_unlike_the_others_is_named_and_left_out_and_the_guard_goes_on_to_warn_of_it(
    api: Any, by_masks: bool
) -> None:
    _, odd, *_ = NEAR
    mixed = {name: (inverted(name) if name == odd else scan, mask) for name, (scan, mask) in NEAR.items()}
    cohort = upload(api, mixed, "balls" if by_masks else "")
    options: dict[str, Any] = {"preset": "masks", "steps": 2, "folds": 2} if by_masks else {}
    job = adapted(api, cohort, "balls", **options)
    assert job["state"] in ("succeeded", "fell_back"), job["reason"]
    label = f"scan {hashlib.sha256(mixed[odd][0]).hexdigest()[:12]}"
    kinds, out = job["warnings"][-2:]
    assert "2 kinds of scans" in kinds
    assert out.startswith("1 of 4 scans is left out, unlike the others or the task (" + label)
    assert "unlike=include" in out
    assert odd not in str(job["warnings"])
    result = job["result"]
    assert (result["scans"], result["warned"], result["kinds"]) == (3, 0.25, [3, 1])
    assert [(each["scan"], each["used"]) for each in result["unlike"]] == [(label, False)]
    section = next(each for each in job["sections"] if each["title"].startswith("Scans unlike"))
    assert section["body"]["rows"][0]["mark"] == "left out"
    candidate = api.store.open(job["candidate"]["reference"]).manifest
    assert candidate.statistics.count == 8 + 3
    assert label not in candidate.model_dump_json()
    answer = api.segment(mixed[odd][0], model=job["candidate"]["reference"])
    assert "scan-unlike-task" in answer.headers["locum-warning-names"]
    # Included, it is fitted to and known.
    job = adapted(api, cohort, "balls", unlike="include", **options)
    assert (job["result"]["scans"], job["warnings"][-1:]) == (4, [kinds])
    assert api.store.open(job["candidate"]["reference"]).manifest.statistics.count == 8 + 4


def test_the_guard_does_not_learn_from_a_cohort_that_it_warns_of(api: Any, far: str) -> None:
    job = adapted(api, far, "balls")
    assert (job["result"]["scans"], job["result"]["warned"], job["result"]["kinds"]) == (4, 1.0, [4])
    candidate = api.store.open(job["candidate"]["reference"])
    assert candidate.manifest.statistics.count == 8
    answer = api.segment(FAR[next(iter(FAR))][0], model=str(candidate))
    assert "scan-unlike-task" in answer.headers["locum-warning-names"]


def test_masks_of_drawn_volumes_check_a_candidate(api: Any, far: str) -> None:
    job = adapted(api, far, "balls")
    asked = api.client.post(f"/jobs/{job['id']}/checks", json={"masks": 4})
    check = finished(api, asked.json()["id"])
    assert check["state"] == "succeeded", check["reason"]
    assert check["result"]["differing"] == 4
    for name, (_, mask) in FAR.items():
        place = f"/hospitals/dune/cohorts/{far}/scans/{name}/mask"
        assert api.client.put(place, content=mask).status_code == 201
    verdict = api.client.post(f"/jobs/{job['id']}/checks/{check['id']}/verdict")
    said = finished(api, verdict.json()["id"])
    for name in FAR:
        api.client.delete(f"/hospitals/dune/cohorts/{far}/scans/{name}/mask")
    assert said["state"] == "succeeded", said["reason"]
    # Dice on the scan's own grid, as a naive loop over the answers has it.
    changes = []
    for scan, mask in FAR.values():
        truth = nib.Nifti1Image.from_bytes(mask).get_fdata()
        answers = (
            api.segment(scan, model=job["candidate"]["reference"]),
            api.segment(scan, model="balls", personalization="global"),
        )
        found = [mask_of(answer) for answer in answers]
        changes.append(dice(found[0], truth) - dice(found[1], truth))
    drawn = {each["scan"] for each in check["result"]["draws"]}
    assert said["result"]["verdict"]["worst"] >= min(changes) - 1e-6
    assert len(drawn) == said["result"]["verdict"]["masks"]
    if len(drawn) == len(FAR):
        assert said["result"]["verdict"]["worst"] == pytest.approx(min(changes), abs=1e-6)


def test_learned_routing_of_volumes_reports_epochs(api: Any, far: str) -> None:
    job = adapted(api, far, "steady", preset="paper", epochs=2)
    assert job["state"] == "succeeded", job["reason"]
    assert [epoch["epoch"] for epoch in job["epochs"]] == [0, 1, 2]
    assert job["result"]["images"] > 4  # patches side by side


def test_auto_blends_the_statistics_of_instance_norm_that_tracks(api: Any, far: str) -> None:
    job = adapted(api, far, "steady")
    assert job["state"] == "succeeded", job["reason"]
    assert job["result"]["options"]["preset"] == "blend"
    assert api.store.open("steady.at-dune").manifest.network.name == "blended"


def jobs(api: Any) -> list[Any]:
    found: list[Any] = api.client.get("/jobs").json()["jobs"]
    return found


@pytest.mark.parametrize(
    ("model", "preset", "ways"),
    [
        ("still", "auto", "paper, official, as-published, masks (with masks of some scans)"),
        ("still", "ladder", "paper, official, as-published, masks (with masks of some scans)"),
        ("still", "blend", "paper, official, as-published, masks (with masks of some scans)"),
        ("steady", "tent", "auto, paper, official, as-published, blend, masks (with masks of some scans)"),
        ("ball", "auto", "masks (with masks of some scans)"),
        ("ball", "statistics", "masks (with masks of some scans)"),
    ],
)
def test_a_preset_that_would_change_nothing_is_refused_before_a_job_is_made(
    api: Any, far: str, model: str, preset: str, ways: str
) -> None:
    before = jobs(api)
    named = {"cohort": far, "model": model, "options": {"preset": preset}}
    answer = api.client.post("/hospitals/dune/adaptations", json=named)
    form = {"model": model, "options": json.dumps({"preset": preset})}
    sent = api.client.post("/hospitals/dune/adaptations", data=form, files={"scans": ("a.nii", b"no scan")})
    for refused in (answer, sent):
        assert (refused.status_code, refused.json()["type"]) == (422, "urn:locum:problem:not-adaptable")
        assert f"preset '{preset}' would change nothing" in refused.json()["detail"]
        assert "this network has instance norm" in refused.json()["detail"]
        assert refused.json()["detail"].endswith(f"It can be adapted by {ways}")
    assert jobs(api) == before


def test_the_list_says_of_each_network_what_adapts_it(api: Any) -> None:
    listed = {model["name"]: model for model in api.client.get("/models").json()["models"]}
    said = {name: (model["adaptable"], model["masks"], model["summary"]) for name, model in listed.items()}
    either = (True, "optional", "adapts to a hospital without masks, or with a few")
    assert said["balls"] == said["steady"] == said["pair"] == either
    masked, has = "adapts to a hospital with masks of a few scans", "its network has instance norm"
    assert said["ball"] == (True, "required", f"{masked}, not without: {has}")
    learned = "without only by preset paper or official or as-published"
    assert said["still"] == (True, "required", f"{masked}, {learned}: {has}")
    assert "scan" in listed["balls"]["personalizations"]
    assert "scan" not in listed["ball"]["personalizations"]
    assert listed["ball"]["presets"] == ["auto", "masks"]
    assert "ladder" in listed["balls"]["presets"]
    viewers = describe(api.context.store, api.context.database)["models"]
    assert "preset" not in viewers["ball"]["config"]
    assert "intent" in viewers["pair"]["config"]["preset"]
    lineage = api.client.get("/lineage").json()["versions"]
    assert {each["summary"] for each in lineage if each["name"] == "ball"} == {said["ball"][2]}


def test_masks_of_a_few_volumes_fine_tune_a_plain_model(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[Any] = []
    asked = AnsweredScans.beside_drawn

    def beside_drawn(*arguments: Any) -> Any:
        judged.extend(asked(*arguments))
        return judged

    monkeypatch.setattr(AnsweredScans, "beside_drawn", beside_drawn)
    cohort = upload(api, FAR, model="ball", without="patient-503.nii")
    job = adapted(api, cohort, "ball", steps=10, folds=2)
    assert job["state"] == "succeeded", job["reason"]
    held_out = job["result"]["held_out_dice"]
    assert held_out[str(job["result"]["weight"])] == max(held_out.values()) > held_out["0.0"]
    # The masks that must be plausible are the answers to whole scans, those without a mask last.
    candidate = job["candidate"]["reference"]
    for (scan, drawn), (found, truth) in zip(FAR.values(), judged, strict=True):
        answer = api.segment(scan, model=candidate, output="nifti")
        assert np.array_equal(mask_of(answer), found)
        if truth is not None:
            assert np.array_equal(nib.Nifti1Image.from_bytes(drawn).get_fdata(), truth)
    assert [truth is None for _, truth in judged] == [False, False, False, True]


@pytest.mark.parametrize(
    "geometry",
    [
        {"mirror": (0, 1, 2)},
        {"mirror": (0, 2), "average": "logits", "restore": "logits", "window": "nnunet"},
        {"restore": "labels", "window": "constant"},
    ],
    ids=["mirrored", "as-nnunet", "as-a-bundle"],
)
def test_the_dice_that_the_gate_states_is_that_of_the_answers(
    api: Any, geometry: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Mirrored passes, windows, the way back and the largest component are the service's."""
    name = str(request.node.callspec.id)
    shared = api.store.open("ball")
    task = shared.manifest.task
    answered = task.model_copy(
        update={"geometry": task.geometry.model_copy(update=geometry), "keep_largest": ("ball",)}
    )
    manifest = shared.manifest.model_copy(update={"name": name, "task": answered, "files": {}})
    api.store.publish(manifest, {each: shared.read(each) for each in (WEIGHTS, GRAPH)})
    job = adapted(api, upload(api, FAR, model=name), name, steps=4, folds=2, unlike="include")
    assert job["state"] in ("succeeded", "fell_back"), job["reason"]
    asked = {"model": name, "personalization": "global", "output": "nifti"}
    pairs = [(api.segment(scan, **asked).content, mask) for scan, mask in FAR.values()]
    assert job["result"]["held_out_dice"]["0.0"] == pytest.approx(mean_dice(tmp_path, pairs), abs=1e-6)


def test_a_cohort_of_channels_makes_a_version_that_is_served_by_channel_and_stacked(api: Any) -> None:
    stacked = scans(4, channels=2, blur=1.2)
    voxels, mask = volume(510, channels=2, blur=1.2)
    apart = packed({name: [nifti(voxels[..., index])] for index, name in enumerate(("T1", "FLAIR"))})
    cohort = upload(api, {**stacked, "patient-510.zip": (apart, nifti(mask))}, model="pair")
    job = adapted(api, cohort, "pair", steps=10, folds=2)
    assert job["state"] == "succeeded", job["reason"]
    assert (job["result"]["scans"], job["result"]["patients"]) == (5, 5)
    assert job["gate"]["passed"], job["gate"]
    body = {"version": job["candidate"]["reference"], "actor": "ines", "reason": "looked"}
    made = api.client.put("/hospitals/dune/serving/pair", json=body, headers={"If-None-Match": "*"})
    assert made.status_code == 200, made.text
    seen, _ = volume(903, channels=2, blur=1.2)
    fields = {
        f"scan.{name}": (f"case_{name}.nii", nifti(seen[..., index]))
        for index, name in enumerate(("T1", "FLAIR"))
    }
    ask = partial(api.client.post, "/segment")
    own = ask(files=fields, data={"model": "pair", "hospital": "dune"})
    assert own.headers["locum-personalization"] == "hospital; hospital=dune"
    in_one_file = ask(files={"scan": ("case.nii", nifti(seen))}, data={"model": "pair", "hospital": "dune"})
    np.testing.assert_array_equal(mask_of(own), mask_of(in_one_file))
    everyone = ask(files=fields, data={"model": "pair", "personalization": "global"})
    assert not np.array_equal(mask_of(own), mask_of(everyone))


def test_a_time_series_in_a_cohort_is_refused_by_the_job(api: Any, far: str) -> None:
    stacked = upload(api, scans(2, channels=3))
    job = adapted(api, stacked, "balls")
    assert job["state"] == "failed"
    assert "expected one volume of up to 3 dimensions" in job["reason"]


def test_a_small_volume_is_answered_by_its_own_statistics_at_once_as_by_a_job(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = nifti(volume(901, blur=1.2)[0])
    asked = {"model": "balls", "personalization": "scan"}
    at_once = api.segment(scan, **asked)
    assert at_once.headers["locum-personalization"].startswith("scan")
    assert not np.array_equal(mask_of(at_once), mask_of(api.segment(scan, model="balls")))
    monkeypatch.setattr(scan_requests, "is_taken_together", lambda *_: False)
    later = api.segment(scan, **asked)
    assert later.status_code == 202, later.text
    job = finished(api, later.json()["id"])
    assert job["state"] == "succeeded", job["reason"]
    result = api.client.get(f"/jobs/{job['id']}/result")
    assert dice(mask_of(result), mask_of(at_once)) > 0.999


def test_a_scan_is_refused_where_its_network_has_nothing_to_move(api: Any) -> None:
    before = jobs(api)
    for model in ("still", "ball"):
        answer = api.segment(nifti(volume(902)[0]), model=model, personalization="scan")
        assert (answer.status_code, answer.json()["type"]) == (422, "urn:locum:problem:not-adaptable")
        assert "preset 'auto' would change nothing" in answer.json()["detail"]
        assert "masks" not in answer.json()["detail"]
    assert jobs(api) == before
