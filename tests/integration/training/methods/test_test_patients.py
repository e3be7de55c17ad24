"""Every method scores what it publishes on the sites' test patients, once, and chooses nothing by them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from model_store.store import Store
from tests.helpers.training.backbones import publish, unet, vit
from tests.helpers.training.classified_sites import CORNERS, images, labelled_data
from tests.helpers.training.sites import TASK, site_data, slices
from training.algorithm import Publication
from training.config import MethodConfig
from training.engine.client import RunEnvironment
from training.engine.egress import ALL_KINDS, SiteSpec
from training.engine.engine import FederationEngine, RunOutcome
from training.engine.folder import RunFolder
from training.engine.history import TEST, final_scores
from training.local.data import Examples
from training.methods.registry import method

SITES = ("A", "B", "C")
WITHOUT_CONSENT = "C"
SMALL: Mapping[str, Any] = {"width": 2, "batch_size": 4, "rounds": 1, "least_steps": 0}
ONE_SHOT: Mapping[str, Any] = {
    "width": 1,
    "local_epochs": 2,
    "batch_size": 4,
    "epochs": 1,
    "synthesis_batch": 4,
}
GENERATED = {**ONE_SHOT, "generator_steps": 1, "generator_width": 2, "noise_size": 4}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "fedoap": {"width": 2, "batch_size": 4, "rounds": 1, "local_steps": 2, "fine_tune_rounds": 1},
    "fedins": {"rounds": 1, "entries": 4, "top": 2, "local_epochs": 1, "batch_size": 4},
    "fedbicross": {
        **ONE_SHOT,
        "probes": 8,
        "min_silhouette": -1,
        "steps": 4,
        "outer_steps": 2,
        "personal_epochs": 1,
    },
    "dense": GENERATED,
    "dafl": GENERATED,
    "co-boosting": GENERATED,
    "fedisca": {**ONE_SHOT, "steps": 3},
}
# Each of the ways to score. Others inherit FedAvg's, and `test_every_method_ends_with_the_test` has them all.
CASES = [
    *((name, "segmentation", {}) for name in ("fedavg", "centralised", "ditto", "pfedme", "fedsoup")),
    *((name, "segmentation", {}) for name in ("fedbn", "fedper", "fedrep", "local-only", "iop-fl")),
    *((name, "segmentation", {}) for name in ("fedoap", "fedins")),
    *((name, "classification", {}) for name in ("fedavg", "fedbn", "fedsoup", "fedins", "fedbicross")),
    *((name, "classification", {}) for name in ("dense", "dafl", "fedisca", "co-boosting", "moon", "feddc")),
    *((name, "segmentation", {}) for name in ("moon", "feddc")),
    ("iop-fl", "segmentation", {"recipe": "paper"}),  # a moving average
]
# Methods that publish nothing else, or publish the one that all share only to a new hospital.
SHARED = {"fedbn", "fedper", "fedrep", "local-only", "fedoap", "fedbicross"}
PERSONAL = {"fedbn", "fedper", "fedrep", "local-only", "fedoap", "fedbicross", "ditto", "pfedme", "fedsoup"}


class Federation:
    """A federation in memory with four test slices, of two patients, or four test images at each site."""

    def __init__(self, name: str, kind: str, more: Mapping[str, Any], root: Any) -> None:
        self.name, self.kind = name, kind
        self.task = TASK if kind == "segmentation" else CORNERS
        chosen = method(name)
        self.config: MethodConfig = chosen.config(**{**CONFIGS.get(name, SMALL), **more})
        if name == "fedins":
            store = Store(root / "store")
            publish(store.root, self.task, (unet if kind == "segmentation" else vit)(self.task), "base")
            self.config = self.config.model_copy(update={"backbone": "base"})
            self.config = self.config.prepared(store, self.task, "pool")
        self.algorithm = chosen.build(self.config, self.task)

    def tests(self, other: bool) -> dict[str, Examples]:
        drawn = slices if self.kind == "segmentation" else images
        return {site: drawn(4, 50 + i + 10 * other) for i, site in enumerate(SITES)}

    def run(self, folder: Any, *, other: bool = False, statistics: bool = True) -> RunOutcome:
        train = site_data if self.kind == "segmentation" else labelled_data
        data = {
            site: replace(train(site, 4, 4, i), test=self.tests(other)[site]) for i, site in enumerate(SITES)
        }
        allows = ALL_KINDS if statistics else ALL_KINDS - {"statistics"}
        specs = [
            SiteSpec(site, lambda site=site: data[site], allows, site != WITHOUT_CONSENT, 20)
            for site in SITES
        ]
        environment = RunEnvironment(3, "cpu", 1)
        return FederationEngine(self.algorithm, specs, environment, RunFolder(folder), workers=0).run()

    def score(self, draft: Any, sites: tuple[str, ...], *, other: bool = False) -> tuple[float, int]:
        """Mean and n by a naive loop over the network that is published."""
        network = method(self.name).network(self.config, self.task, draft.network, draft.weights).eval()
        values: list[float] = []
        for site in sites:
            found = self.tests(other)[site]
            with torch.no_grad():
                answers = self.answers(network, found)
            if self.kind == "classification":
                values += list((answers == found.targets).astype(float))
                continue
            for patient in dict.fromkeys(found.patients):
                of = np.array([each == patient for each in found.patients])
                a, b = answers[of] == 1, found.targets[of] == 1
                values.append(2 * float((a & b).sum()) / float(a.sum() + b.sum()))
        return sum(values) / len(values), len(values)

    def answers(self, network: Any, found: Examples) -> Any:
        """Class indices; a patient's slices pick from a pool together, as a service routes a scan."""
        images = torch.from_numpy(found.images)
        if self.name != "fedins" or self.kind == "classification":
            return network(images).argmax(1).numpy()
        queries = network.query(images)
        for patient in dict.fromkeys(found.patients):
            own = torch.tensor([each == patient for each in found.patients])
            queries[own] = queries[own].mean(dim=0)
        return network.answer(images, queries).logits.argmax(1).numpy()


