"""A NIfTI as NRRD, MetaImage or a header and its voxels, as ITK writes it."""

from __future__ import annotations

from pathlib import Path

import SimpleITK as sitk

from model_store.scans.dicom.files import zip_of

SUFFIXES = (".nrrd", ".seg.nrrd", ".mha", ".hdr")


def save_as(nifti: Path, target: Path) -> None:
    """Save the same volume by the target's suffix, compressed where the format has one file."""
    image = sitk.ReadImage(str(nifti))
    for key in image.GetMetaDataKeys():
        # Fields of NIfTI, which ITK's other writers warn of.
        image.EraseMetaData(key)
    sitk.WriteImage(image, str(target), not target.name.endswith(".hdr"))


def in_format(nifti: Path, folder: Path, suffix: str) -> bytes:
    """The same volume as it is sent: a file, or a zip of two."""
    target = folder / f"as{suffix}"
    save_as(nifti, target)
    voxels = target.with_suffix(".img")
    if suffix != ".hdr":
        return target.read_bytes()
    return zip_of((target.read_bytes(), voxels.read_bytes()))
