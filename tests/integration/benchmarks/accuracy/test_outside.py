from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.accuracy.outside.arms import HeldOutHospital, Models, halves, tent, with_test_statistics
from benchmarks.accuracy.outside.experiment import PROFILES, Profile, cells_of
from benchmarks.accuracy.outside.gate import Judge, shuffled
from benchmarks.accuracy.outside.report import sections
from benchmarks.accuracy.outside.routing import routing_arms
from benchmarks.accuracy.outside.scores import scores_of
from benchmarks.accuracy.outside.study import Federations, Study
from benchmarks.harness.cells import Rows, in_order
from benchmarks.harness.evaluation import Scans, mean_dice, patient_dice, predict
from model_store.manifest import NetworkSpec
from personalization.iop_fl.network import route
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.losses import entropy
from training.algorithm import State
from training.data.cases import Federation
from training.data.federation import load_federation
from training.engine.folder import RunFolder
from training.methods.common.local_training import new_network, state_of

ROOT = Path(__file__).parents[4]
SETTINGS = Profile(1, 1, 24, 16, method={"recipe": "paper", "rounds": 1, "width": 2, "batch_size": 8})
SPEC = NetworkSpec(name="unet", arguments={"in_channels": 1, "classes": 2, "width": 2})


def test_recorded_rows_are_those_of_the_cells_that_there_are() -> None:
    """Keys hold the gate's limits and the presets' losses: a changed name or limit makes other cells."""
    rows = Rows(ROOT / "docs/results/outside.cpu.jsonl").read()
    sites = tuple({row["cell"]["site"] for row in rows})
    cells = cells_of("brain_lgg_flair", sites, "cpu", PROFILES["cpu"])
    assert len(cells) == 84
    assert len(in_order(rows, cells)) == len(cells)


@pytest.fixture(scope="module")
def federation(phantom_federation: Path) -> Federation:
    return load_federation(phantom_federation)


@pytest.fixture(scope="module")
def scans(federation: Federation) -> Scans:
    return Scans.load(federation.site("cedar").cases, federation.task)


@pytest.fixture(scope="module")
def models() -> Models:
    states: dict[str, State] = {}
    for seed, name in enumerate(("aster", "birch", "global")):
        network = new_network(SPEC, torch.Generator().manual_seed(seed)).train()
        network(torch.randn(4, 1, 32, 32, generator=torch.Generator().manual_seed(seed)))
        states[name] = state_of(network)
    return Models(SPEC, states, torch.device("cpu"))


