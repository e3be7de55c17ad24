"""What `auto` serves by the shift of the scans alone, and its gate."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from personalization.dose import ShiftRecord, by_shift, view
from personalization.errors import NetworkError
from personalization.gate import BY_SHIFT_WITHOUT_MASKS, ObservedClasses, Shifted, judge
from personalization.iop_fl.batch_norm import bake_statistics, profile
from personalization.iop_fl.space import RoutingSpace
from personalization.iop_fl.spread import Spread, sent_by
from personalization.networks import build, initialise
from personalization.test_time.ladder import blended
from tests.helpers.personalization.discs import discs, space

PATIENTS = [index // 4 for index in range(24)]
RECORD = ShiftRecord(episodes=12, mean=0.01, worst=-0.02, lost=0.05, largest=5.0, members={})


def shown(contrast: float, seed: int) -> torch.Tensor:
    return discs(len(PATIENTS), seed, contrast=contrast)[0]


def spread_of(here: RoutingSpace, contrasts: tuple[float, ...] = (2.0, 2.2)) -> Spread:
    """What members with these contrasts send together."""
    targets = discs(len(PATIENTS), 3)[1]
    own = (float((targets > 0).double().mean()), 0.2, 1.0)
    found = [profile(here.plain(), shown(each, 3 + n), PATIENTS) for n, each in enumerate(contrasts)]
    sent = [sent_by(each, own) for each in found]
    mean = {name: torch.stack([each[name] for each in sent]).mean(dim=0) for name in sent[0]}
    return Spread.of(found[0].layers, mean, len(sent))


class Passes:
    """Counts the images that a network of the space sees in whole passes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.images = 0
        plain = RoutingSpace.plain

        def counted(own: RoutingSpace) -> torch.nn.Module:
            network = plain(own)
            network.register_forward_pre_hook(lambda _network, inputs: self.note(len(inputs[0])))
            return network

        monkeypatch.setattr(RoutingSpace, "plain", counted)

    def note(self, images: int) -> None:
        self.images += images


def test_it_is_the_ladder_with_the_dose_of_the_shift_in_three_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, images = space(), shown(2.0, 9) * 3
    spread, passes = spread_of(here), Passes(monkeypatch)
    served = by_shift(here, spread, None, images, PATIENTS)
    # And a third of a pass of every fourth image, to see whether they are inverted.
    assert passes.images == 3 * len(images) + len(images) // 4
    assert served.dose.shift > 1
    assert served.config.doses == served.dose.doses
    expected = blended(here.plain(), images, served.dose.doses).state_dict()
    assert all(torch.equal(served.adapted.merged.state_dict()[name], expected[name]) for name in expected)
    assert torch.equal(served.candidate.maps, view(served.adapted.merged, images).maps)


def test_scans_like_the_members_keep_the_global_model_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    here = space()
    # Both members are far from the network's running averages, and so is a hospital like them.
    spread, passes = spread_of(here, (2.0, 2.4)), Passes(monkeypatch)
    served = by_shift(here, spread, None, shown(2.2, 11), PATIENTS)
    assert passes.images == len(PATIENTS)
    assert served.dose.doses == (0.0, 0.0, 0.0)
    assert served.passed
    weights, found = here.plain().state_dict(), served.adapted.merged.state_dict()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_the_gate_vetoes_a_target_that_moves_away_and_a_shift_beyond_practice() -> None:
    here, images = space(), shown(2.0, 9) * 1.2
    served = by_shift(here, spread_of(here), None, images, PATIENTS)
    good = replace(served, candidate=served.parent)
    assert good.passed
    nothing = replace(served.parent, maps=torch.zeros_like(served.parent.maps), foreground=0.0)
    lost = replace(served, candidate=nothing)
    assert {"size_gain", "emptied", "size_factor"} <= set(lost.failed)
    # Where the parent finds nothing, what finds the members' size is no explosion.
    cured = replace(served, parent=nothing, candidate=served.parent)
    assert not {"size_gain", "size_factor", "giant", "fragments"} & set(cured.failed)
    dose = replace(served.dose, shift=10.1, share=0.9)
    assert replace(good, dose=dose, record=RECORD).failed == ("shift_beyond_practice",)
    # Without practice nothing farther than phantoms were is moved.
    assert replace(good, dose=replace(dose, shift=59.9)).passed
    assert replace(good, dose=replace(dose, shift=60.1)).failed == ("shift_beyond_practice",)
    lossy = RECORD.model_copy(update={"lost": 0.2, "largest": 50.0})
    assert replace(good, dose=dose, record=lossy).failed == ("practice_lost",)
    # Nothing is moved, so what others lost by moving refuses nothing.
    still = replace(served.dose, shift=0.9, share=0.0)
    assert replace(good, dose=still, record=lossy).passed


