"""Scans of several channels: their names in file names, and the zip that holds one file or series of each.

A zip of channels has either a NIfTI file for each, or a folder `channels` with a file or a folder (a DICOM
series) for each. A channel is named as the task names it, at the end of the file's name after `_` or alone
(`T1.nii.gz`, `case7_T1.nii.gz`), or by nnU-Net's number in the task's order (`case7_0000.nii.gz`).

Channels share one grid. They are never resampled onto each other here: that is a registration, and an answer
would not show its errors.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

import numpy as np
from pydicom import Dataset

from model_store.errors import DamagedScan, ScanError, ScanMismatch, UnsupportedScan
from model_store.scans.archive import names_in, unpacked
from model_store.scans.dicom.deidentify import deidentify as deidentify_dicom
from model_store.scans.dicom.files import reported
from model_store.scans.dicom.reading import open_series
from model_store.scans.formats import strip_suffix
from model_store.scans.types import Limits, Parts, Scan, largest_shift
from model_store.volume import MOST_CHANNELS

FOLDER = "channels"
# More files than a scan may have, and folders.
_MOST_ENTRIES = 40_000
_NUMBER = re.compile(r"^(?P<case>.*?)_?(?P<number>\d{4})$", re.DOTALL)
# Share of a voxel by which the corners of two channels' grids may differ: programs round affines.
_SAME_GRID = 0.01


def split_name(stem: str, channels: Sequence[str]) -> tuple[str, int] | None:
    """Find the case and the number of the channel in a file's name without suffix; None where it has none.

    `case7_FLAIR` and `case7_0001` are channel 1 of case7, for the channels T1 and FLAIR; `FLAIR` alone is of
    the case ``""``. Names are compared in any case of letters, longer ones first.
    """
    folded = stem.casefold()
    for index in sorted(range(len(channels)), key=lambda each: -len(channels[each])):
        name = channels[index].casefold()
        if folded == name:
            return "", index
        if folded.endswith((f"_{name}", f"-{name}")):
            return stem[: -len(name) - 1], index
    found = _NUMBER.match(stem)
    if found is None or int(found["number"]) >= len(channels):
        return None
    if found["case"] and not stem[: -len(found["number"])].endswith("_"):
        return None
    return found["case"], int(found["number"])


def group_cases(stems: Iterable[str], channels: Sequence[str]) -> tuple[dict[str, dict[int, str]], list[str]]:
    """Group the names of files by their case: case -> number of the channel -> name; and those of no channel.

    Where a case has two names for one channel, the first is kept and the other is of no channel.
    """
    cases: dict[str, dict[int, str]] = {}
    others = []
    for stem in stems:
        found = split_name(stem, channels)
        if found is None or found[1] in cases.setdefault(found[0], {}):
            others.append(stem)
        else:
            cases[found[0]][found[1]] = stem
    return {case: dict(sorted(found.items())) for case, found in cases.items() if found}, others


def join(scans: Mapping[str, Scan]) -> Scan:
    """Make one scan [I, J, K, C] of the channels' scans, in their order.

    Raises ScanMismatch for a channel that is no grey volume, and for one on another grid than the first.
    """
    (first_name, first), *others = scans.items()
    for name, scan in scans.items():
        if scan.affine is None or scan.channels != 1:
            what = "an image" if scan.affine is None else f"a volume with {scan.channels} values per voxel"
            raise ScanMismatch(f"channel {name}: expected a volume with one value per voxel, found {what}")
        if difference := _other_grid(first, scan):
            raise ScanMismatch(
                f"channel {name} is not on the grid of channel {first_name}: {difference}. Channels must "
                "share one grid; register and resample them together before you send them"
            )
    names = tuple(scans)
    if not others:
        return replace(first, channel_names=names)
    # Channel by channel in memory, each in the order in which the first is stored.
    voxels = np.stack([scan.voxels[..., 0].T for scan in scans.values()]).T
    voxels.flags.writeable = False
    notes = tuple(dict.fromkeys(note for scan in scans.values() for note in scan.notes))
    return replace(first, voxels=voxels, notes=notes, channel_names=names)


def _other_grid(one: Scan, other: Scan) -> str | None:
    """What is different between the grids of two volumes; None if they are the same."""
    if one.grid != other.grid:
        return f"it has {' x '.join(map(str, other.grid))} voxels, the other {' x '.join(map(str, one.grid))}"
    assert one.affine is not None
    assert other.affine is not None
    first = np.diag([one.mm_per_unit] * 3 + [1.0]) @ one.affine
    second = np.diag([other.mm_per_unit] * 3 + [1.0]) @ other.affine
    shift = largest_shift(first, second, one.grid)
    if shift > _SAME_GRID * float(np.linalg.norm(first[:3, :3], axis=0).min()):
        return f"their affines put a voxel {shift:.3g} mm apart"
    return None


def sniff(data: bytes) -> bool:
    """Whether it is a zip of channels: all of it in the folder `channels`, or NIfTI files, two at least."""
    names = names_in(data, _MOST_ENTRIES)
    in_folder = all(name.startswith(f"{FOLDER}/") for name in names)
    volumes = len(names) > 1 and all(name.lower().endswith((".nii", ".nii.gz")) for name in names)
    return bool(names) and (in_folder or volumes)


def read_channels(data: bytes, limits: Limits, decode: Callable[[bytes | Parts, Limits], Scan]) -> Scan:
    """Read a zip of channels, each by `decode`. Raises ScanError; the message names the channel."""
    scans: dict[str, Scan] = {}
    sources: dict[str, Dataset] = {}
    voxels = 0
    for name, content in _contents(data, limits).items():
        left = replace(limits, max_voxels=limits.max_voxels - voxels)
        try:
            scans[name] = decode(content, left)
            if scans[name].format == "dicom":
                sources[name] = open_series(content, left).headers[0]
        except ScanError as error:
            raise type(error)(f"channel {name}: {error}") from error
        voxels += scans[name].voxels.size
    _check_one_frame(sources)
    return replace(join(scans), format="channels", from_dicom=len(sources) == len(scans))


def first_series(data: bytes, limits: Limits) -> bytes | Parts:
    """The DICOM series of the first channel, which has the scan's grid. `read_channels` has read the zip."""
    return next(iter(_contents(data, limits).values()))


