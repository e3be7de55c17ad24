from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.cross_organ import Profile, cells_of
from benchmarks.cross_organ_arms import (
    FEDBN,
    FEDREP,
    LOCAL,
    NO_PBL,
    SCRATCH,
    TRAINED,
    WHOLE,
    compute,
)
from benchmarks.cross_organ_data import OUTSIDE, SITES, assemble
from benchmarks.cross_organ_report import page
from benchmarks.harness import Rows
from training.data.cases import Federation
from training.data.federation import load_federation
from training.tasks import template

METHOD = {"width": 2, "rounds": 1, "local_steps": 2, "batch_size": 2, "fine_tune_rounds": 1, "groups": 4}
TINY = Profile(32, 1, 1, (4, 2), {**METHOD, "bank_minimum": 2, "precision": "bfloat16"}, budgets=(4,))
# Every way there is to train a cell; the others are these with other options.
TRIED = (WHOLE, SCRATCH, LOCAL, FEDREP, FEDBN)
# Two of the four sites inside: one whose images all have a tumour, and one that has images without.
INSIDE = {"bladder_mri", "brain_flair"}


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """Six images with a bright square at every site, and in brain FLAIR an empty one of each patient."""
    data = tmp_path_factory.mktemp("data")
    draw = np.random.default_rng(0)
    for name, place in SITES.items():
        for index in range(6):
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
    kept = tuple(site for site in whole.sites if site.name in {*INSIDE, *OUTSIDE})
    return replace(whole, sites=kept)


@pytest.fixture(scope="module")
def finished(federation: Federation, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The results of some cells, and the folder of their checkpoints."""
    work = tmp_path_factory.mktemp("work")
    cells = {cell["trained"]: cell for cell in cells_of("toy", TINY)}
    assert list(cells) == list(TRAINED)
    return {name: compute(federation, "cpu", cells[name], work / name) for name in TRIED}, work


def test_a_hospital_from_outside_is_tested_before_and_after_it_labels(
    finished: tuple[dict[str, Any], Path],
) -> None:
    for trained, result in finished[0].items():
        assert set(result["outside"]) == ({trained} if trained in (WHOLE, SCRATCH) else set())
        for arm, sites in result["outside"].items():
            assert set(sites) == set(OUTSIDE)
            for by_budget in sites.values():
                assert set(by_budget) == ({"4"} if arm == SCRATCH else {"0", "4"})
                assert all(len(patients) == 2 for patients in by_budget.values())


def test_every_arm_is_tested_at_every_site_and_the_page_says_so(
    finished: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    results, _ = finished
    found = {arm: sites for result in results.values() for arm, sites in result["inside"].items()}
    assert set(found) == {WHOLE, NO_PBL, LOCAL, FEDREP, FEDBN}
    for arm, sites in found.items():
        assert set(sites) == INSIDE, arm
        for site, patients in sites.items():
            for dice, bearing, alarms, empty in patients.values():
                assert 0 <= dice <= 1
                assert bearing == 1
                assert 0 <= alarms <= empty == (site == "brain_flair")
    curves = {arm: sites for result in results.values() for arm, sites in result["curves"].items()}
    # Validated before each of two rounds and after the last; with two stages, anew before the second.
    assert {arm: len(sites["bladder_mri"]) for arm, sites in curves.items()} == {
        **dict.fromkeys((LOCAL, FEDREP, FEDBN), 3),
        **dict.fromkeys((WHOLE, NO_PBL), 4),
    }
    assert curves[WHOLE]["bladder_mri"][:3] == curves[NO_PBL]["bladder_mri"][:3]

    path = tmp_path / "rows" / "cross_organ.toy.jsonl"
    cells = cells_of("toy", TINY)
    for cell in cells:
        if cell["trained"] in results:
            row = {"cell": cell, "result": results[cell["trained"]], "seconds": 1.0, "made_with": {}}
            Rows(path).append(row)
    page(path, cells, "python -m benchmarks.cross_organ")
    text = path.with_suffix(".md").read_text()
    for heading in ("## Inside", "## Was it a plateau?", "### brain_mri_t1ce", "The perturbed loss"):
        assert heading in text
    assert "5 of 10 cells" in text


def test_a_cell_that_was_killed_goes_on_to_the_same_result(
    federation: Federation, finished: tuple[dict[str, Any], Path]
) -> None:
    results, work = finished
    cell = next(cell for cell in cells_of("toy", TINY) if cell["trained"] == WHOLE)
    trained = [work / WHOLE / run / "checkpoint.json" for run in ("first", "second-plain")]
    before = [path.stat().st_mtime_ns for path in trained]
    assert compute(federation, "cpu", cell, work / WHOLE) == results[WHOLE]
    assert [path.stat().st_mtime_ns for path in trained] == before
