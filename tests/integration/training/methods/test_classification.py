"""Methods on a classification: few hospitals, dropouts, options and rejected configurations."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from tests.helpers.training.classified_sites import write_volumes
from tests.helpers.training.sites import client_step
from training.algorithm import Memory
from training.choices.fedavg import FedAvgConfig
from training.config import RunConfig
from training.data.federation import load_federation
from training.data.splits import split_by_patient
from training.engine.client import RunEnvironment
from training.errors import ConfigurationError, SiteFailed
from training.local.site import SiteData
from training.methods.dense import DenseConfig
from training.methods.fedbicross.config import FedBiCrossConfig
from training.methods.fedbicross.method import FedBiCross
from training.methods.iop_fl import IopFlConfig
from training.phantom import write_federation
from training.phantom.shapes import write_shapes
from training.run import Run, execute

CONFIG = FedBiCrossConfig(
    width=1,
    local_epochs=2,
    batch_size=8,
    probes=8,
    min_silhouette=-1,
    epochs=1,
    steps=4,
    synthesis_batch=6,
    outer_steps=2,
    checkpoint_every=2,
    personal_epochs=1,
)


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    root = write_shapes(
        tmp_path_factory.mktemp("shapes"), ("elm", "fir", "hazel"), images_per_site=12, size=8
    )
    return load_federation(root)


def run(federation, folder, config=CONFIG, method="fedbicross", quorum=None, **settings):
    job = Run(federation, method, config, RunConfig(**{"consent": "all", **settings}))
    return execute(job, folder, workers=0, quorum=quorum)


def models(result) -> dict[str, dict[str, torch.Tensor]]:
    return {draft.site or str(draft.cluster): draft.weights for draft in result.publication.models}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def test_fedbicross_result_does_not_depend_on_checkpoint_every(federation, tmp_path):
    results = [
        run(federation, tmp_path / str(every), CONFIG.model_copy(update={"checkpoint_every": every}))
        for every in (1, 3)
    ]
    steps = [sum(entry.phase == "synthesise+bilevel" for entry in r.history) for r in results]
    assert steps == [4, 2]
    first, second = map(models, results)
    assert first.keys() == second.keys()
    assert all(same(state, second[name]) for name, state in first.items())
    assert results[0].publication.composite == results[1].publication.composite


@pytest.mark.parametrize("count", [1, 2])
def test_fedbicross_of_one_or_two_hospitals_gives_one_cluster(federation, tmp_path, count):
    names = federation.names[:count]
    result = run(federation.only(names), tmp_path)
    assert result.publication.composite == {
        "assignment": dict.fromkeys(names, "1"),
        "mixing": {"1": {"1": 1.0}},
        "silhouettes": {},
    }
    assert list(models(result)) == ["1", *names]


def test_fedbicross_without_stage_3_publishes_the_cluster_model_as_personal(federation, tmp_path):
    result = run(federation, tmp_path, CONFIG.model_copy(update={"personal_epochs": 0}))
    found = models(result)
    for site, cluster in result.publication.composite["assignment"].items():
        assert same(found[site], found[cluster])


def test_fedbicross_without_consent_publishes_no_personal_model(federation, tmp_path):
    result = run(federation, tmp_path, consent=())
    assert {draft.role for draft in result.publication.models} == {"cluster"}
    assert not result.history[-1].sites


def test_fedbicross_with_a_hospital_that_withholds_its_model_is_rejected(federation, tmp_path):
    with pytest.raises(Exception, match="fir: phase 'local' uploads 'model'"):
        run(federation, tmp_path, egress={"fir": ("statistics",)})


def test_fedbicross_leaves_out_a_hospital_that_drops_out(federation, tmp_path, monkeypatch):
    train = FedBiCross.train_once

    def fail_at_fir(method, context, seed, data):
        if context.site == "fir":
            raise SiteFailed("its line is down")
        return train(method, context, seed, data)

    monkeypatch.setattr(FedBiCross, "train_once", fail_at_fir)
    sites = [s.assigned(dict.fromkeys(s.patients, "train")) for s in federation.sites]
    result = run(replace(federation, sites=tuple(sites)), tmp_path, quorum=2)
    assert [set(entry.dropped) for entry in result.history if entry.dropped] == [{"fir"}] * 3
    assert set(result.publication.composite["assignment"]) == {"elm", "hazel"}
    assert "fir" not in models(result)


def test_fedbicross_leaves_out_a_hospital_with_another_network_by_name(federation, tmp_path, monkeypatch):
    train = FedBiCross.train_once

    def train_wider_at_fir(method, context, seed, data):
        wider = FedBiCross(CONFIG.model_copy(update={"width": 2}), federation.task)
        return train(wider if context.site == "fir" else method, context, seed, data)

    monkeypatch.setattr(FedBiCross, "train_once", train_wider_at_fir)
    result = run(federation, tmp_path, quorum=2)
    refused = r"site fir: group 'model': tensor 'conv1.weight': expected \[1, 1, 3, 3\]"
    assert re.match(refused, result.history[0].dropped["fir"])
    assert set(result.publication.composite["assignment"]) == {"elm", "hazel"}


def test_fedbicross_common_start_gives_every_hospital_the_same_weights(federation):
    data = SiteData.load(split_by_patient(federation.sites[0], 0), federation.task)
    for common in (True, False):
        # At such a rate training changes nothing: the upload equals the initial weights.
        config = CONFIG.model_copy(
            update={"common_start": common, "learning_rate": 1e-30, "weight_decay": 0.0}
        )
        method = FedBiCross(config, federation.task)
        environment = RunEnvironment(seed=3)
        server = method.initial(environment.context("initial", 0, 1))
        uploads = []
        for name in ("elm", "fir"):
            context = environment.context("local", 0, 1, name)
            received = method.plan()[0].broadcast(server, name)
            uploads.append(client_step(method, context, received, Memory(), data).uploads["model"])
        assert torch.equal(uploads[0]["conv1.weight"], uploads[1]["conv1.weight"]) == common


def test_fedavg_on_a_classification_publishes_the_best_resnet(federation, tmp_path):
    config = FedAvgConfig(width=1, rounds=2, batch_size=4)
    result = run(federation, tmp_path, config, "fedavg")
    (draft,) = result.publication.models
    assert draft.network.name == "resnet18"
    best = max(
        sum(round(entry.sites[name].metrics["val_accuracy"] * 2) for name in federation.names)
        for entry in result.history
        if entry.phase in ("train", "validate")
    )
    assert draft.metrics["val_accuracy"] == pytest.approx(best / 6)  # two validation images per site


DENSE = DenseConfig(
    width=1,
    local_epochs=1,
    batch_size=8,
    epochs=1,
    generator_steps=1,
    synthesis_batch=4,
    noise_size=4,
    generator_width=2,
)


@pytest.mark.parametrize(
    ("method", "config"),
    [("fedavg", FedAvgConfig(width=1, rounds=1, batch_size=8)), ("fedbicross", CONFIG), ("dense", DENSE)],
)
def test_volumes_of_a_classification_are_scored_by_slice_and_no_site_is_dropped(method, config, tmp_path):
    data = load_federation(write_volumes(tmp_path / "data", ("elm", "fir")))
    result = run(data, tmp_path / "run", config, method)
    assert not any(entry.dropped for entry in result.history)
    assert "val_accuracy" in result.publication.models[0].metrics


def test_method_for_another_kind_of_task_is_rejected_by_name(federation, tmp_path):
    with pytest.raises(ConfigurationError, match=r"'shapes' is a classification: use .*fedbicross, "):
        run(federation, tmp_path, IopFlConfig(), "iop-fl")
    masks = load_federation(write_federation(tmp_path / "p", ("aster",), patients_per_site=2, size=16))
    with pytest.raises(ConfigurationError, match=r"'phantom' is a segmentation: use .*iop-fl"):
        run(masks, tmp_path / "run")


def test_fedbicross_config_rejects_several_rounds_and_too_many_outer_steps():
    with pytest.raises(ValueError, match="rounds"):
        FedBiCrossConfig(rounds=2)
    with pytest.raises(ValueError, match="outer_steps"):
        FedBiCrossConfig(steps=4)
