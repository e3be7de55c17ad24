"""The caller that a request or a session acts for, and which hospitals' records it may see.

A hospital that a caller may not see does not exist for it: look-ups answer as for an unknown id, and listings
leave it out. The store hides versions that were adapted to such a hospital (`Store.visible_to`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import get_args

from sqlalchemy.orm import Session

from service.roles import Role

# Each hospital role includes those before it. A federation operator has none of them.
_HOSPITAL_ROLES: tuple[Role, ...] = ("reader", "operator", "approver", "admin")

_INFO = "caller"


@dataclass(frozen=True)
class Caller:
    """Who asks.

    Attributes:
        actor: name, for logs: `key:<name>`, `key:<name>@<hospital>` or `oidc:<subject>`.
        roles: as granted; `has` knows which others they include.
        hospitals: ids of the hospitals that it may see; None for all of them.
        authenticated: whether a credential proves the actor.
        key: id of the API key that does; None for another credential.
        until: when the credential ends; None for never.
    """

    actor: str
    roles: frozenset[Role]
    hospitals: frozenset[str] | None
    authenticated: bool = True
    key: str | None = field(default=None, compare=False)
    until: datetime | None = field(default=None, compare=False)

    @property
    def share(self) -> str:
        """What this caller's requests count for where callers share a limit fairly.

        Its hospitals, so that another key of a hospital gives it no second share; else the caller itself.
        """
        return " ".join(sorted(self.hospitals)) if self.hospitals else self.actor

    def has(self, role: Role) -> bool:
        """Return whether the caller has this role, or one that includes it."""
        if role not in _HOSPITAL_ROLES:
            return role in self.roles
        return not self.roles.isdisjoint(_HOSPITAL_ROLES[_HOSPITAL_ROLES.index(role) :])

    def sees(self, hospital: str | None) -> bool:
        """Return whether the caller may see the records of this hospital.

        What belongs to no hospital (None) does.
        """
        return self.hospitals is None or hospital is None or hospital in self.hospitals


ANONYMOUS = Caller("anonymous", frozenset(get_args(Role)), None, authenticated=False)
"""Every client where `LOCUM_AUTH` is `none`."""

PUBLIC = Caller("anonymous", frozenset(), frozenset(), authenticated=False)
"""Every client of a path that needs no credential."""

SERVICE = Caller("service", frozenset(get_args(Role)), None)
"""The service itself: the worker, the reconciler and the metrics."""


def caller_of(session: Session) -> Caller:
    """Return the caller that a session of `Database` acts for."""
    caller: Caller = session.info[_INFO]
    return caller


def acting_for(caller: Caller) -> dict[str, Caller]:
    """The `info` of such a session."""
    return {_INFO: caller}
