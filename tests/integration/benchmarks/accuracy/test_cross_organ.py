from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.accuracy.cross_organ import arms
from benchmarks.accuracy.cross_organ.arms import (
    CONTROLS,
    FEDBN,
    FEDREP,
    LOCAL,
    LONG_FEDAVG,
    LONG_WHOLE,
    NO_PBL,
    SCRATCH,
    TRAINED,
    TUNED,
    WHOLE,
    WHOLE_PBL,
    compute,
)
from benchmarks.accuracy.cross_organ.data import JOINING, OUTSIDE, SITES, Hospitals, assemble
from benchmarks.accuracy.cross_organ.experiment import Profile, cells_of
from benchmarks.accuracy.cross_organ.report import sections
from benchmarks.harness.cells import Cell
from benchmarks.harness.federate import federate, in_memory
from training.data.federation import load_federation
from training.engine.client import RunEnvironment
from training.engine.folder import RunFolder
from training.methods.fedoap.config import FedOapConfig
from training.methods.fedoap.method import FedOap
from training.tasks import template

METHOD = {"width": 2, "rounds": 1, "local_steps": 2, "batch_size": 2, "fine_tune_rounds": 1, "groups": 4}
METHOD |= {"bank_minimum": 2, "precision": "bfloat16", "selection": "last"}
TINY = Profile(32, 1, 1, (4, 2), METHOD, budgets=(4,))
CELLS = {str(cell["trained"]): cell for cell in cells_of("toy", TINY, "theirs")}
# Every way there is to train a cell; the others are these with other options.
TRIED = (WHOLE, SCRATCH, LOCAL, FEDREP, FEDBN, LONG_FEDAVG)
# Two of the four sites inside: in one all images have a tumour, the other has images without.
INSIDE = {"bladder_mri", "brain_flair"}


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Hospitals:
    """Ten images with a bright square at every site, and in brain FLAIR an empty one of each patient."""
    data = tmp_path_factory.mktemp("data")
    draw = np.random.default_rng(0)
    for name, place in SITES.items():
        for index in range(10):
            for empty in (False, True) if name == "brain_flair" else (False,):
                mask = np.zeros((32, 32), np.uint8)
                row, column = draw.integers(2, 20, size=2)
                mask[row : row + 9, column : column + 9] = 0 if empty else 255
                image = (draw.integers(0, 60, size=mask.shape) + 0.5 * mask).astype(np.uint8)
                file = (
                    f"TCGA_HT_{index}_1_{int(empty)}.png" if name == "brain_flair" else f"{3000 + index}.png"
                )
                for folder, pixels in (("images", image), ("masks", mask)):
                    (data / place / folder).mkdir(parents=True, exist_ok=True)
                    Image.fromarray(pixels).save(data / place / folder / file)
    root = assemble(data, tmp_path_factory.mktemp("links"))
    assert all((root / name).is_symlink() for name in SITES)
    whole = load_federation(root, template("tumour_any_organ").model_copy(update={"size": (32, 32)}))
    sites = (site for site in whole.sites if site.name in {*INSIDE, *OUTSIDE})
    # Every image of a bladder is a patient here, as the lists of the benchmark would have it.
    own = (replace(s, cases=tuple(replace(c, patient=c.name[:12]) for c in s.cases)) for s in sites)
    return Hospitals(replace(whole, sites=tuple(own)))


