"""A decoder of pydicom's for JPEG Extended of 12 bits by GDCM, which reads it though pydicom's own refuses.

pydicom takes `is_available`, `DECODER_DEPENDENCIES` and the function that decodes from a module by name.
"""

from __future__ import annotations

from pydicom.pixels.decoders.base import DecodeRunner, get_decoder
from pydicom.uid import JPEGExtended12Bit

DECODER_DEPENDENCIES = {JPEGExtended12Bit: ("gdcm>=3.0.24",)}
_END_OF_IMAGE = b"\xff\xd9"
PLUGIN = "gdcm of 12 bits"


def is_available(uid: str) -> bool:
    """Whether the transfer syntax is decoded here: GDCM is always installed."""
    return uid in DECODER_DEPENDENCIES


def decode_frame(source: bytes, runner: DecodeRunner) -> bytes:
    """Decode one grey frame to 16 bits a pixel. Raises RuntimeError, ValueError."""
    if not source.rstrip(b"\0\xff").endswith(_END_OF_IMAGE):
        # GDCM would make grey of what is missing.
        raise ValueError("the frame is cut off")
    # Half a second of imports that only compressed pixels need.
    import gdcm

    fragment, fragments = gdcm.Fragment(), gdcm.SequenceOfFragments.New()
    fragment.SetByteStringValue(source)
    fragments.AddFragment(fragment)
    element = gdcm.DataElement(gdcm.Tag(0x7FE0, 0x0010))
    element.SetValue(fragments.__ref__())
    image = gdcm.Image()
    image.SetNumberOfDimensions(2)
    image.SetDimensions((runner.columns, runner.rows, 1))
    image.SetDataElement(element)
    photometric = gdcm.PhotometricInterpretation.GetPIType(str(runner.photometric_interpretation))
    image.SetPhotometricInterpretation(gdcm.PhotometricInterpretation(photometric))
    syntax = gdcm.TransferSyntax.GetTSType(str.__str__(runner.transfer_syntax))
    image.SetTransferSyntax(gdcm.TransferSyntax(syntax))
    stored = runner.bits_stored
    image.SetPixelFormat(
        gdcm.PixelFormat(1, runner.bits_allocated, stored, stored - 1, runner.pixel_representation)
    )
    # GDCM returns its bytes as a text.
    decoded: bytes = image.GetBuffer().encode("utf-8", "surrogateescape")
    return decoded


get_decoder(JPEGExtended12Bit).add_plugin(PLUGIN, (__name__, "decode_frame"))