@pytest.fixture(scope="module")
def results(federation: Federation, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A row of each kind of cell, all on one federation."""
    folder = tmp_path_factory.mktemp("outside")
    federations = Federations(federation, folder, "cpu", workers=0, train=True)
    study = Study(federation, federations, "cpu")
    rows = {}
    for cell in cells_of("phantom", ("cedar",), "toy", SETTINGS):
        if cell["arms"] in ("plain", "baked", "planted", "routing paper direct", "routing paper pooled"):
            assert federations.ready(cell)
            rows[cell["arms"]] = {"cell": cell, "result": study.compute(cell)}
    return {"rows": rows, "folder": folder}


def test_scans_read_once_score_as_scans_read_one_by_one(
    federation: Federation, scans: Scans, models: Models
) -> None:
    network = models.network()
    cases = federation.site("cedar").cases
    assert scans.dice(predict(network, scans.images)) == pytest.approx(
        patient_dice(network, cases, federation.task), abs=1e-4
    )


def test_the_slices_of_a_patient_are_judged_as_one(federation: Federation) -> None:
    case = federation.site("cedar").cases[0]
    scans = Scans.load([case, *federation.site("cedar").cases[1:3], case], federation.task)
    index, slices = scans.patient_index, [scan.slices for scan in scans.scans]
    assert scans.patients[index[0]] == case.patient
    assert index == [number for number, count in zip((0, 1, 2, 0), slices, strict=True) for _ in range(count)]


def test_predictions_come_back_in_the_order_of_the_images(models: Models) -> None:
    images = torch.randn(37, 1, 32, 32, generator=torch.Generator().manual_seed(3))
    network = models.network().eval()
    with torch.no_grad():
        expected = torch.cat([torch.softmax(network(image[None]), dim=1) for image in images])
    torch.testing.assert_close(predict(network, images), expected, rtol=1e-4, atol=1e-6)


def test_a_batch_has_slices_of_the_whole_hospital(models: Models) -> None:
    # The second half is brighter: the statistics of each half alone would hide that.
    images = torch.randn(32, 1, 32, 32, generator=torch.Generator().manual_seed(4))
    images[16:] += 5
    network = with_test_statistics(models.network())
    with torch.no_grad():
        mixed = torch.softmax(network(images[0::2]), dim=1)
    torch.testing.assert_close(predict(network, images)[0::2], mixed, rtol=1e-4, atol=1e-6)


def test_test_statistics_are_those_of_training_mode(models: Models) -> None:
    images = torch.randn(4, 1, 32, 32, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = models.network().train()(images)
        found = with_test_statistics(models.network()).eval()(images)
    torch.testing.assert_close(found, expected)


def test_uniform_weights_are_where_routing_starts(models: Models) -> None:
    images = torch.randn(4, 1, 32, 32, generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        expected = route(models.space())(images)
        found = with_test_statistics(models.uniform())(images)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_tent_lowers_the_entropy_by_batch_norm_alone(scans: Scans, models: Models) -> None:
    tented = tent(models, scans, 2, seed=0)
    assert len(tented.entropies) == 3
    assert tented.best_epoch > 0
    assert tented.entropies[tented.best_epoch] == min(tented.entropies) < tented.entropies[0]
    assert float(entropy(predict(tented.network, scans.images))) == pytest.approx(
        min(tented.entropies), rel=1e-6
    )
    before = models.states["global"]
    # The rest are coefficients, of one model each
    kept = {name: value for name, value in tented.network.named_parameters() if "router" not in name}
    changed = {name for name, value in kept.items() if not torch.equal(value, before[name])}
    assert changed
    assert all(before[name].ndim == 1 and "bn" in name for name in changed)


def test_halves_are_disjoint_complete_and_drawn() -> None:
    patients = [f"p{i}" for i in range(9)]
    first, second = halves(patients, 1)
    assert sorted((*first, *second)) == patients
    assert (len(first), len(second)) == (5, 4)
    assert halves(patients, 1) == halves(list(reversed(patients)), 1) != halves(patients, 2)


def test_shuffling_one_layer_leaves_the_others(models: Models) -> None:
    network = models.network()
    changed = shuffled(network, torch.Generator().manual_seed(0), "bottleneck.bottleneck_conv1")
    different = [
        name
        for (name, old), new in zip(network.named_parameters(), changed.parameters(), strict=True)
        if not torch.equal(old, new)
    ]
    assert different == ["bottleneck.bottleneck_conv1.weight"]


def test_every_arm_reports_every_patient_of_the_site_left_out(
    results: dict[str, Any], federation: Federation
) -> None:
    rows = list(results["rows"].values())
    patients = {("cedar", patient) for patient in federation.site("cedar").patients}
    for mode in ("transductive", "inductive"):
        scores = scores_of(rows, mode)
        assert {
            "global (running)",
            "average (test)",
            "uniform (test)",
            "ensemble (running)",
            "tent",
            *(f"{arm} (baked)" for arm in ("global", "average", "uniform", "ensemble", "tent")),
            "routing paper (merged)",
            "routing paper (dynamic, test)",
            "routing paper pooled (dynamic, baked)",
            "routing paper pooled (mean, test)",
            "single models, mean (test)",
        } <= set(scores)
        assert all(set(by_seed[0]) == patients for by_seed in scores.values())


def test_the_gate_is_asked_about_every_candidate(results: dict[str, Any]) -> None:
    rows = results["rows"]
    asked = [line["candidate"] for line in rows["routing paper direct"]["result"]["gate"]]
    assert asked == [*["routing paper, inductive"] * 2, "routing paper, transductive"]
    planted = rows["planted"]["result"]["gate"]
    assert {line["candidate"] for line in planted} >= {"shuffled weights", "inverted scans", "rate x100"}
    for line in planted:
        assert line["change"] == pytest.approx(line["dice"] - line["parent_dice"], abs=1e-5)
        assert line["verdict"]["passed"] == all(check["passed"] for check in line["verdict"]["checks"])


@pytest.mark.parametrize(("lenient", "expected"), [(True, [0, 1, 0, 1, 2]), (False, [0, 0, 2])])
def test_no_candidate_passes_without_rivals(
    federation: Federation,
    scans: Scans,
    models: Models,
    monkeypatch: pytest.MonkeyPatch,
    lenient: bool,
    expected: list[int],
) -> None:
    """Two patients: a half is one, with another seed as its only replica. The whole has both halves."""
    held_against: list[int] = []

    def record(_self: Judge, _kind: str, _candidate: Any, replicas: list[Any], _turn: Any) -> dict[str, Any]:
        held_against.append(len(replicas))
        return {"verdict": {"passed": lenient}}

    monkeypatch.setattr(Judge, "record", record)
    judge = Judge(models, None, federation.task)
    routing_arms(
        models, judge, HeldOutHospital.of(scans, 0, 24), AdaptationConfig(preset="statistics", epochs=1)
    )
    assert held_against == expected


def test_a_trained_federation_is_used_again(results: dict[str, Any], federation: Federation) -> None:
    run = results["folder"] / "phantom" / "cedar-0" / "run"
    history = (run / "history.jsonl").stat().st_mtime_ns
    elsewhere = Federations(federation, results["folder"], "cpu", workers=0, train=False)
    cell = results["rows"]["plain"]["cell"]
    assert elsewhere.ready(cell)
    assert not elsewhere.ready({**cell, "seed": 1})
    elsewhere.get(cell)
    assert (run / "history.jsonl").stat().st_mtime_ns == history
    with RunFolder(run).held():
        assert not elsewhere.ready(cell)


def test_the_page_has_the_tables_and_a_try_apart(results: dict[str, Any]) -> None:
    rows = list(results["rows"].values())
    usual = {row["cell"]["arms"]: row["cell"]["adaptation"] for row in results["rows"].values()}
    routed = results["rows"]["routing paper direct"]
    tried = {**routed["cell"], "adaptation": {**routed["cell"]["adaptation"], "bn_rate": 0.5}}
    rows.append({**routed, "cell": tried})
    text = "\n".join(sections(rows, lambda cell: usual[cell["arms"]]))
    assert [line for line in text.splitlines() if line.startswith("## ")] == ["## phantom"]
    tries = [line.split("|") for line in text.splitlines() if "bn_rate = 0.5" in line]
    # Transductive and inductive; the row is the usual one's, so it is no different.
    assert [line[5].strip() for line in tries] == ["+0.000 [+0.000, +0.000]"] * 2
    assert [line[7].strip().split(" of ")[1] for line in tries] == ["1", "2"]
    assert "inverted scans (planted)" in text
    mean = mean_dice(routed["result"]["dice"]["inductive"]["routing paper (merged)"])
    assert f"{mean:.3f}" in text
    assert "cpu" in PROFILES
