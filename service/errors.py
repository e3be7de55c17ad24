"""Everything of the service's own that can go wrong; the errors of the store and of scans are the store's.

    ServiceError
    ├── DatabaseNotMigrated      the database is of another version than this code
    ├── BrokerError              no Redis, where one was promised
    └── AssignmentError
        ├── HospitalUnknown      nobody registered this hospital
        ├── AssignmentStale      the log has moved on since the caller looked
        └── NothingToRollBack    there is no earlier assignment

A message names the thing, what was expected, what was found, and what to do. Over HTTP each is a problem
(RFC 9457).
"""

from __future__ import annotations


class ServiceError(Exception):
    """Base of every error that the service raises on purpose, HTTP problems apart."""


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
