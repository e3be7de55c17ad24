"""A hospital's own bounds on features: they hold beside the federation's, and the stricter of both wins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.helpers.training.fedoap_federation import CONFIG, DATA, Federation
from tests.helpers.training.sites import EMPTY, TASK, context, declared, noise, slices
from training.algorithm import ClientResult, Group, State
from training.bounds import NO_BOUNDS, FeatureBounds
from training.config import RunConfig, parse, read_sections
from training.data.cases import Federation as Folder
from training.data.cases import Site
from training.engine.client import run_step
from training.engine.egress import SiteSpec, check_plan, let_out, may_take_part
from training.engine.folder import SiteFolder
from training.errors import ConfigurationError, EgressRefused
from training.methods.fedoap.config import FedOapConfig
from training.methods.fedoap.tokens import mean_tokens
from training.run import Run


@pytest.mark.parametrize(
    ("site", "federation", "expected"),
    [
        (
            {"minimum_images": 4, "minimum_patients": 3, "clip": 5.0, "noise": 1.0},
            {"minimum_images": 10, "clip": 2.0, "noise": 0.5},
            {"minimum_images": 10, "minimum_patients": 3, "clip": 2.0, "noise": 1.0},
        ),
        ({"clip": 0.5}, {"clip": 2.0, "noise": 0.5}, {"clip": 0.5, "noise": 0.5}),
        ({"minimum_patients": 7}, {"minimum_patients": 2}, {"minimum_patients": 7}),
        ({}, {"minimum_images": 10}, {"minimum_images": 10}),
        ({"clip": 3.0, "noise": 2.0}, {}, {"clip": 3.0, "noise": 2.0}),
    ],
)
def test_of_each_bound_the_stricter_one_holds(
    site: dict[str, float], federation: dict[str, float], expected: dict[str, float]
) -> None:
    mine, theirs = FeatureBounds.model_validate(site), FeatureBounds.model_validate(federation)
    assert mine.stricter(theirs) == theirs.stricter(mine) == FeatureBounds.model_validate(expected)


def per_image(federation: Federation) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    """A network of A's, and the keys and values of each of its training images, one after the other."""
    algorithm = federation.algorithm
    state = algorithm.whole(algorithm.initial(context("initial", 0)))
    network = algorithm.first.network(context("train", 0, site="A"), state, {})
    with torch.no_grad():
        found = [network.keys_and_values(torch.tensor(image)[None]) for image in DATA["A"].train.images]
    return network, {name: torch.cat([pair[i] for pair in found]) for i, name in enumerate(("key", "value"))}


def sent(bounds: FeatureBounds, patients: tuple[str, ...] | None = None) -> State:
    network, _ = per_image(Federation())
    train = DATA["A"].train
    if patients:
        train = replace(train, patients=patients)
    return mean_tokens(network, train, 2, bounds, noise)


def test_the_minimum_counts_images_and_patients() -> None:
    """A has five slices of three patients."""
    assert DATA["A"].train.patients == ("p0", "p0", "p1", "p1", "p2")
    for enough in ({"minimum_patients": 3}, {"minimum_images": 5}):
        assert sent(FeatureBounds.model_validate(enough)).keys() == {"key", "value"}
    for few in ({"minimum_patients": 4}, {"minimum_images": 6}):
        assert sent(FeatureBounds.model_validate(few)) == {}
    # However many slices there are of one patient, they are of one patient.
    alone = ("p",) * 5
    assert sent(FeatureBounds(minimum_images=5), alone).keys() == {"key", "value"}
    assert sent(FeatureBounds(minimum_patients=2), alone) == {}
    network, _ = per_image(Federation())
    many = replace(slices(60, 0), patients=("p",) * 60)
    bounds = FeatureBounds(minimum_images=10, minimum_patients=10)
    assert mean_tokens(network, many, 16, bounds, noise) == {}