def test_scans_that_are_far_nearer_in_negative_are_refused() -> None:
    here, images = space(), shown(2.0, 9) * 3
    spread, network = spread_of(here), here.plain().eval()
    served = by_shift(here, spread, None, images, PATIENTS)
    # Against whole passes of the same images as they are and in negative, layer by layer.
    found = profile(network, images, PATIENTS)
    few = images[::4]
    negative = profile(network, 2 * few.mean(dim=(1, 2, 3), keepdim=True) - few, range(len(few)))
    assert found.sampling is not None
    usual = spread.tau() + found.sampling
    ratios = [
        float((found.shift[layer] / usual[layer]).mean() / (negative.shift[layer] / usual[layer]).mean())
        for layer in range(len(found.layers) // 3)
    ]
    assert served.negative == pytest.approx(math.exp(sum(map(math.log, ratios)) / len(ratios)), rel=1e-2)
    assert "negative" in replace(served, negative=2.1).failed
    assert "negative" not in replace(served, negative=1.9).failed
    assert "mistaken" in replace(served, mistaken=0.6).failed
    assert "mistaken" not in replace(served, mistaken=0.4).failed


def test_colours_are_inverted_about_one_mean() -> None:
    arguments = {"in_channels": 3, "classes": 2, "width": 4}
    network = build("unet", **arguments).eval()
    grey = shown(2.0, 5)

    def coloured(images: torch.Tensor) -> torch.Tensor:
        # Normalised over the image, a picture keeps its colour: every channel has a mean of its own.
        together = torch.cat([images + 0.5, 0.3 * images, images.square() - 1], dim=1)
        axes = (1, 2, 3)
        return (together - together.mean(axes, keepdim=True)) / together.std(axes, keepdim=True)

    images = coloured(grey)
    bake_statistics(network, images)
    here = RoutingSpace.of("unet", arguments, {}, network.state_dict())
    found = [profile(network, coloured(grey + shift), PATIENTS) for shift in (0.05, 0.1)]
    sent = [sent_by(each, (0.05, 0.2, 1.0)) for each in found]
    spread = Spread.of(
        found[0].layers, {name: (sent[0][name] + sent[1][name]) / 2 for name in sent[0]}, len(sent)
    )
    inverted = by_shift(here, spread, None, -images, PATIENTS)
    assert inverted.negative is not None
    assert inverted.negative > 10
    assert "negative" in inverted.failed


def test_statistics_of_something_else_leave_more_of_the_shift() -> None:
    here, images = space(), shown(2.0, 9) * 3
    spread = spread_of(here)
    served = by_shift(here, spread, None, images, PATIENTS)
    assert "shift_left" not in served.failed
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(1))
    wrong = blended(here.plain(), noise, (1.0, 1.0, 1.0))
    planted = replace(served, candidate=view(wrong, images, patients=PATIENTS))
    assert "shift_left" in planted.failed


def test_a_size_within_the_members_own_is_no_veto() -> None:
    here, images = space(), shown(2.0, 9) * 1.2
    served = by_shift(here, spread_of(here), None, images, PATIENTS)
    assert served.targets.share
    parent = replace(served.parent, foreground=served.targets.share)
    larger = replace(served.candidate, foreground=1.2 * served.targets.share)
    moved = replace(served, parent=parent, candidate=larger)
    assert "size_gain" in replace(moved, spread=served.spread.model_copy(update={"size": 0.04})).failed
    assert "size_gain" not in replace(moved, spread=served.spread.model_copy(update={"size": 0.2})).failed
    # The same distance, beyond what members differ by.
    far = replace(larger, foreground=1.6 * served.targets.share)
    own = served.spread.model_copy(update={"size": 0.2})
    assert "size_gain" in replace(moved, candidate=far, spread=own).failed


def test_a_classification_is_judged_without_masks_and_needs_practice() -> None:
    arguments = {"in_channels": 1, "classes": 3, "width": 4}
    network = initialise(build("resnet18", **arguments), torch.Generator().manual_seed(0)).eval()
    here = RoutingSpace.of("resnet18", arguments, {}, network.state_dict())
    images = shown(2.0, 5)
    found = [profile(network, images + shift, PATIENTS) for shift in (0.0, 0.1)]
    sent = [sent_by(each, None) for each in found]
    mean = {name: torch.stack([each[name] for each in sent]).mean(dim=0) for name in sent[0]}
    served = by_shift(here, Spread.of(found[0].layers, mean, 2), None, 3 * images + 5, PATIENTS)
    assert served.candidate.maps.shape == (len(images),)
    assert [result.name for result in served.verdict.checks] == [
        "shift_left",
        "shift_beyond_practice",
        "negative",
        "mistaken",
        "practised",
        "practice_lost",
        "class_lost",
    ]
    moved, still = (replace(served, dose=replace(served.dose, share=share)) for share in (0.5, 0.0))
    assert "practised" in moved.failed
    assert "practised" not in replace(moved, record=RECORD).failed
    # Left alone, it needs no licence.
    assert "practised" not in still.failed


@pytest.mark.parametrize(
    ("parent", "candidate", "is_lost"),
    [
        ([0, 0, 1, 1, 2, 2, 0, 1, 2, 1], [0, 0, 1, 1, 2, 2, 0, 1, 2, 2], False),
        ([0] * 5 + [1] * 5, [0] * 10, True),
        # A parent that fails gives one class alone.
        ([0] * 10, [0] * 4 + [1] * 6, False),
        # 6 of 8 are lost: (8 + 1) / (2 + 1), at the limit; then one more.
        ([1] * 8 + [0] * 2, [1] * 2 + [0] * 8, False),
        ([1] * 8 + [0] * 2, [1] * 1 + [0] * 9, True),
    ],
)
def test_a_class_that_is_lost_is_refused(parent: list[int], candidate: list[int], is_lost: bool) -> None:
    observed = ObservedClasses(
        torch.tensor(candidate), torch.tensor(parent), 3, Shifted(beyond=1.0, left=0.5), licensed=True
    )
    (result,) = [each for each in judge(BY_SHIFT_WITHOUT_MASKS, observed).checks if each.name == "class_lost"]
    assert result.passed != is_lost


def test_a_network_without_batch_norm_is_refused() -> None:
    arguments = {"in_channels": 1, "classes": 2, "size": [32, 32], "patch": 8, "width": 8, "depth": 1}
    arguments["heads"] = 2
    here = RoutingSpace.of("vit", arguments, {}, build("vit", **arguments).state_dict())
    with pytest.raises(NetworkError, match="batch norm"):
        by_shift(here, spread_of(space()), None, shown(2.0, 1), PATIENTS)
