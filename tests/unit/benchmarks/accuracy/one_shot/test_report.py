from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.accuracy.one_shot.arms import Examined, averaged, digits, strings
from benchmarks.accuracy.one_shot.experiment import PROFILES, cells_of
from benchmarks.accuracy.one_shot.outside import as_good, worth
from benchmarks.accuracy.one_shot.report import weights, where
from benchmarks.accuracy.one_shot.scores import (
    balanced_of_all,
    bootstrap,
    difference_of_all,
    own_accuracies,
    own_balanced,
    own_difference,
    right_of_all,
)
from benchmarks.harness.tables import Interval, verdict
from training.data.classification import ImageSet


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
    clients = {"clients": {"a": [3, 0], "b": [1, 1]}}
    return {"cell": {"set": "s", "alpha": 0.3, "seed": 4, "clients": 2}, "result": {**clients, **result}}


def test_accuracies_by_hand() -> None:
    row = _row(labels="00011", owners="11122", own={"arm": "00110"}, right={"arm": "22011"})
    # Client 1 has class 0 alone, 2 of 3 right; client 2 has class 1 alone, 1 of 2 right.
    assert own_accuracies(row, "arm") == pytest.approx([2 / 3, 1 / 2])
    assert right_of_all(row, "arm").tolist() == [1, 1, 0, 0.5, 0.5]
    # Class 0: (2 + 2 + 0) / 6; class 1: (1 + 1) / 4.
    assert balanced_of_all(row, "arm") == pytest.approx((4 / 6 + 2 / 4) / 2)


def test_a_client_with_two_classes_has_both_count_alike() -> None:
    row = _row(labels="00010", owners="11112", own={"arm": "01110"}, right={"arm": "00000"})
    # Class 0: 1 of 3; class 1: 1 of 1. Client 2: 1 of 1.
    assert own_balanced(row, "arm") == pytest.approx([(1 / 3 + 1) / 2, 1])


def test_images_of_the_client_from_outside_count_for_nobody_at_home() -> None:
    row = _row(labels="010", owners="102", own={"arm": "1-0"}, right={"arm": "000"})
    assert own_accuracies(row, "arm") == [0, 1]


def test_a_difference_is_the_mean_over_clients_however_many_images_they_have() -> None:
    row = _row(labels="00000", owners="11112", own={"x": "00001", "y": "11110"}, right={"x": "0" * 5})
    found, each = own_difference([row, row], "x", "y")
    # Client 1 gains 1 on four images, client 2 loses 1 on one.
    assert (found.mean, each, found.count) == (0, [0, 0], 5)


def test_the_interval_is_that_of_a_bootstrap_in_a_plain_loop() -> None:
    parts = [(np.array([0, 1, 2, 3]), np.array([1.0, 0, 0, 1])), (np.array([1, 3]), np.array([-1.0, 0.5]))]
    draw, means = np.random.default_rng(1), []
    for _ in range(4000):
        images = draw.integers(4, size=4).tolist()
        found = []
        for own, difference in parts:
            seen = [difference[list(own).index(image)] for image in images if image in own]
            found += [np.mean(seen)] if seen else []
        means.append(np.mean(found))
    interval = bootstrap(parts)
    assert interval.mean == pytest.approx((0.5 - 0.25) / 2)
    assert (interval.low, interval.high) == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.05)


def test_one_image_under_several_trainings_is_one_image() -> None:
    row = _row(labels="0011", owners="1122", own={}, right={"x": "2002", "y": "0000"})
    once, thrice = difference_of_all([row], "x", "y")[0], difference_of_all([row] * 3, "x", "y")[0]
    assert (once.low, once.high) == (thrice.low, thrice.high)
    assert once.low < once.mean == 0.5 < once.high


