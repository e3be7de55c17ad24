"""Look up registered hospitals, and the federation sites that they are."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from service.database.models import Hospital
from service.errors import HospitalUnknown


def require_hospital(session: Session, hospital: str) -> Hospital:
    """The hospital's row.

    Raises:
        HospitalUnknown: no hospital of this id is registered.
    """
    found = session.get(Hospital, hospital)
    if found is None:
        alike = session.scalars(
            select(Hospital.id).where(func.lower(Hospital.id) == hospital.lower()).order_by(Hospital.id)
        ).all()
        hint = (
            f", but {' and '.join(map(repr, alike))} is: ids tell capitals from small letters"
            if alike
            else f": PUT /hospitals/{hospital} registers it"
        )
        raise HospitalUnknown(f"no hospital {hospital!r} is registered{hint}")
    return found


def site_of_hospital(session: Session, hospital: str) -> str | None:
    """The federation site of a member hospital; None for one from outside.

    Raises:
        HospitalUnknown: no hospital of this id is registered.
    """
    return require_hospital(session, hospital).site
