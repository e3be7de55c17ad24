"""Roles of callers."""

from __future__ import annotations

from typing import Literal

Role = Literal["reader", "operator", "approver", "admin", "federation"]
"""What a caller may do; the reference of roles is docs/reference/roles.md."""
