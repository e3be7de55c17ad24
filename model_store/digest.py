"""Compute digests in the form used by references: `sha256:` and 64 hexadecimal digits."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

from pydantic import Field

Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


def sha256(content: bytes) -> str:
    """Compute the digest of bytes."""
    return "sha256:" + hashlib.sha256(content).hexdigest()


def sha256_of_file(path: Path) -> str:
    """Compute the digest of a file without loading it into memory."""
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
