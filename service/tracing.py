"""The id of the request that is answered: log lines and rows of the audit trail carry it."""

from __future__ import annotations

from contextvars import ContextVar

current_request: ContextVar[str] = ContextVar("locum_request", default="-")
"""`-` outside of a request."""
