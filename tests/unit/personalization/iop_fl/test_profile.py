"""The shift of a cohort at batch norm, and how far members are apart, against plain loops and by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from personalization.errors import NetworkError, RoutingError
from personalization.iop_fl.batch_norm import Profile, profile
from personalization.iop_fl.spread import Spread, check_sent, sent_by
from personalization.test_time.ladder import dose_by_shift


def network(dimensions: int = 2) -> nn.Sequential:
    """Two batch norms with statistics that fit no image, in 1 to 3 dimensions."""
    torch.manual_seed(0)
    convolution = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dimensions]
    norm = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dimensions]
    layers = nn.Sequential(convolution(1, 2, 3), norm(2), nn.ReLU(), convolution(2, 3, 3), norm(3))
    for each in (layers[1], layers[4]):
        each.running_mean.uniform_(-1, 1)
        each.running_var.uniform_(0.5, 2)
    return layers.eval()


def distances(norm: nn.Module, values: torch.Tensor) -> torch.Tensor:
    """d_m and d_v [2, C] of values [C, n], from all of them at once."""
    mean, variance = values.mean(dim=1), values.var(dim=1, correction=0)
    usual, spread = norm.running_mean.double(), norm.running_var.double()
    moved = (mean - usual) / (spread + norm.eps).sqrt()
    return torch.stack([moved, ((variance + norm.eps) / (spread + norm.eps)).log() / 2])


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_the_profile_equals_a_loop_that_leaves_patients_out(dimensions: int) -> None:
    layers, draw = network(dimensions), torch.Generator().manual_seed(1)
    images = torch.randn(7, 1, *(6,) * dimensions, generator=draw)
    patients = ["b", "a", "b", "c", "c", "c", "a"]
    found = profile(layers, images, patients, batch_size=3)
    with torch.no_grad():
        inputs = {"1": layers[0](images), "4": layers[:4](images)}
    assert found.layers == ("1", "4")
    assert found.patients == 3
    for row, (path, features) in enumerate(inputs.items()):
        norm, values = layers[int(path)], features.double()

        def of(indices: list[int], norm=norm, values=values) -> torch.Tensor:
            return distances(norm, values[indices].transpose(0, 1).flatten(1))

        whole = of(list(range(7)))
        torch.testing.assert_close(found.shift[row], whole.square().mean(dim=1), rtol=1e-4, atol=1e-7)
        left = torch.stack([of([i for i in range(7) if patients[i] != out]) for out in "abc"])
        jackknife = 2 / 3 * (left - left.mean(dim=0)).square().sum(dim=0)
        torch.testing.assert_close(found.sampling[row], jackknife.mean(dim=1), rtol=1e-4, atol=1e-7)


def test_a_shift_by_hand() -> None:
    """m = 1, v = 4 against images of values 3 and 5: m' = 4, v' = 1, so d_m = 1.5 and d_v = -log 2."""
    norm = nn.BatchNorm1d(1, eps=0.0)
    norm.running_mean.fill_(1.0)
    norm.running_var.fill_(4.0)
    images = torch.tensor([[[3.0, 3.0]], [[5.0, 5.0]]])
    found = profile(nn.Sequential(norm), images, [0, 1])
    assert found.shift[0].tolist() == pytest.approx([2.25, math.log(2) ** 2])
    # Without one patient or the other the means are 5 and 3: d_m = 2 and 1, jackknife 1/2 (1/4 + 1/4).
    assert found.sampling[0, 0].item() == pytest.approx(0.25)


def test_one_patient_has_no_sampling_variance_and_wrong_patients_are_refused() -> None:
    images = torch.randn(3, 1, 6, 6)
    assert profile(network(), images, "aaa").sampling is None
    with pytest.raises(RoutingError, match=r"expected one per image \(3\), found 2"):
        profile(network(), images, "ab")


def test_a_network_without_norms_to_move_is_refused() -> None:
    layers = nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2))
    with pytest.raises(NetworkError, match="GroupNorm"):
        profile(layers, torch.randn(2, 1, 6, 6), [0, 1])


def seen(shift: float, sampling: float | None, patients: int = 4) -> Profile:
    """One layer that is alike in means and variances."""
    pair = torch.full((1, 2), shift, dtype=torch.float64)
    drawn = None if sampling is None else torch.full((1, 2), sampling, dtype=torch.float64)
    return Profile(("norm",), (), (), pair, drawn, patients)


def spread(*members: Profile) -> Spread:
    """What these members say together."""
    sent = [sent_by(each, (0.1, 0.3, 2.0)) for each in members]
    for each in sent:
        check_sent(each)
    mean = {name: torch.stack([each[name] for each in sent]).mean(dim=0) for name in sent[0]}
    return Spread.of(members[0].layers, mean, len(members))


def test_tau_of_two_members_is_three_times_their_mean() -> None:
    """By hand: t = max(0.5 - 0.1, 0.1) = 0.4 and max(0.1 - 0.09, 0.02) = 0.02; (K + 1) / (K - 1) = 3."""
    found = spread(seen(0.5, 0.1), seen(0.1, 0.09))
    assert found.tau("arithmetic")[0, 0].item() == pytest.approx(3 * 0.21)
    assert found.tau("geometric")[0, 1].item() == pytest.approx(3 * math.sqrt(0.4 * 0.02))
    # s P: (0.4 + 0.36) / 2 of one patient
    assert found.sampling(2)[0, 0].item() == pytest.approx(0.19)
    assert (found.share, found.largest, found.pieces) == pytest.approx((0.1, 0.3, 2.0))


def test_hospitals_like_the_members_have_a_shift_of_one() -> None:
    """Members and outsiders drawn from the same hospitals, many times: the factor of K makes R one."""
    draw, outside, natural = torch.Generator().manual_seed(0), [], []
    for _ in range(2000):
        hospitals = torch.randn(3, generator=draw, dtype=torch.float64)
        members, outsider = hospitals[:2], hospitals[2]
        middle = members.mean()
        natural.append(3 * float((members - middle).square().mean()))
        outside.append(float((outsider - middle).square()))
    assert sum(outside) / sum(natural) == pytest.approx(1.0, abs=0.1)


def test_the_dose_by_hand() -> None:
    members = [seen(0.2, 0.0), seen(0.2, 0.0)]  # tau = 0.6
    # R = 1.2 / (0.6 + 0.2) = 1.5, a = 1/3, in the shape of the early layers
    dose = dose_by_shift(seen(1.2, 0.2), spread(*members))
    assert (dose.shift, dose.share) == pytest.approx((1.5, 1 / 3), rel=1e-5)
    assert dose.doses == pytest.approx((1 / 3, 1 / 6, 0.0), rel=1e-5)
    # R = 16: a = 15/16, in the same shape still
    dose = dose_by_shift(seen(9.6, 0.0), spread(*members))
    assert dose.doses == pytest.approx((15 / 16, 15 / 32, 0.0), rel=1e-5)
    # R = 32: w = 1/2, a = 31/32, between the shape and all alike
    dose = dose_by_shift(seen(19.2, 0.0), spread(*members))
    assert dose.doses == pytest.approx((31 / 32, 31 / 32 * 0.75, 31 / 64), rel=1e-5)


def test_a_natural_shift_asks_for_no_dose() -> None:
    dose = dose_by_shift(seen(0.3, 0.0), spread(seen(0.2, 0.0), seen(0.2, 0.0)))
    assert dose.shift == pytest.approx(0.5, rel=1e-5)
    assert dose.doses == (0.0, 0.0, 0.0)


def test_one_patient_has_the_sampling_variance_of_the_members() -> None:
    members = [seen(0.2, 0.05), seen(0.2, 0.05)]  # tau 3 * 0.15, per patient 0.2
    dose = dose_by_shift(seen(1.3, None, patients=1), spread(*members))
    assert dose.shift == pytest.approx(1.3 / (0.45 + 0.2), rel=1e-5)


def test_a_spread_of_another_network_is_refused() -> None:
    other = Profile(("other",), (), (), torch.ones(1, 2), None, 1)
    with pytest.raises(RoutingError, match="spread: expected that of the network"):
        dose_by_shift(other, spread(seen(0.2, 0.0), seen(0.2, 0.0)))


def test_what_no_member_can_send_is_refused() -> None:
    sent = sent_by(seen(0.2, 0.1), (0.1, 0.2, 1.0))
    assert sent_by(seen(0.2, None), None) == {}
    assert sent_by(seen(0.2, 0.1), (0.0, 0.0, 0.0)) == {}
    with pytest.raises(ValueError, match="with their logarithms"):
        check_sent({**sent, "logarithm": sent["logarithm"] + 1})
    with pytest.raises(ValueError, match=r"within 0\.\.1"):
        check_sent({**sent, "targets": torch.tensor([0.1, 0.2, 1.0, 0.01], dtype=torch.float64)})
