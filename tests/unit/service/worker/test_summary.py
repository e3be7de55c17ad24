"""The sentences beside a verdict: what gain a person may expect."""

from __future__ import annotations

import pytest

from service.worker.cross_attention import validation


@pytest.mark.parametrize(
    ("dice", "patients", "words"),
    [
        (0.8, 3, "On 3 patients that it did not learn from, Dice is 80.0 %: 20.0 points more than"),
        (0.55, 1, "On 1 patient that it did not learn from, Dice is 55.0 %: 5.0 points less than"),
    ],
)
def test_validation_says_patients_dice_and_difference(dice: float, patients: int, words: str) -> None:
    assert validation(dice, 0.6, patients).startswith(words)
