"""The errors of stored artefacts, tasks and scans.

    LocumStoreError
    ├── StoreError
    │   ├── ReferenceInvalid
    │   ├── ReferenceNotFound
    │   ├── ArtefactDamaged
    │   ├── ArtefactWithdrawn
    │   ├── ArtefactUntrusted
    │   ├── GraphRefused
    │   ├── KeyUnusable
    │   ├── UnknownKind
    │   ├── KindMismatch
    │   ├── PublishRefused
    │   └── StoreUnavailable
    ├── TaskError
    └── ScanError
        ├── UnsupportedScan
        ├── DamagedScan
        ├── ScanTooLarge
        └── ScanMismatch
            └── MaskMismatch

A message names the thing, what was expected, what was found, and what to do.
"""

from __future__ import annotations


class LocumStoreError(Exception):
    """Base of all errors that `model_store` raises on purpose."""


class StoreError(LocumStoreError):
    """An artefact cannot be published, found or opened."""


class ReferenceInvalid(StoreError):
    """A reference is not `name`, `name@3` or `name@sha256:…`, or a name does not follow the grammar."""


class ReferenceNotFound(StoreError):
    """No artefact in the store has the reference."""


class ArtefactDamaged(StoreError):
    """A file of an artefact is missing, truncated or has another digest."""


class ArtefactWithdrawn(StoreError):
    """The version was withdrawn: it has a tombstone with a reason."""


class ArtefactUntrusted(StoreError):
    """No trusted key signed the version."""


class GraphRefused(StoreError):
    """A graph has data in other files, or operators and parts that are not allowed."""


class KeyUnusable(StoreError):
    """A file is not a key of the expected kind, or a key would overwrite one."""


class UnknownKind(StoreError):
    """This version of Locum does not know the manifest's kind or schema version."""


class KindMismatch(StoreError):
    """The artefact is of another kind than the caller expects."""


class PublishRefused(StoreError):
    """The draft contradicts itself, or refers to an artefact that is not in the store."""


class StoreUnavailable(StoreError):
    """The S3 service does not answer, or refuses; the folder of the store had models and has none."""


class TaskError(LocumStoreError):
    """A task.yaml is ill-defined, or data do not belong to the task."""


class ScanError(LocumStoreError):
    """A scan cannot be read or does not fit."""


class UnsupportedScan(ScanError):
    """A format, or a variant of a format, that Locum does not read."""


class DamagedScan(ScanError):
    """A scan is truncated, has an inconsistent header, or values that are not numbers."""


class ScanTooLarge(ScanError):
    """The scan exceeds the limits; raised before anything large is allocated."""


class ScanMismatch(ScanError):
    """A readable scan that does not fit the task."""


class MaskMismatch(ScanMismatch):
    """A readable image that is not a mask, or not a mask of its scan."""
