"""Adaptation jobs, run in this process: the candidate, its attempts, and how jobs fail."""

from __future__ import annotations

import gzip
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import nibabel as nib
import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image

from model_store.artefact import Artefact
from model_store.manifest import GRAPH, SHIFT_GRAPH, WEIGHTS, ModelManifest
from model_store.preprocessing import prepare, prepare_mask, restore
from personalization.dose import FILE, by_shift
from personalization.gate import BY_SHIFT
from personalization.iop_fl.batch_norm import profile
from personalization.iop_fl.spread import FILE as SPREAD
from personalization.iop_fl.spread import Spread, sent_by
from personalization.networks import build
from personalization.options.presets import FOR_COHORTS
from personalization.state import from_safetensors
from personalization.test_time.presets.ladder import shift_graph
from service.errors import LeaseLost
from service.jobs import leases, records
from service.kinds.routing_space import KIND
from service.worker.attempt import Attempt
from service.worker.candidate import publish
from service.worker.routing_space import DYNAMIC
from service.worker.runner import run_job
from tests.helpers.service.routing_federation import ARGUMENTS, ORGAN, outside_scans, volume
from tests.helpers.service.workplace import Workplace, draft_of, opened
from tests.helpers.waiting import wait_for

EPOCHS = 2
SCANS = 2
JOB = "a" * 32


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, routing_store: Path) -> Iterator[Workplace]:
    """Where the job `JOB` was run to its end by one undisturbed attempt."""
    with opened(tmp_path_factory.mktemp("finished"), routing_store) as place:
        place.adaptation(place.cohort(outside_scans(SCANS)), job_id=JOB)
        run_job(JOB, place.settings)
        yield place


@pytest.fixture
def place(tmp_path: Path, routing_store: Path) -> Iterator[Workplace]:
    with opened(tmp_path, routing_store) as opened_place:
        yield opened_place


def candidate_of(place: Workplace) -> tuple[Artefact, ModelManifest]:
    artefact = place.store.open("organ.at-dune")
    assert isinstance(artefact.manifest, ModelManifest)
    return artefact, artefact.manifest


def test_adaptation_job_publishes_a_candidate_with_lineage_and_gate(finished: Workplace) -> None:
    job = finished.job(JOB)
    artefact, manifest = candidate_of(finished)
    assert (job.state, job.reason, job.attempt) == ("succeeded", None, 1)
    assert (job.candidate_name, job.candidate_version) == ("organ.at-dune", 1)
    assert job.candidate_digest == artefact.digest
    assert (manifest.role, manifest.hospital, manifest.site) == ("hospital", "dune", None)
    lineage = manifest.lineage
    assert (lineage.method, lineage.run, lineage.sites) == ("iop-fl-routing", JOB, ("aster", "birch"))
    assert lineage.parents == (finished.space,)
    assert (lineage.rounds, lineage.seed) == (EPOCHS, 0)
    used = lineage.details["coefficients"]
    assert isinstance(used, dict)
    assert used["models"] == ["aster", "birch", "global"]
    assert np.shape(used["values"]) == (23, 3)
    np.testing.assert_allclose(np.sum(used["values"], axis=1), 1, atol=1e-5)
    # The guard of the candidate knows the hospital's scans beside those of training.
    source = finished.store.open("organ.global").manifest
    assert isinstance(source, ModelManifest)
    assert source.statistics is not None
    assert manifest.statistics is not None
    assert manifest.statistics.count == source.statistics.count + SCANS
    assert job.gate is not None
    assert job.gate["passed"] == all(check["passed"] for check in job.gate["checks"])
    assert len(job.gate["checks"]) == 9
    assert all(check["value"] is not None for check in job.gate["checks"])


