"""Which parts of a receipt decide the UIDs of a DICOM answer."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pydicom
import pytest

from model_store.scan import Limits, open_series
from service.prediction.dicom_seg import encode_report
from service.prediction.receipt import ModelReceipt, Receipt
from tests.helpers.service.coded import CODED, VOLUME, coded_series

MODEL = ModelReceipt(name="coded@1", digest="sha256:" + "1" * 64)
RECEIPT = Receipt(
    request="1",
    input_sha256="sha256:" + "2" * 64,
    input_bytes=1,
    model=MODEL,
    network=MODEL,
    graph="sha256:" + "3" * 64,
    personalization="global",
    site=None,
    cluster=None,
    why="asked for",
    options={"model": "coded", "uncertainty": False},
    provider="CPUExecutionProvider",
    onnxruntime="1.24.1",
    locum="1.0",
    machine="x86_64",
)


def instances(**changed: Any) -> list[tuple[str, str]]:
    """SOPInstanceUID and SeriesInstanceUID of the report and the SEG."""
    series = open_series({str(n): one for n, one in enumerate(coded_series().values())}, Limits())
    classes = (VOLUME.transpose(2, 1, 0) > 100).astype(np.uint8)
    receipt = RECEIPT.model_copy(update=changed)
    files = encode_report(series, classes, CODED, receipt, {"bright": 1.0})
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
