"""What DICOM costs: a series beside the same volume as NIfTI, a SEG beside highdicom alone, and broken files.

series      `POST /segment` of a zip of a series and of an uncompressed NIfTI of the same voxels, each to a
            server process of its own, in turn. The two masks must be equal. The peak of each server's
            memory is taken at the end.
seg         `encode_seg` of drawn labels beside highdicom's own constructor and writer with the same source
            images, labels and descriptions.
mutations   Broken files and zips, made from valid ones by changing bytes, posted to one server one after the
            other. Counted are the answers by status; the slowest answer and the growth of the server's memory
            are given.
"""

from __future__ import annotations

import gzip
import http.client
import io
import time
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import nibabel as nib
import numpy as np
from numpy.typing import NDArray
from pydicom import Dataset, FileMetaDataset
from pydicom.uid import (
    CTImageStorage,
    ExplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGLSLossless,
    RLELossless,
    generate_uid,
)

from benchmarks.cost.base import CostExperiment, Kind
from benchmarks.cost.serving import SIZE, TASK, WARM_UP, form, post, publish, server, volume, wake
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.gpu import device_of
from benchmarks.harness.measuring import alternated, high_water, milliseconds, quartiles
from benchmarks.harness.tables import table
from model_store.scan import Limits, decode, open_series
from model_store.task import Code, LabelCodes, Task
from service.prediction import dicom_seg
from service.prediction.receipt import ModelReceipt, Receipt, software

ORGANS = (
    ("liver", "10200004"),
    ("spleen", "78961009"),
    ("kidney", "64033007"),
    ("pancreas", "15776009"),
    ("stomach", "69695003"),
)
# Every label of the served task needs a code to be answered as a SEG.
CODED = TASK.model_copy(update={"codes": {"bright": LabelCodes.model_validate({
    "category": {"value": "91723000", "meaning": "Anatomical Structure"},
    "type": {"value": "10200004", "meaning": "Liver"},
})}})  # fmt: skip
SPACING = (1.5, 1.0, 1.0)


@dataclass(frozen=True)
class Profile:
    """Slices of each series, pairs to time, slices of the SEG, mutated files; the U-Net and its threads."""

    slices: tuple[int, ...] = (19, 300)
    repeats: int = 7
    encoded: int = 300
    mutations: int = 5000
    width: int = 16
    threads: int = 2
    device: str = "cpu"


PROFILES = {
    "smoke": Profile((3,), 2, 3, 40, 2, 1),
    "cpu": Profile(),
    "gpu": Profile(width=32, threads=1, device="cuda"),
}


class DicomCost(CostExperiment[Profile]):
    """The cost of DICOM in and out, and what broken DICOM does."""

    name = "dicom_cost"
    title = "What DICOM costs"
    question = "What does a DICOM series cost over the same volume as NIfTI, and a SEG over highdicom alone?"
    profiles = PROFILES
    by = "measured"

    def kinds(self) -> Mapping[str, Kind]:
        """How each kind of cell is measured, and how its rows are shown."""
        return {
            "series": Kind(_series, _series_section),
            "seg": Kind(_seg, _seg_section),
            "mutations": Kind(_mutations, _mutations_section),
        }

    def measured(self) -> Sequence[Cell]:
        """One cell per series, one for the SEG, one for the mutations."""
        profile = self.profile
        served = {"width": profile.width, "threads": profile.threads}
        cells: list[Cell] = [
            *(
                {"measured": "series", "slices": slices, "repeats": profile.repeats, **served}
                for slices in profile.slices
            ),
            {"measured": "seg", "slices": profile.encoded, "segments": 5, "repeats": profile.repeats},
            {"measured": "mutations", "number": profile.mutations, **served},
        ]
        return cells


