"""What a person sees of a job, at a terminal and elsewhere."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from locum.commands.following import LEARNING, Followed, follow
from service.job_kinds import KINDS

Event = tuple[str, dict[str, Any]]


def epoch(number: int, loss: float | None, values: list[list[float]] | None = None) -> Event:
    used = {"layers": ["a", "b"], "models": ["aster", "global"], "values": values}
    data = {"epoch": number, "loss": loss, "agreement": None if loss is None else 0.5}
    return "epoch", data | ({} if values is None else {"coefficients": used})


EVENTS: list[Event] = [
    ("state", {"state": "running"}),
    ("progress", {"stage": "preparing"}),
    ("progress", {"stage": "adapting", "epoch": 0, "epochs": 2}),
    epoch(0, 0.04, [[0.5, 0.5], [0.5, 0.5]]),
    ("progress", {"stage": "adapting", "epoch": 1, "epochs": 2}),
    # A pooled router, with coefficients that do not add up to 1: (0.8 + 0.6) / 2 is aster's share
    epoch(1, 0.02, [[0.8, 0.2], [0.3, 0.2]]),
    ("warning", {"message": "mind the step"}),
    ("progress", {"stage": "judging", "against": "another seed"}),
    ("progress", {"stage": "judging", "against": "half 1 of the scans"}),
]


def shown(followed: Followed) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    with console.capture() as capture:
        console.print(followed)
    return [line.rstrip() for line in capture.get().splitlines()]


def followed(*events: Event) -> Followed:
    result = Followed()
    for event in events:
        result.take(*event)
    return result


def test_at_a_terminal_it_shows_how_far_the_job_is_and_whose_knowledge_it_uses() -> None:
    stages, learning, *knowledge, against = shown(followed(*EVENTS))
    assert "✓ preparing  ✓ adapting" in stages
    assert "· drawing  · publishing" in stages
    assert "✓ judging" not in stages
    assert "epoch 1  loss 0.0200  agreement 0.50  █▁" in learning
    assert [line.split()[-2:] for line in knowledge] == [["70%", "aster"], ["30%", "global"]]
    assert against.endswith("judging against half 1 of the scans")


def test_job_that_measures_its_dose_is_shown_in_that_stage() -> None:
    stages, *_ = shown(followed(EVENTS[0], EVENTS[1], ("progress", {"stage": "measuring"})))
    assert "✓ preparing" in stages
    assert "measuring" in stages
    assert "adapting" not in stages


def test_every_stage_that_makes_a_candidate_is_known() -> None:
    passed = {"waiting", "preparing", "judging", "drawing", "publishing"}
    assert {*LEARNING} == KINDS["adaptation"].stages.keys() - passed


def test_a_job_that_is_over_has_nothing_left_to_do() -> None:
    over = [("progress", {"stage": "publishing"}), ("state", {"state": "succeeded"})]
    stages, *_ = shown(followed(*EVENTS, *over))
    assert stages.strip() == "✓ preparing  ✓ adapting  ✓ judging  ✓ drawing  ✓ publishing"


def test_an_epoch_whose_loss_was_no_number_is_shown_all_the_same() -> None:
    assert any("epoch 2" in line for line in shown(followed(*EVENTS, epoch(2, None))))
    assert any("epoch 0" in line for line in shown(followed(epoch(0, None))))


def test_elsewhere_each_thing_is_told_once_in_a_line() -> None:
    told = io.StringIO()
    follow(Console(file=told, width=40), EVENTS)
    assert [line.strip() for line in told.getvalue().splitlines()] == [
        "running",
        "preparing",
        "adapting",
        "epoch 0  loss 0.0400  agreement 0.50",
        "epoch 1  loss 0.0200  agreement 0.50",
        "mind the step",
        "judging against another seed",
        "judging against half 1 of the scans",
    ]
