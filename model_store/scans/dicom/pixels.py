"""Frames of a DICOM file to intensities: decoding, signs, colours, rescaling.

Each transfer syntax has one decoder. The size that a compressed frame announces is compared with the header
before the frame is decoded, because decoders allocate what the frame says.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydicom import Dataset
from pydicom.encaps import generate_frames
from pydicom.pixels.decoders.base import get_decoder
from pydicom.pixels.processing import apply_color_lut, apply_modality_lut
from pydicom.uid import UID

from model_store.errors import DamagedScan, ScanError, UnsupportedScan
from model_store.scans.dicom import jpeg_12_bits
from model_store.scans.dicom.files import reported

_IMPLICIT, _EXPLICIT, _DEFLATED, _BIG = (
    "1.2.840.10008.1.2",
    "1.2.840.10008.1.2.1",
    "1.2.840.10008.1.2.1.99",
    "1.2.840.10008.1.2.2",
)
NATIVE = (_IMPLICIT, _EXPLICIT, _DEFLATED, _BIG)
_RLE = "1.2.840.10008.1.2.5"
_EXTENDED = "1.2.840.10008.1.2.4.51"
_JPEG = (
    "1.2.840.10008.1.2.4.50",
    _EXTENDED,
    "1.2.840.10008.1.2.4.57",
    "1.2.840.10008.1.2.4.70",
)
_JPEG_LS = ("1.2.840.10008.1.2.4.80", "1.2.840.10008.1.2.4.81")
_JPEG_2000 = (
    "1.2.840.10008.1.2.4.90",
    "1.2.840.10008.1.2.4.91",
    "1.2.840.10008.1.2.4.201",
    "1.2.840.10008.1.2.4.202",
    "1.2.840.10008.1.2.4.203",
)
# Transfer syntax -> the plugin of pydicom that decodes it; "" is pydicom itself.
DECODERS: dict[str, str] = {
    **dict.fromkeys(NATIVE, ""),
    _RLE: "pydicom",
    **dict.fromkeys(_JPEG, "gdcm"),
    **dict.fromkeys(_JPEG_LS, "pyjpegls"),
    **dict.fromkeys(_JPEG_2000, "pylibjpeg"),
}
TRANSFER_SYNTAXES = tuple(DECODERS)
LOSSY = ("1.2.840.10008.1.2.4.50", "1.2.840.10008.1.2.4.51", "1.2.840.10008.1.2.4.81")

_GREY = ("MONOCHROME1", "MONOCHROME2")
_COLOUR = ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_RCT", "YBR_ICT")
# EOI of JPEG and JPEG-LS, EOC of JPEG 2000.
_END_OF_IMAGE = b"\xff\xd9"
# RT Structure Set Storage.
_CONTOURS = ("1.2.840.10008.5.1.4.1.1.481.3",)
# No run of RLE is shorter than two bytes for each of at most 128 that it stands for; a run that helps
# nothing costs one byte in 128.
_RLE_HEADER = 64


@dataclass(frozen=True)
class Layout:
    """The size and sample type of a file's frames, as its header says.

    `stored` of `allocated` bits hold a sample, the highest in bit `high`.
    """

    rows: int
    columns: int
    frames: int
    samples: int
    allocated: int
    stored: int
    high: int
    signed: bool
    photometric: str
    syntax: str

    @property
    def decoded_bytes(self) -> int:
        """Bytes of all decoded frames."""
        channels = 3 if self.photometric == "PALETTE COLOR" else self.samples
        return self.frames * self.rows * self.columns * channels * self.allocated // 8


def layout_of(header: Dataset, where: str, grey: tuple[int, ...] = (8, 16, 32)) -> Layout:
    """Check that the frames can be decoded; `grey` are the bits that a grey sample may have.

    Raises UnsupportedScan, DamagedScan.
    """
    syntax = UID(str(header.file_meta.TransferSyntaxUID))
    if syntax not in DECODERS:
        raise UnsupportedScan(
            f"DICOM: {where} has transfer syntax {syntax.name[:64]!r}, which Locum does not decode; convert "
            "it to Explicit VR Little Endian, for example with gdcmconv --raw"
        )
    with reported(f"the image header of {where}"):
        numbers = {
            name: int(header.get(name) or 0)
            for name in ("Rows", "Columns", "SamplesPerPixel", "BitsAllocated", "BitsStored")
        }
        high = header.get("HighBit")
        signed = bool(int(header.get("PixelRepresentation") or 0))
        photometric = str(header.get("PhotometricInterpretation") or "").strip()
        frames = int(header.get("NumberOfFrames") or 1)
    rows, columns, samples, allocated, stored = numbers.values()
    if not rows or not columns:
        raise UnsupportedScan(f"DICOM: {where} is {no_image(header)}")
    expected = 1 if photometric in (*_GREY, "PALETTE COLOR") else 3 if photometric in _COLOUR else 0
    if samples != expected:
        raise UnsupportedScan(
            f"DICOM: {where}: expected grey, palette or RGB pixels, found {samples} samples per pixel with "
            f"photometric interpretation {photometric[:16]!a}; export it as grey or RGB"
        )
    bits = grey if samples == 1 else (8,)
    if allocated not in bits or not 1 <= stored <= allocated or frames < 1:
        raise UnsupportedScan(
            f"DICOM: {where}: expected {' or '.join(map(str, bits))} bits per sample, found {stored} in "
            f"{allocated} bits and {frames} frames; export it with whole bytes"
        )
    top = stored - 1 if high is None or syntax not in NATIVE else int(high)
    if not stored - 1 <= top < allocated:
        raise DamagedScan(f"DICOM: {where}: bit {top} cannot be the highest of {stored} in {allocated}")
    return Layout(rows, columns, frames, samples, allocated, stored, top, signed, photometric, str(syntax))


def _kind(header: Dataset) -> str:
    """The name of the SOP class, which is no patient's."""
    known = UID(str(header.get("SOPClassUID") or ""))
    return known.name if known.type == "SOP Class" else "of an unknown class"