@pytest.fixture(scope="module")
def finished(hospitals: Hospitals, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The results of some cells, and the folder of their checkpoints."""
    work = tmp_path_factory.mktemp("work")
    assert list(CELLS) == [*TRAINED, *CONTROLS]
    return {name: compute(hospitals, "cpu", CELLS[name], work / name) for name in TRIED}, work


def test_a_hospital_from_outside_is_tested_before_and_after_it_labels(
    finished: tuple[dict[str, Any], Path],
) -> None:
    starts = {WHOLE: {WHOLE, WHOLE_PBL}, SCRATCH: {SCRATCH}}
    for trained, result in finished[0].items():
        assert set(result["outside"]) == starts.get(trained, set())
        for start, sites in result["outside"].items():
            assert set(sites) == set(OUTSIDE)
            for site, by_budget in sites.items():
                joins = {"4"} if site in JOINING else set()
                assert set(by_budget) == joins | ({"0"} if start == WHOLE else set())
                # Without joining all are tested; else four of ten are labelled, and four are too near.
                assert all(len(patients) == (2 if joins else 10) for patients in by_budget.values())


def test_every_arm_is_tested_at_every_site_and_the_page_says_so(
    finished: tuple[dict[str, Any], Path],
) -> None:
    results, _ = finished
    found = {arm: sites for result in results.values() for arm, sites in result["inside"].items()}
    assert set(found) == {WHOLE, NO_PBL, LOCAL, FEDREP, FEDBN, LONG_FEDAVG}
    for arm, sites in found.items():
        assert set(sites) == INSIDE, arm
        for site, patients in sites.items():
            for dice, bearing, alarms, empty in patients.values():
                assert 0 <= dice <= 1
                assert bearing == 1
                assert 0 <= alarms <= empty == (site == "brain_flair")
    curves = {arm: sites for result in results.values() for arm, sites in result["curves"].items()}
    # Stage 1 is validated before it begins (and then before every fourth round) and at its end.
    rounds = {
        arm: {stage: [number for number, _ in points] for stage, points in sites["bladder_mri"].items()}
        for arm, sites in curves.items()
    }
    assert rounds == {
        **{arm: {"1": [0, 2]} for arm in (LOCAL, FEDREP, FEDBN)},
        LONG_FEDAVG: {"1": [0, 3]},
        **{arm: {"1": [0, 1], "2": [1]} for arm in (WHOLE, NO_PBL)},
    }
    assert curves[WHOLE]["bladder_mri"]["1"] == curves[NO_PBL]["bladder_mri"]["1"]

    rows = [{"cell": CELLS[trained], "result": result} for trained, result in results.items()]
    text = "\n".join(sections(rows, list(CELLS.values())))
    for said in ("## Inside", "## Was it a plateau?", "### brain_mri_t1ce", "The perturbed loss cannot be"):
        assert said in text
    assert "6 of 13 cells" in text
    assert "The learning rate was tuned for none of them." in text
    assert "every arm has finished" not in text

    # With all arms of a first seed, a second one that has but begun is left out.
    others = [{**CELLS[trained], "seed": 1} for trained in TRAINED]
    for cell in (*(CELLS[trained] for trained in TRAINED if trained not in results), others[0]):
        rows.append({"cell": cell, "result": results[WHOLE]})
    text = "\n".join(sections(rows, [*CELLS.values(), *others]))
    assert "every arm has finished" in text
    inside, _, _ = text.partition("## Was it a plateau?")
    assert "±" not in inside.partition("## Inside")[2]


def test_a_cell_that_was_killed_goes_on_to_the_same_result(
    hospitals: Hospitals, finished: tuple[dict[str, Any], Path]
) -> None:
    results, work = finished
    trained = [work / WHOLE / run / "checkpoint.json" for run in ("first", "perturbed")]
    before = [path.stat().st_mtime_ns for path in trained]
    # Killed while the first stage was copied for the other second one.
    shutil.rmtree(work / WHOLE / "plain")
    (work / WHOLE / ".plain").mkdir()
    (work / WHOLE / ".plain" / "run.json").write_text("{")
    assert compute(hospitals, "cpu", CELLS[WHOLE], work / WHOLE) == results[WHOLE]
    assert [path.stat().st_mtime_ns for path in trained] == before


def test_two_stages_of_which_one_is_shared_are_one_run_of_fedoap(
    hospitals: Hospitals, finished: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    data = hospitals.inside(0, 32, TINY.most).data
    for loss in ("perturbed", "plain"):
        method = FedOap(FedOapConfig(**METHOD, fine_tune_loss=loss), hospitals.task(32))
        whole = federate(method, in_memory(data), RunEnvironment(0), tmp_path / loss, {}).server
        folder = RunFolder(finished[1] / WHOLE / loss)
        checkpoint = folder.checkpoint()
        assert checkpoint is not None
        ours = folder.server(checkpoint.server_slot)
        assert ours.tensors.keys() == whole.tensors.keys()
        assert any(name.startswith("inside/bladder_mri/") for name in ours.tensors)
        for name, tensor in whole.tensors.items():
            assert torch.equal(ours.tensors[name], tensor), name
        assert ours.facts == whole.facts


def test_all_arms_take_the_same_steps(
    hospitals: Hospitals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = hospitals.federation
    inside = replace(federation, sites=tuple(s for s in federation.sites if s.name in INSIDE))
    taken: dict[str, int] = {}
    running: list[str] = []
    step = torch.optim.AdamW.step

    def counted(self: torch.optim.AdamW, *arguments: Any) -> Any:
        taken[running[-1]] = taken.get(running[-1], 0) + 1
        return step(self, *arguments)

    def named(*arguments: Any) -> Any:
        running.append(arguments[3].name)
        return federate(*arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", counted)
    monkeypatch.setattr(arms, "federate", named)
    # Stage 2 of two rounds in shorter steps: three in all, as a round of stage 1 has no other number.
    method = {**METHOD, "rounds": 1, "local_steps": 4, "fine_tune_rounds": 2, "fine_tune_steps": 2}
    cells = cells_of("toy", replace(TINY, method=method), "theirs")
    by_cell: dict[str, dict[str, int]] = {}
    for cell in cells:
        taken.clear()
        compute(Hospitals(inside), "cpu", cell, tmp_path / str(cell["trained"]))
        by_cell[str(cell["trained"])] = dict(taken)

    sites, steps = len(INSIDE), 4 + 2 * 2
    first, second = sites * 4, sites * 2 * 2
    assert by_cell.pop(WHOLE) == {"first": first, "perturbed": second, "plain": second}
    assert by_cell.pop(TUNED) == {"first": first, "plain": second}
    assert by_cell.pop(SCRATCH) == {}
    for control in (LONG_WHOLE, LONG_FEDAVG):
        assert by_cell.pop(control) == {"longer": sites * (2 * 4 + 2 * 2)}
    assert by_cell.pop(LOCAL) == {f"{LOCAL}-{site}": steps for site in INSIDE}
    assert len(by_cell) == len(TRAINED) - 4
    assert {trained: sum(runs.values()) for trained, runs in by_cell.items()} == dict.fromkeys(
        by_cell, sites * steps
    )


def test_joining_is_alike_for_all_but_one_start(
    hospitals: Hospitals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = []

    def noted(network: Any, train: Any, validation: Any, config: Any) -> None:
        joined.append((network._precision, config.loss, config.batch_size, config.epochs))
        assert not {*train.patients} & {*validation.patients}

    monkeypatch.setattr(arms, "join", noted)
    for trained in (WHOLE, TUNED, SCRATCH):
        cell: Cell = {**CELLS[trained], "joining": {"steps": 6, "batch": 2}}
        compute(hospitals, "cpu", cell, tmp_path / trained)
    # Three of the four labelled images train: two batches an epoch.
    losses = ["plain", "perturbed", "plain", "plain"]
    assert joined == [("bfloat16", loss, 2, 3) for loss in losses]