def test_clip_and_noise_are_what_they_say() -> None:
    _, tokens = per_image(Federation())
    norms = tokens["key"].double().flatten(1).norm(dim=1)
    clip = float(norms.sort().values[2])  # two images are longer, two are shorter
    scale = (clip / norms).clamp(max=1)
    assert [int((scale < 1).sum()), int((scale == 1).sum())] == [2, 3]
    found = sent(FeatureBounds(clip=clip, noise=3.0))
    draws = noise("tokens")
    for name in ("key", "value"):
        norms = tokens[name].double().flatten(1).norm(dim=1)
        mean = (tokens[name].double() * (clip / norms).clamp(max=1)[:, None, None]).sum(0) / 5
        added = 3.0 * clip / 5 * torch.from_numpy(draws.standard_normal(mean.shape))
        torch.testing.assert_close(found[name], (mean + added).float(), rtol=1e-4, atol=1e-6)


def entry(root: Path, federal: dict[str, float], own: FeatureBounds, scale: float = 1.0) -> State:
    """What A sends after a round of training, with the key in its folder in `root`.

    It receives the initial weights times `scale`.
    """
    federation = Federation(CONFIG.model_copy(update=federal))
    phase = federation.phase("train")
    received = dict(phase.broadcast(federation.server, "A"))
    received["weights"] = {name: (t * scale).to(t.dtype) for name, t in received["weights"].items()}
    where = context("train", 0, site="A")
    site = SiteSpec("A", dict, bounds=own)
    folder = SiteFolder(root, "A")
    outgoing, _ = run_step(phase, where, site, received, EMPTY, DATA["A"], folder)
    return outgoing.uploads["tokens"]


def test_a_site_sends_within_its_own_bounds_and_the_federations(tmp_path: Path) -> None:
    loose, tight = {"bank_clip": 2.0}, {"bank_clip": 0.25, "bank_noise": 0.5}
    plain = entry(tmp_path, {}, NO_BOUNDS)
    clipped = entry(tmp_path, tight, NO_BOUNDS)
    assert not torch.equal(plain["key"], clipped["key"])
    # A hospital's word is worth as much as the federation's, and the looser of the two is worth nothing.
    for federal, own in (
        (loose, {"clip": 0.25, "noise": 0.5}),
        (tight, {"clip": 2.0}),
        ({}, {"clip": 0.25, "noise": 0.5}),
    ):
        found = entry(tmp_path, federal, FeatureBounds.model_validate(own))
        assert all(torch.equal(found[name], clipped[name]) for name in ("key", "value"))
    # Three patients, five images: CONFIG asks for four images.
    assert entry(tmp_path, {}, FeatureBounds(minimum_patients=3))["key"].shape == plain["key"].shape
    assert entry(tmp_path, {}, FeatureBounds(minimum_patients=4)) == {}
    assert entry(tmp_path, {"bank_minimum": 6}, FeatureBounds(minimum_patients=3)) == {}


def test_who_knows_the_seed_does_not_know_the_noise(tmp_path: Path) -> None:
    """The seed, and all settings, are in what is published."""
    own = FeatureBounds(clip=0.25, noise=0.5)
    mine, others = entry(tmp_path, {}, own), entry(tmp_path / "another", {}, own)
    exact = entry(tmp_path, {}, FeatureBounds(clip=0.25))
    hidden, guessed = mine["key"] - exact["key"], others["key"] - exact["key"]
    assert torch.equal(entry(tmp_path, {}, own)["key"], mine["key"])
    together = torch.corrcoef(torch.stack([hidden.flatten(), guessed.flatten()]))[0, 1]
    assert abs(float(together)) < 4 / hidden.numel() ** 0.5
    assert float(hidden.std()) == pytest.approx(0.5 * 0.25 / 5, rel=0.2)