def no_image(header: Dataset) -> str:
    """What a DICOM object without pixels is, and what to do."""
    kind = _kind(header)
    if str(header.get("SOPClassUID") or "") in _CONTOURS:
        return (
            f"an RTSTRUCT ({kind}): contours on a scan, and no scan; send the images as the scan, and it as "
            "their mask"
        )
    return f"no image ({kind}, without rows and columns); send the images"


def decode_frames(dataset: Dataset, layout: Layout, where: str) -> Iterator[NDArray[Any]]:
    """Yield the file's frames in order, [rows, columns, 1 or 3]: RGB in 8 bits, or stored values of grey.

    With a Modality LUT, grey is what that makes of the stored values (PS3.3 C.11.1).

    Raises DamagedScan, UnsupportedScan.
    """
    if "PixelData" not in dataset:
        raise UnsupportedScan(f"DICOM: {where} has no pixel data ({_kind(dataset)}); send the images")
    plugin = DECODERS[layout.syntax]
    if layout.syntax == _EXTENDED and layout.stored > 8:
        plugin = jpeg_12_bits.PLUGIN
    _check_amount(dataset, layout, where)
    with _decoding(dataset, layout, where):
        decoder = get_decoder(UID(layout.syntax))
        decoded = 0
        for frame, description in decoder.iter_array(dataset, decoding_plugin=plugin):
            decoded += 1
            if decoded > layout.frames:
                break
            yield _values(frame, dataset, layout, str(description["photometric_interpretation"]))
    if decoded != layout.frames:
        found = "more" if decoded > layout.frames else decoded
        raise DamagedScan(f"DICOM: {where} announces {layout.frames} frames and has {found}; send it again")


