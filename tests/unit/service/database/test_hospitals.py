"""Look-ups of registered hospitals."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier, BrokenBarrierError
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Response

from service.database import ANONYMOUS, Database
from service.database.hospitals import require_hospital, site_of_hospital
from service.errors import HospitalUnknown
from service.http.problems import Problem
from service.routes import hospitals


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


def test_concurrent_changes_with_one_if_match_have_one_success(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    context: Any = SimpleNamespace(database=database.for_caller(ANONYMOUS))
    seen = Response()
    hospitals.get_hospital(context, "north", seen)
    both, decision = Barrier(2), hospitals._decision

    def wait_for_the_other(*given: Any) -> dict[str, Any]:
        # Both compared If-Match, or the other one waits for the row.
        with suppress(BrokenBarrierError):
            both.wait(2)
        return decision(*given)

    def change(site: str) -> int:
        body = hospitals.HospitalBody(name="North", site=site, reason="a merger", actor="ada")
        try:
            hospitals.put_hospital(context, "north", body, Response(), seen.headers["ETag"])
        except Problem as problem:
            return problem.status
        return 200

    monkeypatch.setattr(hospitals, "_decision", wait_for_the_other)
    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(change, ["CS", "UCL"])) == [200, 412]