@pytest.fixture
def apart(place: Workplace) -> Spread:
    """The routing space once more, which says how far its two members are apart."""
    loaded, sent = place.loaded(), []
    network = loaded.space.plain()
    for scanner in ("aster", "birch"):
        scans = [prepare(volume(scanner, patient)[0], ORGAN).slices for patient in (700, 701, 702)]
        patients = [index for index, slices in enumerate(scans) for _ in slices]
        sent.append(profile(network, torch.tensor(np.concatenate(scans)), patients))
    found = [sent_by(each, (0.05, 0.2, 1.0)) for each in sent]
    mean = {name: (found[0][name] + found[1][name]) / 2 for name in found[0]}
    spread = Spread.of(sent[0].layers, mean, 2)
    graph = shift_graph(network, spread, ORGAN.in_channels, ORGAN.size)
    place.store.publish(loaded.offered.manifest, {SPREAD: spread.to_bytes(), SHIFT_GRAPH: graph})
    return spread


def test_job_without_options_takes_the_dose_that_the_shift_asks_for(place: Workplace, apart: Spread) -> None:
    job_id = place.adaptation(place.cohort(outside_scans(SCANS)), options={"preset": "auto"})
    run_job(job_id, place.settings)
    job = place.job(job_id)
    assert (job.state, job.reason) == ("succeeded", None)
    artefact, manifest = candidate_of(place)
    details = manifest.lineage.details
    dose, options = details["dose"], details["options"]
    assert isinstance(dose, dict)
    assert isinstance(options, dict)
    assert options["preset"] == "ladder"
    assert options["doses"] == pytest.approx(dose["doses"], abs=1e-4)
    assert dose["share"] == pytest.approx(max(0, 1 - 1 / dose["shift"]), abs=1e-3)
    assert job.gate is not None
    assert [check["name"] for check in job.gate["checks"]] == [check.name for check in BY_SHIFT]
    assert "where 1 is usual between hospitals" in job.gate["summary"][0]
    sections = KIND.adaptation.sections(job.result, ())  # type: ignore[union-attr]
    assert sections[0].title == "How far these scans are from the members'"
    # The version is that which the recipe makes of the same scans.
    slices = [torch.tensor(prepare(volume("dune", 500 + n)[0], ORGAN).slices) for n in range(SCANS)]
    served = by_shift(
        place.loaded().space,
        apart,
        None,
        torch.cat(slices),
        [n for n, each in enumerate(slices) for _ in each],
    )
    weights = from_safetensors(artefact.read(WEIGHTS))
    for name, tensor in served.adapted.merged.state_dict().items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6)
    assert not place.events(job_id, "warning")


def test_a_scan_has_the_dose_of_its_own_slices_by_a_job_as_by_the_graph(
    place: Workplace, apart: Spread
) -> None:
    (data,) = outside_scans(1).values()
    job_id = place.scan_job(data)
    run_job(job_id, place.settings)
    answer = place.folder(job_id).read_result()
    assert answer is not None
    mask = np.asarray(nib.Nifti1Image.from_bytes(gzip.decompress(answer.body)).dataobj)
    offered = place.loaded().offered
    session = onnxruntime.InferenceSession(offered.read(SHIFT_GRAPH), providers=["CPUExecutionProvider"])
    prepared = prepare(volume("dune", 500)[0], ORGAN)
    (found,) = session.run(None, {"image": prepared.slices})
    at_once = restore(found, prepared.geometry)
    assert at_once.any()
    assert np.mean((at_once > 0) != (mask > 0)) < 1e-3


