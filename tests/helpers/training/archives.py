"""Archives of which the members expand to much."""

from __future__ import annotations

import io
import zipfile


def deflated(content: bytes) -> bytes:
    """The same archive with its members compressed."""
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(content)) as old,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for member in old.namelist():
            new.writestr(member, old.read(member))
    return packed.getvalue()
