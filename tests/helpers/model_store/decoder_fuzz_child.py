"""Child process of test_decoder_fuzz: mutate small valid files and decode each one.

    python decoder_fuzz_child.py MUTATIONS SEED HEADROOM_MIB

HEADROOM_MIB is the memory allowed beyond the use after loading libraries and decoding every seed.

Prints one JSON line: the count of each outcome, and the mutations that raised anything but a ScanError.
"""

from __future__ import annotations

import gzip
import io
import json
import resource
import struct
import sys
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import nibabel as nib
import numpy as np
from PIL import Image

from model_store.errors import ScanError
from model_store.scan import Limits, Scan, decode, decode_mask, deidentify, encode_nrrd
from model_store.scans.dicom.files import zip_of
from tests.helpers.model_store import dicom_files, scan_files

LIMITS = Limits(max_bytes=2**20, max_pixels=2**20, max_voxels=2**20, max_decompressed=2**23)
INTERESTING = (0, 1, 0x7F, 0x80, 0xFF)
WIDE = (0, 1, -1, 8, 255, 32767, -32768, 65535, 2**31 - 1, -(2**31), 2**20, 2**24)


def seeds() -> dict[str, bytes]:
    rng = np.random.default_rng(1)
    grey = rng.integers(0, 255, (16, 12), dtype=np.uint8)
    volume = rng.integers(0, 900, (9, 10, 4)).astype(np.int16)
    found: dict[str, bytes] = {}

    def save(name: str, array: np.ndarray, kind: str, mode: str | None = None, **options: object) -> None:  # type: ignore[type-arg]
        content = io.BytesIO()
        image = Image.fromarray(array)
        (image.convert(mode) if mode else image).save(content, kind, **options)
        found[name] = content.getvalue()

    save("grey.png", grey, "PNG")
    save("deep.png", grey.astype(np.uint16) * 200, "PNG")
    save("colour.png", np.dstack([grey] * 3), "PNG")
    save("palette.png", grey, "PNG", mode="P")
    save("alpha.png", np.dstack([grey] * 3 + [np.full_like(grey, 255)]), "PNG")
    save("bits.png", grey > 99, "PNG")
    for name, array in (("grey", grey), ("deep", grey.astype(np.uint16)), ("float", grey.astype(np.float32))):
        for compression in (None, "tiff_lzw", "tiff_adobe_deflate", "packbits"):
            save(f"{name}-{compression}.tif", array, "TIFF", compression=compression)
    save("colour.tif", np.dstack([grey] * 3), "TIFF")
    for kind in (nib.Nifti1Image, nib.Nifti2Image):
        for dtype in ("<i2", ">f4", "u1", ">f8"):
            header = kind.header_class(endianness=dtype[0] if dtype[0] in "<>" else "<")
            header.set_data_dtype(dtype)
            content = kind(volume.astype(dtype), np.diag([1, 2, 3, 1]), header).to_bytes()
            found[f"{kind.__name__}-{dtype}.nii"] = content
            found[f"{kind.__name__}-{dtype}.nii.gz"] = gzip.compress(content, 1, mtime=0)
    for compress in (True, False):
        mask = (volume > 450).astype(np.uint8)
        found[f"mask-{compress}.nrrd"] = encode_nrrd(mask, np.diag([1.0, 2.0, 3.0, 1.0]), compress=compress)
        found[f"volume-{compress}.mha"] = scan_files.metaimage(volume, compress=compress)
    whole = scan_files.nifti1(volume, magic=b"ni1\0", vox_offset=0.0)
    found["pair.zip"] = zip_of((whole[:348], whole[352:]))
    header = nib.Spm99AnalyzeHeader()
    header.set_data_dtype(np.int16)
    header.set_data_shape(volume.shape)
    header["origin"][:3], header["scl_slope"] = (3, 4, 2), 0.5
    found["analyze.zip"] = zip_of((bytes(header.binaryblock), gzip.compress(volume.tobytes(order="F"))))
    slices = rng.integers(0, 900, (3, 9, 10)).astype(np.int16)
    files = dicom_files.series(slices)
    found["slice.dcm"] = next(iter(files.values()))
    found["enhanced.dcm"] = dicom_files.enhanced(slices)
    found["projection.dcm"] = dicom_files.image(grey)
    found["series.zip"] = dicom_files.zipped(files)
    found["tilted.zip"] = dicom_files.zipped(dicom_files.tilted(slices, 12, PixelPaddingValue=0))
    found["stored.zip"] = dicom_files.zipped(files, zipfile.ZIP_STORED)
    for coding in ("BINARY", "LABELMAP"):
        found[f"{coding}.seg"] = dicom_files.seg(files, (slices > 450).astype(np.uint8), coding)
    return found


