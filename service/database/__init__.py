"""The database: hospitals, API keys, the serving log, cohorts, jobs, verifications of the store."""

from service.database.caller import ANONYMOUS, PUBLIC, Caller, Role, caller_of
from service.database.engine import DATABASE_ERRORS, Database, database_failure, database_now, in_turn
from service.database.models import (
    ApiKey,
    Assignment,
    AuditCheckpoint,
    AuditRow,
    Base,
    BrowserSession,
    Cohort,
    CohortMask,
    CohortScan,
    Hospital,
    Job,
    JobEvent,
    KeyUsage,
    Verification,
    Worker,
)
from service.database.schema import check, is_current, upgrade

__all__ = [
    "ANONYMOUS",
    "DATABASE_ERRORS",
    "PUBLIC",
    "ApiKey",
    "Assignment",
    "AuditCheckpoint",
    "AuditRow",
    "Base",
    "BrowserSession",
    "Caller",
    "Cohort",
    "CohortMask",
    "CohortScan",
    "Database",
    "Hospital",
    "Job",
    "JobEvent",
    "KeyUsage",
    "Role",
    "Verification",
    "Worker",
    "caller_of",
    "check",
    "database_failure",
    "database_now",
    "in_turn",
    "is_current",
    "upgrade",
]
