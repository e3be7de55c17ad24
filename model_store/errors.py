"""The errors of stored artefacts, tasks and scans.

    LocumStoreError
    ├── StoreError
    │   ├── ReferenceInvalid      the reference is not `name`, `name@3` or `name@sha256:…`
    │   ├── ReferenceNotFound     no artefact in the store has that reference
    │   ├── ArtefactDamaged       a file is missing, truncated or has another digest
    │   ├── ArtefactWithdrawn     the version was withdrawn, with a reason
    │   ├── ArtefactUntrusted     no trusted key signed the version
    │   ├── GraphRefused          a graph names other files, or has operators that are not allowed
    │   ├── KeyUnusable           a file is not the key that it should be
    │   ├── UnknownKind           this version of Locum does not know the manifest's kind or schema
    │   ├── KindMismatch          the artefact is of another kind than expected
    │   ├── PublishRefused        the draft cannot be published
    │   └── StoreUnavailable      the S3 service does not answer, or refuses; the folder lost its models
    ├── TaskError                 a task.yaml, or a value outside the task
    └── ScanError
        ├── UnsupportedScan       a format, or a variant of one, that Locum does not read
        ├── DamagedScan           truncated, inconsistent header, NaN
        ├── ScanTooLarge          beyond the limits; raised before anything large is allocated
        └── ScanMismatch          a valid scan that does not fit this task
            └── MaskMismatch      a valid image that is not a mask of its scan

A message names the thing, what was expected, what was found, and what to do.
"""

from __future__ import annotations


class LocumStoreError(Exception):
    """Base of all errors that `model_store` raises on purpose."""


class StoreError(LocumStoreError):
    """An artefact cannot be published, found or opened."""


class ReferenceInvalid(StoreError):
    """A reference or name does not follow the grammar."""


class ReferenceNotFound(StoreError):
    """No artefact in the store has the reference."""


class ArtefactDamaged(StoreError):
    """An artefact's files are not as published."""


class ArtefactWithdrawn(StoreError):
    """The version was withdrawn (it has a tombstone)."""


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
    """A task is ill-defined, or data do not belong to it."""


class ScanError(LocumStoreError):
    """A scan cannot be read or does not fit."""


class UnsupportedScan(ScanError):
    """A format, or a variant of a format, that Locum does not read."""


class DamagedScan(ScanError):
    """The bytes do not match their header."""


class ScanTooLarge(ScanError):
    """The scan exceeds the limits."""


class ScanMismatch(ScanError):
    """A readable scan that does not fit the task."""


class MaskMismatch(ScanMismatch):
    """A readable image that is not a mask, or not a mask of its scan."""