def read(name: str, content: bytes) -> Scan:
    """Decode a scan or, by its name, a mask; a scan also without its patient."""
    if name.endswith(".seg"):
        return decode_mask(content, LIMITS)
    scan = decode(content, LIMITS)
    cleaned = decode(deidentify(content, LIMITS, b"key"), LIMITS)
    if cleaned.voxels.dtype != scan.voxels.dtype or not np.array_equal(cleaned.voxels, scan.voxels):
        raise AssertionError("de-identification changed the voxels")
    if cleaned.format != "dicom" and not np.array_equal(cleaned.affine, scan.affine):  # type: ignore[arg-type]
        raise AssertionError("de-identification changed the affine")
    return scan


def repaired(content: bytearray) -> bytearray:
    """A mutated PNG with corrected checksums, so that the code behind the checksum test runs too."""
    position = 8
    while position + 12 <= len(content):
        (length,) = struct.unpack_from(">I", content, position)
        end = position + 12 + length
        if end > len(content):
            break
        struct.pack_into(">I", content, end - 4, zlib.crc32(content[position + 4 : end - 4]))
        position = end
    return content


def mutate(content: bytes, rng: np.random.Generator) -> bytes:
    data = bytearray(content)
    for _ in range(int(rng.integers(1, 5))):
        if not data:
            break
        # Headers are at the front and a TIFF's directory is at the end: mutate both more often than chance.
        where = int(rng.integers(0, 3))
        low, high = ((0, min(len(data), 120)), (max(0, len(data) - 250), len(data)), (0, len(data)))[where]
        position = int(rng.integers(low, high))
        match int(rng.integers(0, 7)):
            case 0:
                data[position] ^= 1 << int(rng.integers(0, 8))
            case 1:
                data[position] = INTERESTING[int(rng.integers(0, len(INTERESTING)))]
            case 2:
                letter = "<>"[int(rng.integers(0, 2))] + "qihh"[int(rng.integers(0, 4))]
                size = struct.calcsize(letter)
                value = WIDE[int(rng.integers(0, len(WIDE)))]
                if position + size <= len(data):
                    data[position : position + size] = (value % 2 ** (8 * size)).to_bytes(
                        size, "little" if letter[0] == "<" else "big"
                    )
            case 3:
                del data[position:]
            case 4:
                del data[position : position + int(rng.integers(1, 40))]
            case 5:
                data[position:position] = data[: int(rng.integers(1, 40))]
            case 6:
                data[position : position + 8] = rng.bytes(8)
    if bytes(data[:8]) == b"\x89PNG\r\n\x1a\n" and rng.random() < 0.8:
        data = repaired(data)
    return bytes(data)


def mutations(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    rng = np.random.default_rng(seed)
    files = seeds()
    names = list(files)
    for number in range(count):
        name = names[number % len(names)]
        content = files[name]
        if name.endswith(".gz") and rng.random() < 0.6:
            yield name, gzip.compress(mutate(gzip.decompress(content), rng), 1, mtime=0)
        else:
            yield name, mutate(content, rng)


def outcome(name: str, content: bytes) -> str:
    try:
        scan = read(name, content)
    except ScanError as error:
        # Reaching the memory limit is a failure, even when reported as a ScanError.
        return type(error).__name__ if "memory" not in str(error) else f"! {error}"
    except BaseException as error:
        return f"! {type(error).__name__}: {error}"
    if not np.isfinite(scan.voxels.astype(np.float64)).all() or scan.channels not in (1, 3):
        return "! a Scan that is none"
    return "Scan"


def main() -> None:
    count, seed, headroom = map(int, sys.argv[1:])
    warnings.simplefilter("error")
    for name, content in seeds().items():
        if (found := outcome(name, content)) != "Scan":
            raise SystemExit(f"{name}: the unchanged file is no valid neighbour: {found}")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + headroom * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        bytearray(2 * headroom * 2**20)
    except MemoryError:
        pass
    else:
        raise SystemExit("the memory limit is not in force")
    outcomes: Counter[str] = Counter()
    failures = []
    for name, content in mutations(count, seed):
        found = outcome(name, content)
        outcomes[found.split(":")[0]] += 1
        if found.startswith("!"):
            failures.append([name, found, content.hex()])
    print(json.dumps({"outcomes": outcomes, "failures": failures[:20]}))


if __name__ == "__main__":
    main()