def ct_series(voxels: NDArray[np.int16], syntax: str = ExplicitVRLittleEndian) -> dict[str, bytes]:
    """[slices, rows, columns] as the files of an axial CT series, in the transfer syntax."""
    study, series, frame = (
        generate_uid(entropy_srcs=["locum", name]) for name in ("study", "series", "frame")
    )
    files = {}
    for place, pixels in enumerate(voxels):
        image = Dataset()
        image.file_meta = FileMetaDataset()
        image.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
        image.SOPClassUID = CTImageStorage
        image.SOPInstanceUID = generate_uid(entropy_srcs=["locum", "slice", str(place)])
        image.StudyInstanceUID, image.SeriesInstanceUID, image.FrameOfReferenceUID = study, series, frame
        image.PatientName = image.PatientID = image.PatientBirthDate = image.PatientSex = ""
        image.StudyDate, image.StudyTime, image.StudyID, image.AccessionNumber = "20200101", "120000", "1", ""
        image.ReferringPhysicianName = image.PositionReferenceIndicator = image.Manufacturer = ""
        image.Modality, image.SeriesNumber, image.InstanceNumber = "CT", 1, place + 1
        image.ImageOrientationPatient = [1, 0, 0, 0, 1, 0]
        image.ImagePositionPatient = [0, 0, place * SPACING[0]]
        image.PixelSpacing, image.SliceThickness = list(SPACING[1:]), SPACING[0]
        image.RescaleSlope, image.RescaleIntercept = 1, 0
        image.Rows, image.Columns = pixels.shape
        image.SamplesPerPixel, image.PhotometricInterpretation = 1, "MONOCHROME2"
        image.BitsAllocated = image.BitsStored = 16
        image.HighBit, image.PixelRepresentation = 15, 1
        image.PixelData = pixels.astype("<i2").tobytes()
        if syntax != ExplicitVRLittleEndian:
            image.compress(syntax, generate_instance_uid=False)
        content = io.BytesIO()
        image.save_as(content, enforce_file_format=True)
        files[f"{place:04d}.dcm"] = content.getvalue()
    return files