def test_one_model_alone_is_adapted_as_its_space_is(place: Workplace, apart: Spread) -> None:
    whole = place.loaded().global_model
    files = {WEIGHTS: whole.read(WEIGHTS), GRAPH: whole.read(GRAPH), SPREAD: apart.to_bytes()}
    manifest = whole.manifest.model_copy(update={"name": "alone", "part_of": None})
    place.store.publish(manifest, files)
    alone = place.store.open("alone")
    scans = outside_scans(SCANS)
    options = {"preset": "auto"}
    for fields in ({}, {"model": "alone", "parent": alone.digest}):
        job_id = place.adaptation(place.cohort(scans), options=options, **fields)
        run_job(job_id, place.settings)
        assert (place.job(job_id).state, place.job(job_id).reason) == ("succeeded", None)
    candidate, adapted = candidate_of(place)[0], place.store.open("alone.at-dune")
    assert adapted.read(WEIGHTS) == candidate.read(WEIGHTS)
    assert adapted.manifest.lineage.method == "test-time"
    assert adapted.manifest.lineage.parents == (alone.digest,)
    # One scan: by the same recipe, in a job.
    (data,) = outside_scans(1).values()
    bodies = []
    for parent in (place.space, alone.digest):
        job_id = place.scan_job(data, parent=parent)
        run_job(job_id, place.settings)
        answer = place.folder(job_id).read_result()
        assert answer is not None
        bodies.append(answer.body)
    assert bodies[0] == bodies[1]
    # It has no other models to weigh.
    job_id = place.adaptation(place.cohort(scans), options={}, model="alone", parent=alone.digest)
    run_job(job_id, place.settings)
    assert "it needs models of members to weigh" in (place.job(job_id).reason or "")


# `ttt` needs rotation heads (test_ttt.py), `blend` instance norm (unit/personalization/test_dynunet.py).
@pytest.mark.parametrize("preset", [name for name in FOR_COHORTS if name not in ("ttt", "blend")])
def test_every_preset_makes_a_judged_candidate_that_answers(place: Workplace, preset: str) -> None:
    options = {"preset": preset, "epochs": 1}
    job_id = place.adaptation(place.cohort(outside_scans(SCANS)), options=options)
    run_job(job_id, place.settings)
    job = place.job(job_id)
    assert job.state in ("succeeded", "fell_back"), job.reason
    assert job.gate is not None
    assert len(job.gate["checks"]) == 9
    artefact, manifest = candidate_of(place)
    network = build(manifest.network.name, **manifest.network.arguments)
    network.load_state_dict(from_safetensors(artefact.read(WEIGHTS)))
    scan, _ = volume("dune", 500)
    slices = prepare(scan, ORGAN).slices
    session = onnxruntime.InferenceSession(artefact.read(GRAPH), providers=["CPUExecutionProvider"])
    (answer,) = session.run(None, {"image": slices})
    with torch.no_grad():
        expected = torch.softmax(network.eval()(torch.tensor(slices)), dim=1).numpy()
    np.testing.assert_allclose(answer, expected, atol=1e-4)


def earlier_playbook(**more: object) -> bytes:
    """A playbook of the first format, with recipes."""
    found = {
        **{"format": "locum-playbook/1", "members": ["aster", "birch"], "episodes": 12, "severities": [0.0]},
        **{"recipes": [{"name": "full"}], "targets": {"share": 0.1, "largest": 0.2, "pieces": 1.0}},
    }
    return json.dumps({**found, **more}).encode()


def test_job_of_a_version_without_its_members_spread_takes_the_ladder_and_says_so(place: Workplace) -> None:
    """What an earlier release practised of recipes is not read."""
    place.store.publish(place.loaded().offered.manifest, {FILE: earlier_playbook()})
    job_id = place.adaptation(place.cohort(outside_scans(SCANS)), options={"preset": "auto"})
    run_job(job_id, place.settings)
    assert place.job(job_id).state == "succeeded"
    _, manifest = candidate_of(place)
    assert manifest.lineage.details["options"]["preset"] == "ladder"  # type: ignore[index, call-overload]
    (warning,) = place.events(job_id, "warning")
    assert "does not say how far its members are apart (spread.json)" in warning.data["message"]


