"""Updates that leave a hospital clipped and with noise: the bound, the noise, and the list of releases."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from scipy.stats import kstest

from tests.helpers.training.sites import declared
from tests.helpers.training.toy_federation import Toy, site
from training.engine.client import RunEnvironment
from training.engine.egress import Outgoing, SiteSpec
from training.engine.engine import FederationEngine
from training.engine.folder import RunFolder, SiteFolder
from training.engine.release import clipped_update, with_noise
from training.errors import RoundFailed, SiteFailed
from training.parts.train import WEIGHTS
from training.privacy import Noising, PrivacyDemand, RunPrivacy, epsilon_of

PHASE = declared("train", 9, (WEIGHTS,), (WEIGHTS,))
RECEIVED = {"w": torch.tensor([1.0, 2.0]), "v": torch.tensor([[0.5]]), "seen": torch.tensor(7)}


def moved(by: tuple[float, float, float]):
    return {
        "w": RECEIVED["w"] + torch.tensor(by[:2]),
        "v": RECEIVED["v"] + by[2],
        "seen": torch.tensor(99),
    }


def spec(clip: float = 1.0, noise: float = 2.0, **demand: object) -> SiteSpec:
    how = Noising(clip=clip, noise=noise)
    own = PrivacyDemand(kinds={"weights": how}, **demand)
    return SiteSpec("A", dict, privacy=RunPrivacy(groups={"weights": how}), demand=own)


def release(root, upload, *, received=RECEIVED, round_=0, site=None):
    outgoing = Outgoing({"weights": upload}, 3.0, {}, ())
    return with_noise(PHASE, round_, site or spec(), {"weights": received}, outgoing, SiteFolder(root, "A"))


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ((2.0, 3.0, 6.0), (2 / 7, 3 / 7, 6 / 7)),  # norm 7 over both tensors, clipped to 1
        ((0.125, 0.25, 0.5), (0.125, 0.25, 0.5)),  # within the clip
        ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0)),
    ],
)
def test_update_is_clipped_over_all_tensors_of_the_group(by, expected):
    update = clipped_update(moved(by), RECEIVED, 1.0)
    assert [*update["w"].tolist(), update["v"].item()] == pytest.approx(expected, abs=1e-6)
    assert "seen" not in update


def test_two_updates_of_a_hospital_are_at_most_two_clips_apart():
    draw = torch.Generator().manual_seed(0)
    worst = 0.0
    for _ in range(200):
        one, other = (
            clipped_update(moved(tuple((torch.randn(3, generator=draw) * 9).tolist())), RECEIVED, 0.5)
            for _ in range(2)
        )
        distance = sum(float((one[n] - other[n]).square().sum()) for n in one) ** 0.5
        worst = max(worst, distance)
    assert 0.9 < worst <= 1.0 + 1e-12


def test_noise_is_gaussian_with_the_declared_deviation_and_leaves_no_integer(tmp_path):
    size = 2**20 + 5  # more than one chunk of the stream
    received = {"w": torch.zeros(size), "n": torch.tensor([4])}
    sent = release(
        tmp_path, {"w": torch.zeros(size), "n": torch.tensor([8])}, received=received, site=spec(0.5, 3.0)
    )
    noise = sent.uploads["weights"]["w"]
    assert noise.dtype == torch.float32
    assert float(noise.mean()) == pytest.approx(0, abs=5 * 1.5 / size**0.5)
    assert float(noise.std()) == pytest.approx(1.5, rel=0.005)
    assert kstest(noise[:20000].double().numpy() / 1.5, "norm").pvalue > 1e-3
    halves = torch.corrcoef(torch.stack([noise[: 2**19], noise[2**19 : 2**20]]))[0, 1]
    assert abs(float(halves)) < 5 / 2**9.5
    assert sent.uploads["weights"]["n"].item() == 4
    # On a grid that the data do not move.
    assert bool((noise.double() * 2**20 == (noise.double() * 2**20).round()).all())


def test_repeated_step_sends_the_same_bytes_and_costs_once(tmp_path):
    first, again = (release(tmp_path, moved((2.0, 3.0, 6.0))) for _ in range(2))
    assert all(torch.equal(first.uploads["weights"][n], again.uploads["weights"][n]) for n in RECEIVED)
    assert first.privacy == again.privacy
    assert again.privacy["weights"].releases == 1
    assert again.privacy["weights"].epsilon == pytest.approx(epsilon_of([2.0], 1e-5))


def test_step_repeated_with_other_weights_has_noise_of_its_own_and_costs_twice(tmp_path):
    """With the same noise, the difference of the two would be that of the updates."""
    width = {"w": torch.zeros(4000)}
    first = release(tmp_path, {"w": torch.ones(4000)}, received=width).uploads["weights"]["w"]
    other = {"w": torch.full((4000,), 1e-3)}
    second = release(tmp_path, {"w": torch.ones(4000)}, received=other)
    difference = first - second.uploads["weights"]["w"]
    assert float(difference.std()) == pytest.approx(2 * 2**0.5, rel=0.1)
    assert second.privacy["weights"].releases == 2
    elsewhere = release(tmp_path / "other key", {"w": torch.ones(4000)}, received=width)
    assert not torch.equal(first, elsewhere.uploads["weights"]["w"])


def test_account_of_several_runs_bounds_them_together_and_is_kept_when_a_run_is_deleted(tmp_path):
    most = epsilon_of([2.0, 2.0], 1e-5)
    site = spec(epsilon=most)
    account = tmp_path / "releases.json"

    def released(run):
        outgoing = Outgoing({"weights": moved((1.0, 1.0, 1.0))}, 3.0, {}, ())
        own = SiteFolder(tmp_path / run, "A", account)
        return with_noise(PHASE, 0, site, {"weights": RECEIVED}, outgoing, own)

    first, second = released("one"), released("two")
    # The same update has other noise in another run, and counts there.
    assert not torch.equal(first.uploads["weights"]["w"], second.uploads["weights"]["w"])
    assert [each.privacy["weights"].releases for each in (first, second)] == [1, 1]
    once = f"{epsilon_of([2.0], 1e-5):.3g}"
    with pytest.raises(SiteFailed, match=f"releases.json: {once} in run one, {once} in run two"):
        released("three")
    # Without its folder a run has another key, so that its step would be another release.
    shutil.rmtree(tmp_path / "one")
    with pytest.raises(SiteFailed, match="is used up"):
        released("one")
    released("two")


def test_epsilon_that_is_used_up_keeps_the_update_at_home(tmp_path):
    most = epsilon_of([2.0, 2.0], 1e-5)
    site = spec(epsilon=most)
    for round_ in range(2):
        release(tmp_path, moved((1.0, 1.0, float(round_))), round_=round_, site=site)
    with pytest.raises(SiteFailed, match="is used up: this step would make it"):
        release(tmp_path, moved((1.0, 1.0, 2.0)), round_=2, site=site)
    # What left already may be sent again.
    release(tmp_path, moved((1.0, 1.0, 1.0)), round_=1, site=site)


@pytest.mark.parametrize(
    ("upload", "why"),
    [
        ({**RECEIVED, "w": torch.tensor([float("nan"), 0.0])}, "expected finite values"),
        ({"w": RECEIVED["w"]}, "other tensors than those it received"),
    ],
)
def test_update_that_cannot_be_clipped_does_not_leave(tmp_path, upload, why):
    with pytest.raises(SiteFailed, match=why):
        release(tmp_path, upload)
    assert SiteFolder(tmp_path, "A").releases() == {}


def test_variances_stay_positive_below_the_noise(tmp_path):
    received = {"bn.running_var": torch.full((500,), 0.25), "bn.weight": torch.zeros(500)}
    sent = release(tmp_path, received, received=received).uploads["weights"]
    assert float(sent["bn.running_var"].min()) == 0.125
    assert float(sent["bn.weight"].min()) < 0


class TestEngine:
    """A run of the toy method, of which the sites' updates are their mean values: 2, 5 and 3."""

    PRIVATE = RunPrivacy(groups={"weights": Noising(clip=4.0, noise=1e-6)})

    def sites(self, **options):
        values = {"A": (1.0, 3.0), "B": (5.0,), "C": (0.0, 0.0, 9.0)}
        return [site(name, *values[name], **{"privacy": self.PRIVATE, **options}) for name in values]

    def run(self, root, sites, *, quorum=None, **options):
        environment, folder = RunEnvironment(0), RunFolder(root, kept=6)
        engine = FederationEngine(
            Toy(width=1, **options), sites, environment, folder, workers=0, quorum=quorum
        )
        return engine.run()

    def test_mean_is_that_of_the_clipped_updates(self, tmp_path):
        outcome = self.run(tmp_path, self.sites(consents=True), rounds=1)
        # B's update of 5 is clipped to 4; the noise is small.
        expected = (2 * 2.0 + 1 * 4.0 + 3 * 3.0) / 6
        assert outcome.server.tensors["w"].item() == pytest.approx(4 * expected, rel=1e-4)
        spent = outcome.history[0].sites["A"].privacy["weights"]
        assert (spent.clip, spent.noise, spent.releases) == (4.0, 1e-6, 1)
        assert outcome.history[0].sites["A"].privacy.keys() == {"weights"}
        # The export is not in the declaration of the run.
        assert outcome.history[-1].sites["A"].privacy == {}

    def test_resumed_run_has_the_same_bits_and_epsilon_and_rounds_taken_back_cost_once(self, tmp_path):
        noisy = RunPrivacy(groups={"weights": Noising(clip=4.0, noise=1.0)})
        whole = self.run(tmp_path, self.sites(privacy=noisy))
        RunFolder(tmp_path, kept=6).take_back_to("train", 3)
        again = self.run(tmp_path, self.sites(privacy=noisy))
        assert torch.equal(whole.server.tensors["w"], again.server.tensors["w"])
        costs = [
            [entry.sites["C"].privacy["weights"] for entry in outcome.history if entry.phase == "train"]
            for outcome in (whole, again)
        ]
        assert costs[0] == costs[1]
        assert [cost.releases for cost in costs[0]] == [1, 2, 3]
        assert costs[0][-1].epsilon == pytest.approx(epsilon_of([1.0] * 3, 1e-5))

    def test_hospital_with_a_budget_stops_sending_and_the_others_go_on(self, tmp_path):
        sites = self.sites(privacy=None)
        how = Noising(clip=4.0, noise=2.0)
        demand = PrivacyDemand(kinds={"weights": how}, epsilon=epsilon_of([2.0, 2.0], 1e-5))
        sites[1] = replace(sites[1], demand=demand)
        outcome = self.run(tmp_path, sites, quorum=1)
        train = [entry for entry in outcome.history if entry.phase == "train"]
        assert ["B" in entry.sites for entry in train] == [True, True, False]
        assert "epsilon of" in train[2].dropped["B"]
        assert train[0].sites["A"].privacy == {}
        with pytest.raises(RoundFailed, match="is used up"):
            self.run(tmp_path / "all", [replace(each, demand=demand) for each in sites])
