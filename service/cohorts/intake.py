"""Decode a job's scans on arrival, so that the client gets the error, and remove the patient from them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from anyio import to_thread

from model_store.errors import ScanError
from model_store.scan import choose_series, decode, deidentify
from service.errors import FilesUnavailable
from service.inference.admission import Admission
from service.runtime.spool import Upload
from service.settings import Settings, cohort_limits

UID_KEY = "dicom-uid.key"
"""The file of the installation's key for UIDs."""
_KEY_BYTES = 32


async def take_in(
    uploads: Sequence[Upload], settings: Settings, admission: Admission, series: str | None = None
) -> list[str]:
    """Decode each scan, and return its format; each takes its turn.

    An upload is replaced by its de-identified bytes: only these are stored. `series` chooses one of several
    of DICOM, see `choose_series`.

    Raises:
        ScanError: a scan cannot be read; of several scans the message says which.
    """
    formats = []
    for number, upload in enumerate(uploads, start=1):
        try:
            async with admission.turn():
                formats.append(await to_thread.run_sync(check_and_deidentify, upload, settings, series))
        except ScanError as error:
            if len(uploads) == 1:
                raise
            # Named by its position in the form, because file names are ignored.
            raise type(error)(f"scan {number} of {len(uploads)}: {error}") from error
    return formats


def check_and_deidentify(upload: Upload, settings: Settings, series: str | None = None) -> str:
    """Decode one scan, replace it by its de-identified bytes, and return the format. Blocking.

    Raises ScanError.
    """
    limits = cohort_limits(settings)
    data = upload.read()
    chosen = choose_series(data, series, limits)
    if chosen is not data:
        upload.replace(chosen)
    found = decode(chosen, limits).format
    deidentify_upload(upload, settings)
    return found


def deidentify_upload(upload: Upload, settings: Settings) -> None:
    """Replace a scan or mask that was decoded by its de-identified bytes. Blocking."""
    data = upload.read()
    cleaned = deidentify(data, cohort_limits(settings), uid_key(settings))
    if cleaned != data:
        upload.replace(cleaned)


def uid_key(settings: Settings) -> bytes:
    """The installation's key for UIDs, drawn when it is first needed: the same for all processes.

    Raises FilesUnavailable if it is damaged: with an empty key, anyone could compute the pseudonyms.
    """
    files, name = settings.open_files(), UID_KEY
    key = files.read(name)
    if key is None:
        key = files.create(name, secrets.token_bytes(_KEY_BYTES))
    if len(key) != _KEY_BYTES:
        raise FilesUnavailable(
            f"{name}: expected {_KEY_BYTES} bytes, found {len(key)}: restore the file, or delete it for a "
            "new key, which gives known patients other pseudonyms"
        )
    return key