def test_job_of_a_version_that_was_practised_earlier_has_its_licence(place: Workplace, apart: Spread) -> None:
    record = {"episodes": 12, "mean": 0.021, "worst": -0.004, "lost": 0.05, "largest": 9.5}
    members = {"aster": [0.02, -0.004, 0.05], "birch": [0.02, 0.0, 0.04]}
    playbook = earlier_playbook(by_shift={**record, "members": members})
    files = {SPREAD: apart.to_bytes(), FILE: playbook}
    place.store.publish(place.loaded().offered.manifest, files)
    job_id = place.adaptation(place.cohort(outside_scans(SCANS)), options={"preset": "auto"})
    run_job(job_id, place.settings)
    job = place.job(job_id)
    assert job.gate is not None
    values = {check["name"]: check["value"] for check in job.gate["checks"]}
    dose = job.result["dose"]  # type: ignore[index]
    assert dose["practised"] == {"largest": 9.5, "changes": members}
    assert values["shift_beyond_practice"] == pytest.approx(dose["shift"] / 9.5, abs=1e-4)
    if dose["share"]:
        assert values["practice_lost"] == 0.05
    titles = [section.title for section in KIND.adaptation.sections(job.result, ())]  # type: ignore[union-attr, arg-type]
    assert "What this did at the members" in titles


def test_harmless_candidate_passes_every_check_but_possibly_consensus_gain(place: Workplace) -> None:
    """Every check of the gate is measured on it, and its labels, which no check sees, agree."""
    options = {"epochs": 1, "routing_rate": 0.01}
    job_id = place.adaptation(place.cohort(outside_scans(6, "cedar")), options=options)
    run_job(job_id, place.settings)
    gate = place.job(job_id).gate
    assert gate is not None
    failed = {check["name"]: check["value"] for check in gate["checks"] if not check["passed"]}
    assert gate["passed"] == (not failed)
    # The gain over the parent is next to nothing, on either side of the limit as the machine rounds.
    assert failed.keys() <= {"consensus_gain"}
    assert all(value > -0.02 for value in failed.values())
    assert all(check["value"] is not None for check in gate["checks"])
    dice = {}
    for artefact in (place.store.open("organ.global"), candidate_of(place)[0]):
        session = onnxruntime.InferenceSession(artefact.read(GRAPH), providers=["CPUExecutionProvider"])
        found, true = [], []
        for patient in range(500, 506):
            scan, mask = volume("cedar", patient)
            prepared = prepare(scan, ORGAN)
            (probabilities,) = session.run(None, {"image": prepared.slices})
            found.append(probabilities.argmax(axis=1))
            true.append(prepare_mask(mask, ORGAN, prepared.geometry))
        inside, drawn = np.concatenate(found) == 1, np.concatenate(true) == 1
        dice[artefact.name] = 2 * (inside & drawn).sum() / (inside.sum() + drawn.sum())
    assert dice["organ.at-dune"] > dice["organ.global"] - 0.01


def test_candidate_graphs_equal_the_merged_network(finished: Workplace) -> None:
    artefact, _ = candidate_of(finished)
    network = build("unet", **ARGUMENTS).eval()
    network.load_state_dict(from_safetensors(artefact.read(WEIGHTS)))
    images = prepare(volume("dune", 600)[0], ORGAN).slices
    with torch.no_grad():
        expected = torch.softmax(network(torch.from_numpy(images.copy())), dim=1).numpy()
    for file in (GRAPH, DYNAMIC):
        session = onnxruntime.InferenceSession(artefact.read(file), providers=["CPUExecutionProvider"])
        (found,) = session.run(None, {"image": images})
        # Direct coefficients are the same for every image, so merging them changes nothing but rounding.
        np.testing.assert_allclose(found, expected, atol=1e-4, err_msg=file)
    parent = from_safetensors(finished.store.open("organ.global").read(WEIGHTS))
    assert any(not torch.equal(tensor, parent[name]) for name, tensor in network.state_dict().items())


