"""What `auto` serves where a lens moves the scans first."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from personalization.dose import Lensed, by_lens, by_lens_alone, by_scale, by_shift, lensed, view
from personalization.gate import GateVerdict, ThroughLens
from personalization.iop_fl.space import RoutingSpace
from personalization.iop_fl.spread import Spread
from tests.helpers.personalization.discs import space
from tests.unit.personalization.dose.test_auto import PATIENTS, shown, spread_of

SEEN = ThroughLens(left=0.2, grid=0.8, sides=10.0)


@cache
def here() -> RoutingSpace:
    return space()


@cache
def spread() -> Spread:
    return spread_of(here())


def failed(verdict: GateVerdict | None) -> set[str]:
    assert verdict is not None
    return {check.name for check in verdict.checks if not check.passed}


def served(images: torch.Tensor, through: torch.Tensor | None, seen: ThroughLens = SEEN) -> Lensed:
    return by_lens(here(), spread(), None, images, through, PATIENTS, seen)


def test_inverted_scans_are_served_through_the_lens() -> None:
    usual = shown(2.0, 9)
    made = served(-usual, usual, replace(SEEN, negated=True))
    assert made.served == "lens"
    assert made.sees_through
    assert made.network is None
    assert made.shifts is not None
    assert made.shifts[1] < made.shifts[0] / 1.5
    expected = by_shift(here(), spread(), None, usual, PATIENTS).parent
    assert torch.equal(made.through.maps, expected.maps)


def test_what_is_left_of_the_shift_is_dosed() -> None:
    usual = shown(2.0, 9)
    made = served(6 * usual, 2 * usual)
    expected = by_shift(here(), spread(), None, 2 * usual, PATIENTS)
    assert expected.dose.share > 0
    assert made.dosed is not None
    assert made.dosed.dose == expected.dose
    # Whatever the gate of the dose refuses, both together do not pass.
    assert (made.served == "lens and dose") == (expected.passed and not failed(made.both))
    assert failed(expected.verdict) <= failed(made.both)


def test_a_dose_that_is_refused_leaves_the_lens(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, nothing = shown(2.0, 9), torch.zeros(len(PATIENTS), 1, 32, 32)

    def refused(*arguments: object, **options: object) -> object:
        made = by_shift(*arguments, **options)  # type: ignore[arg-type]
        return replace(made, candidate=replace(made.candidate, maps=nothing[:, 0].to(torch.uint8)))

    monkeypatch.setattr(lensed, "by_shift", refused)
    made = served(6 * usual, 2 * usual)
    assert made.both is not None
    assert failed(made.both)
    assert (made.served, made.network) == ("lens", None)


def test_without_a_licence_the_scans_are_dosed_as_they_are() -> None:
    images = 2 * shown(2.0, 9)
    made = served(images, 4 * images)
    expected = by_shift(here(), spread(), None, images, PATIENTS)
    assert "lens_licence" in failed(made.verdict)
    assert not made.sees_through
    assert (made.served == "dose") == expected.passed
    assert made.dosed is not None
    assert made.dosed.dose == expected.dose


@pytest.mark.parametrize("through", [None, 4.0])
@pytest.mark.parametrize(("seen", "why"), [({"grid": 0.1}, "lens_grid"), ({"sides": 1.1}, "lens_sides")])
def test_no_dose_is_served_of_scans_that_do_not_show_what_the_members_do(
    through: float | None, seen: dict[str, float], why: str
) -> None:
    images = 1.8 * shown(2.0, 9)
    lensed = None if through is None else through * images
    usual = served(images, lensed)
    assert usual.served == "dose"
    assert usual.dosed is not None
    assert usual.judged.checks[2:] == usual.dosed.verdict.checks
    made = served(images, lensed, replace(SEEN, **seen))
    assert (made.served, made.candidate) == ("nothing", "dose")
    assert failed(made.judged) == {why}


def test_without_a_step_there_is_no_lens() -> None:
    images = shown(2.0, 9)
    made = served(images, None)
    assert (made.verdict, made.both, made.shifts) == (None, None, None)
    assert made.served in ("dose", "nothing")


def test_a_lens_that_its_gate_refuses_leaves_the_global_model() -> None:
    usual = shown(2.0, 9)
    made = served(-usual, usual, replace(SEEN, grid=0.1))
    assert failed(made.verdict) == {"lens_grid"}
    assert (made.served, made.candidate, made.network) == ("nothing", "lens", None)
    assert made.judged == made.verdict


def test_a_network_without_batch_norm_to_move_is_asked_for_its_masks_alone() -> None:
    usual, see = shown(2.0, 9), partial(view, here().plain())
    made = by_lens_alone(see, 2, -usual, usual, PATIENTS, replace(SEEN, negated=True))
    assert (made.served, made.shifts, made.dosed, made.network) == ("lens", None, None, None)
    assert torch.equal(made.through.maps, see(usual).maps)
    refused = by_lens_alone(see, 2, -usual, usual, PATIENTS, replace(SEEN, left=1.1))
    assert (refused.served, refused.candidate) == ("nothing", "lens")
    assert failed(refused.judged) >= {"lens_left"}
    same = by_lens_alone(see, 2, usual, None, PATIENTS, replace(SEEN, left=1.0))
    assert (same.served, same.candidate, same.judged.passed) == ("nothing", "nothing", True)


def test_larger_images_are_compared_on_the_pixels_of_the_images_as_they_are() -> None:
    images, network = shown(2.0, 9), here().plain()
    larger = images.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    seen = replace(SEEN, left=0.1, zoom=2.0)
    made = by_scale(network, 2, images, larger, images, PATIENTS, seen)
    assert made.through.maps.shape[1:] == larger.shape[2:]
    assert made.judged == made.verdict
    assert made.shifts is None
    refused = by_scale(network, 2, images, larger, images, PATIENTS, replace(seen, left=1.1))
    assert (refused.served, failed(refused.verdict) >= {"lens_left"}) == ("nothing", True)


def test_a_network_that_does_not_see_its_scans_in_the_middle_has_no_licence() -> None:
    images, seen = shown(2.0, 9), replace(SEEN, left=0.1, zoom=2.0)
    same = by_scale(here().alone().plain(), 2, images, images, images, PATIENTS, seen, spread())
    assert same.shifts is not None
    assert same.shifts[0] == same.shifts[1]
    assert "lens_licence" in failed(same.verdict)
