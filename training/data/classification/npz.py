"""Load a classification federation from an .npz in MedMNIST's layout, divided among clients.

    {train,val,test}_images   [N, H, W] or [N, H, W, 3], 8 or 16 bit
    {train,val,test}_labels   [N] or [N, 1], class indices

The headers are checked before any array is read, because they are untrusted. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import re
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model_store.errors import TaskError
from model_store.scans.types import MIN_SIDE
from model_store.task import Task
from training.data.cases import SPLITS, Federation, LabelledCase, Site
from training.data.classification.partition import Partition, share_out
from training.errors import FederationError

# All arrays together, in memory. The largest data sets of MedMNIST at 224 x 224 do not fit.
MAX_BYTES = 8 * 2**30
_MAX_HEADER = 10_000
_MOST_CLASSES = 1000
_IMAGE_TYPES = (np.dtype(np.uint8), np.dtype(np.uint16))


def load_npz(path: Path, task: Task | None, partition: Partition) -> Federation[LabelledCase]:
    """Read and check an .npz, and divide its images among the clients of `partition`.

    The task is `task` if given, otherwise STEM.yaml beside the file, otherwise inferred. Raises
    FederationError; its `.problems` lists all problems.
    """
    beside = path.with_suffix(".yaml")
    if task is None and beside.is_file():
        try:
            task = Task.load(beside)
        except TaskError as error:
            raise _refused(path, [str(error)]) from error
    arrays = read_arrays(path)
    inferred = task is None
    task = task or _inferred(path, arrays)
    problems = _problems(arrays, task)
    if problems:
        raise _refused(path, problems)
    labels: dict[str, NDArray[np.int64]] = {
        split: arrays[f"{split}_labels"].reshape(-1).astype(np.int64) for split in SPLITS
    }
    parts = share_out(labels, partition)
    sites = tuple(
        Site(
            name,
            tuple(
                LabelledCase(
                    f"{split}-{index:06d}",
                    path,
                    int(labels[split][index]),
                    f"{split}-{index:06d}",
                    split,
                    (f"{split}_images", int(index)),
                )
                for split in SPLITS
                for index in parts[split][client]
            ),
        )
        for client, name in enumerate(partition.names)
    )
    return Federation(path, task, sites, inferred, _digest(path, task, sites))


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Read the six arrays. Raises FederationError naming every array that is absent, too large or invalid."""
    names = [f"{split}_{what}" for split in SPLITS for what in ("images", "labels")]
    try:
        with zipfile.ZipFile(path) as archive:
            entries = {entry.filename: entry for entry in archive.infolist()}
            problems = [f"array '{name}' is missing" for name in names if f"{name}.npy" not in entries]
            if not problems:
                size = sum(entries[f"{name}.npy"].file_size for name in names)
                if size > MAX_BYTES:
                    problems = [f"expected at most {MAX_BYTES} bytes of arrays, found {size}"]
            if problems:
                raise _refused(path, problems)
            return {name: _read(archive, entries[f"{name}.npy"]) for name in names}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise _refused(path, [f"not an .npz of plain arrays: {error}"]) from error


def _read(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> NDArray[Any]:
    """Read one array. Its header is compared with the file's size before memory is allocated."""
    with archive.open(entry) as stream:
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"{entry.filename}: expected .npy version 1.0 or 2.0, found {version}")
        read_header = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read_header(stream, max_header_size=_MAX_HEADER)
        count = 1
        for side in shape:
            count *= side
        if dtype.hasobject or count * dtype.itemsize > entry.file_size:
            raise ValueError(
                f"{entry.filename}: shape {shape} of {dtype} in the header, found {entry.file_size} bytes"
            )
    with archive.open(entry) as stream:
        array: NDArray[Any] = np.lib.format.read_array(
            stream, allow_pickle=False, max_header_size=_MAX_HEADER
        )
    return array


def _problems(arrays: dict[str, NDArray[Any]], task: Task) -> list[str]:
    if task.kind != "classification":
        return [f"task '{task.name}' is a {task.kind}; an .npz needs a task of kind: classification"]
    problems: list[str] = []
    for split in SPLITS:
        images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
        if images.ndim not in (3, 4) or images.shape[3:] not in ((), (1,), (3,)):
            problems.append(
                f"{split}_images: expected [N, H, W] or [N, H, W, 3], found {list(images.shape)}; volumes "
                "cannot be read from an .npz"
            )
        elif len(images) and min(images.shape[1:3]) < MIN_SIDE:
            problems.append(
                f"{split}_images: expected at least {MIN_SIDE} pixels a side, found {images.shape}"
            )
        elif images.shape[3:] == (3,) and task.channel_count == 1 and task.colour != "luminance":
            problems.append(
                f"{split}_images: in colour, and task '{task.name}' expects grey (colour: refuse)"
            )
        elif images.shape[3:] != (3,) and task.channel_count == 3 and task.colour != "replicate":
            problems.append(f"{split}_images: grey, and task '{task.name}' expects colour (colour: refuse)")
        if images.dtype not in _IMAGE_TYPES:
            problems.append(f"{split}_images: expected 8 or 16 bit integers, found {images.dtype}")
        if labels.shape not in ((len(images),), (len(images), 1)) or labels.dtype.kind not in "iu":
            problems.append(
                f"{split}_labels: expected one integer per image ({len(images)}), found "
                f"{list(labels.shape)} {labels.dtype}; several labels per image are not supported"
            )
        elif labels.size and not 0 <= int(labels.min()) <= int(labels.max()) < len(task.classes):
            problems.append(
                f"{split}_labels: expected 0..{len(task.classes) - 1}, the classes of task '{task.name}', "
                f"found {int(labels.min())}..{int(labels.max())}"
            )
    return problems


def _inferred(path: Path, arrays: dict[str, NDArray[Any]]) -> Task:
    """Infer the task: classes numbered as in the labels, channels and size from the images."""
    labels = [arrays[f"{split}_labels"] for split in SPLITS]
    images = arrays["train_images"]
    try:
        count = max(2, 1 + max((int(found.max()) for found in labels if found.size), default=0))
        if count > _MOST_CLASSES:
            raise ValueError(f"{count} classes")
        digits = len(str(count - 1))
        return Task(
            name=re.sub(r"[^a-z0-9_-]+", "-", path.stem.lower()).strip("-_")[:64] or "images",
            kind="classification",
            class_names=tuple(f"{index:0{digits}d}" for index in range(count)),
            channels=3 if images.shape[3:] == (3,) else 1,
            size=(int(images.shape[1]), int(images.shape[2])),
        )
    except (ValueError, IndexError, TypeError) as error:
        raise _refused(path, [f"no task can be inferred from it: {error}; give one (--task)"]) from error


def _digest(path: Path, task: Task, sites: tuple[Site[LabelledCase], ...]) -> str:
    with path.open("rb") as stream:
        content = hashlib.file_digest(stream, "sha256").hexdigest()
    hasher = hashlib.sha256(f"{task.model_dump_json()}\0{content}\0".encode())
    for site in sites:
        hasher.update("\0".join((site.name, *(case.name for case in site.cases))).encode() + b"\0\0")
    return f"sha256:{hasher.hexdigest()}"


def _refused(path: Path, problems: list[str]) -> FederationError:
    return FederationError(f"{path} is not an .npz that can be trained on:", problems)