@contextmanager
def _decoding(dataset: Dataset, layout: Layout, where: str) -> Iterator[None]:
    """Report what a decoder raises, with the transfer syntax, which some files use in a rare variant.

    A frame that is whole and that the decoder refuses is of a variant that it does not know.
    """
    if layout.syntax in NATIVE:
        with reported(f"the pixels of {where}"):
            yield
        return
    name = UID(layout.syntax).name
    try:
        with reported(
            f"the pixels of {where}, {layout.stored} bits in transfer syntax {name!r},",
            "convert it to Explicit VR Little Endian, for example with dcmdjpeg of DCMTK, or export it again",
        ):
            yield
    except DamagedScan as error:
        if not isinstance(error.__context__, ScanError) and _is_whole(dataset, layout):
            raise UnsupportedScan(
                f"DICOM: {where} has {layout.stored} bits in transfer syntax {name!r}, in a variant that is "
                "not supported; convert it to Explicit VR Little Endian, for example with dcmdjpeg of DCMTK"
            ) from None
        raise


def _is_whole(dataset: Dataset, layout: Layout) -> bool:
    """Whether every compressed frame ends as its format says; of RLE nothing says so."""
    if layout.syntax == _RLE:
        return False
    frames = generate_frames(
        dataset.PixelData, number_of_frames=layout.frames, extended_offsets=_extended_offsets(dataset)
    )
    return all(frame.rstrip(b"\0\xff").endswith(_END_OF_IMAGE) for frame in frames)


def _check_amount(dataset: Dataset, layout: Layout, where: str) -> None:
    with reported(f"the pixel data of {where}"):
        pixels: bytes = dataset.PixelData
        per_frame = layout.rows * layout.columns * layout.samples * layout.allocated // 8
        if layout.syntax in NATIVE:
            subsampled = layout.photometric == "YBR_FULL_422"
            needed = layout.frames * per_frame * 2 // 3 if subsampled else layout.frames * per_frame
            if len(pixels) < needed:
                raise DamagedScan(
                    f"DICOM: {where} announces {layout.frames} x {layout.rows} x {layout.columns} pixels "
                    f"({needed} bytes), found {len(pixels)} bytes; send the whole file"
                )
            return
        for frame in generate_frames(
            pixels,
            number_of_frames=layout.frames,
            extended_offsets=_extended_offsets(dataset),
        ):
            if layout.syntax == _RLE:
                if len(frame) > _RLE_HEADER + 2 * per_frame + 2 * layout.rows:
                    raise DamagedScan(f"DICOM: {where}: a frame in RLE is longer than uncompressed")
                continue
            found = _announced(frame, jpeg_2000=layout.syntax in _JPEG_2000)
            if found != (layout.rows, layout.columns, layout.samples):
                what = "no size" if found is None else "{} x {} pixels of {} samples".format(*found)
                raise DamagedScan(
                    f"DICOM: {where}: the header says {layout.rows} x {layout.columns} pixels of "
                    f"{layout.samples} samples, its compressed frame {what}; export it again"
                )


def _extended_offsets(dataset: Dataset) -> tuple[bytes, bytes] | None:
    if "ExtendedOffsetTable" not in dataset or "ExtendedOffsetTableLengths" not in dataset:
        return None
    return dataset.ExtendedOffsetTable, dataset.ExtendedOffsetTableLengths


def _announced(frame: bytes, *, jpeg_2000: bool) -> tuple[int, int, int] | None:
    """Rows, columns and samples by a compressed frame's own header; None without one."""
    if jpeg_2000:
        start = frame.find(b"\xff\x4f\xff\x51")
        size = frame[start + 6 : start + 42]
        if start < 0 or len(size) < 36:
            return None
        right, bottom, left, top = (int.from_bytes(size[2 + 4 * i : 6 + 4 * i], "big") for i in range(4))
        return bottom - top, right - left, int.from_bytes(size[34:36], "big")
    position = 2 if frame.startswith(b"\xff\xd8") else len(frame)
    while position + 10 <= len(frame) and frame[position] == 0xFF:
        marker = frame[position + 1]
        if marker == 0xFF:  # fill byte
            position += 1
            continue
        # Start of frame: of JPEG (C0 to CF but for tables and arithmetic conditioning) and JPEG-LS (F7).
        if marker == 0xF7 or (0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC)):
            rows, columns = (int.from_bytes(frame[position + i : position + i + 2], "big") for i in (5, 7))
            return rows, columns, frame[position + 9]
        position += 2 + int.from_bytes(frame[position + 2 : position + 4], "big")
    return None


