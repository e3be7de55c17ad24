"""Remove the patient from DICOM files: only what the voxels and their geometry need is kept.

This is stricter than the Basic Application Level Confidentiality Profile (PS3.15 annex E): every attribute
that is not listed below is removed, private ones included, and no date and no text of the source remains.
UIDs are replaced by a keyed function of themselves, so that a series becomes the same UIDs under one key.
"""

from __future__ import annotations

import hashlib
import hmac
import io
from typing import Any

from pydicom import Dataset, FileMetaDataset
from pydicom.sequence import Sequence as Items

from model_store.errors import UnsupportedScan
from model_store.scans.dicom.files import reported, zip_of
from model_store.scans.dicom.geometry import is_reconstructed
from model_store.scans.dicom.pixels import modality_lut
from model_store.scans.dicom.reading import open_series
from model_store.scans.types import Limits, Parts

_PIXELS = (
    *("Rows", "Columns", "SamplesPerPixel", "PhotometricInterpretation", "PlanarConfiguration"),
    *("BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "NumberOfFrames"),
    *("PixelPaddingValue", "PixelPaddingRangeLimit"),
    *(f"{colour}PaletteColorLookupTableDescriptor" for colour in ("Red", "Green", "Blue")),
    *(f"{colour}PaletteColorLookupTableData" for colour in ("Red", "Green", "Blue")),
    *("LossyImageCompression", "BurnedInAnnotation", "ExtendedOffsetTable", "ExtendedOffsetTableLengths"),
    "PixelData",
)
_GEOMETRY = (
    *("ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing", "SliceThickness"),
    *("RescaleSlope", "RescaleIntercept"),
)
_GROUPS = (
    *("PlanePositionSequence", "PlaneOrientationSequence", "PixelMeasuresSequence"),
    "PixelValueTransformationSequence",
)
_UIDS = ("StudyInstanceUID", "SeriesInstanceUID", "FrameOfReferenceUID", "SOPInstanceUID")


def deidentify(content: bytes | Parts, limits: Limits, key: bytes) -> bytes:
    """Write one DICOM file, or a stored zip of a series in slice order, that decodes to the same scan.

    Equal input and key give equal bytes. Raises as `open_series`, and UnsupportedScan for a file without
    SOPClassUID or SOPInstanceUID, which can be read but not written.
    """
    series = open_series(content, limits)
    order = list(dict.fromkeys(frame.file for frame in series.frames))
    with reported("the header"):
        files = [_written(_kept(series.load(file), key, place)) for place, file in enumerate(order)]
    return files[0] if len(files) == 1 else zip_of(files)


def _kept(source: Dataset, key: bytes, place: int) -> Dataset:
    for keyword in ("SOPClassUID", "SOPInstanceUID"):
        if not source.get(keyword):
            raise UnsupportedScan(
                f"DICOM: expected a {keyword} in every file, found one without; export it again as "
                "DICOM files (PS3.10)"
            )
    kept = Dataset()
    _copy(source, kept, (*_PIXELS, *_GEOMETRY))
    if (table := modality_lut(source)) is not None:
        # Without its explanation and type, which are texts.
        kept.ModalityLUTSequence = Items([Dataset()])
        _copy(table, kept.ModalityLUTSequence[0], ("LUTDescriptor", "LUTData"))
    for name in ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence"):
        if source.get(name):
            setattr(kept, name, Items([_group(item) for item in source[name].value]))
    if is_reconstructed(source):
        _copy(source, kept, ("SpacingBetweenSlices", "SliceVector"))
        kept.ImageType = ["DERIVED", "PRIMARY", "RECON TOMO", "EMISSION"]
        kept.DetectorInformationSequence = Items([Dataset()])
        _copy(source.DetectorInformationSequence[0], kept.DetectorInformationSequence[0], _GEOMETRY)
    for keyword in _UIDS:
        if source.get(keyword):
            setattr(kept, keyword, mapped(str(source.get(keyword)), key))
    kept.SOPClassUID, kept.Modality = source.SOPClassUID, str(source.get("Modality") or "OT")[:2]
    kept.InstanceNumber = place + 1
    kept.PatientName = kept.PatientID = ""
    kept.PatientIdentityRemoved, kept.DeidentificationMethod = "YES", "Locum: pixels and geometry alone"
    kept.file_meta = FileMetaDataset()
    kept.file_meta.TransferSyntaxUID = source.file_meta.TransferSyntaxUID
    return kept


def _group(source: Dataset) -> Dataset:
    kept = Dataset()
    for name in _GROUPS:
        if source.get(name):
            macro = Dataset()
            _copy(source[name].value[0], macro, _GEOMETRY)
            setattr(kept, name, Items([macro]))
    return kept


def _copy(source: Dataset, target: Dataset, keywords: tuple[str, ...]) -> None:
    for keyword in keywords:
        if keyword in source:
            target[keyword] = source[keyword]


def mapped(uid: str, key: bytes) -> str:
    """The UID that takes the place of another under a key."""
    digest = hmac.digest(key, uid.encode(), hashlib.sha256)
    return f"2.25.{int.from_bytes(digest[:16], 'big')}"


def _written(dataset: Any) -> bytes:
    content = io.BytesIO()
    dataset.save_as(content, enforce_file_format=True)
    return content.getvalue()