def test_statistics_preset_publishes_a_candidate_with_new_statistics_only(place: Workplace) -> None:
    job_id = place.adaptation(place.cohort(outside_scans(SCANS)), options={"preset": "statistics"})
    run_job(job_id, place.settings)
    job = place.job(job_id)
    assert (job.state, job.reason) == ("succeeded", None)
    assert [event.data["epoch"] for event in place.events(job_id, "epoch")] == [0]
    artefact, manifest = candidate_of(place)
    assert manifest.lineage.details["coefficients"]["models"] == ["global"]
    found, parent = (from_safetensors(a.read(WEIGHTS)) for a in (artefact, place.store.open("organ.global")))
    changed = {name.rsplit(".", 1)[-1] for name, t in parent.items() if not torch.equal(found[name], t)}
    assert (
        {"running_mean", "running_var"} <= changed <= {"running_mean", "running_var", "num_batches_tracked"}
    )
    assert job.gate is not None
    # Nothing is drawn, and three patients have no halves: there is nothing to be stable against.
    assert [check["name"] for check in job.gate["checks"] if check["value"] is None] == ["stability"]


def test_tent_preset_changes_batch_norm_of_the_global_model_only(place: Workplace) -> None:
    options = {"preset": "tent", "epochs": 2}
    job_id = place.adaptation(place.cohort(outside_scans(SCANS)), options=options)
    run_job(job_id, place.settings)
    assert place.job(job_id).state == "succeeded"
    epochs = [event.data for event in place.events(job_id, "epoch")]
    assert [epoch["epoch"] for epoch in epochs] == [0, 1, 2]
    assert all(epoch["loss"] == epoch["entropy"] and epoch["consistency"] is None for epoch in epochs)
    artefact, manifest = candidate_of(place)
    assert manifest.lineage.details["options"]["preset"] == "tent"
    assert manifest.lineage.details["coefficients"]["models"] == ["global"]
    found, parent = (from_safetensors(a.read(WEIGHTS)) for a in (artefact, place.store.open("organ.global")))
    changed = {name for name, tensor in parent.items() if not torch.equal(found[name], tensor)}
    assert {"weight", "bias"} <= {name.rsplit(".", 1)[-1] for name in changed}
    assert all("bn" in name for name in changed)


def test_adaptation_job_records_epochs_stages_states_and_pictures(finished: Workplace) -> None:
    epochs = [event.data for event in finished.events(JOB, "epoch")]
    assert [epoch["epoch"] for epoch in epochs] == list(range(EPOCHS + 1))
    assert all(epoch["safe"] and np.isfinite(epoch["loss"]) for epoch in epochs)
    np.testing.assert_allclose(epochs[0]["coefficients"]["values"], 1 / 3, atol=1e-6)
    assert np.ptp(epochs[-1]["coefficients"]["values"]) > 0.01
    stages = [event.data["stage"] for event in finished.events(JOB, "progress")]
    assert list(dict.fromkeys(stages)) == ["preparing", "adapting", "judging", "drawing", "publishing"]
    # The time that is left is known after an epoch, and counts the replicas that judging makes.
    known = {
        event.data["stage"]
        for event in finished.events(JOB, "progress")
        if event.data.get("seconds_left", -1) >= 0
    }
    assert known == {"adapting", "judging"}
    assert [event.data["state"] for event in finished.events(JOB, "state")] == [
        "queued",
        "running",
        "succeeded",
    ]
    folder = finished.folder(JOB)
    pictures = folder.pictures()
    assert {scan: set(found) for scan, found in pictures.items()} == {
        scan: {"before", "after"} for scan in "12"
    }
    with Image.open(io.BytesIO(pictures["1"]["after"])) as picture:
        assert picture.size > (300, 300)
    assert folder.CHECKPOINT not in folder.names


def test_damaged_checkpoint_restarts_the_job_with_an_equal_result(
    finished: Workplace, place: Workplace
) -> None:
    place.adaptation(place.cohort(outside_scans(SCANS)), job_id=JOB)
    folder = place.folder(JOB)
    folder.write(folder.CHECKPOINT, b"half of a checkpoint")
    run_job(JOB, place.settings)
    assert candidate_of(place)[0].digest == candidate_of(finished)[0].digest
    (warning,) = place.events(JOB, "warning")
    assert "started over" in warning.data["message"]