def test_noise_of_a_step_repeated_with_other_weights_or_another_clip_cannot_be_subtracted(
    tmp_path: Path,
) -> None:
    """With one noise for all, the difference of two uploads is that of the features."""

    def hidden(clip: float, scale: float) -> Tensor:
        bounds = [FeatureBounds(clip=clip, noise=noise) for noise in (0.5, 0.0)]
        noisy, exact = (entry(tmp_path, {}, own, scale)["key"].double() for own in bounds)
        return ((noisy - exact) / (0.5 * clip / 5)).flatten()

    first = hidden(0.25, 1.0)
    torch.testing.assert_close(hidden(0.25, 1.0), first)
    for other in (hidden(0.25, 0.9), hidden(0.2, 1.0)):
        together = torch.corrcoef(torch.stack([first, other]))[0, 1]
        assert abs(float(together)) < 4 / first.numel() ** 0.5


def test_only_a_step_at_a_site_has_noise() -> None:
    with pytest.raises(TypeError, match="noise for 'tokens'"):
        context("train", 0, site="A").noise("tokens", {}, 1.0)


FEATURES = Group("tokens", "features", "collect", essential=False)
BOUNDED = replace(FEATURES, bounded=True)
OWN = SiteSpec("A", dict, bounds=FeatureBounds(clip=1.0))


@pytest.mark.parametrize(
    ("site", "group", "leaves"),
    [
        (OWN, FEATURES, False),
        (OWN, BOUNDED, True),
        (SiteSpec("A", dict), FEATURES, True),
        (replace(OWN, allows=frozenset({"weights"})), BOUNDED, False),
        (OWN, Group("weights", "weights", "collect", essential=False), True),
    ],
)
def test_features_that_no_method_bounds_do_not_leave_a_site_that_has_bounds(
    site: SiteSpec, group: Group, leaves: bool
) -> None:
    phase = declared("train", 1, (), (group,))
    out = let_out(phase, site, ClientResult({group.name: {"x": torch.ones(1)}}, 1.0))
    assert (set(out.uploads), set(out.withheld)) == (
        ({group.name}, set()) if leaves else (set(), {group.name})
    )
    essential = declared("train", 1, (), (replace(group, essential=True),))
    assert may_take_part(essential, site) is leaves
    if not leaves:
        with pytest.raises(EgressRefused, match=r"does not apply the site's bounds|policy refuses"):
            check_plan((essential,), [site])


def run_of(settings: RunConfig) -> Run:
    folder = Folder(Path(), TASK, (Site("A", ()), Site("B", ())), False, "sha256:0")
    return Run(folder, "fedoap", FedOapConfig(), settings)


def test_they_are_read_beside_the_egress_policy_and_decide_the_run(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "run:\n  egress: {B: [weights]}\n"
        "  feature_bounds: {A: {minimum_patients: 10, clip: 5.0, noise: 1.0}}\n"
    )
    settings = parse(RunConfig, read_sections(path)[1], "a test")
    own = FeatureBounds(minimum_patients=10, clip=5.0, noise=1.0)
    assert settings.feature_bounds == {"A": own}
    bounded, plain = run_of(settings), run_of(RunConfig(egress={"B": ("weights",)}))
    assert bounded.id != plain.id
    assert bounded.identity()["run"]["feature_bounds"] == {"A": own.model_dump()}
    assert "feature_bounds" not in plain.identity()["run"]
    with pytest.raises(ConfigurationError, match="feature_bounds: there is no site 'C'; sites: A, B"):
        run_of(RunConfig(feature_bounds={"C": own})).sites()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"noise": 1.0}, "set clip too"),
        ({"clip": 0.0}, "greater than 0"),
        ({"clip": float("nan")}, "finite"),
        ({"noise": -1.0, "clip": 1.0}, "greater than or equal to 0"),
        ({"minimum_patients": 0}, "greater than or equal to 1"),
        ({"minimum": 10}, "minimum"),
    ],
)
def test_bounds_that_bound_nothing_are_refused(content: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        parse(RunConfig, {"feature_bounds": {"A": content}}, "a test")
