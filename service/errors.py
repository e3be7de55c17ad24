"""Everything of the service's own that can go wrong; the errors of the store and of scans are the store's.

    ServiceError
    ├── SettingsInvalid          a variable of the environment has a value that makes no sense
    ├── DatabaseNotMigrated      the database is of another version than this code
    ├── BrokerError              no Redis, where one was promised
    ├── AssignmentError
    │   ├── HospitalUnknown      nobody registered this hospital
    │   ├── AssignmentStale      the log has moved on since the caller looked
    │   └── NothingToRollBack    there is no earlier assignment
    ├── CohortError
    │   ├── CohortUnknown        no such cohort of this hospital, or no such scan in it
    │   ├── CohortGone           its scans expired or were deleted
    │   ├── CohortInUse          a job that is not over needs its scans
    │   ├── ScanNameTaken        other bytes are there under this name
    │   ├── MaskTaken            the scan has another mask
    │   └── CohortFull           no room: too many scans, or too many bytes
    └── JobError
        ├── JobUnknown           no such job
        ├── JobNotOver           only a job that is over can do this
        ├── QueueFull            too many jobs wait for a worker already
        ├── IdempotencyConflict  the key was used for another request
        ├── LeaseLost            the job is another worker's by now
        ├── JobCancelled         somebody asked for the job to stop
        └── AdaptationRefused    there is nothing that could be adapted, or adapted to

A message names the thing, what was expected, what was found, and what to do. Over HTTP each is a problem
(RFC 9457).
"""

from __future__ import annotations


class ServiceError(Exception):
    """Base of every error that the service raises on purpose, HTTP problems apart."""


class SettingsInvalid(ServiceError):
    """A setting has a value that makes no sense."""


class DatabaseNotMigrated(ServiceError):
    """The schema is not the one this code was written for."""


class BrokerError(ServiceError):
    """Redis cannot be started or reached."""


class AssignmentError(ServiceError):
    """An entry cannot be added to the serving log."""


class HospitalUnknown(AssignmentError):
    """No hospital of that id is registered."""


class AssignmentStale(AssignmentError):
    """The entry that the caller meant to replace is not the latest any more."""


class NothingToRollBack(AssignmentError):
    """No assignment came before the present one."""


class CohortError(ServiceError):
    """A cohort cannot be read or changed."""


class CohortUnknown(CohortError):
    """The hospital has no cohort of that id, or the cohort no scan of that name."""


class CohortDeleted(CohortError):
    """Its scans have expired or were deleted."""


class CohortInUse(CohortError):
    """A job that is not over needs its scans."""


class ScanNameTaken(CohortError):
    """A scan with other bytes has this name."""


class MaskTaken(CohortError):
    """The scan has a mask of other bytes, or another scan has its name by now."""


class CohortFull(CohortError):
    """There is no room for another scan."""


class JobError(ServiceError):
    """A job cannot be made, changed or gone on with."""


class JobUnknown(JobError):
    """There is no job of that id."""


class JobStillRunning(JobError):
    """The job still waits or runs."""


class QueueFull(JobError):
    """As many jobs wait for a worker as may."""


class IdempotencyConflict(JobError):
    """The idempotency key belongs to another request."""


class LeaseLost(JobError):
    """The worker's lease is not in force any more: it must stop, and may write nothing."""


class JobCancelled(JobError):
    """The job is to stop. Raised inside a worker, between two steps of its work."""


class AdaptationRejected(JobError):
    """The artefact is of a kind that cannot be adapted, the cohort has no scan, or there is no GPU."""
