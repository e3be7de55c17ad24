"""What a session that acts for a caller finds."""

from __future__ import annotations

import pytest

from service.cohorts import cohorts
from service.database import Caller, Database, caller_of
from service.database.caller import SERVICE
from service.database.hospitals import require_hospital, require_visible, visible_hospitals
from service.errors import CohortUnknown, HospitalUnknown, JobUnknown, QueueFull
from service.jobs import records
from service.roles import Role
from service.settings import Settings
from tests.helpers.service.queued import queued

NORTH = Caller("north's key", frozenset({"admin"}), frozenset({"north"}))


def job_of(database: Database, settings: Settings, hospital: str | None) -> str:
    with database.write() as session:
        return queued(
            session,
            settings,
            kind="scan",
            hospital=hospital,
            model="brain",
            parent="sha256:" + "0" * 64,
        ).id


def test_session_acts_for_the_service_unless_bound_to_a_caller(database: Database) -> None:
    bound = database.for_caller(NORTH)
    for opened in (database.read, database.write):
        with opened() as session:
            assert caller_of(session) is SERVICE
    for opened in (bound.read, bound.write):
        with opened() as session:
            assert caller_of(session) is NORTH
    with database.read() as session:
        assert caller_of(session) is SERVICE


def test_hospital_hidden_from_the_caller_is_unknown(database: Database) -> None:
    with database.for_caller(NORTH).read() as session:
        assert [row.id for row in visible_hospitals(session)] == ["north"]
        assert require_hospital(session, "north").name == "North"
        said = []
        for hospital in ("south", "nowhere"):
            for look_up in (require_hospital, require_visible):
                with pytest.raises(HospitalUnknown) as unknown:
                    look_up(session, hospital)
                said.append(str(unknown.value).replace(hospital, "…"))
        assert len(set(said)) == 1
        # No hint at a hospital that is spelled alike, either.
        with pytest.raises(
            HospitalUnknown, match="'SOUTH' is registered that your key or token covers: it covers 'north'"
        ):
            require_hospital(session, "SOUTH")
        with pytest.raises(HospitalUnknown, match="but 'north' is"):
            require_hospital(session, "NORTH")


@pytest.mark.parametrize(
    ("roles", "hospitals", "advice"),
    [
        ({"admin"}, None, "PUT /hospitals/west registers it"),
        ({"approver"}, None, "an admin of all hospitals registers it"),
        ({"admin"}, {"west"}, "an admin of all hospitals registers it"),
    ],
)
def test_advice_on_a_hospital_that_is_not_registered_is_what_the_caller_may_do(
    database: Database, roles: set[Role], hospitals: set[str] | None, advice: str
) -> None:
    seen = None if hospitals is None else frozenset(hospitals)
    caller = Caller("some key", frozenset(roles), seen)
    with (
        database.for_caller(caller).read() as session,
        pytest.raises(HospitalUnknown, match=f"'west' is registered: {advice}$"),
    ):
        require_hospital(session, "west")


def test_cohort_of_another_hospital_is_unknown_to_the_caller(database: Database, settings: Settings) -> None:
    with database.write() as session:
        own, other = (cohorts.create(session, settings, name).id for name in ("north", "south"))
    with database.for_caller(NORTH).read() as session:
        assert cohorts.get(session, "north", own).id == own
        for name, cohort in (("south", other), ("north", other), ("south", own)):
            with pytest.raises(CohortUnknown):
                cohorts.get(session, name, cohort)
    with pytest.raises(CohortUnknown):
        cohorts.remove(database.for_caller(NORTH), settings, "south", other)


def test_job_of_another_hospital_is_unknown_and_not_listed(database: Database, settings: Settings) -> None:
    own, other, of_none = (job_of(database, settings, hospital) for hospital in ("north", "south", None))
    bound = database.for_caller(NORTH)
    with bound.write() as session:
        assert [job.id for job in records.listed(session)] == [own]
        assert records.listed(session, "south") == []
        assert records.get(session, own).hospital == "north"
        for look_up in (records.get, records.cancel):
            with pytest.raises(JobUnknown):
                look_up(session, other)
        # Another caller sent that scan.
        for look_up in (records.get, records.cancel):
            with pytest.raises(JobUnknown):
                look_up(session, of_none)
    with database.read() as session:
        assert {job.id for job in records.listed(session)} == {own, other, of_none}
        assert records.get(session, other).state == "queued"


def test_job_without_hospital_is_its_makers(database: Database, settings: Settings) -> None:
    own = job_of(database.for_caller(NORTH), settings, None)
    colleague = Caller("key:other", frozenset({"admin"}), frozenset({"north"}))
    with database.for_caller(NORTH).read() as session:
        assert [job.id for job in records.listed(session)] == [own]
        assert records.get(session, own).actor == NORTH.actor
    with database.for_caller(colleague).read() as session:
        assert records.listed(session) == []
        with pytest.raises(JobUnknown):
            records.get(session, own)


def test_queue_bound_counts_the_jobs_of_one_hospital_or_caller(
    database: Database, settings: Settings
) -> None:
    tight = settings.model_copy(update={"max_waiting_jobs": 1})
    for hospital in ("south", None):
        job_of(database, tight, hospital)
    for hospital in ("north", None):
        job_of(database.for_caller(NORTH), tight, hospital)
        with pytest.raises(QueueFull, match=f"^1 jobs of {'yours' if hospital is None else 'hospital'} "):
            job_of(database.for_caller(NORTH), tight, hospital)


@pytest.fixture
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("settings")
    return Settings(store=folder / "store", state_dir=folder / "state")
