"""Look-ups of registered hospitals."""

from __future__ import annotations

import pytest

from service.database import Database
from service.database.hospitals import require_hospital, site_of_hospital
from service.errors import HospitalUnknown


def test_site_of_hospital_is_none_for_an_outside_hospital(database: Database) -> None:
    with database.read() as session:
        assert require_hospital(session, "south").name == "South"
        assert site_of_hospital(session, "south") == "CS"
        assert site_of_hospital(session, "north") is None


def test_unregistered_hospital_is_rejected_with_advice(database: Database) -> None:
    with database.read() as session:
        for ask in (site_of_hospital, require_hospital):
            with pytest.raises(HospitalUnknown, match="PUT /hospitals/west registers it"):
                ask(session, "west")
            with pytest.raises(HospitalUnknown, match="'SOUTH' is registered, but 'south' is"):
                ask(session, "SOUTH")
