"""What the service must remember: hospitals, what served whom, and when the store was last verified."""

from service.database.engine import Database
from service.database.models import Assignment, Base, Hospital, Verification
from service.database.schema import is_current, upgrade

__all__ = ["Assignment", "Base", "Database", "Hospital", "Verification", "is_current", "upgrade"]
