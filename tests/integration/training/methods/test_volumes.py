"""Every method that can be trained on volumes, in seconds, on balls; the others say why they cannot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from model_store.manifest import GRAPH, Lineage
from model_store.preprocessing.windows import slide
from model_store.store import Store
from model_store.task import Task
from personalization.iop_fl.spread import Spread
from tests.helpers.training.volumes import BALLS, GEOMETRY, volume_data, volumes
from training.algorithm import Publication
from training.config import MethodConfig
from training.engine.client import RunEnvironment
from training.engine.egress import ALL_KINDS, SiteSpec
from training.engine.engine import FederationEngine, RunOutcome
from training.engine.folder import RunFolder
from training.engine.history import final_distances, final_scores
from training.local.scores import predict
from training.local.site import SiteData
from training.methods.registry import method, methods
from training.publish import Origin, publish

SITES = ("A", "B", "C")
SMALL: Mapping[str, Any] = {"width": 4, "rounds": 2, "least_steps": 2, "batch_size": 2}
ON_VOLUMES = [
    name
    for name in methods()
    if "segmentation" in method(name).kinds and "volumes" not in method(name).refused
]
BATCH_NORM = {
    "network": "monai.dynunet",
    "network_arguments": {
        "strides": [[1, 1, 1], [2, 2, 2], [2, 2, 1]],
        "norm_name": "batch",
    },
}


class Sites:
    """Loads a site's volumes; picklable for worker processes."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self) -> Any:
        return volume_data(SITES[self.number], 3, 2, self.number, test=2)


def configured(name: str, tmp_path: Path, **more: Any) -> MethodConfig:
    chosen = method(name)
    given = {
        field: value for field, value in {**SMALL, **more}.items() if field in chosen.config.model_fields
    }
    return chosen.config(**given).prepared(Store(tmp_path / "store"), BALLS, "balls")


def run(
    name: str, folder: Path, *, workers: int = 0, kept: int = 1, **more: Any
) -> tuple[RunOutcome, Publication]:
    algorithm = method(name).build(configured(name, folder, **more), BALLS)
    specs = [SiteSpec(site, Sites(number), ALL_KINDS, True, 20) for number, site in enumerate(SITES)]
    engine = FederationEngine(
        algorithm, specs, RunEnvironment(3, "cpu", 1), RunFolder(folder / "run", kept), workers=workers
    )
    outcome = engine.run()
    return outcome, algorithm.publication(outcome.server)


@pytest.mark.parametrize("name", ON_VOLUMES)
def test_a_method_trains_scores_and_publishes_on_volumes(name: str, tmp_path: Path) -> None:
    outcome, publication = run(name, tmp_path)
    assert publication.models
    scores = {(score.model, score.split): score for score in final_scores(outcome.history) if not score.label}
    assert scores
    for score in scores.values():
        assert score.count == 6
    distances = final_distances(outcome.history)
    assert {found.unit for found in distances} <= {"mm"}
    lineage = Lineage(method=name, run="0" * 16, sites=SITES, rounds=2, seed=3)
    artefacts = publish(Store(tmp_path / "store"), Origin("balls", BALLS, lineage), publication)
    draft, artefact = publication.models[0], artefacts[0]
    assert draft.network.name == "monai.dynunet"
    session = onnxruntime.InferenceSession(artefact.read("graph.onnx"))
    assert session.get_inputs()[0].shape[1:] == [1, *GEOMETRY.patch]

    # The served graph, by the service's windows, gives the masks that training scored.
    def answered(patch: Any) -> Any:
        return session.run(["probabilities"], {"image": np.ascontiguousarray(patch)[None]})[0][0]

    network = method(name).network(configured(name, tmp_path), BALLS, draft.network, draft.weights)
    tests = volumes(2, 200)
    for image, found in zip(tests.images, predict(network, tests), strict=True):
        planes = slide(image, GEOMETRY.patch, GEOMETRY.overlap, GEOMETRY.window, answered)
        served = np.stack([plane.argmax(axis=0) for _, plane in planes])
        assert (served == found.numpy()).mean() > 0.999


def test_methods_that_cannot_are_those_that_say_why() -> None:
    refused = {name for name in methods() if method(name).refused.get("volumes")}
    assert refused >= {"fedoap", "fedins", "feddg"}


