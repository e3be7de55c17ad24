"""The lens: its steps against torch's interpolation and plain Fourier transforms, and what it cures."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import ndimage
from torch.nn.functional import interpolate

from model_store.lens import STEPS, Fingerprint, Fitted, Kind, Lens, Step, fit, seen_of
from model_store.lens.features import CENTRES, LEVELS, standardised
from model_store.lens.fit import Cohort
from model_store.lens.lens import Curve

Images = NDArray[np.float32]


def scans(seed: int, count: int = 12, side: int = 48, axes: int = 2, channels: int = 1) -> Images:
    """Bright organs off the centre, with texture."""
    rng, shape = np.random.default_rng(seed), (side,) * axes
    grid = np.stack(np.meshgrid(*(np.linspace(-1, 1, side),) * axes, indexing="ij"))
    found = []
    for _ in range(count):
        centre = rng.normal([0.3] + [-0.2] * (axes - 1), 0.05).reshape(-1, *(1,) * axes)
        organ = 1 / (1 + np.exp(30 * (np.square(grid - centre).sum(axis=0) - 0.25)))
        texture = ndimage.gaussian_filter(rng.normal(size=(channels, *shape)), (0, *(1.5,) * axes))
        found.append(2 * organ + texture + 0.05 * rng.normal(size=(channels, *shape)))
    return np.stack(found).astype(np.float32)


def cohort(images: Images) -> Cohort:
    def each() -> Iterator[tuple[int, Images]]:
        return ((index, images[index : index + 1]) for index in range(len(images)))

    return each


def scanner(
    images: Images, gamma: float = 1.0, shade: float = 0.0, blur: float = 0.0, noise: float = 0.0
) -> Images:
    low = images.min()
    x = (images - low) / (images.max() - low)
    x = x**gamma + shade * np.linspace(-1, 1, images.shape[-1])
    x = ndimage.gaussian_filter(x, (0, 0, *(blur,) * (images.ndim - 2)))
    return (x + noise * np.random.default_rng(1).normal(size=x.shape)).astype(np.float32)


def fitted(images: Images, known: Fingerprint, steps: Collection[Step] = STEPS) -> Fitted:
    made = fit(cohort(images), known, steps)
    assert made is not None
    return made


def federation(axes: int = 2, channels: int = 1) -> Fingerprint:
    sites = ((1.0, 0.0, 0.0), (1.1, 0.05, 0.3), (0.9, -0.05, 0.0), (1.05, 0.02, 0.2))
    members = [
        scanner(scans(n, axes=axes, channels=channels, side=48 if axes == 2 else 24), *how)
        for n, how in enumerate(sites)
    ]
    return Fingerprint.of([seen_of(cohort(member)()) for member in members])


def same(found: Images, expected: Images, room: float = 1e-5) -> None:
    np.testing.assert_allclose(found, expected, atol=room)


def again(x: Images) -> Images:
    return standardised(x)[0]


# ------------------------------------------------------------------ steps


@pytest.mark.parametrize("axes", [2, 3])
def test_the_field_is_interpolated_linearly_and_subtracted(axes: int) -> None:
    x = again(scans(0, 2, 20, axes))
    cells = np.random.default_rng(0).normal(size=6**axes)
    lens = Lens(axes=axes, channels=1, field=(tuple(map(float, cells)),))
    mode = "bilinear" if axes == 2 else "trilinear"
    grid = torch.from_numpy(cells).reshape(1, 1, *(6,) * axes)
    field = interpolate(grid, size=x.shape[2:], mode=mode, align_corners=False).numpy()
    same(lens.apply(x), again((x - field).astype(np.float32)))


@pytest.mark.parametrize("sides", [(40, 33), (12, 15, 10)])
def test_the_spectrum_is_a_gain_by_the_radius(sides: tuple[int, ...]) -> None:
    x = again(np.random.default_rng(0).normal(size=(1, 1, *sides)).astype(np.float32))
    logarithms = np.linspace(-0.1, -1.2, len(CENTRES))
    seen = np.fft.fftn(x[0, 0])
    for place in np.ndindex(*sides):
        if any(place):
            radius = np.sqrt(
                sum((min(k, side - k) / side) ** 2 for k, side in zip(place, sides, strict=True))
            )
            seen[place] *= np.exp(np.interp(np.log(radius), np.log(CENTRES), logarithms))
    lens = Lens(axes=len(sides), channels=1, spectrum=tuple(map(float, logarithms)))  # type: ignore[arg-type]
    expected = np.fft.ifftn(seen).real.astype(np.float32)[None, None]
    same(lens.apply(x), again(expected))


def test_the_curve_is_linear_between_quantiles_and_shifted_beyond() -> None:
    x = again(scans(3, 1, 32))
    source = np.linspace(-1, 1, len(LEVELS))
    target = np.sign(source) * np.abs(source) ** 1.5 + 0.2
    lens = Lens(axes=2, channels=1, curve=(Curve(source=tuple(source), target=tuple(target)),))

    def moved(value: float) -> float:
        if value < -1:
            return value + 1 + target[0]
        if value > 1:
            return value - 1 + target[-1]
        place = int(np.clip(np.searchsorted(source, value), 1, len(source) - 1))
        share = (value - source[place - 1]) / (source[place] - source[place - 1])
        return float((1 - share) * target[place - 1] + share * target[place])

    expected = np.vectorize(moved)(x).astype(np.float32)
    same(lens.apply(x), again(expected))


def test_an_image_keeps_its_mean_and_its_deviation() -> None:
    x = scans(5, 3, channels=2) * np.float32(300) + np.float32(1000)
    made = fitted(scanner(scans(6, channels=2), 2.5, 0.4, 1.0), federation(channels=2))
    assert made.lens.steps
    found = made.lens.apply(x)
    for axis in (np.mean, np.std):
        np.testing.assert_allclose(axis(found, axis=(2, 3)), axis(x, axis=(2, 3)), rtol=1e-3)
    assert not np.allclose(found, x, rtol=1e-2)


def test_a_lens_without_steps_and_a_constant_channel_change_nothing() -> None:
    x = scans(0, 2)
    same(Lens(axes=2, channels=1).apply(x), x, 1e-6)
    constant = np.full((1, 1, 48, 48), -3, np.float32)
    made = fitted(scanner(scans(6), 2.5, 0.4, 1.0), federation())
    np.testing.assert_array_equal(made.lens.apply(constant), constant)


def test_other_shapes_are_refused() -> None:
    lens = Lens(axes=2, channels=1)
    with pytest.raises(ValueError, match="expected images of 1 channels and 2 axes, found"):
        lens.apply(scans(0, 1, channels=2))
    with pytest.raises(ValueError, match="expected images of 2 channels"):
        fit(cohort(scans(0)), federation(channels=2))


def test_a_lens_is_read_as_it_was_written_and_bounded() -> None:
    made = fitted(scanner(scans(6), 2.5, 0.4, 1.0), federation())
    assert Lens.model_validate_json(made.lens.to_bytes()) == made.lens
    with pytest.raises(ValueError, match="expected gains within"):
        Lens(axes=2, channels=1, spectrum=(5.0,) * len(CENTRES))
    with pytest.raises(ValueError, match="expected quantiles that rise"):
        Curve(source=(0.0,) * len(LEVELS), target=tuple(map(float, range(len(LEVELS)))))
    with pytest.raises(ValueError, match="expected 36 cells"):
        Lens(axes=2, channels=1, field=((0.0,),))


# ------------------------------------------------------------------ fitting


@pytest.mark.parametrize("axes", [2, 3])
def test_a_hospital_like_the_members_is_left_alone(axes: int) -> None:
    made = fitted(scanner(scans(9, axes=axes, side=48 if axes == 2 else 24), 1.0, 0.0, 0.1), federation(axes))
    assert made.lens.steps == ()
    assert made.before == made.after
    assert max(made.before.values()) < 1.5


@pytest.mark.parametrize("axes", [2, 3])
def test_an_inverted_hospital_is_negated_and_nothing_else(axes: int) -> None:
    usual = scanner(scans(9, axes=axes, side=48 if axes == 2 else 24), 1.0, 0.0, 0.1)
    made = fitted(-usual, federation(axes))
    assert made.polarity is not None
    assert (made.lens.steps, made.polarity.inverted) == (("polarity",), True)
    assert made.polarity.correlation < -0.5
    same(
        made.lens.apply(-usual, scans=range(len(usual))),
        usual - 2 * usual.mean(axis=tuple(range(2, usual.ndim)), keepdims=True),
        1e-4,
    )


def test_a_scan_that_is_not_inverted_is_not_negated() -> None:
    usual = scans(9)
    made = fitted(-usual, federation())
    mixed = np.concatenate([usual[:4], -usual[4:8]])
    found = made.lens.apply(mixed, scans=[0, 0, 1, 1, 2, 2, 3, 3])
    same(again(found), again(usual[:8]), 1e-4)
    # All images are one scan where nothing else is known.
    same(again(made.lens.apply(usual[:2])), again(usual[:2]), 1e-4)


@pytest.mark.parametrize(
    ("how", "step"),
    [({"shade": 0.8}, "field"), ({"noise": 0.4}, "spectrum"), ({"gamma": 3.0}, "quantiles")],
)
def test_each_step_answers_what_it_is_for(how: dict[str, float], step: Kind) -> None:
    usual = scans(9)
    made = fitted(scanner(usual, **how), federation())
    assert step in made.lens.steps
    assert made.after[step] < made.before[step] / 3
    away, left = (
        np.abs(again(each) - again(usual)).mean()
        for each in (scanner(usual, **how), made.lens.apply(scanner(usual, **how)))
    )
    assert left < 0.85 * away


def test_a_blur_is_not_sharpened() -> None:
    blurred = scanner(scans(9), blur=1.5)
    made = fitted(blurred, federation(), ("spectrum",))
    assert made.before["spectrum"] > 100
    assert made.lens.steps == ()
    assert made.after == made.before


def test_the_share_that_is_not_natural_is_taken_back() -> None:
    far = scanner(scans(9), shade=0.8)
    known = federation()
    made = fitted(far, known, ("field",))
    assert made.lens.field is not None
    seen = seen_of(cohort(far)())["field"]
    shift = float(np.square(seen.mean - known.field.mean_CE).mean()) / (known.field.tau + seen.variance / 12)
    assert made.shares == {"field": pytest.approx(1 - 1 / shift)}
    np.testing.assert_allclose(
        made.lens.field[0], (1 - 1 / shift) * (seen.mean - known.field.mean_CE)[0], atol=1e-9
    )


def test_one_scan_is_judged_by_the_variance_of_one_patient_of_the_members() -> None:
    known, one = federation(), scanner(scans(9, 1), shade=0.8)
    made = fitted(one, known)
    seen = seen_of(cohort(one)())["field"]
    expected = float(np.square(seen.mean - known.field.mean_CE).mean()) / (
        known.field.tau + known.field.patient
    )
    assert made.before["field"] == pytest.approx(expected)


def test_a_cohort_that_says_nothing_has_no_lens() -> None:
    assert fit(cohort(np.zeros((3, 1, 16, 16), np.float32)), federation()) is None


def test_equal_cohorts_give_equal_bytes() -> None:
    far, known = scanner(scans(6), 2.5, 0.4, 1.0), federation()
    assert fitted(far, known).lens.to_bytes() == fitted(far.copy(), known).lens.to_bytes()
