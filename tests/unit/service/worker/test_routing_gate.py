"""Which slices are judged as one, and what a candidate is compared with: halves of the patients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from model_store.digest import sha256
from model_store.guard import ScanSummary
from model_store.scan import Limits
from model_store.task import Task
from model_store.unlike import kinds_of
from personalization.cancellation import never_cancelled
from personalization.gate import ObservedRouting, consensus, shift_of_statistics, statistics_distance
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.recipe import Adapted, recipe_of
from service.cohorts.files import ScanFile
from service.files.folder import FilesFolder
from service.worker import routing_gate
from service.worker.cohort_images import CohortImages, load_images
from service.worker.routing_gate import _replicas
from tests.helpers.personalization.discs import discs, space

SCANS = [
    ScanSummary("grey image", {}, (0.0,) * 12, constant=False, modality=each)
    for each in (None,) * 3 + ("CT",)
]
TASK = Task(name="spots", labels={"spot": (1,)}, size=(16, 16), patient=r"^(?P<patient>\w+)-")


def test_load_images_numbers_patients_and_scans_of_slices(tmp_path: Path) -> None:
    files = []
    draw = np.random.default_rng(0)
    for name in ("anna-1.png", "anna-2.png", "bert-1.png"):
        Image.fromarray(draw.integers(255, size=(20, 20), dtype=np.uint8)).save(tmp_path / name)
        data = (tmp_path / name).read_bytes()
        files.append(ScanFile(name, FilesFolder(tmp_path), name, sha256(data).removeprefix("sha256:")))
    cohort = load_images(files, TASK, None, Limits(), lambda: None)
    assert cohort.patient_of_image.tolist() == [0, 0, 1]
    assert cohort.scan_of_image.tolist() == [0, 1, 2]


def cohort_of(patients: list[int]) -> CohortImages:
    return CohortImages(
        torch.zeros(len(patients), 1, 4, 4),
        np.arange(len(patients)),  # every image a file of its own
        np.array(patients),
        kinds_of(SCANS, None, TASK),
        None,
        0,
    )


def replicas(patients: list[int]) -> dict[str, tuple[int, list[int]]]:
    found = _replicas(cohort_of(patients), AdaptationConfig(seed=5))
    return {name: (seed, chosen.tolist()) for name, seed, chosen in found}


def test_replica_halves_split_all_patients_disjointly() -> None:
    patients = [0, 0, 1, 2, 2, 2, 3, 1, 4]
    found = replicas(patients)
    halves = [found["half 1 of the scans"], found["half 2 of the scans and another seed"]]
    assert len(found) == 2
    assert [seed for seed, _ in halves] == [5, 6]
    sides = [{patients[image] for image in chosen} for _, chosen in halves]
    assert sides == [{0, 2, 4}, {1, 3}]
    assert sorted(image for _, chosen in halves for image in chosen) == list(range(9))


def test_replica_seed_may_exceed_the_client_limit() -> None:
    found = _replicas(cohort_of([0]), AdaptationConfig(seed=2**31 - 1))
    assert [seed for _, seed, _ in found] == [2**31]


def test_replicas_of_three_patients_have_no_halves() -> None:
    assert list(replicas([0, 1, 2] * 20)) == ["another seed"]


@pytest.mark.parametrize("preset", ["statistics", "tent"])
def test_replicas_of_a_preset_without_draws_have_no_other_seed(preset: str) -> None:
    cohort = cohort_of([0, 1, 2, 3])
    found = _replicas(cohort, AdaptationConfig(preset=preset))
    assert [name for name, _, _ in found] == ["half 1 of the scans", "half 2 of the scans"]


def test_the_gate_observes_the_candidate_parent_replicas_and_references(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the gate observes is taken here by another way: by plain networks, one after the other."""
    over = space()
    images = discs(8, 3, contrast=1.4)[0]
    cohort = replace(
        cohort_of([0, 0, 1, 1, 2, 2, 3, 3]),
        images=images,
        # The task is for MR, and so the guard warns of one of four.
        kinds=kinds_of(SCANS, None, TASK.model_copy(update={"modality": "MR"})),
        scan_of_image=np.arange(8),
    )
    config = AdaptationConfig(epochs=1, batch_size=4, routing_rate=0.5, seed=5)
    loaded: Any = SimpleNamespace(space=over, task=TASK)
    entered: list[str] = []
    left: list[int] = []

    def set_stage(_: str, against: str, seconds_left: int | None = None) -> None:
        entered.append(against)
        left.extend([] if seconds_left is None else [seconds_left])

    attempt: Any = SimpleNamespace(check_cancelled=never_cancelled, set_stage=set_stage)
    device = torch.device("cpu")

    def adapted(chosen: Tensor, seed: int) -> Adapted:
        return recipe_of(config.preset).adapt(over, chosen, config.model_copy(update={"seed": seed}), device)

    seen: dict[str, Any] = {}

    def spy(**given: Any) -> ObservedRouting:
        seen.update(given)
        return ObservedRouting(**given)

    monkeypatch.setattr(routing_gate, "ObservedRouting", spy)
    candidate = adapted(images, 5)
    routing_gate.verdict_on(attempt, loaded, candidate, cohort, config, device, adapted_in_s=10)

    def maps(network: nn.Module) -> NDArray[np.int64]:
        with torch.no_grad():
            return network.eval()(images).argmax(dim=1).numpy()

    # The replicas cost as much as the adaptation, each half of the patients half of it.
    assert left == [10, 5]
    halves = [[0, 1, 4, 5], [2, 3, 6, 7]]
    replicas = [adapted(images[half], seed) for half, seed in zip(halves, (5, 6), strict=True)]
    np.testing.assert_array_equal(seen["candidate"], maps(candidate.merged))
    np.testing.assert_array_equal(seen["parent"], maps(over.plain()))
    assert len(seen["replicas"]) == 2
    for found, replica in zip(seen["replicas"], replicas, strict=True):
        np.testing.assert_array_equal(found, maps(replica.merged))
    assert len({found.tobytes() for found in (seen["candidate"], seen["parent"], *seen["replicas"])}) > 2
    for found, expected in zip(seen["references"], consensus(over, images), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert seen["scan_index"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (seen["classes"], seen["source_warnings"]) == (2, 0.25)
    shift = shift_of_statistics(over.plain().state_dict(), candidate.merged, images)
    assert seen["statistics_distance"] == pytest.approx(shift)
    half = "half 2 of the scans and another seed"
    assert entered == ["half 1 of the scans", half, "the federation"]


def test_statistics_shift_depends_little_on_the_number_of_images() -> None:
    """The statistics that are served are drawn towards the parent's; the distance is not."""
    over, images = space(), discs(32, 3, contrast=1.6)[0]
    parent = over.plain().state_dict()
    config = AdaptationConfig(preset="statistics")
    found = {}
    for count in (2, 32):
        chosen = images[:count]
        merged = recipe_of("statistics").adapt(over, chosen, config, torch.device("cpu")).merged
        served = merged.state_dict()
        found[count] = shift_of_statistics(parent, merged, chosen)
        assert statistics_distance(parent, served) < found[count]
        assert all(torch.equal(tensor, served[name]) for name, tensor in merged.state_dict().items())
    assert found[2] > 0.7 * found[32]
