"""The caller that a request or a session acts for, and which hospitals' records it may see.

A hospital that a caller may not see does not exist for it: look-ups answer as for an unknown id, and listings
leave it out. The store hides versions that were adapted to such a hospital (`Store.visible_to`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from sqlalchemy.orm import Session

Role = Literal["operator", "engineer", "researcher"]

_INFO = "caller"


@dataclass(frozen=True)
class Caller:
    """Who asks.

    Attributes:
        actor: name, for people.
        roles: what the caller is to the service. No route requires one yet.
        hospitals: ids of the hospitals that it may see; None for all of them.
    """

    actor: str
    roles: frozenset[Role]
    hospitals: frozenset[str] | None

    def sees(self, hospital: str | None) -> bool:
        """Return whether the caller may see the records of this hospital.

        What belongs to no hospital (None) does: a scan's job without one is known by its id alone, which only
        the client that sent the scan received.
        """
        return self.hospitals is None or hospital is None or hospital in self.hospitals


ANONYMOUS = Caller("anonymous", frozenset(get_args(Role)), None)
"""Every client, while the service has no API keys."""

SERVICE = Caller("service", frozenset(get_args(Role)), None)
"""The service itself: the worker, the reconciler and the metrics."""


def caller_of(session: Session) -> Caller:
    """Return the caller that a session of `Database` acts for."""
    caller: Caller = session.info[_INFO]
    return caller


def acting_for(caller: Caller) -> dict[str, Caller]:
    """The `info` of such a session."""
    return {_INFO: caller}
