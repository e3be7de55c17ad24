"""Practice, fit and decision, each against another way."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from personalization.gate import Targets
from personalization.gate.statistics import statistics_distance
from personalization.iop_fl.batch_norm import bake_statistics, profile
from personalization.iop_fl.spread import Spread, sent_by
from personalization.metrics import foreground_dice
from personalization.playbook import (
    FEATURES,
    Episode,
    Features,
    Playbook,
    Practice,
    Trial,
    choose,
    features_of,
    fit,
    fit_gate,
    passes,
    practise,
    targets_of,
    typical_targets,
    verdict_by_practice,
    view,
)
from personalization.playbook.playbook import pooled_quantile
from personalization.playbook.practice import BY_SHIFT, PLANTED
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.ladder import blended
from tests.helpers.personalization.discs import discs, space

CPU = torch.device("cpu")
HALF = AdaptationConfig(preset="ladder", doses=(0.5, 0.5, 0.5))
FULL = AdaptationConfig(preset="ladder", doses=(1.0, 1.0, 1.0))
TRIALS = (Trial("half", HALF), Trial("full", FULL))
TARGETS = Targets(0.1, 0.2, 1.5)


# ---------------------------------------------------------------------- what is seen of a cohort


def test_a_view_has_the_masks_sizes_certainty_and_shift_of_one_pass() -> None:
    network, images = space().plain().eval(), discs(20, 1, contrast=1.3)[0]
    passes: list[int] = []
    handle = network.register_forward_pre_hook(lambda _network, inputs: passes.append(len(inputs[0])))
    found = view(network, images, shift=True)
    handle.remove()
    assert sum(passes) == 20
    with torch.no_grad():
        probabilities = torch.softmax(network(images), dim=1)
    maps = probabilities.argmax(dim=1)
    assert torch.equal(found.maps, maps.to(torch.uint8))
    assert found.foreground == pytest.approx(float((maps > 0).double().mean()))
    certain = 2 * (probabilities[:, 1] * (maps > 0)).sum() / (probabilities[:, 1].sum() + (maps > 0).sum())
    assert found.certainty == pytest.approx(float(certain), rel=1e-5)
    # The first layer's statistics do not depend on the layers before it.
    features = network.encoder1[0](images).detach().double()
    mean, variance = features.mean((0, 2, 3)), features.var((0, 2, 3), correction=0)
    names = ("n.running_mean", "n.running_var")
    running = {names[0]: network.encoder1[1].running_mean, names[1]: network.encoder1[1].running_var}
    here = statistics_distance(running, {names[0]: mean, names[1]: variance})
    assert found.shift[0] > 0
    first_only = view(torch.nn.Sequential(network.encoder1[0], network.encoder1[1]), images, shift=True)
    assert first_only.shift[0] == pytest.approx(here, rel=1e-4)


def test_images_that_training_knew_are_near_and_others_far() -> None:
    network = bake_statistics(space().plain(), discs(64, 1)[0])
    near, far = (
        view(network, discs(64, 2, contrast=contrast)[0], shift=True).shift for contrast in (2.0, 6.0)
    )
    assert all(one < other for one, other in zip(near, far, strict=True))


def test_features_compare_a_candidate_with_its_parent() -> None:
    maps = torch.zeros(1, 10, 10, dtype=torch.uint8)
    ours, theirs = maps.clone(), maps.clone()
    theirs[0, :2] = 1  # 20 of 100
    ours[0, :1] = 1  # 10, all within the parent's
    blank = view(space().plain().eval(), discs(1)[0], shift=True)
    parent = replace(blank, maps=theirs, certainty=0.8, foreground=0.2, shift=(0.01, 0.04, 0.09))
    candidate = replace(blank, maps=ours, certainty=0.9, foreground=0.1)
    found = features_of(parent, candidate, share=0.1)
    assert (found.early, found.middle, found.late) == pytest.approx((0.1, 0.2, 0.3))
    assert (found.certainty, found.certainty_change) == pytest.approx((0.8, 0.1))
    assert found.disagreement == pytest.approx(1 - 2 * 10 / 30)
    halved = math.log(0.101 / 0.201)
    assert found.size_change == pytest.approx(math.tanh(2 * halved))
    # From twice the federation's size to the same.
    assert found.size_gain == pytest.approx(math.tanh(-2 * halved))
    away = features_of(parent, candidate, share=0.2)
    assert away.size_gain == pytest.approx(math.tanh(2 * halved))
    # Neither nearer nor farther, where the federation's size is unknown.
    assert features_of(parent, candidate, share=0.0).size_gain == 0.0


# ---------------------------------------------------------------------- practice


def test_an_episode_is_what_a_plain_loop_over_both_halves_finds() -> None:
    images, truth = discs(12, 4, contrast=1.2)
    patients = [f"p{index // 2}" for index in range(12)]
    [episode] = practise(
        space(), images, truth, patients, Practice(TRIALS[:1], (0.0,), damage=0), 0.05, seed=1
    )
    here = [index for index in range(12) if (index // 2) % 2 == 0]
    there = [index for index in range(12) if (index // 2) % 2 == 1]
    changes: dict[str, float] = {}
    for learned, scored in ((here, there), (there, here)):
        networks = space().plain().eval(), blended(space().plain(), images[learned], (0.5, 0.5, 0.5))
        names = [patients[index] for index in scored]
        with torch.no_grad():
            before, after = (
                foreground_dice(network(images[scored]).argmax(1), truth[scored], names, 2)
                for network in networks
            )
        changes |= {patient: after[patient] - before[patient] for patient in before}
    values = np.array(list(changes.values()))
    assert (episode.trial, episode.severity, episode.patients) == ("half", 0.0, 6)
    assert episode.change == pytest.approx(values.mean())
    assert episode.spread == pytest.approx(values.std(ddof=1))
    assert episode.worse == pytest.approx((values < -0.01).mean())


def test_scans_go_through_one_scanner_per_severity_and_the_seed_repeats_them() -> None:
    images, truth = discs(8, 4)
    patients = [f"p{index}" for index in range(8)]
    practice = Practice(TRIALS, (0.0, 2.0, 2.0), damage=0)
    first, again = (
        list(practise(space(), images, truth, patients, practice, 0.05, seed=3)) for _ in range(2)
    )
    assert first == again
    assert [(each.trial, each.severity) for each in first] == [
        (trial, severity) for severity in (0.0, 2.0, 2.0) for trial in ("half", "full")
    ]
    assert first[2] != replace(first[4], trial="half")  # another draw of the same severity
    assert list(practise(space(), images, truth, patients, practice, 0.05, seed=4)) != first


def test_damage_and_the_dose_by_shift_are_practised_and_judged() -> None:
    images, truth = discs(12, 4)
    patients = [f"p{index // 2}" for index in range(12)]
    here = space()
    found = [profile(here.plain(), discs(12, seed)[0], patients) for seed in (5, 6)]
    sent = [sent_by(each, (0.05, 0.2, 1.0)) for each in found]
    spread = Spread.of(
        found[0].layers, {name: (sent[0][name] + sent[1][name]) / 2 for name in sent[0]}, len(sent)
    )
    practice = Practice(TRIALS[:1], (0.0, 3.0))
    seen = list(practise(here, images, truth, patients, practice, 0.05, seed=1, spread=spread))
    kinds = ["statistics of noise", "statistics of inverted scans", "one layer shuffled", "rate x100"]
    planted = [f"{PLANTED}{kind}" for kind in kinds]
    first = [each.trial for each in seen if not each.severity]
    assert first == ["half", BY_SHIFT, *planted]
    assert [each.trial for each in seen if each.severity] == ["half", BY_SHIFT]
    by_name = {each.trial: each for each in seen if not each.severity}
    assert by_name["half"].served is None
    assert all(by_name[name].served is not None for name in (BY_SHIFT, *planted))
    # Damage that loses the target is refused in the place of a dose, so that nothing changes.
    wrecked = by_name[f"{PLANTED}statistics of noise"]
    assert wrecked.change < -0.05
    assert wrecked.served == 0.0
    # Damage moves what is predicted, not the range of what was practised.
    plain = {"a": [by_name["half"], seen[6]], "b": [seen[6], by_name["half"]]}
    alone, taught = fit_gate(plain), fit_gate(plain, {"a": [by_name[name] for name in planted]})
    assert (alone.lowest, alone.highest, alone.centre) == (taught.lowest, taught.highest, taught.centre)
    assert alone.whole != taught.whole


@pytest.mark.parametrize(("count", "damage"), [(8, 0), (20, 2)])
def test_passes_are_the_images_that_go_through_the_network(count: int, damage: int) -> None:
    images, truth = discs(count, 4)
    practice = Practice(TRIALS, (0.0, 1.0, 2.0), most=4, damage=damage)
    here, seen = space(), [0]

    def look(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        seen[0] += len(inputs[0]) if type(module) is kind else 0

    kind = type(here.plain())
    hook = torch.nn.modules.module.register_module_forward_pre_hook(look)
    with hook:
        list(practise(here, images, truth, [f"p{index}" for index in range(count)], practice, 0.05, seed=1))
    assert passes(practice, count, shifted=False) == seen[0]


def test_a_member_with_one_patient_has_no_episode() -> None:
    images, truth = discs(4, 4)
    assert list(practise(space(), images, truth, ["one"] * 4, Practice(TRIALS), 0.05, seed=0)) == []


def test_targets_have_their_share_the_large_ones_and_their_pieces() -> None:
    maps = torch.zeros(4, 10, 10, dtype=torch.long)
    maps[0, 0, 0] = maps[0, 5, 5] = 1  # two pieces, 2 %
    maps[1, 2:4, :] = 1  # one piece, 20 %
    maps[2, 4:8, :] = 2  # one piece of another class, 40 %
    found = targets_of(maps, ["a", "a", "b", "c"], 3)
    assert found.share == pytest.approx(0.62 / 4)
    # Patients have 11, 40 and 0 %: nine tenths of the way from 11 to 40.
    assert found.largest == pytest.approx(0.11 + 0.9 * 0.29)
    assert found.pieces == pytest.approx(4 / 3)


def test_members_targets_are_put_together_and_one_without_a_target_leaves_the_share_unknown() -> None:
    members = [Targets(0.04, 0.2, 1.0), Targets(0.01, 0.1, 4.0)]
    found = typical_targets(members)
    assert (found.share, found.largest, found.pieces) == pytest.approx((0.02, 0.2, 2.5))
    assert typical_targets([*members, Targets()]).share == 0
    assert typical_targets([]) == Targets()


# ---------------------------------------------------------------------- fit


def episodes(member: int, count: int = 8, slope: float = 0.5, noise: float = 0.0) -> list[Episode]:
    """Their change is a slope times the change of certainty, times how much the candidate differs."""
    draw = np.random.default_rng(member)
    found = []
    for number in range(count):
        values = dict(zip(FEATURES, draw.uniform(0.1, 0.4, len(FEATURES)), strict=True))
        values["certainty_change"] = draw.uniform(-0.3, 0.3)
        moved = values["disagreement"] + 0.01
        change = moved * (slope * values["certainty_change"] + noise * draw.normal())
        severity = float(number % 3)
        found.append(Episode("half", severity, change, 0.01, 5, 0.0, 0.0, Features(**values)))
    return found


def test_the_gate_finds_what_the_change_depends_on() -> None:
    gate = fit_gate({f"m{member}": episodes(member, 20) for member in range(4)})
    found = dict(zip(gate.features, gate.whole.weights, strict=True))
    assert max(found, key=lambda name: abs(found[name])) == "certainty_change"
    for episode in episodes(9):
        expected = gate.predict(episode.features.values())
        assert expected.change == pytest.approx(episode.change, abs=0.02)
        assert expected.bound <= expected.change + 1e-9


def test_the_bound_holds_for_about_as_many_hospitals_as_promised() -> None:
    """Of 5 hospitals drawn like 4 members one may be below; over 60 draws of members, in the mean."""
    below = []
    for draw in range(60):
        members = {f"m{member}": episodes(100 * draw + member, 6, noise=0.1) for member in range(4)}
        gate = fit_gate(members)
        [other] = episodes(100 * draw + 50, 1, noise=0.1)
        below.append(other.change < gate.predict(other.features.values()).bound)
    assert np.mean(below) <= 0.25


def test_features_beyond_practice_count_as_the_nearest_that_was_practised() -> None:
    gate = fit_gate({f"m{member}": episodes(member) for member in range(3)})
    far = [1e6] * len(FEATURES)
    edge = [c + s * h for c, s, h in zip(gate.centre, gate.scale, gate.highest, strict=True)]
    np.testing.assert_allclose(gate.standardised(far), gate.standardised(edge))
    assert gate.predict(edge).beyond == pytest.approx(0, abs=1e-9)
    # One feature is four deviations beyond the edge: no prediction holds there.
    edge[2] += 4 * gate.scale[2]
    assert gate.predict(edge).beyond == pytest.approx(4)
    assert not gate.predict(edge).accepted


def test_every_member_weighs_the_same_in_the_quantile() -> None:
    """Two members: one with a single residual of -1, one with a hundred of 0."""
    assert pooled_quantile([np.array([-1.0]), np.zeros(100)], 0.4) == -1.0
    assert pooled_quantile([np.array([-1.0]), np.zeros(100)], 0.6) == 0.0
    assert pooled_quantile([np.array([3.0, 1.0]), np.array([2.0, 4.0])], 0.25) == 2.0


def test_recipes_are_ranked_by_their_lower_bound_over_members() -> None:
    steady = {f"m{m}": [replace(e, change=0.01) for e in episodes(m)] for m in range(4)}
    wild = {
        f"m{m}": [replace(e, trial="full", change=0.02 + 0.1 * (m - 1.5)) for e in episodes(m)]
        for m in range(4)
    }
    found = fit({m: [*steady[m], *wild[m]] for m in steady}, {"full": {"a": 1}, "half": {}}, TARGETS)
    assert [record.name for record in found.recipes] == ["half", "full"]
    full = found.recipes[1]
    assert (full.mean, full.worst, full.harmful) == pytest.approx((0.02, -0.13, 0.5))
    assert full.bound < full.mean
    assert (found.members, found.episodes, found.targets) == (("m0", "m1", "m2", "m3"), 32, TARGETS)
    assert found.severities == (0.0, 1.0, 2.0)


def test_a_playbook_needs_two_members() -> None:
    with pytest.raises(ValueError, match="at least two members"):
        fit({"m0": episodes(0), "m1": []}, {"half": {}}, TARGETS)


def test_a_playbook_is_json_with_what_it_promises() -> None:
    found = fit({f"m{member}": episodes(member) for member in range(4)}, {"half": {}}, TARGETS)
    assert Playbook.model_validate_json(found.to_bytes()) == found
    assert found.certainty == 0.8
    assert "Of 5 hospitals like the 4 members, about one may do worse" in found.promise
    assert "where the first of several that pass was chosen" in found.promise


# ---------------------------------------------------------------------- decide


def test_the_recipe_with_the_highest_bound_serves_if_it_is_expected_to_gain() -> None:
    playbook = fit({f"m{member}": episodes(member, 20) for member in range(4)}, {"half": {}}, TARGETS)
    sure = replace(episodes(7)[0].features, certainty_change=0.3, size_gain=0.2)
    harmful = replace(sure, certainty_change=-0.3)
    away = replace(sure, size_gain=-0.2)
    decided = [playbook.decide({"half": each.values()}) for each in (sure, harmful, away)]
    assert [decision.expected.accepted for decision in decided] == [True, False, False]
    assert decided[0].expected.change > 0 > decided[1].expected.change
    with pytest.raises(ValueError, match="at least one recipe"):
        playbook.decide({"unknown": sure.values()})


def test_a_larger_dose_needs_every_smaller_one() -> None:
    options = {"quarter": {}, "half": {}, "full": {}}
    members = {
        f"m{member}": [replace(e, trial=trial) for trial in options for e in episodes(member, 20)]
        for member in range(4)
    }
    playbook = fit(members, options, TARGETS, {"half": "quarter", "full": "half"})
    sure = replace(episodes(7)[0].features, certainty_change=0.3, size_gain=0.2)
    away = replace(sure, size_gain=-0.2)
    good, bad = sure.values(), away.values()
    every = playbook.decisions({"quarter": good, "half": good, "full": good})
    assert [every[name].expected.accepted for name in options] == [True, True, True]
    middle = playbook.decisions({"quarter": good, "half": bad, "full": good})
    assert [middle[name].expected.accepted for name in options] == [True, False, False]
    assert middle["full"].expected.smaller == 0.5
    assert playbook.decide({"quarter": good, "half": bad, "full": good}).trial == "quarter"
    # A recipe that stands alone needs no other.
    assert playbook.decisions({"full": good})["full"].expected.accepted


@pytest.fixture(scope="module")
def practised() -> tuple[Playbook, torch.Tensor]:
    """A playbook of two recipes, and the images of its practice."""
    images, truth = discs(24, 4, contrast=1.2)
    patients = [f"p{index}" for index in range(24)]
    practice = Practice(TRIALS, (0.0, 1.0, 2.0))
    members = {
        f"m{seed}": list(practise(space(), images, truth, patients, practice, 0.05, seed))
        for seed in range(3)
    }
    options = {trial.name: trial.config.facts() for trial in TRIALS}
    return fit(members, options, targets_of(truth, patients, 2)), images


def test_every_smaller_dose_of_a_recipe_is_tried_with_it(practised: tuple[Playbook, torch.Tensor]) -> None:
    playbook, images = practised
    full, half = (next(r for r in playbook.recipes if r.name == name) for name in ("full", "half"))
    after = full.model_copy(update={"after": "half"})
    others = tuple(half.model_copy(update={"name": f"other {number}"}) for number in range(3))
    long = full.model_copy(update={"name": "more", "after": "full"})
    # Sorted by bound, the smaller dose is the last of six, and there is room for four.
    choice = choose(
        playbook.model_copy(update={"recipes": (after, others[0], long, *others[1:], half)}),
        space(),
        images,
        CPU,
    )
    assert list(choice.tried) == ["full", "other 0", "more", "half"]
    alone = choose(playbook.model_copy(update={"recipes": (half,)}), space(), images, CPU)
    accepted = alone.chosen.decision.expected.accepted
    assert choice.tried["full"].decision.expected.smaller == (1.0 if accepted else 0.0)
    # A dose is left out where its smaller ones have no room.
    longest = long.model_copy(update={"name": "most", "after": "more"})
    found = playbook.model_copy(update={"recipes": (longest, long, after, others[0], half)})
    assert [record.name for record in found.shortlist(3)] == ["more", "full", "half"]


def test_a_choice_costs_two_passes_per_recipe_and_one_of_the_parent(
    practised: tuple[Playbook, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    playbook, images = practised
    passes: list[int] = []
    network = type(space().plain())
    forward = network.forward

    def counted(self: torch.nn.Module, image: torch.Tensor) -> torch.Tensor:
        passes.append(len(image))
        answer: torch.Tensor = forward(self, image)
        return answer

    monkeypatch.setattr(network, "forward", counted)
    choice = choose(playbook, space(), images, CPU)
    assert sum(passes) == 24 * (1 + 2 * 2)
    trial = choice.chosen.decision.trial
    assert choice.chosen.config.ladder == {"half": HALF, "full": FULL}[trial].ladder
    assert set(choice.tried) == {"half", "full"}
    assert choice.chosen is choice.tried[trial]
    verdict = verdict_by_practice(choice, space().plain(), images, range(24), 2)
    # With four recipes it is ten passes of at most twelve.
    assert sum(passes) == 24 * (1 + 2 * 2 + 1)
    assert {result.name for result in verdict.checks} >= {"predicted_gain", "gain_bound", "size_factor"}
