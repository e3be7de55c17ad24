"""The database: hospitals, API keys, the serving log, cohorts, viewers' scans, jobs, verifications."""

from service.database.caller import ANONYMOUS, PUBLIC, Caller, caller_of
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
    ViewerScanRow,
    Worker,
)
from service.database.schema import check, is_current, upgrade
from service.roles import Role

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
    "ViewerScanRow",
    "Worker",
    "caller_of",
    "check",
    "database_failure",
    "database_now",
    "in_turn",
    "is_current",
    "upgrade",
]
