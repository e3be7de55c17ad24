"""What sites say of their scans to the lens: means over patients, of enough of them, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from model_store.lens import FINGERPRINT as FILE
from model_store.lens import KINDS, Fingerprint, seen_of
from tests.helpers.training.sites import context, site_data
from training.algorithm import Memory, SiteSize, State
from training.bounds import FeatureBounds
from training.engine.reduction import Reducer
from training.errors import SiteFailed
from training.local.site import SiteData
from training.parts.describe import FINGERPRINT, Describe, Described, describe

SIZE = SiteSize(cases=8)
BOUNDS = FeatureBounds()


def site(seed: int, patients: int = 4) -> SiteData:
    """A site with two slices of each patient."""
    data = site_data("A", 4, 2, seed)
    draw = np.random.default_rng(seed)
    images = draw.normal(size=(2 * patients, *data.train.images.shape[1:])).astype(np.float32)
    names = tuple(f"p{index // 2}" for index in range(2 * patients))
    train = replace(
        data.train,
        images=images,
        targets=np.zeros((2 * patients, *images.shape[2:]), np.uint8),
        patients=names,
        cases=names,
        positions=(0,) * len(names),
    )
    return replace(data, train=train, unfiltered=None)


def told(*states: State) -> Described:
    """What a round of these uploads says."""
    (phase,) = Describe("sample").plan()
    reducer = Reducer(phase)
    for name, state in zip("ABCDE", states, strict=False):
        reducer.add(name, {FINGERPRINT.name: state}, 1.0, {}, size=SIZE)
    reducer.settle()
    return Described.of(reducer.result())


def uploaded(data: SiteData, bounds: FeatureBounds = BOUNDS) -> State:
    return describe(data, bounds)[FINGERPRINT.name]


def test_it_is_the_fingerprint_of_what_the_sites_see() -> None:
    sites = [site(seed) for seed in (1, 2, 3)]
    expected = Fingerprint.of([seen_of(each.all_train.viewed()) for each in sites])
    described = told(*map(uploaded, sites))
    assert described.fingerprint == expected
    assert expected.members == 3
    part = Describe("sample")
    server = part.slot.write(Memory(), described)
    assert part.slot.read(server) == described
    assert part.publish(server).files == {FILE: expected.to_bytes()}


def test_a_site_sends_the_means_over_its_patients_alone() -> None:
    data = site(1)
    sent = uploaded(data)
    assert sent.keys() == {*KINDS, "variances", "patients"}
    assert sum(tensor.numel() for tensor in sent.values()) == 36 + 12 + 25 + 3 + 1
    assert int(sent["patients"]) == 4


@pytest.mark.parametrize(("patients", "bounds"), [(2, BOUNDS), (4, FeatureBounds(minimum_patients=5))])
def test_too_few_patients_send_nothing(patients: int, bounds: FeatureBounds) -> None:
    assert uploaded(site(1, patients), bounds) == {}


def test_fewer_than_two_sites_have_no_fingerprint() -> None:
    assert told(uploaded(site(1)), uploaded(site(2, 2))).fingerprint is None
    assert Describe("sample").publish(Memory()).files == {}


def test_images_of_other_channels_than_most_are_left_out() -> None:
    one, two, other = (uploaded(site(seed)) for seed in (1, 2, 3))
    for kind in KINDS:
        other[kind] = torch.cat([other[kind]] * 3)
    found = told(other, one, two).fingerprint
    assert found is not None
    assert (found.members, len(found.field.mean)) == (2, 1)


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        ({"field": torch.full((1, 36), 1e30).double()}, "expected means of 1000 at most"),
        ({"spectrum": torch.zeros(1, 13).double()}, r"expected means \[channels, entries\]"),
        ({"variances": torch.tensor([-1.0, 0, 0]).double()}, "a variance of at least 0"),
        ({"variances": torch.zeros(2).double()}, "a variance of each feature"),
        ({"patients": torch.tensor(2)}, "and 3 to 8 patients"),
        ({"patients": torch.tensor(9)}, "and 3 to 8 patients"),
        ({"more": torch.zeros(1)}, "expected the tensors"),
    ],
)
def test_what_no_site_can_have_seen_drops_the_site(lie: State, why: str) -> None:
    (phase,) = Describe("sample").plan()
    reducer = Reducer(phase)
    reducer.add("A", {FINGERPRINT.name: uploaded(site(1))}, 1.0, {}, size=SIZE)
    with pytest.raises(SiteFailed, match=f"site B: group 'fingerprint': .*{why}"):
        reducer.add("B", {FINGERPRINT.name: {**uploaded(site(2)), **lie}}, 1.0, {}, size=SIZE)


def test_the_step_sends_it_beside_the_statistics() -> None:
    part = Describe("sample")
    result = part.step(context("describe", 0), {}, Memory(), site(1))
    assert result.uploads.keys() == {"statistics", "fingerprint"}