@pytest.mark.parametrize("name", ["fedavg", "iop-fl"])
def test_batch_norm_of_volumes_is_estimated_and_its_spread_measured(name: str, tmp_path: Path) -> None:
    outcome, publication = run(name, tmp_path, **BATCH_NORM)
    (draft,) = (draft for draft in publication.models if draft.site is None)
    means = [tensor for key, tensor in draft.weights.items() if key.endswith("running_mean")]
    assert means
    assert any(tensor.abs().max() > 0 for tensor in means)
    assert outcome.server.facts["spread"]["spread"]["members"] == len(SITES)
    lineage = Lineage(method=name, run="0" * 16, sites=SITES, rounds=2, seed=3)
    artefacts = publish(Store(tmp_path / "store"), Origin("balls", BALLS, lineage), publication)
    assert "spread.json" in artefacts[-1].manifest.files
    # The gate of a hospital's model compares its targets with the members', both in patches.
    assert 0 < Spread.model_validate_json(artefacts[-1].read("spread.json")).share < 1
    averaged = BALLS.model_copy(update={"geometry": GEOMETRY.model_copy(update={"average": "logits"})})
    made = publish(Store(tmp_path / "logits"), Origin("balls", averaged, lineage), publication)
    for published, outputs in ((made, {"probabilities", "logits"}), (artefacts, {"probabilities"})):
        graph = next(each for each in published if GRAPH in each.manifest.files).read(GRAPH)
        session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
        assert {each.name for each in session.get_outputs()} == outputs


def test_more_workers_and_a_second_run_give_the_same_bits(tmp_path: Path) -> None:
    runs = [run("fedavg", tmp_path / str(workers), workers=workers)[1] for workers in (0, 1, 2)]
    first, *others = (publication.models[0].weights for publication in runs)
    for other in others:
        assert all(torch.equal(tensor, other[name]) for name, tensor in first.items())


def test_a_run_that_goes_on_from_its_second_round_gives_the_same_bits(tmp_path: Path) -> None:
    _, first = run("fedavg", tmp_path, kept=6)
    RunFolder(tmp_path / "run", 6).take_back_to("train", 2)
    outcome, again = run("fedavg", tmp_path, kept=6)
    assert [entry.round for entry in outcome.history if entry.phase == "train"] == [0, 1]
    assert all(
        torch.equal(tensor, again.models[0].weights[name]) for name, tensor in first.models[0].weights.items()
    )


def test_what_suits_volumes_is_taken_where_nothing_is_given(tmp_path: Path) -> None:
    config = method("fedavg").config().prepared(Store(tmp_path), BALLS, "balls")
    chosen = config.model_dump()
    assert (chosen["loss"], chosen["batch_size"], chosen["optimiser"]) == ("dice_ce", 2, "adamw")
    given = method("fedavg").config(loss="dice", batch_size=4).prepared(Store(tmp_path), BALLS, "balls")
    assert (given.model_dump()["loss"], given.model_dump()["batch_size"]) == ("dice", 4)


def test_regions_are_trained_with_a_sigmoid_each_and_answered_as_they_are_served(tmp_path: Path) -> None:
    nested = Task(
        name="nested",
        labels={"whole": (1, 2), "core": (2,)},
        regions=("whole", "core"),
        geometry=GEOMETRY,
    )
    found = volumes(2, 7, task=nested)
    # The core is the half of each ball, and the network is trained on one batch of both volumes.
    targets = [each.copy() for each in found.targets]
    for each in targets:
        each[: each.shape[0] // 2] *= 2
    found = replace(found, targets=tuple(targets))
    data = SiteData("A", found, found, found, None)
    config = method("fedavg").config(width=4, rounds=1, least_steps=60, augment=False, intensity=0.0)
    config = config.prepared(Store(tmp_path / "store"), nested, "nested")
    algorithm = method("fedavg").build(config, nested)
    spec = SiteSpec("A", partial(_same, data), ALL_KINDS, True, 20)
    engine = FederationEngine(
        algorithm, [spec], RunEnvironment(3, "cpu", 1), RunFolder(tmp_path / "run"), workers=0
    )
    outcome = engine.run()
    publication = algorithm.publication(outcome.server)
    draft = publication.models[0]
    assert draft.network.arguments["classes"] == 2
    assert draft.metrics["test_dice/whole"] > 0.5
    lineage = Lineage(method="fedavg", run="0" * 16, sites=("A",), rounds=1, seed=3)
    (artefact,) = publish(Store(tmp_path / "store"), Origin("nested", nested, lineage), publication)
    session = onnxruntime.InferenceSession(artefact.read("graph.onnx"))
    network = method("fedavg").network(config, nested, draft.network, draft.weights).eval()
    patch = torch.randn(1, 1, *GEOMETRY.patch)
    with torch.no_grad():
        expected = torch.sigmoid(network(patch)).numpy()
    served = session.run(["probabilities"], {"image": patch.numpy()})[0]
    np.testing.assert_allclose(served, expected, atol=1e-4)


def _same(data: Any) -> Any:
    return data


def test_plain_sgd_stays_plain_sgd_on_volumes(tmp_path: Path) -> None:
    for name in ("scaffold", "feddc"):
        chosen = method(name).config().prepared(Store(tmp_path), BALLS, "balls").model_dump()
        assert (chosen["loss"], chosen["optimiser"]) == ("dice_ce", "sgd"), name
