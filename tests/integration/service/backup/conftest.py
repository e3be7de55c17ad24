"""PostgreSQL, as the unit tests of the service have it."""

from tests.unit.service.conftest import postgresql

__all__ = ["postgresql"]