def zipped(files: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    """The files as one zip."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data, method)
    return content.getvalue()


def _series(cell: Cell, work: Path) -> dict[str, Any]:
    voxels = volume(cell["slices"])
    # DICOM's axes x and y point left and back, NIfTI's right and front.
    image = nib.Nifti1Image(voxels.transpose(2, 1, 0), np.diag((-SPACING[2], -SPACING[1], SPACING[0], 1.0)))
    scans = {"dicom": zipped(ct_series(voxels)), "nifti": image.to_bytes()}
    ends: dict[str, list[float]] = {kind: [] for kind in scans}
    rest: dict[str, list[float]] = {kind: [] for kind in scans}
    with ExitStack() as stack:
        servers = {}
        settings = {"LOCUM_DEVICE": device_of(cell)}
        for kind, data in scans.items():
            folder = work / f"{kind}-{cell['slices']}"
            folder.mkdir(exist_ok=True)
            if not (folder / "store").exists():
                publish(folder / "store", cell["width"], decode(data))
            servers[kind] = stack.enter_context(server(folder, cell["threads"], settings))
        for repeat in range(WARM_UP + cell["repeats"]):
            masks = {}
            for kind, data in scans.items():
                connection = servers[kind].connection
                wake(connection)
                began = time.perf_counter()
                answer, timing = post(connection, form(data))
                end = time.perf_counter() - began
                masks[kind] = nib.Nifti1Image.from_bytes(gzip.decompress(answer))
                if repeat >= WARM_UP:
                    ends[kind].append(end)
                    rest[kind].append(end - timing["decode"] / 1e3)
            dicom, nifti = masks["dicom"], masks["nifti"]
            if not np.array_equal(dicom.dataobj, nifti.dataobj) or not np.allclose(
                dicom.affine, nifti.affine
            ):
                raise RuntimeError("the series' mask is not the NIfTI's")
        peaks = {kind: round(high_water(each.pid) / 2**20) for kind, each in servers.items()}
    return {
        "end_to_end_s": {kind: quartiles(seconds) for kind, seconds in ends.items()},
        "without_decode_s": {kind: quartiles(seconds) for kind, seconds in rest.items()},
        "ratio": round(median(ends["dicom"]) / median(ends["nifti"]), 4),
        "ratio_without_decode": round(median(rest["dicom"]) / median(rest["nifti"]), 4),
        "peak_mib": peaks,
        "bytes": {kind: len(data) for kind, data in scans.items()},
    }


def _seg(cell: Cell, work: Path) -> dict[str, Any]:
    del work
    import highdicom as hd
    from pydicom.sr.codedict import codes

    task = _organs(cell["segments"])
    voxels = volume(cell["slices"])
    content = zipped(ct_series(voxels))
    series = open_series(content, Limits())
    levels = np.linspace(voxels.min(), voxels.max(), cell["segments"] + 2)[1:-1]
    labels = np.digitize(voxels, levels).astype(np.uint8)
    classes = labels.transpose(2, 1, 0)
    algorithm = hd.AlgorithmIdentificationSequence("cost", codes.cid7162.ArtificialIntelligence, "1")

    def ours() -> bytes:
        return dicom_seg.encode_seg(series, classes, task, _receipt())

    def alone() -> bytes:
        descriptions = [
            hd.seg.SegmentDescription(
                number,
                name,
                codes.SCT.Organ,
                hd.sr.CodedConcept(code, "SCT", name),
                hd.seg.SegmentAlgorithmTypeValues.AUTOMATIC,
                algorithm,
            )
            for number, (name, code) in enumerate(ORGANS, start=1)
        ]
        made = hd.seg.Segmentation(
            source_images=series.headers,
            pixel_array=labels,
            segmentation_type="BINARY",
            segment_descriptions=descriptions,
            series_instance_uid=generate_uid(),
            series_number=1,
            sop_instance_uid=generate_uid(),
            instance_number=1,
            manufacturer="highdicom",
            manufacturer_model_name="alone",
            software_versions="1",
            device_serial_number="1",
            omit_empty_frames=False,
        )
        stream = io.BytesIO()
        made.save_as(stream)
        return stream.getvalue()

    seconds = alternated(dict(zip(_ENCODERS, (ours, alone), strict=True)), cell["repeats"], WARM_UP)
    return {
        "seconds": {name: quartiles(values) for name, values in seconds.items()},
        "ratio": round(median(seconds[_ENCODERS[0]]) / median(seconds[_ENCODERS[1]]), 4),
        "bytes": dict(zip(_ENCODERS, (len(ours()), len(alone())), strict=True)),
    }


def _organs(number: int) -> Task:
    names = ORGANS[:number]
    category = Code(value="91723000", meaning="Anatomical Structure")
    return Task.model_validate(
        {
            **TASK.model_dump(),
            "labels": {name: (place,) for place, (name, _) in enumerate(names, start=1)},
            "codes": {
                name: LabelCodes(category=category, type=Code(value=code, meaning=name))
                for name, code in names
            },
        }
    )


def _receipt() -> Receipt:
    made = ModelReceipt(name="cost@1", digest="sha256:" + "0" * 64)
    return Receipt(
        request="-", input_sha256="0" * 64, input_bytes=0, model=made, network=made, graph="0" * 64,
        personalization="global", site=None, cluster=None, why="", options={}, **software(),
        provider="CPUExecutionProvider",
    )  # fmt: skip


def _mutations(cell: Cell, work: Path) -> dict[str, Any]:
    voxels = volume(4)[:, ::8, ::8]
    statuses: Counter[str] = Counter()
    slowest, failures = 0.0, []
    folder = work / "mutations"
    folder.mkdir(exist_ok=True)
    if not (folder / "store").exists():
        publish(folder / "store", cell["width"], decode(zipped(ct_series(voxels))), CODED)
    with server(folder, cell["threads"], {"LOCUM_DEVICE": device_of(cell)}) as running:
        connection = running.connection
        for data in _seeds(voxels):
            post(connection, form(data, output="dicom-seg"))
        before = high_water(running.pid)
        for number, data in enumerate(_mutated(_seeds(voxels), cell["number"])):
            output = ("dicom-seg", "json", "dicom-sr", "nifti")[number % 4]
            began = time.perf_counter()
            try:
                connection.request("POST", "/segment", form(data, output=output), _FORM)
                answer = connection.getresponse()
                answer.read()
                status = answer.status
            except (http.client.HTTPException, OSError) as error:
                connection.close()
                failures.append(f"{number}: {type(error).__name__}")
                continue
            slowest = max(slowest, time.perf_counter() - began)
            statuses[str(status)] += 1
        growth = high_water(running.pid) - before
        wake(connection)
    return {
        "statuses": dict(sorted(statuses.items())),
        "without_answer": failures,
        "slowest_s": round(slowest, 3),
        "growth_mib": round(growth / 2**20, 1),
    }


_FORM = {"Content-Type": "multipart/form-data; boundary=locum"}


def _seeds(voxels: NDArray[np.int16]) -> list[bytes]:
    """Small valid files: zips of a series, stored and deflated, and single slices, in each syntax."""
    syntaxes = (ExplicitVRLittleEndian, RLELossless, JPEGLSLossless, JPEG2000Lossless)
    series = [ct_series(voxels, syntax) for syntax in syntaxes]
    return [
        *(zipped(files) for files in series),
        zipped(series[0], zipfile.ZIP_DEFLATED),
        *(next(iter(files.values())) for files in series),
    ]


def _mutated(seeds: Sequence[bytes], number: int) -> Iterator[bytes]:
    """Change one to four places of a file: a bit, a wide number, a cut, a hole, a repetition or noise."""
    rng = np.random.default_rng(24)
    for count in range(number):
        data = bytearray(seeds[count % len(seeds)])
        for _ in range(rng.integers(1, 5)):
            # Headers are at the front of a file and at the end of a zip.
            low, high = ((0, 2000), (len(data) - 600, len(data)), (0, len(data)))[rng.integers(3)]
            at = int(rng.integers(max(0, low), max(1, min(high, len(data)))))
            length = int(rng.integers(1, 60))
            match int(rng.integers(6)):
                case 0:
                    data[at : at + 1] = bytes(
                        [(data[at] if at < len(data) else 0) ^ 1 << int(rng.integers(8))]
                    )
                case 1:
                    wide = (0, 1, 2**15, 2**16 - 1, 2**31 - 1, 2**32 - 1)[rng.integers(6)]
                    data[at : at + 4] = wide.to_bytes(4, "little")
                case 2:
                    del data[at:]
                case 3:
                    del data[at : at + length]
                case 4:
                    data[at:at] = data[at : at + length]
                case 5:
                    data[at : at + length] = rng.bytes(length)
        yield bytes(data)


def _series_section(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        slices, result = row["cell"]["slices"], row["result"]
        for name, key, ratio in (
            ("end to end, ms", "end_to_end_s", result["ratio"]),
            ("without decoding, ms", "without_decode_s", result["ratio_without_decode"]),
        ):
            sides = [milliseconds(result[key][kind], 0) for kind in ("dicom", "nifti")]
            lines.append([slices, name, *sides, f"{ratio:.3f}"])
        dicom, nifti = (result["peak_mib"][kind] for kind in ("dicom", "nifti"))
        lines.append([slices, "peak of memory, MiB", str(dicom), str(nifti), f"{dicom / nifti:.3f}"])
    cell = rows[0]["cell"]
    return [
        f"## A series\n\nSlices of {SIZE}x{SIZE} of 16 bits in a stored zip, beside an uncompressed NIfTI; "
        f"U-Net of width {cell['width']}, {cell['threads']} threads. Median [quartiles]. Asked for: at most "
        "1.25 times end to end, 1.05 without decoding.",
        table(["slices", "", "DICOM", "NIfTI", "ratio"], lines),
    ]


def _seg_section(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        cell, result = row["cell"], row["result"]
        times = [milliseconds(result["seconds"][name], 0) for name in _ENCODERS]
        sizes = [f"{result['bytes'][name]:,}" for name in _ENCODERS]
        what = f"{cell['slices']} slices, {cell['segments']} segments"
        lines.append([what, *times, f"{result['ratio']:.3f}", *sizes])
    return [
        f"## A SEG\n\nBINARY, {SIZE}x{SIZE}, every frame written. Milliseconds: median [quartiles].",
        table(["", *_ENCODERS, "ratio", *(f"bytes, {name}" for name in _ENCODERS)], lines),
    ]


_ENCODERS = ("Locum", "highdicom alone")


def _mutations_section(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        result = row["result"]
        statuses = result["statuses"]
        failed = sum(number for status, number in statuses.items() if status.startswith("5"))
        lines.append(
            [
                f"{row['cell']['number']:,}",
                ", ".join(f"{status}: {number:,}" for status, number in statuses.items()),
                str(failed),
                str(len(result["without_answer"])),
                f"{result['slowest_s']:.2f} s",
                f"{result['growth_mib']:.0f} MiB",
            ]
        )
    head = ["files", "answers", "5xx", "without an answer", "slowest", "growth of the peak"]
    return [
        "## Broken files\n\nZips of a series and single slices in four transfer syntaxes, with one to four "
        "changed places, answered as SEG, JSON, report and NIfTI in turn.",
        table(head, lines),
    ]
