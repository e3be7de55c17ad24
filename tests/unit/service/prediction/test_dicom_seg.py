"""What decides the UIDs of a DICOM answer."""

from __future__ import annotations

import io
from typing import Any

import pydicom
import pytest

from model_store.scan import DicomSeries, Limits, open_series
from service.prediction.dicom_seg import encode_report, encode_seg
from tests.helpers.model_store.dicom_files import uid, zipped
from tests.helpers.service.coded import CODED, RECEIPT, VOLUME, coded_series

CLASSES = (VOLUME.transpose(2, 1, 0) > 100).astype("u1")


def opened(content: Any) -> DicomSeries:
    return open_series(content, Limits())


def made(series: DicomSeries, review: float | None = None, **changed: Any) -> tuple[bytes, bytes]:
    """The report, with this rank of the label, and the SEG."""
    receipt = RECEIPT.model_copy(update=changed)
    return encode_report(series, CLASSES, CODED, receipt, {"bright": 1.0}, {"bright": review})


def instances(
    series: DicomSeries | None = None, review: float | None = None, **changed: Any
) -> list[tuple[str, str]]:
    """SOPInstanceUID and SeriesInstanceUID of the report and the SEG."""
    files = made(series or opened(coded_series()), review, **changed)
    found = [pydicom.dcmread(io.BytesIO(one)) for one in files]
    return [(one.SOPInstanceUID, one.SeriesInstanceUID) for one in found]


@pytest.mark.parametrize(
    "changed",
    [
        {"provider": "CUDAExecutionProvider"},
        {"onnxruntime": "1.25.0"},
        {"locum": "1.1"},
        {"machine": "aarch64"},
        {"options": {"model": "coded", "uncertainty": True}},
    ],
)
def test_whatever_may_change_the_bytes_makes_another_instance(changed: dict[str, Any]) -> None:
    before, after = instances(), instances(**changed)
    assert not {uid for pair in before for uid in pair} & {uid for pair in after for uid in pair}


def test_another_request_for_the_same_makes_the_same_instance() -> None:
    same = {"request": "2", "why": "assigned", "options": {"model": "coded@1", "uncertainty": False}}
    assert instances(**same) == instances()


def test_report_has_the_rank_of_a_label_and_is_another_once_the_rank_is() -> None:
    report, _ = made(opened(coded_series()), review=0.042)
    content = pydicom.dcmread(io.BytesIO(report))
    numbers = [item for item in _items(content) if item.ValueType == "NUM"]
    found = {
        item.ConceptNameCodeSequence[0].CodeValue: (
            float(item.MeasuredValueSequence[0].NumericValue),
            item.MeasuredValueSequence[0].MeasurementUnitsCodeSequence[0].CodeValue,
        )
        for item in numbers
    }
    assert found == {"118565006": (1.0, "ml"), "review": (4.0, "%")}
    scheme = content.CodingSchemeIdentificationSequence[-1]
    assert scheme.CodingSchemeDesignator == "99LOCUM"
    # Whole percents: the report follows no other answer's last digit. The SEG has no rank.
    assert instances(review=0.04) == instances(review=0.042)
    (ranked, seg), (unranked, same_seg) = instances(review=0.04), instances()
    assert ranked[0] != unranked[0]
    assert instances(review=0.5)[0][0] not in (ranked[0], unranked[0])
    assert (ranked[1], seg) == (unranked[1], same_seg)


def _items(within: pydicom.Dataset) -> list[pydicom.Dataset]:
    """All items of a report's content."""
    own = [*within.get("ContentSequence", ())]
    return [each for item in own for each in (item, *_items(item))]


def test_series_in_another_order_or_container_makes_the_same_bytes() -> None:
    files = [*coded_series().values()]
    packed = [
        {str(n): one for n, one in enumerate(files)},
        {str(n): one for n, one in enumerate(files[::-1])},
        zipped({f"IM{n}": one for n, one in enumerate(files)}),
        zipped({"AUTORUN.INF": b"[autorun]", **{f"DICOM/{n}": one for n, one in enumerate(files[::-1])}}),
    ]
    answers = [made(opened(content), input_sha256=f"sha256:{n:064}") for n, content in enumerate(packed)]
    assert all(each == answers[0] for each in answers)
    assert encode_seg(opened(packed[0]), CLASSES, CODED, RECEIPT) == answers[0][1]
    other = coded_series(change=lambda d, place: setattr(d, "SOPInstanceUID", uid("other", place)))
    assert not {*sum(instances(opened(other)), ())} & {*sum(instances(), ())}