def _check_one_frame(sources: Mapping[str, Dataset]) -> None:
    """Raise ScanMismatch for DICOM series of several patients, or with positions in several frames."""
    for keyword, what in (("PatientID", "patient"), ("FrameOfReferenceUID", "frame of reference")):
        with reported("the header"):
            # Without the values, which name the patient.
            found = {name: str(header.get(keyword) or "") for name, header in sources.items()}
        first = next(iter(found), None)
        for name, value in found.items():
            if first is not None and value != found[first]:
                raise ScanMismatch(
                    f"channels {first} and {name}: expected series with one {what}, found two; send series "
                    "that were acquired together, or registered and resampled onto one of them"
                )


def deidentify_channels(
    data: bytes, limits: Limits, key: bytes, deidentify: Callable[[bytes, Limits, bytes], bytes]
) -> bytes:
    """The same zip, each channel without what may name the patient, in a stored zip without times.

    A file is cleaned by `deidentify`, a series as DICOM.
    """
    cleaned = {
        name: deidentify(content, limits, key)
        if isinstance(content, bytes)
        else deidentify_dicom(content, limits, key)
        for name, content in _contents(data, limits).items()
    }
    return packed({name: [content] for name, content in cleaned.items()})


def packed(channels: Mapping[str, Sequence[bytes]]) -> bytes:
    """Write a zip of channels; the same contents in any order of names give the same bytes."""
    stream = io.BytesIO()
    pack_into(stream, {name: [lambda own=own: own for own in files] for name, files in channels.items()})  # type: ignore[misc]
    return stream.getvalue()


def pack_into(stream: Any, channels: Mapping[str, Sequence[Callable[[], bytes]]]) -> None:
    """Write a zip of channels into a stream that has `write`, one file in memory at a time."""
    with zipfile.ZipFile(stream, "w") as archive:
        for name in sorted(channels):
            for number, read in enumerate(channels[name]):
                archive.writestr(zipfile.ZipInfo(f"{FOLDER}/{name}/{number:05d}"), read())


def _contents(data: bytes, limits: Limits) -> dict[str, bytes | Parts]:
    """The file of each channel, or the files of its series, by name in the order of names."""
    found: dict[str, dict[str, bytes]] = {}
    for entry, content in unpacked(data, limits, "channels").items():
        path = PurePosixPath(entry)
        parts = path.parts[1:] if path.parts[0] == FOLDER else path.parts
        name = parts[0] if len(parts) > 1 else strip_suffix(parts[-1])
        found.setdefault(name, {})[str(path)] = content
    if len(found) > MOST_CHANNELS:
        raise UnsupportedScan(f"expected at most {MOST_CHANNELS} channels in the zip, found {len(found)}")
    if not found:
        raise DamagedScan("the zip of channels is empty; send a file for each channel")
    return {
        name: next(iter(found[name].values())) if len(found[name]) == 1 else found[name]
        for name in sorted(found)
    }
