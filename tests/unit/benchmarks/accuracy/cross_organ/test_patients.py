from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.ndimage import gaussian_filter

from benchmarks.accuracy.cross_organ.data import SITES
from benchmarks.accuracy.cross_organ.patients import RULES, Rule, digest, groups, read, regrouped
from model_store.task import Task
from training.data.cases import Case, Federation, Site

TASK = Task(name="t", labels={"tumour": (255,)}, channels=1, size=(32, 32))


def _scene(seed: int, blur: float = 3) -> np.ndarray:
    """A grey picture 160x160 with structure of a few pixels, mean 0 and deviation 1."""
    smooth = gaussian_filter(np.random.default_rng(seed).normal(size=(160, 160)), blur)
    return (smooth - smooth.mean()) / smooth.std()


def _saved(folder: Path, **pictures: np.ndarray) -> list[Path]:
    paths = []
    for name, pixels in pictures.items():
        path = folder / f"{name.removeprefix('_')}.png"
        Image.fromarray(np.clip(128 + 30 * pixels, 0, 255).astype(np.uint8)).save(path)
        paths.append(path)
    return paths


def test_near_duplicates_are_found_whatever_their_size_and_brightness(tmp_path: Path) -> None:
    draw = np.random.default_rng(9)
    marked = _scene(0) + 0.3 * draw.normal(size=(160, 160))
    marked[:20, :30] = 2  # somebody wrote on it
    scenes = {"a": _scene(0), "b": _scene(1), "c": marked, "d": 0.5 * _scene(2) - 1, "e": _scene(2)[::2, ::2]}
    assert groups(_saved(tmp_path, **scenes), Rule(0.9)) == [["a.png", "c.png"], ["d.png", "e.png"]]


def test_who_is_alike_by_others_between_is_one_patient(tmp_path: Path) -> None:
    first, last = _scene(0), _scene(1)
    paths = _saved(tmp_path, **{f"_{n}": (1 - n / 8) * first + n / 8 * last for n in range(9)})
    together = [f"{n}.png" for n in range(9)]
    assert groups(paths, Rule(0.9)) == [together]
    assert groups([paths[0], paths[-1]], Rule(0.9)) == []


def test_shadows_make_no_duplicates_and_hide_none(tmp_path: Path) -> None:
    shadow = np.linspace(-4, 4, 160)[:, None] * np.ones(160)
    scenes = {
        "a": 0.3 * _scene(0) + shadow / 2,
        "b": 0.3 * _scene(0) - shadow / 2,
        "c": 0.3 * _scene(1) + shadow / 2,
    }
    paths = _saved(tmp_path, **scenes)
    assert groups(paths, Rule(0.9)) == [["a.png", "c.png"]]
    assert groups(paths, Rule(1.1, fine=0.5)) == [["a.png", "b.png"]]
    assert groups(paths, Rule(0.9, fine=0.5)) == [["a.png", "b.png", "c.png"]]


def test_neighbours_are_neighbours_in_number(tmp_path: Path) -> None:
    # 9, 10 and 100 in this order; 100 is like 9 and not like 10.
    pictures = {"_9": _scene(0), "_10": _scene(1), "_100": _scene(0), "_101": _scene(0)}
    paths = _saved(tmp_path, **pictures)
    assert groups(paths, Rule(0.9, neighbours=True)) == [["100.png", "101.png"]]
    assert groups(paths, Rule(0.9)) == [["9.png", "100.png", "101.png"]]


def _federation(*names: str) -> Federation:
    site = Site("here", tuple(Case(Path(name), Path(name), name[:1]) for name in names))
    return Federation(Path(), TASK, (site, replace(site, name="there")), False, "")


def test_listed_files_become_one_patient_of_their_site_alone() -> None:
    found = regrouped(_federation("a.png", "b.png", "c.png"), {"here": [["a.png", "c.png"]]})
    assert [case.patient for case in found.site("here").cases] == ["a.png", "b", "a.png"]
    assert [case.patient for case in found.site("there").cases] == ["a", "b", "c"]


def test_lists_of_other_data_are_refused() -> None:
    with pytest.raises(ValueError, match=r"site 'here' has no x\.png \(1 files"):
        regrouped(_federation("a.png"), {"here": [["a.png", "x.png"]]})


def test_the_digest_is_of_whose_every_image_is() -> None:
    plain = _federation("a.png", "b.png")
    grouped = regrouped(plain, {"here": [["a.png", "b.png"]]})
    elsewhere = regrouped(plain, {"there": [["a.png", "b.png"]]})
    assert len({digest(plain), digest(grouped), digest(elsewhere)}) == 3
    assert digest(plain) == digest(_federation("a.png", "b.png"))


def test_no_file_is_in_two_lists() -> None:
    for site, patients in read().items():
        names = [name for patient in patients for name in patient]
        assert len(names) == len(set(names)), site
        assert all(len(patient) > 1 for patient in patients)


def test_twelve_bladders_and_one_breast() -> None:
    lists = read()
    sizes = [len(patient) for patient in lists["bladder_mri"]]
    assert sizes == [4, 11, 6, 33, 23, 33, 22, 37, 30, 7, 14, 44]
    assert [len(patient) for patient in lists["breast_dce_mri"]] == [22]


@pytest.mark.parametrize("site", RULES)
def test_the_lists_are_what_the_rules_make_of_the_real_images(site: str, real_data: Path) -> None:
    paths = list((real_data / SITES[site] / "images").iterdir())
    assert groups(paths, RULES[site]) == read()[site]
