"""Preset ttt as a job: of a cohort, of one scan, of a model alone, and of those without rotation heads."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from model_store.manifest import GRAPH, WEIGHTS, ModelManifest
from model_store.preprocessing import prepare
from personalization.networks import build
from personalization.state import from_safetensors
from service.worker.runner import run_job
from tests.helpers.service.routing_federation import ORGAN, outside_scans, publish_routing_space, volume
from tests.helpers.service.workplace import Workplace, opened

OPTIONS = {"preset": "ttt", "batch_size": 4}


@pytest.fixture(scope="module")
def headed_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("headed")
    partial(publish_routing_space, rotation_head=True)(root)
    return root


@pytest.fixture
def place(tmp_path: Path, headed_store: Path) -> Iterator[Workplace]:
    with opened(tmp_path, headed_store) as opened_place:
        yield opened_place


def test_a_cohort_gets_a_judged_candidate_that_answers(place: Workplace) -> None:
    job_id = place.adaptation(place.cohort(outside_scans(2)), options=OPTIONS)
    run_job(job_id, place.settings)
    job = place.job(job_id)
    assert job.state in ("succeeded", "fell_back"), job.reason
    assert job.gate is not None
    assert len(job.gate["checks"]) == 9
    artefact = place.store.open("organ.at-dune")
    manifest = artefact.manifest
    assert isinstance(manifest, ModelManifest)
    assert manifest.lineage.details["options"]["preset"] == "ttt"
    assert manifest.network.arguments["rotation_head"] is True
    network = build(manifest.network.name, **manifest.network.arguments)
    network.load_state_dict(from_safetensors(artefact.read(WEIGHTS)))
    slices = prepare(volume("dune", 500)[0], ORGAN).slices
    session = onnxruntime.InferenceSession(artefact.read(GRAPH), providers=["CPUExecutionProvider"])
    (answer,) = session.run(None, {"image": slices})
    with torch.no_grad():
        expected = torch.softmax(network.eval()(torch.tensor(slices)), dim=1).numpy()
    np.testing.assert_allclose(answer, expected, atol=1e-4)


def test_a_scan_is_answered_from_the_trained_weights_the_same_every_time(place: Workplace) -> None:
    (data,) = outside_scans(1).values()
    answers = []
    for _ in range(2):
        job_id = place.scan_job(data, preset="ttt")
        run_job(job_id, place.settings)
        job = place.job(job_id)
        assert job.state in ("succeeded", "fell_back"), job.reason
        assert job.result is not None
        assert job.result["epochs"] == 1
        answer = place.folder(job_id).read_result()
        assert answer is not None
        answers.append(answer.body)
    assert answers[0] == answers[1]


def test_the_model_of_fedavg_is_adapted_as_the_global_one_of_a_space(place: Workplace) -> None:
    shared = place.store.open("organ.global")
    files = {name: shared.read(name) for name in (WEIGHTS, GRAPH)}
    place.store.publish(shared.manifest.model_copy(update={"name": "alone", "part_of": None}), files)
    alone, scans = place.store.open("alone"), outside_scans(2)
    for fields in ({}, {"model": "alone", "parent": alone.digest}):
        job_id = place.adaptation(place.cohort(scans), options=OPTIONS, **fields)
        run_job(job_id, place.settings)
        job = place.job(job_id)
        assert job.state in ("succeeded", "fell_back"), job.reason
    # A model is nearest to itself, so that no other confirms what was learned.
    assert job.gate is not None
    assert not {check["name"]: check["passed"] for check in job.gate["checks"]}["consensus_gain"]
    made = place.store.open("alone.at-dune")
    assert made.read(WEIGHTS) == place.store.open("organ.at-dune").read(WEIGHTS)
    bodies = []
    for parent in (place.space, alone.digest):
        job_id = place.scan_job(next(iter(scans.values())), parent=parent, preset="ttt")
        run_job(job_id, place.settings)
        answer = place.folder(job_id).read_result()
        assert answer is not None, place.job(job_id).reason
        bodies.append(answer.body)
    assert bodies[0] == bodies[1]


def test_a_federation_without_heads_is_refused_with_what_to_do(tmp_path: Path, routing_store: Path) -> None:
    with opened(tmp_path, routing_store) as place:
        job_id = place.adaptation(place.cohort(outside_scans(1)), options=OPTIONS)
        run_job(job_id, place.settings)
        job = place.job(job_id)
    assert job.state == "failed"
    assert "a head that predicts quarter turns, trained with --rotation-head" in (job.reason or "")
