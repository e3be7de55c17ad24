"""What a file of weights may expand to, by its own size: checked by headers and shapes, before it is read.

Trained weights hardly compress. A file that would become many times as large was made to fill the memory.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable, Mapping
from typing import Final

import torch
from torch import Tensor

MOST_BYTES: Final = 8 << 30
_TIMES, _ALWAYS = 8, 64 << 20
# Names, shapes and logs beside the tensors, in torch's pickle.
_MOST_PICKLED: Final = 8 << 20
_PICKLE = "data.pkl"
# Tensors are kept in float32 at least.
_FLOAT: Final = 4


def most_bytes(size: int) -> int:
    """The bytes that a file of `size` bytes may become: 8 times as many, at least 64 MiB, at most 8 GiB."""
    return min(MOST_BYTES, max(_ALWAYS, _TIMES * size))


def check_expanded(size: int, found: int, what: str = "numbers") -> None:
    """Raise ValueError where `found` bytes are more than a file of `size` bytes may become."""
    if found > (most := most_bytes(size)):
        raise ValueError(
            f"expected at most {most >> 20} MiB of {what} in a file of {size} bytes, found {found >> 20} "
            "MiB: save it without compression, with no tensor twice"
        )


def check_archive(content: bytes) -> list[zipfile.ZipInfo]:
    """List the members of a zip archive (`.npz`, `.pth`), by its directory.

    Raises ValueError where they expand to too much, and BadZipFile.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = archive.infolist()
    check_expanded(len(content), sum(member.file_size for member in members))
    pickled = max((each.file_size for each in members if each.filename.endswith(_PICKLE)), default=0)
    if pickled > _MOST_PICKLED:
        raise ValueError(
            f"expected at most {_MOST_PICKLED >> 20} MiB beside the tensors, found {pickled >> 20} MiB: save "
            "its state_dict alone"
        )
    return members


def check_tensors(tensors: Mapping[str, Tensor], size: int) -> None:
    """Check the tensors of a file of `size` bytes. A view repeats numbers that the file has once.

    Raises ValueError for a tensor that is not dense and of real numbers, and where all have too many.
    """
    for name, tensor in tensors.items():
        plain = tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_complex())
        if not plain or tensor.device.type != "cpu":
            raise ValueError(f"tensor '{name[:128]}': expected a dense tensor of real numbers")
    check_expanded(size, as_floats(tensors.values()))


def as_floats(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, those of narrower numbers as float32. Shapes are enough (torch's meta device)."""
    return sum(tensor.numel() * max(tensor.element_size(), _FLOAT) for tensor in tensors)