def of_tests(metrics: Mapping[str, float], *, kept: bool) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith("test_") == kept}


@pytest.mark.parametrize(("name", "kind", "more"), CASES)
def test_test_patients_score_what_is_published_and_choose_nothing(
    name: str, kind: str, more: Mapping[str, Any], tmp_path: Any
) -> None:
    federation = Federation(name, kind, more, tmp_path)
    outcomes = [federation.run(tmp_path / f"run{i}", other=bool(i)) for i in (0, 1)]
    one, two = (federation.algorithm.publication(outcome.server) for outcome in outcomes)
    metric = "test_dice" if kind == "segmentation" else "test_accuracy"
    scored = 0
    for draft, again in zip(one.models, two.models, strict=True):
        assert all(torch.equal(tensor, again.weights[part]) for part, tensor in draft.weights.items())
        assert of_tests(draft.metrics, kept=False) == of_tests(again.metrics, kept=False)
        sites = members(one, draft)
        if name == "fedoap" and draft.site is None:
            assert not draft.metrics  # a new hospital's, which no member uses
            continue
        for found, other in ((draft, False), (again, True)):
            mean, count = federation.score(found, sites, other=other)
            assert found.metrics[metric] == pytest.approx(mean)
            assert found.metrics["test_n"] == count
        scored += 1
    assert scored == len(one.models) - (name == "fedoap")
    assert scored
    for key, value in one.composite.items():
        assert value == two.composite[key]
    check_history(name, outcomes[0])


def members(publication: Publication, draft: Any) -> tuple[str, ...]:
    """The sites with the test patients that a published model is scored on."""
    if draft.site is not None:
        return (draft.site,)
    if draft.cluster is not None:
        assigned = publication.composite["assignment"]
        return tuple(site for site in SITES if assigned[site] == draft.cluster)
    return SITES


def check_history(name: str, outcome: RunOutcome) -> None:
    """The record has every site's scores, also of the one that exports nothing; only numbers travelled."""
    (entry,) = [entry for entry in outcome.history if entry.phase == TEST]
    assert set(entry.sites) == set(SITES)
    models = {score.model for score in final_scores(outcome.history)}
    expected = {"personal"} if name in PERSONAL else set()
    if name not in SHARED:
        expected |= {""}
    if name == "fedbicross":
        expected |= {"cluster"}
    assert models - {"personal"} == expected - {"personal"}
    # IOP-FL's sites may choose the global model, and have none of their own.
    assert expected <= models
    for score in final_scores(outcome.history):
        if score.split == "test" and name in PERSONAL:
            assert set(score.sites) == set(SITES)
    for site in entry.sites.values():
        # Sum and count, float64, of two splits and at most two labels: less than any image.
        assert sum(site.sent.values()) < 600
        assert {group for group in site.sent if group != "metrics"} <= {
            "tested",
            "cluster_tested",
            "personal_tested",
        }


@pytest.mark.parametrize("name", ["fedavg", "ditto", "fedbn", "iop-fl", "fedoap"])
def test_a_site_that_lets_no_statistics_out_is_trained_with_and_not_scored(name: str, tmp_path: Any) -> None:
    federation = Federation(name, "segmentation", {}, tmp_path)
    outcome = federation.run(tmp_path / "run", statistics=False)
    (entry,) = [entry for entry in outcome.history if entry.phase == TEST]
    assert set(entry.sites) == set(SITES)
    assert all(site.withheld and not site.metrics for site in entry.sites.values())
    for draft in federation.algorithm.publication(outcome.server).models:
        assert not of_tests(draft.metrics, kept=True)


@pytest.mark.parametrize("name", ["iop-fl", "ditto", "fedbn", "fedoap"])
def test_a_run_that_is_taken_back_to_the_test_scores_alike(name: str, tmp_path: Any) -> None:
    federation = Federation(name, "segmentation", {}, tmp_path)
    first = federation.run(tmp_path / "run")
    folder = RunFolder(tmp_path / "run", 2)
    checkpoint = folder.checkpoint()
    assert checkpoint is not None
    phases = [entry.phase for entry in first.history]
    assert phases[-1] == "export"
    folder.take_back(checkpoint)
    second = federation.run(tmp_path / "run")
    assert [entry.phase for entry in second.history] == phases
    one, two = (federation.algorithm.publication(outcome.server) for outcome in (first, second))
    assert [draft.metrics for draft in one.models] == [draft.metrics for draft in two.models]
    assert final_scores(first.history) == final_scores(second.history)
