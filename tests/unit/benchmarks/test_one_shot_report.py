from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.one_shot import PROFILES, cells_of
from benchmarks.one_shot_arms import Examined, averaged, digits, strings
from benchmarks.one_shot_report import balanced_global, balanced_own, global_scores, own_scores, weights
from training.data.classified import ImageSet


def _answers(*classes: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(classes), 3).float()


def _images(cases: list[str], labels: list[int]) -> ImageSet:
    pixels = torch.tensor([float(case[-1]) for case in cases]).reshape(-1, 1, 1, 1).numpy()
    return ImageSet(pixels, torch.tensor(labels).numpy(), tuple(cases), tuple(cases), (0,) * len(cases))


def test_fedavg_in_one_round_weighs_clients_by_their_images() -> None:
    models = {"a": {"w": torch.tensor([1.0]), "n": torch.tensor(7)}, "b": {"w": torch.tensor([5.0])}}
    models["b"]["n"] = torch.tensor(9)
    found = averaged(models, {"a": 30, "b": 10})
    assert found["w"].tolist() == [2.0]  # (30 * 1 + 10 * 5) / 40
    assert found["n"].item() == 7  # a counter is copied


def test_test_images_are_put_into_the_order_of_the_file() -> None:
    parts = [_images(["test-2", "test-0"], [1, 0]), _images(["test-3"], [2]), _images(["test-1"], [1])]
    found = Examined.of(parts)
    assert found.images.flatten().tolist() == [0, 1, 2, 3]
    assert found.labels.tolist() == [0, 1, 1, 2]
    assert found.owners.tolist() == [1, 0, 1, 2]


def test_own_answers_are_the_owners_and_right_counts_models() -> None:
    answers = {"arm": {"x": _answers(0, 1, 2, 2), "y": _answers(1, 1, 0, 2)}}
    found = strings(answers, torch.tensor([0, 1, 2, 1]), torch.tensor([1, 2, 2, 0]))
    assert found == {"own": {"arm": "010-"}, "right": {"arm": "1210"}}


def test_more_than_a_digit_is_refused() -> None:
    with pytest.raises(ValueError, match="found 10"):
        digits(torch.tensor([3, 10]))


def _row(**result: Any) -> dict[str, Any]:
    return {"cell": {"set": "s", "alpha": 0.3, "seed": 4, "clients": 2}, "result": result}


def test_accuracies_by_hand() -> None:
    row = _row(labels="00011", owners="11122", own={"arm": "00110"}, right={"arm": "22011"})
    # Client 1 has class 0 alone, 2 of 3 right; client 2 has class 1 alone, 1 of 2 right.
    assert balanced_own(row, "arm") == pytest.approx((2 / 3 + 1 / 2) / 2)
    # Class 0: (2 + 2 + 0) / 6; class 1: (1 + 1) / 4.
    assert balanced_global(row, "arm") == pytest.approx((4 / 6 + 2 / 4) / 2)
    assert list(own_scores([row])["arm"][4].values()) == [1, 1, 0, 1, 0]
    assert list(global_scores([row])["arm"][4].values()) == [1, 1, 0, 0.5, 0.5]


def test_images_of_the_client_from_outside_count_for_nobody_at_home() -> None:
    row = _row(labels="01", owners="10", own={"arm": "1-"}, right={"arm": "00"})
    assert balanced_own(row, "arm") == 0
    assert own_scores([row])["arm"][4] == {("s, α 0.3", "000000"): 0.0}


def test_w_is_said_to_have_moved_only_where_it_did() -> None:
    def row(*mixing: list[float]) -> dict[str, Any]:
        names = [str(n) for n in range(1, len(mixing) + 1)]
        rows_of_w = {n: dict(zip(names, own, strict=True)) for n, own in zip(names, mixing, strict=True)}
        found = {
            "mixing": rows_of_w,
            "assignment": {f"site {n}": n for n in names},
            "silhouettes": {"2": 0.25},
        }
        as_printed = {"mixing": {"1": {"1": 0.502, "2": 0.498}, "2": {"1": 0.5, "2": 0.5}}}
        return _row(**{"clusters": found, "clusters as printed": as_printed})

    text = weights([row([0.5, 0.5], [0.5, 0.5]), row([0.9, 0.1], [0.5, 0.5]), row([1.0])])[1]
    assert text.startswith("In 1 of 2 federations")
    assert "1 have one cluster" in text
    assert "as printed`) w moved by 0.002 at most" in text


def test_cells_come_seed_by_seed_with_the_whole_configuration() -> None:
    cells = cells_of("cpu", PROFILES["cpu"])
    assert len(cells) == 3 * 2 * 2
    assert [cell["seed"] for cell in cells] == [0] * 4 + [1] * 4 + [2] * 4
    assert {cell["method"]["local_epochs"] for cell in cells if cell["set"] == "pneumoniamnist"} == {12}
    assert all(cell["method"]["outer_steps"] == 6 for cell in cells)
