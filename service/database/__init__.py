"""What the service must remember: hospitals, what served whom, cohorts, jobs, verifications of the store."""

from service.database.engine import Database, in_turn
from service.database.models import (
    Assignment,
    Base,
    Cohort,
    CohortMask,
    CohortScan,
    Hospital,
    Job,
    JobEvent,
    KeyUsage,
    Verification,
)
from service.database.schema import is_current, upgrade

__all__ = [
    "Assignment",
    "Base",
    "Cohort",
    "CohortMask",
    "CohortScan",
    "Database",
    "Hospital",
    "Job",
    "JobEvent",
    "KeyUsage",
    "Verification",
    "in_turn",
    "is_current",
    "upgrade",
]