def _values(frame: NDArray[Any], dataset: Dataset, layout: Layout, photometric: str) -> NDArray[Any]:
    if frame.shape[:2] != (layout.rows, layout.columns):
        raise DamagedScan("DICOM: a decoded frame has another size than its header says; export it again")
    if layout.photometric == "PALETTE COLOR":
        coloured = apply_color_lut(frame, dataset)
        if coloured.dtype.itemsize > 1:
            # Palettes of 16 bits; some hold 8-bit values all the same. All their entries decide.
            range_ = np.iinfo(frame.dtype)
            entries = np.arange(range_.min, range_.max + 1).astype(frame.dtype)
            coloured = coloured >> 8 if apply_color_lut(entries, dataset).max() > 255 else coloured
        return coloured[..., :3].astype(np.uint8)
    if layout.samples == 3:
        if photometric != "RGB":
            raise UnsupportedScan(
                f"DICOM: colours of {photometric[:16]!r} are not converted; export it as RGB"
            )
        return frame
    grey = _signed(frame, layout)[..., None]
    if (table := modality_lut(dataset)) is None:
        return grey
    if table.LUTDescriptor[2] not in (8, 16):
        raise UnsupportedScan(
            f"DICOM: expected a Modality LUT of 8 or 16 bits, found {table.LUTDescriptor[2]}; export it with "
            "Rescale Slope and Intercept"
        )
    # pydicom subtracts the first value in the type of the pixels, which would overflow.
    return apply_modality_lut(grey.astype(np.promote_types(grey.dtype, np.int32)), dataset)


def padding_of(dataset: Dataset, layout: Layout) -> tuple[int, int] | None:
    """The lowest and highest stored value that is no measurement (PS3.3 C.7.5.1.1.2); None without one.

    A Modality LUT may map it to any value, and then nothing is known to be padding. Some writers give a
    negative value as if it were unsigned, or the other way round.
    """
    if layout.samples != 1 or layout.photometric not in _GREY or dataset.get("ModalityLUTSequence"):
        return None
    value = dataset.get("PixelPaddingValue")
    if value is None or value == "":
        return None
    limit = dataset.get("PixelPaddingRangeLimit")
    ends = []
    for end in (value, value if limit is None or limit == "" else limit):
        own = int(end) % 2**layout.stored
        negative = layout.signed and own >= 2 ** (layout.stored - 1)
        ends.append(own - 2**layout.stored if negative else own)
    return min(ends), max(ends)


def modality_lut(dataset: Dataset) -> Dataset | None:
    """Return the item of the Modality LUT Sequence with its number of entries unsigned; None without one."""
    if not dataset.get("ModalityLUTSequence"):
        return None
    table: Dataset = dataset.ModalityLUTSequence[0]
    # pydicom reads it as signed beside signed pixels in Implicit VR, and cannot write that.
    table.LUTDescriptor[0] %= 2**16
    return table


def _signed(frame: NDArray[Any], layout: Layout) -> NDArray[Any]:
    """Keep the stored bits alone (others may hold an overlay), and extend the sign from the highest."""
    bits = 8 * frame.dtype.itemsize
    if layout.stored == layout.allocated == bits:
        return frame
    above, below = bits - 1 - layout.high, bits - layout.stored
    kind = np.dtype(f"{'i' if layout.signed else 'u'}{frame.dtype.itemsize}")
    return (frame.view(kind) << above) >> below