def test_a_verdict_needs_every_training_to_agree() -> None:
    above, below, around = Interval(0.1, 0.05, 0.2, 9), Interval(-0.1, -0.2, -0.05, 9), Interval(0, -1, 1, 9)
    assert verdict(above, [0.2, 0.1]) == "helps"
    assert verdict(below, [-0.2, -0.1]) == "harms"
    open_ = [(above, [0.3, -0.01]), (below, [-0.3, 0.01]), (around, [0.1, 0.1])]
    assert {verdict(*each) for each in open_} == {"no difference shown"}


def test_table_of_clients_separates_them_by_their_data() -> None:
    arms = ("local-only", "local-only, trained on", "FedAvg-1", "FedAvg-1 + fine-tuning", "FedBiCross")
    own = dict.fromkeys(arms, "0101") | {"local-only": "0001", "FedBiCross": "1101"}
    text = where([_row(labels="0111", owners="1122", own=own, clients={"a": [99, 1], "b": [30, 40]})])[-1]
    [one_sided] = [
        line for line in text.splitlines() if "nearly all of one class, 100 images and more" in line
    ]
    [mixed] = [line for line in text.splitlines() if "mixed, under 100 images" in line]
    assert [cell.strip() for cell in one_sided.split("|")[2:-1]] == [
        *("1", "0.500"),
        *["+0.500 (1 up, 0 down)"] * 3,
        "+0.000 (0 up, 0 down)",
    ]
    assert mixed.count("+0.000 (0 up, 0 down)") == 4


def test_chance_is_as_good_as_the_best_as_often_as_it_meets_it() -> None:
    accuracies = {"1": 0.5, "2": 0.9, "3": 0.1, "4": 0.9}
    outside = {
        "accuracies": accuracies,
        "picked": {"information": "1"},
        "anybody": {"accuracies": {"FedAvg-1": 0.95}},
    }
    row = _row(outside=outside)
    found = {
        way: (worth(row, way, "accuracies"), as_good(row, way, "accuracies"))
        for way in ("by chance", "information", "FedAvg-1", "best in hindsight")
    }
    assert found["by chance"] == pytest.approx((0.6, 0.5))
    assert found["information"] == (0.5, 0)
    assert found["FedAvg-1"] == (0.95, 1)
    assert found["best in hindsight"] == (0.9, 1)


def test_how_far_w_moved_and_what_it_leaves_to_the_own_cluster() -> None:
    def row(*mixing: list[float], printed: float = 0.6) -> dict[str, Any]:
        names = [str(n) for n in range(1, len(mixing) + 1)]
        rows_of_w = {n: dict(zip(names, own, strict=True)) for n, own in zip(names, mixing, strict=True)}
        found = {
            "mixing": rows_of_w,
            "assignment": {f"site {n}": n for n in names},
            "silhouettes": {"2": 0.25},
        }
        as_printed = {"mixing": {"1": {"1": printed, "2": 1 - printed}, "2": {"1": 0.5, "2": 0.5}}}
        return _row(**{"clusters": found, "clusters as printed": as_printed})

    text = weights([row([0.5, 0.5], [0.5, 0.5]), row([0.9, 0.1], [0.4, 0.6], printed=0.75), row([1.0])])
    assert "w left 1/K by 0.10 to 0.25" in text[1]
    lines = [[cell.strip() for cell in line.split("|")[2:-1]] for line in text[2].splitlines()[2:]]
    assert [line[3:5] for line in lines] == [["0.250", "0.000"], ["0.250", "0.400"], ["0.250", "–"]]
    assert [line[5] for line in lines] == ["0.500", "0.750", "–"]


def test_cells_come_seed_by_seed_with_the_whole_configuration() -> None:
    cells = cells_of("cpu", PROFILES["cpu"])
    assert len(cells) == 3 * 2 * 2
    assert [cell["seed"] for cell in cells] == [0] * 4 + [1] * 4 + [2] * 4
    assert {cell["method"]["local_epochs"] for cell in cells if cell["set"] == "pneumoniamnist"} == {12}
    assert all(cell["method"]["outer_steps"] == 6 for cell in cells)
