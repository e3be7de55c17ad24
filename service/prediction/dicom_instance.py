"""What the DICOM instances of an answer have in common: their UIDs, their device and their dates.

An instance is a function of the source, the network, the options, the software and the device: the same
request makes the same instance, byte for byte, so that a PACS that receives it twice keeps one. After an
update, which may change the mask, it makes another, so that the PACS does not keep the outdated one.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue
from pydicom import Dataset
from pydicom.uid import UID

from model_store.digest import sha256
from model_store.errors import UnsupportedScan
from model_store.scan import DicomSeries
from service.about import NOTICE
from service.prediction.dicom_source import valid_value
from service.prediction.receipt import Receipt

# highdicom quotes values of headers, the patient's name among them, in what it logs and warns of.
logging.getLogger("highdicom").setLevel(logging.CRITICAL + 1)
warnings.filterwarnings("ignore", module=r"highdicom(\.|$)")

MANUFACTURER: Final = "Locum"
# The series of segmentations; those of reports and structure sets follow.
SERIES_NUMBER: Final = 24001
_DATES = (
    ("ContentDate", "ContentTime"),
    ("AcquisitionDate", "AcquisitionTime"),
    ("SeriesDate", "SeriesTime"),
    ("StudyDate", "StudyTime"),
)
_NAMING = ("model", "hospital", "site", "guard", "scanner", "segmentation_type")


def check_identifiers(series: DicomSeries) -> None:
    """Raise UnsupportedScan unless a DICOM answer can refer to every file."""
    headers, advice = series.headers, "export the series again, or ask for output=nifti or json"
    space = () if series.affine is None else ("FrameOfReferenceUID",)
    for keyword in ("SOPClassUID", "SOPInstanceUID", "SeriesInstanceUID", "StudyInstanceUID", *space):
        wrong = sum(not UID(str(header.get(keyword) or "")).is_valid for header in headers)
        if wrong:
            raise UnsupportedScan(
                f"DICOM: expected a valid {keyword} in every file, to which a DICOM answer refers, found "
                f"{wrong} of {len(headers)} without; {advice}"
            )
    different = len({str(header.SOPInstanceUID) for header in headers})
    if different < len(headers):
        raise UnsupportedScan(
            f"DICOM: expected a SOPInstanceUID for each of {len(headers)} files, to which a DICOM answer "
            f"refers, found {different} different ones; {advice}"
        )


@contextmanager
def supported(series: DicomSeries) -> Iterator[None]:
    """Turn what highdicom and pydicom raise for odd headers into a reason, without their text."""
    try:
        yield
    except (UnsupportedScan, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (series.headers[0].get("SOPClassUID"),):
            raise UnsupportedScan(
                "DICOM: expected a SOPClassUID of the standard, by which a DICOM answer repeats attributes, "
                "found another; ask for output=nifti or json"
            ) from None
        raise UnsupportedScan(
            f"DICOM: no DICOM answer can be made for this series ({type(error).__name__} in its header); ask "
            "for output=nifti or json"
        ) from None


def written(dataset: Any) -> bytes:
    """The bytes of a file."""
    content = io.BytesIO()
    dataset.save_as(content)
    return content.getvalue()


def uid(*key: str) -> str:
    """Make a UID that is a function of the key (PS3.5 B.2: a UUID as a number)."""
    digest = bytearray(hashlib.sha256("\0".join(key).encode()).digest()[:16])
    digest[6], digest[8] = digest[6] & 0x0F | 0x80, digest[8] & 0x3F | 0x80  # UUID version 8
    return f"2.25.{int.from_bytes(digest, 'big')}"


def instance_key(series: DicomSeries, classes: NDArray[np.uint8], receipt: Receipt, kind: str) -> str:
    """List what the answer depends on. How the client named the model and hospital is not part of it.

    The scan is named by its instances and their mask, so that the same series in another order or container
    makes the same answer, and one with other pixels under the same UIDs another.
    """
    options = {k: v for k, v in receipt.options.items() if k not in (*_NAMING, "output")}
    instances: list[JsonValue] = [*sorted(str(header.SOPInstanceUID) for header in series.headers)]
    parts: list[JsonValue] = [
        instances,
        sha256(np.ascontiguousarray(classes).tobytes()),
        receipt.model.digest,
        receipt.network.digest,
        receipt.graph,
        receipt.personalization,
        options,
        kind,
        receipt.provider,
        receipt.onnxruntime,
        receipt.locum,
        receipt.machine,
        *([] if receipt.gpu is None else [receipt.gpu]),
    ]
    return json.dumps(parts, sort_keys=True)


def other_options(receipt: Receipt) -> dict[str, str]:
    """The options that an algorithm has for parameters."""
    named = {k: v for k, v in receipt.options.items() if k not in (*_NAMING, "personalization", "output")}
    return {name: str(value) for name, value in named.items() if value is not None}


def code_of(code: Any) -> Any:
    """A code of a task as pydicom has it."""
    from pydicom.sr.coding import Code

    return Code(code.value, code.scheme, code.meaning)


def equipment_of(hd: Any, receipt: Receipt, software: str) -> Any:
    """The version that answered as a device, which programs that edit the instance keep."""
    from pydicom.sr.coding import Code

    equipment = hd.ContributingEquipment(
        manufacturer=MANUFACTURER,
        purpose_of_reference=Code("109102", "DCM", "Processing Equipment"),
        manufacturer_model_name=receipt.network.name[:64],
        software_versions=software,
        contribution_description=f"Segmentation by {receipt.network.name}, {NOTICE}"[:1024],
    )
    # Each version, hence each version adapted to a hospital, is a device of its own.
    equipment.DeviceUID = device_uid(receipt.network.digest)
    return equipment


def device_uid(digest: str) -> str:
    """The UID of a published version as a device, by its digest."""
    return uid("device", digest)


def without_clock(made: Any, source: Dataset) -> None:
    """Replace what highdicom takes from the clock by the moment of the source."""
    for item in made.ContributingEquipmentSequence:
        if "ContributionDateTime" in item:
            del item.ContributionDateTime
    made.ContentDate, made.ContentTime = content_moment(source)
    for keyword in ("InstanceCreationDate", "InstanceCreationTime", "SeriesDate", "SeriesTime"):
        if keyword in made:
            delattr(made, keyword)


def content_moment(source: Dataset) -> Sequence[str]:
    """When the source was made: a clock would make every repetition another instance."""
    for date, time in _DATES:
        if found := valid_value(source, date):
            return str(found), str(valid_value(source, time) or "000000")
    return "19000101", "000000"
