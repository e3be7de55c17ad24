"""Everything that can be wrong with a stored artefact, a task or a scan.

    LocumStoreError
    ├── StoreError
    │   ├── ReferenceInvalid      the reference is not `name`, `name@3` or `name@sha256:…`
    │   ├── ReferenceNotFound     nothing in the store answers to it
    │   ├── ArtefactDamaged       a file is missing, truncated or has another digest
    │   ├── ArtefactWithdrawn     the version was withdrawn, with a reason
    │   ├── UnknownKind           the manifest is of a kind or schema this version does not know
    │   ├── KindMismatch          the artefact is of another kind than expected
    │   └── PublishRefused        the draft is not fit to be published
    ├── TaskError                 a task.yaml, or a value outside the task
    └── ScanError
        ├── UnsupportedScan       not a format Locum reads, or a variant it does not
        ├── DamagedScan           truncated, lying header, NaN
        ├── ScanTooLarge          beyond the limits, before anything large is allocated
        └── ScanMismatch          a good scan that is not one of this task
            └── MaskMismatch      a picture that is not a mask of its scan

A message names the thing, what was expected, what was found, and what to do.
"""

from __future__ import annotations


class LocumStoreError(Exception):
    """Base of every error that `model_store` raises on purpose."""


class StoreError(LocumStoreError):
    """An artefact cannot be published, found or opened."""


class ReferenceInvalid(StoreError):
    """A reference or name does not follow the grammar."""


class ReferenceNotFound(StoreError):
    """No artefact answers to the reference."""


class ArtefactDamaged(StoreError):
    """An artefact's files are not the ones that were published."""


class ArtefactWithdrawn(StoreError):
    """The version carries a tombstone."""


class UnknownKind(StoreError):
    """The manifest's kind or schema version is not known here."""


class KindMismatch(StoreError):
    """The artefact is of another kind than the caller expects."""


class PublishRefused(StoreError):
    """The draft contradicts itself or refers to what is not in the store."""


class TaskError(LocumStoreError):
    """A task is ill-defined, or data do not belong to it."""


class ScanError(LocumStoreError):
    """A scan cannot be read or does not fit."""


class UnsupportedScan(ScanError):
    """A format, or a variant of a format, that Locum does not read."""


class DamagedScan(ScanError):
    """The bytes are not what their header promises."""


class ScanTooLarge(ScanError):
    """The scan is beyond the limits in force."""


class ScanMismatch(ScanError):
    """A readable scan that does not fit the task."""


class MaskMismatch(ScanMismatch):
    """A readable picture that is no mask, or not one of its scan."""
