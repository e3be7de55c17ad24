"""Look up registered hospitals, and the federation sites that they are.

Every look-up of what belongs to a hospital begins here, or asks `caller_of(session)` itself: a hospital that
the caller may not see is unknown.
"""

from __future__ import annotations

from sqlalchemy import ColumnElement, func, select, true
from sqlalchemy.orm import Session

from model_store.versions import some
from service.database.caller import caller_of
from service.database.models import Hospital
from service.errors import HospitalUnknown


def visible_hospitals(session: Session, limit: int | None = None, after: str | None = None) -> list[Hospital]:
    """List the registered hospitals that the caller may see, by id, after the id `after`."""
    query = select(Hospital).where(_visible(session))
    if after is not None:
        query = query.where(Hospital.id > after)
    return list(session.scalars(query.order_by(Hospital.id).limit(limit)))


def require_visible(session: Session, hospital: str) -> None:
    """Raise HospitalUnknown for a hospital that the caller may not see, registered or not."""
    if not caller_of(session).sees(hospital):
        raise _unknown(session, hospital)


def require_hospital(session: Session, hospital: str) -> Hospital:
    """The hospital's row.

    Raises:
        HospitalUnknown: no hospital of this id is registered, or the caller may not see it.
    """
    require_visible(session, hospital)
    found = session.get(Hospital, hospital)
    if found is None:
        raise _unknown(session, hospital)
    return found


def site_of_hospital(session: Session, hospital: str) -> str | None:
    """The federation site of a member hospital; None for one from outside. Raises as `require_hospital`."""
    return require_hospital(session, hospital).site


def lent_sites(session: Session) -> frozenset[str] | None:
    """The sites of which the own model may answer this caller: its hospitals' sites, and those that share it.

    None for all: a caller of all hospitals is the operator.
    """
    if caller_of(session).hospitals is None:
        return None
    query = select(Hospital.site).where(Hospital.site.is_not(None), _visible(session) | Hospital.shares_model)
    return frozenset(site for site in session.scalars(query) if site is not None)


def share_of(session: Session, total: int) -> int:
    """The most that one hospital may take of what all share: half where several are registered, else all."""
    several = (session.scalar(select(func.count()).select_from(Hospital)) or 0) > 1
    return total // 2 if several else total


def _unknown(session: Session, hospital: str) -> HospitalUnknown:
    caller = caller_of(session)
    query = select(Hospital.id).where(_visible(session), func.lower(Hospital.id) == hospital.lower())
    alike = session.scalars(query.order_by(Hospital.id)).all()
    if alike:
        hint = f", but {' and '.join(map(repr, alike))} is: ids tell capitals from small letters"
    elif not caller.sees(hospital):
        # Whether it is registered is not this caller's to know.
        covered = some([repr(each) for each in sorted(caller.hospitals or ())]) or "no hospital"
        hint = f" that your key or token covers: it covers {covered}"
    elif caller.hospitals is None and caller.has("admin"):
        hint = f": PUT /hospitals/{hospital} registers it"
    else:
        hint = ": an admin of all hospitals registers it"
    return HospitalUnknown(f"no hospital {hospital!r} is registered{hint}")


def _visible(session: Session) -> ColumnElement[bool]:
    hospitals = caller_of(session).hospitals
    return true() if hospitals is None else Hospital.id.in_(hospitals)
