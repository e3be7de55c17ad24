"""Parse references to artefacts: `name`, `name@3`, `name@sha256:…`."""

from __future__ import annotations

import re

from model_store.errors import ReferenceInvalid

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_REFERENCE = re.compile(rf"({NAME.pattern})(?:@(?:([1-9][0-9]{{0,8}})|(sha256:[0-9a-f]{{64}})))?")


def parse_reference(reference: str) -> tuple[str, int | None, str | None]:
    """Split `name`, `name@3` or `name@sha256:…` into name, version and digest. Raises ReferenceInvalid."""
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise ReferenceInvalid(f"'{reference}': expected name, name@3 or name@sha256:…")
    name, number, digest = match.groups()
    return name, int(number) if number else None, digest