def test_job_adopts_the_version_published_before_its_worker_died(finished: Workplace) -> None:
    before = finished.job(JOB)
    epochs = len(finished.events(JOB, "epoch"))
    with finished.database.write() as session:
        # As a worker leaves it that dies right after publishing.
        job = records.get(session, JOB)
        job.state, job.owner, job.finished_at = "running", "gone:1", None
        job.candidate_name = job.candidate_version = job.candidate_digest = None
    finished.expire(JOB)
    run_job(JOB, finished.settings)
    after = finished.job(JOB)
    assert (after.state, after.attempt) == ("succeeded", 2)
    assert after.candidate_digest == before.candidate_digest
    assert (after.gate, after.result) == (before.gate, before.result)
    assert len(finished.candidates()) == 1
    assert len(finished.events(JOB, "epoch")) == epochs


def test_worker_that_lost_its_lease_cannot_publish(place: Workplace) -> None:
    job_id = place.adaptation(place.cohort(outside_scans(1)))
    stale = leases.claim(place.database, job_id, "stale", place.settings)
    assert stale is not None
    attempt = Attempt(place.database, stale, place.settings)
    loaded = place.loaded()
    draft = draft_of(loaded)
    place.expire(job_id)
    holder = leases.claim(place.database, job_id, "holder", place.settings)
    assert holder is not None
    with pytest.raises(LeaseLost):
        publish(attempt, place.store, draft, gate={"passed": True, "checks": []}, result={})
    assert place.candidates() == []
    assert list((place.settings.store / ".staging").iterdir()) == []
    assert place.job(job_id).gate is None
    published = publish(
        Attempt(place.database, holder, place.settings),
        place.store,
        draft,
        gate={"passed": True, "checks": []},
        result={},
    )
    assert str(published.artefact) == "organ.at-dune@1"


def test_publishing_twice_for_one_job_makes_one_version(place: Workplace) -> None:
    job_id = place.adaptation(place.cohort(outside_scans(1)))
    lease = leases.claim(place.database, job_id, "worker", place.settings)
    assert lease is not None
    attempt, loaded = Attempt(place.database, lease, place.settings), place.loaded()
    versions = {
        publish(
            attempt,
            place.store,
            draft_of(loaded, weights),
            gate={"passed": True, "checks": []},
            result={},
        ).artefact.version
        for weights in (b"first", b"second")
    }
    assert versions == {1}
    assert len(place.candidates()) == 1


def test_worker_that_lost_its_job_to_another_stops(place: Workplace) -> None:
    settings = place.settings.model_copy(update={"lease_seconds": 1})
    job_id = place.adaptation(place.cohort(outside_scans(SCANS)), options={"epochs": 200})
    working = threading.Thread(target=run_job, args=(job_id, settings))
    working.start()
    wait_for(lambda: place.events(job_id, "epoch"))
    # The heartbeat may put the lease in force again in between.
    wait_for(lambda: (place.expire(job_id), leases.claim(place.database, job_id, "other", settings))[1])
    working.join(60)
    assert not working.is_alive()
    job = place.job(job_id)
    assert (job.state, job.owner, job.token) == ("running", "other", 2)
    assert place.candidates() == []


def test_unsafe_adaptation_falls_back_to_step_0(place: Workplace) -> None:
    options = {"epochs": 2, "routing_rate": 10.0, "bn_rate": 10.0}
    job_id = place.adaptation(place.cohort(outside_scans(1)), options=options)
    run_job(job_id, place.settings)
    job = place.job(job_id)
    assert job.state == "fell_back"
    assert job.reason is not None
    assert "at epoch 1" in job.reason
    assert job.result is not None
    assert job.result["best_epoch"] == 0
    (manifest,) = place.candidates()
    used = manifest.lineage.details["coefficients"]
    assert isinstance(used, dict)
    np.testing.assert_allclose(used["values"], 1 / 3, atol=1e-6)
    assert job.gate is not None
