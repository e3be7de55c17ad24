"""Practice of the dose by shift, against a plain loop."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from personalization.dose import Change, Practice, by_lens, by_shift, passes, practise
from personalization.gate import ThroughLens
from personalization.iop_fl.batch_norm import profile
from personalization.iop_fl.spread import Spread, sent_by
from personalization.metrics import foreground_dice
from personalization.scanner import Scanners
from personalization.seeds import seed_of
from personalization.test_time.ladder import blended
from tests.helpers.personalization.discs import discs, space
from tests.helpers.personalization.scored_slices import Practised, practised

CPU = torch.device("cpu")
PATIENTS = [f"p{index // 2}" for index in range(12)]


def spread(contrast: float = 2.0) -> Spread:
    """How far two members with discs of about this contrast are apart."""
    found = [profile(space().plain(), discs(12, seed, contrast=contrast)[0], PATIENTS) for seed in (5, 6)]
    sent = [sent_by(each, (0.05, 0.2, 1.0)) for each in found]
    return Spread.of(found[0].layers, {name: (sent[0][name] + sent[1][name]) / 2 for name in sent[0]}, 2)


def test_an_episode_is_what_a_plain_loop_over_both_halves_finds() -> None:
    images, truth = discs(12, 4)
    images = 1.8 * images
    [episode] = practise(
        space(), spread(), Practised.of(images, truth, PATIENTS), practised, Practice((0.0,)), 1, CPU
    )
    here = [index for index in range(12) if (index // 2) % 2 == 0]
    there = [index for index in range(12) if (index // 2) % 2 == 1]
    changes: dict[str, float] = {}
    shifts = []
    for learned, scored in ((here, there), (there, here)):
        own = [PATIENTS[index] for index in learned]
        made = by_shift(space(), spread(), None, images[learned], own)
        shifts.append(made.dose.shift)
        networks = space().plain().eval(), blended(space().plain(), images[learned], made.dose.doses)
        names = [PATIENTS[index] for index in scored]
        with torch.no_grad():
            before, after = (
                foreground_dice(network(images[scored]).argmax(1), truth[scored], names, 2)
                for network in networks
            )
        # The gate refuses a candidate: the global model stays.
        changes |= {name: (after[name] - before[name]) * made.passed for name in before}
    assert min(shifts) > 1
    assert any(changes.values())
    assert (episode.severity, episode.shift) == (0.0, max(shifts))
    assert episode.served == pytest.approx(sum(changes.values()) / 6)


def test_a_dose_that_its_gate_refuses_changes_nothing() -> None:
    images, truth = discs(12, 4)
    # Farther than anything that was practised.
    [episode] = practise(
        space(), spread(), Practised.of(50 * images, truth, PATIENTS), practised, Practice((0.0,)), 1, CPU
    )
    assert episode.shift > 60
    assert episode.served == 0.0


def test_scans_go_through_one_scanner_per_severity_and_the_seed_repeats_them() -> None:
    images, truth = discs(12, 4)
    scans, practice = Practised.of(images, truth, PATIENTS), Practice((0.0, 2.0, 2.0))

    def episodes(seed: int) -> list[object]:
        return list(practise(space(), spread(), scans, practised, practice, seed, CPU))

    first = episodes(3)
    assert first == episodes(3)
    assert [each.severity for each in first] == [0.0, 2.0, 2.0]
    assert first[1] != first[2]  # another draw of the same severity
    assert episodes(4) != first


def test_a_scanner_is_drawn_once_and_shows_the_scans_one_after_the_other() -> None:
    images, truth = discs(4, 4)
    seen: list[NDArray[np.float32]] = []

    class Seen(Practised):
        def changed_by(self, change: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> Practised:
            seen.extend(change(each[None]) for each in self.images)
            return self

    scans = Seen.of(images, truth, ["a", "a", "b", "b"])
    [*practise(space(), spread(), scans, practised, Practice((2.0,)), 5, CPU)]
    generator = torch.Generator().manual_seed(seed_of(5, "scanner", 0))
    scanner = Scanners.draw(torch.tensor([2.0]), generator)
    for image, found in zip(images, seen, strict=True):
        assert torch.equal(scanner.apply(image[None], generator), torch.from_numpy(found))


@pytest.mark.parametrize("most", [4, 64])
def test_passes_are_the_images_that_go_through_the_network(most: int) -> None:
    images, truth = discs(20, 4)
    practice = Practice((0.0,), most=most)
    here, seen = space(), [0]

    def look(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        seen[0] += len(inputs[0]) if type(module) is kind else 0

    kind = type(here.plain())
    patients = [f"p{index}" for index in range(20)]
    apart = spread()
    with torch.nn.modules.module.register_module_forward_pre_hook(look):
        # Far enough for a dose, and too near to be looked at in negative.
        [episode] = practise(
            here, apart, Practised.of(1.5 * images, truth, patients), practised, practice, 1, CPU
        )
    assert 1 < episode.shift < 4
    assert passes(practice, 20, 20) == seen[0]


def test_a_member_with_one_patient_has_no_episode() -> None:
    images, truth = discs(4, 4)
    alone = Practised.of(images, truth, ["one"] * 4)
    assert [*practise(space(), spread(), alone, practised, Practice(), 0, CPU)] == []


def test_a_lens_is_practised_as_it_is_served() -> None:
    images, truth = discs(12, 4)
    scans, practice = Practised.of(5 * images, truth, PATIENTS), Practice((0.0,))
    fitted: list[tuple[str, ...]] = []

    def fainter(pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        return pixels / 4

    def fit_lens(own: Practised) -> tuple[Change | None, ThroughLens]:
        fitted.append(own.patients)
        return fainter, ThroughLens(0.1, None, 0.9, 3.0)

    [episode] = practise(space(), spread(), scans, practised, practice, 1, CPU, fit_lens=fit_lens)
    here = [index for index in range(12) if (index // 2) % 2 == 0]
    there = [index for index in range(12) if (index // 2) % 2 == 1]
    assert fitted == [tuple(PATIENTS[index] for index in half) for half in (here, there)]
    changes: dict[str, float] = {}
    shifts = []
    for learned, scored in ((here, there), (there, here)):
        own = torch.from_numpy(scans.images[learned])
        names = [PATIENTS[index] for index in learned]
        lens = ThroughLens(0.1, None, 0.9, 3.0)
        made = by_lens(space(), spread(), None, own, own / 4, names, lens)
        assert made.served in ("lens", "lens and dose")
        assert made.dosed is not None
        shifts.append(made.dosed.dose.shift)
        network = made.network if made.served == "lens and dose" else space().plain()
        assert network is not None
        before = practised(space().plain(), scans.take(scored))
        after = practised(network, scans.take(scored).changed_by(fainter))
        changes |= {name: after[name] - before[name] for name in before}
    assert episode.served == pytest.approx(sum(changes.values()) / 6)
    assert episode.served > 0.05
    assert episode.shift == max(shifts)


def test_a_lens_without_a_step_leaves_the_dose() -> None:
    images, truth = discs(12, 4)
    scans, practice = Practised.of(1.8 * images, truth, PATIENTS), Practice((0.0, 2.0))
    common = space(), spread(), scans, practised, practice, 1, CPU
    without = [*practise(*common)]
    assert [*practise(*common, fit_lens=lambda _: (None, ThroughLens(1.0)))] == without
