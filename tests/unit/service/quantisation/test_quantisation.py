"""Another graph of the same weights: made, judged without labels, published."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from model_store.artefact import Artefact
from model_store.digest import sha256
from model_store.errors import KindMismatch, PublishRefused, ReferenceNotFound, UnsupportedScan
from model_store.manifest import GRAPH, WEIGHTS, ModelManifest
from model_store.scan import Limits
from model_store.store import Store
from service.errors import PrecisionUnavailable
from service.inference.providers import CPU, CUDA
from service.inference.sessions import GraphSession
from service.quantisation import work
from service.quantisation.graph import Recipe, reduced
from service.quantisation.precision import check_provider
from service.quantisation.verdict import PatientCounts, Report
from tests.helpers.service.quantised import TASK, Scan, graph_of, manifest, scans


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("quantised") / "store")


@pytest.fixture(scope="module")
def network(store: Store) -> Artefact[ModelManifest]:
    return store.publish(manifest(), {WEIGHTS: b"none", GRAPH: graph_of(40)}).expect(ModelManifest)


def load(graph: bytes) -> GraphSession:
    return GraphSession(sha256(graph), graph, threads=1, device="cpu")


@pytest.fixture(scope="module")
def made(network: Artefact[ModelManifest]) -> tuple[bytes, Report]:
    return work.make(network, "int8", scans(8), load, Limits())


def test_same_scans_and_weights_give_the_same_version(
    store: Store, network: Artefact[ModelManifest], made: tuple[bytes, Report]
) -> None:
    graph, report = made
    assert report.passed, report.to_json()
    again, judged = work.make(network, "int8", scans(8), load, Limits())
    first, second = (work.publish(store, network, *found) for found in ((graph, report), (again, judged)))
    assert (str(first), first.digest) == (str(second), second.digest) == ("discs.int8@1", first.digest)
    assert first.manifest.lineage.parents == (network.digest,)
    assert first.manifest.files[GRAPH].sha256 == sha256(graph)
    assert WEIGHTS not in first.manifest.files
    assert first.manifest.part_of == "discs"


def test_int8_graph_is_smaller_and_has_integer_convolutions(made: tuple[bytes, Report]) -> None:
    nodes = onnx.load_from_string(made[0]).graph.node
    assert len(made[0]) < 0.5 * len(graph_of(40))
    produced = {output: node.op_type for node in nodes for output in node.output}
    weights = [produced.get(node.input[1]) for node in nodes if node.op_type == "Conv"]
    assert weights[0] is weights[-1] is None
    assert {*weights[1:-1]} == {"DequantizeLinear"}


def test_report_names_no_patient_and_no_scan(made: tuple[bytes, Report]) -> None:
    found = made[1].to_json()
    assert [each["patient"] for each in found["patients"]] == [1, 2, 3, 4, 5, 6]
    assert not any(scan.name in json.dumps(found) for scan in scans(8))
    assert (found["overlap"], found["calibrated_on"], found["scans"]) == (False, 2, 12)


def test_spoiled_graph_is_refused_and_not_published(store: Store, network: Artefact[ModelManifest]) -> None:
    def spoiled(graph: bytes) -> GraphSession:
        """The float32 graph as it is; in place of the other, one that was hardly trained."""
        return load(graph if graph == graph_of(40) else graph_of(6))

    graph, report = work.make(network, "int8", scans(4), spoiled, Limits())
    worst = report.checks()[0]
    assert worst["name"] == "worst-patient"
    assert worst["value"] < worst["limit"] == 0.98
    before = store.versions.names()
    with pytest.raises(PublishRefused, match=r"in int8 is not published: .*worst-patient"):
        work.publish(store, network, graph, report)
    assert store.versions.names() == before


def test_counts_of_a_patient_match_a_hand_computed_case() -> None:
    before = np.zeros((20, 20), np.uint8)
    after = before.copy()
    before[:10, :10] = 1
    after[:10, :9] = 1
    before[10:, 10:] = 2
    counts = PatientCounts.none(3)
    counts.add(before, after)
    # Class 1: 2 * 90 / (100 + 90); class 2 is gone.
    assert counts.agreement == pytest.approx((180 / 190 + 0) / 2)
    assert counts.size_ratio == pytest.approx(90 / 200)
    assert counts.emptied == [2]


@pytest.mark.parametrize(("removed", "passed"), [(3, True), (5, False)])
def test_targets_that_all_shrink_by_more_than_two_percent_are_refused(removed: int, passed: bool) -> None:
    counts = PatientCounts.none(2)
    before = np.zeros(1000, np.uint8)
    before[:200] = 1
    after = before.copy()
    after[:removed] = 0
    counts.add(before, after)
    report = Report("int8", TASK, [counts], 1, 1, True, 0)
    assert counts.agreement is not None
    assert counts.agreement > 0.98  # neither is refused by the agreement alone
    assert report.passed is passed


def test_scans_without_a_target_refuse_the_graph() -> None:
    report = Report("int8", TASK, [PatientCounts.none(2)], 1, 1, True, 0)
    assert not report.passed
    assert "no target" in report.checks()[0]["failure"]


def test_patients_are_dealt_without_overlap_where_there_are_enough() -> None:
    calibrating, judging, overlap = work.dealt([0, 0, 1, 2, 3, 3, 4, 4])
    assert not overlap
    assert {*calibrating} | {*judging} == {*range(8)}
    patients = [0, 0, 1, 2, 3, 3, 4, 4]
    assert not {patients[i] for i in calibrating} & {patients[i] for i in judging}
    assert work.dealt([0, 0, 1, 2]) == ([0, 1, 2, 3], [0, 1, 2, 3], True)


def test_float16_keeps_its_input_and_output_and_most_of_its_masks(network: Artefact[ModelManifest]) -> None:
    graph, report = work.make(network, "float16", scans(4), load, Limits())
    assert len(graph) < 0.6 * len(graph_of(40))
    assert report.passed, report.to_json()
    types = {each.type.tensor_type.elem_type for each in onnx.load_from_string(graph).graph.input}
    assert types == {onnx.TensorProto.FLOAT}


def test_precision_belongs_to_its_device() -> None:
    check_provider("int8", CPU)
    check_provider("float16", CUDA)
    with pytest.raises(PrecisionUnavailable, match="are for a GPU, found CPUExecutionProvider"):
        check_provider("float16", CPU)
    with pytest.raises(PrecisionUnavailable, match="for the CPU"):
        check_provider("int8", CUDA)


def test_other_recipe_makes_another_graph() -> None:
    slices = [np.random.default_rng(0).normal(size=(1, 32, 32)).astype(np.float32)]
    recipe = Recipe(scales="minmax")
    assert reduced(graph_of(6), "int8", slices, recipe) != reduced(graph_of(6), "int8", slices)


def test_wrong_input_is_refused_by_its_name(store: Store, network: Artefact[ModelManifest]) -> None:
    with pytest.raises(ReferenceNotFound, match="expected scans"):
        work.make(network, "int8", [], load, Limits())
    broken = [*scans(2), Scan("z.png", b"not a scan")]
    with pytest.raises(UnsupportedScan, match="scan 5 of 5"):
        work.make(network, "int8", broken, load, Limits())
    classes = TASK.model_copy(update={"kind": "classification", "labels": {}, "class_names": ("a", "b")})
    classifier = store.publish(manifest("classes", classes), {WEIGHTS: b"none", GRAPH: graph_of(6)})
    with pytest.raises(KindMismatch, match="found a classifier"):
        work.require_reducible(classifier)


def test_long_name_is_cut_and_stays_unique() -> None:
    names = {work.reduced_name("a" * 126 + end, "int8") for end in "bc"}
    assert len(names) == 2
    assert {len(name) for name in names} == {128}


def test_graph_in_another_precision_needs_its_parent() -> None:
    fields = manifest().model_dump()
    with pytest.raises(ValueError, match="its one parent"):
        ModelManifest.model_validate({**fields, "precision": "int8"})


def test_manifest_in_float32_has_the_bytes_that_it_had(tmp_path: Path) -> None:
    assert b"precision" not in manifest().to_bytes()
