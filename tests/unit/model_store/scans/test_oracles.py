"""Every format of the registry beside the independent reader that the documentation names, and its page."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk
from numpy.typing import NDArray
from PIL import Image

from locum.commands.batch import _SUFFIXES
from model_store.scan import decode
from model_store.scans.formats import FORMATS
from model_store.scans.types import Parts
from service.prediction.output import Output
from tests.helpers.model_store import dicom_files
from tests.helpers.model_store.formats_page import PAGE, page

ROOT = Path(__file__).parents[4]
CUBE = np.random.default_rng(3).integers(0, 200, (9, 10, 12))
OBLIQUE = np.array([[-1.9, 0.3, 0, 11], [0.2, 2.9, 0.5, -13], [0.1, -0.4, 4, -5], [0, 0, 0, 1]])
DIRECTIONS = ((1, 0, 0), (0, 0, 1), (0, -1, 0))
# What the page says.
MOST_MM = 1e-4

Read = tuple[bytes | Parts, NDArray[Any], NDArray[np.float64] | None]


def _of_itk(found: Any) -> tuple[NDArray[Any], NDArray[np.float64]]:
    lps = np.eye(4)
    lps[:3, :3] = np.array(found.GetDirection()).reshape(3, 3) * found.GetSpacing()
    lps[:3, 3] = found.GetOrigin()
    return sitk.GetArrayFromImage(found).T, np.diag([-1.0, -1.0, 1.0, 1.0]) @ lps


def _by_pillow(kind: str, folder: Path) -> Iterator[Read]:
    grey = CUBE[:, :, 0].astype(np.uint8)
    for pixels in (grey, grey.astype(np.uint16) * 300, np.dstack([grey] * 3)):
        path = folder / "a"
        Image.fromarray(pixels).save(path, kind)
        yield path.read_bytes(), np.asarray(Image.open(io.BytesIO(path.read_bytes()))), None


def _by_nibabel(suffix: str, folder: Path) -> Iterator[Read]:
    kinds: tuple[Any, ...] = (nib.Nifti1Pair, nib.Nifti2Pair, nib.AnalyzeImage)
    for kind in kinds if suffix == ".img" else (nib.Nifti1Image, nib.Nifti2Image):
        for dtype in (np.uint8, np.int16, np.float32):
            straight = np.diag([-2.0, 3, 4, 1])
            affine = straight if kind is nib.AnalyzeImage else OBLIQUE
            nib.save(kind(CUBE.astype(dtype), affine), folder / f"a{suffix}")
            found = kind.from_filename(folder / f"a{suffix}")
            files = {path.name: path.read_bytes() for path in folder.iterdir()}
            content = files if suffix == ".img" else files[f"a{suffix}"]
            yield content, np.asarray(found.dataobj), found.affine


def _by_itk(suffix: str, folder: Path) -> Iterator[Read]:
    for kind in (sitk.sitkUInt8, sitk.sitkInt16, sitk.sitkFloat32, sitk.sitkFloat64):
        for turn in (0.0, 0.3):
            image = sitk.Cast(sitk.GetImageFromArray(CUBE.T.astype(np.int16)), kind)
            about = sitk.Euler3DTransform()
            about.SetRotation(turn, -turn, turn / 2)
            turned = np.array(about.GetMatrix()).reshape(3, 3) @ DIRECTIONS
            image.SetDirection(turned.ravel())
            image.SetSpacing((0.7, 1.1, 2.5))
            image.SetOrigin((-30.5, 12.25, 100.125))
            for compress in (False, True):
                path = folder / f"a{suffix}"
                sitk.WriteImage(image, str(path), compress)
                yield path.read_bytes(), *_of_itk(sitk.ReadImage(str(path)))


def _by_gdcm(folder: Path) -> Iterator[Read]:
    for number, plane in enumerate((dicom_files.PLANES["coronal"], dicom_files.turned())):
        files = dicom_files.series(CUBE.astype(np.int16), plane, RescaleIntercept=-1024)
        own = folder / str(number)
        own.mkdir()
        for name, content in files.items():
            (own / name).write_bytes(content)
        reader = sitk.ImageSeriesReader()
        reader.SetFileNames(reader.GetGDCMSeriesFileNames(str(own)))
        yield files, *_of_itk(reader.Execute())


ORACLES: dict[str, tuple[str, Callable[[Path], Iterator[Read]]]] = {
    "png": ("Pillow", lambda folder: _by_pillow("PNG", folder)),
    "tiff": ("Pillow", lambda folder: _by_pillow("TIFF", folder)),
    "nifti": ("nibabel", lambda folder: _by_nibabel(".nii.gz", folder)),
    "nrrd": ("SimpleITK", lambda folder: _by_itk(".nrrd", folder)),
    "metaimage": ("SimpleITK", lambda folder: _by_itk(".mha", folder)),
    "analyze": ("nibabel", lambda folder: _by_nibabel(".img", folder)),
    "dicom": ("SimpleITK", _by_gdcm),
}


@pytest.mark.parametrize("name", [known.name for known in FORMATS])
def test_every_intensity_and_place_is_that_of_the_named_reader(name: str, tmp_path: Path) -> None:
    oracle, files = ORACLES[name]
    assert oracle == next(known.about.oracle for known in FORMATS if known.name == name)
    compared = 0
    for content, voxels, affine in files(tmp_path):
        scan = decode(content)
        np.testing.assert_array_equal(scan.voxels.squeeze(), voxels)
        if affine is not None:
            assert scan.affine is not None
            corners = np.array(np.meshgrid(*[(0, side - 1) for side in scan.grid], [1])).reshape(4, -1)
            assert np.abs((scan.affine - affine) @ corners).max() < MOST_MM
        compared += 1
    assert compared > 1


def test_the_page_of_formats_is_that_of_the_registry() -> None:
    """`python -m tests.helpers.model_store.formats_page` writes it."""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_every_output_has_a_row_on_the_page() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows[1:] == list(get_args(Output))


def test_the_command_and_the_page_know_every_format() -> None:
    assert set(_SUFFIXES) == {suffix for known in FORMATS for suffix in known.suffixes}
    source = (ROOT / "web/src/viewer/nifti.ts").read_text(encoding="utf-8")
    kinds = set(re.findall(r'"([a-z]+)"', re.search(r"type FileKind = ([^;]*);", source)[1]))  # type: ignore[index]
    # A header of ANALYZE or NIfTI, which stands for both files.
    assert kinds - {"zip", "unknown"} == {
        "header" if known.name == "analyze" else known.name for known in FORMATS
    }
