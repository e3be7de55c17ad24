"""Find and read scans on disk: a file, or a folder of files for formats that are stored as several.

The formats are listed in `model_store.scans.formats`.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from model_store.preprocessing import join_channels
from model_store.scan import (
    Parts,
    Scan,
    beside,
    decode,
    decode_mask,
    is_contours,
    not_a_scan,
    series_of,
    strip_suffix,
)
from model_store.scans.types import Limits
from model_store.task import Task
from training.data.cases import Case

# Windows, macOS, and file servers.
_SYSTEM_FILES = {
    *("thumbs.db", "ehthumbs.db", "desktop.ini", "system volume information", "$recycle.bin"),
    *("icon\r", "__macosx", "@eadir", "lost+found"),
}
# Enough for a format to recognise one of its files.
_HEAD_BYTES = 4096


def scans_in(folder: Path | None) -> dict[str, Path]:
    """List the visible scans in a folder by name; empty if there is no such folder.

    Every file counts, because decoding is checked later, but for those of operating systems. A folder counts
    if a format recognises one of its files. A header and its voxels are one scan, called as the header. Names
    are composed (NFC): macOS writes accents as characters of their own, Linux and Windows do not.
    """
    if folder is None or not folder.is_dir():
        return {}
    found = [path for path in folder.iterdir() if not is_system_file(path.name)]
    others = {other for path in found if (other := _beside(path)) is not None}
    visible = (path for path in found if path not in others)
    return {
        unicodedata.normalize("NFC", path.name): path
        for path in sorted(visible)
        if path.is_file() or _is_series(path)
    }


def is_system_file(name: str) -> bool:
    """Whether a file or folder is hidden, or one that Windows, macOS or a file server makes by itself."""
    return name.startswith(".") or name.casefold() in _SYSTEM_FILES


def broken_links(folder: Path | None) -> dict[str, str]:
    """Map the links in a folder that have no target, by name, to the path that they name."""
    if folder is None or not folder.is_dir():
        return {}
    return {
        unicodedata.normalize("NFC", path.name): str(path.readlink())
        for path in sorted(folder.iterdir())
        if path.is_symlink() and not path.exists() and not is_system_file(path.name)
    }


def stem_of(path: Path) -> str:
    """Return a scan's name without its suffix (`.nii.gz` is one suffix); for a folder, its whole name."""
    if path.is_dir():
        return path.name
    stripped = strip_suffix(path.name)
    return stripped if stripped != path.name else path.stem


def read_content(path: Path) -> bytes | Parts:
    """Read a scan's file, it and the other one of two, or the visible files of its folder, for `decode`."""
    if path.is_dir():
        return {file.name: file.read_bytes() for file in _files(path)}
    if (other := _beside(path)) is not None:
        return {file.name: file.read_bytes() for file in (path, other)}
    return path.read_bytes()


def read_scan(path: Path) -> Scan:
    """Decode a scan's file or folder. Raises ScanError."""
    return decode(read_content(path))


def read_case(case: Case, task: Task) -> Scan:
    """Decode a case of volumes: one file, or that of each channel, on one grid. Raises ScanError."""
    return joined([read_content(path) for path in case.images], task)


def joined(contents: Sequence[bytes | Parts], task: Task) -> Scan:
    """One scan of the files of a case, in the order of the task's channels. Raises ScanError."""
    if len(contents) == 1:
        # A file with a fourth axis has as many channels as the task says.
        return decode(contents[0], Limits(max_channels=task.channel_count) if task.stacked else Limits())
    names = (channel.name for channel in task.channel_list)
    return join_channels({name: decode(each) for name, each in zip(names, contents, strict=True)}, task)


def read_mask(path: Path) -> Scan:
    """Decode a mask's file or folder, a DICOM SEG included. Raises ScanError."""
    return decode_mask(read_content(path))


def mask_of(case: Case) -> Scan:
    """Decode a case's mask, with the task's values in place of the site's own. Raises ScanError."""
    content = read_content(case.mask)
    scan = read_scan(case.image) if is_contours(content) else None
    return with_values(decode_mask(content, scan=scan), case.values)


def with_values(mask: Scan, values: Sequence[tuple[int, int]]) -> Scan:
    """A mask with other values in place of some; an RTSTRUCT has names and no values."""
    if not values or mask.structures is not None:
        return mask
    voxels = mask.voxels.copy()
    for own, wanted in values:
        voxels[mask.voxels == own] = wanted
    return replace(mask, voxels=voxels)


def what_it_is(path: Path) -> str | None:
    """What a file is that is neither a scan nor a mask, and what to do; None for one that may be."""
    return None if path.is_dir() else not_a_scan(path.read_bytes())


def content_digest(content: bytes | Parts) -> str:
    """Return the sha256 in hexadecimal of a file's bytes; of several files, over their names and digests."""
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    # A separator that no file name can contain makes the lines unambiguous.
    lines = (f"{name}\0{content_digest(content[name])}\0" for name in sorted(content))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and not is_system_file(path.name))


def _beside(path: Path) -> Path | None:
    """The other file of a scan of two; None where there is none."""
    name = beside(path.name)
    other = None if name is None else path.with_name(name)
    return other if other is not None and other.is_file() else None


def _is_series(folder: Path) -> bool:
    return folder.is_dir() and series_of(map(_head, _files(folder))) is not None


def _head(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(_HEAD_BYTES)
