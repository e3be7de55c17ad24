"""Which version and whose network answers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from model_store.errors import ArtefactWithdrawn, ReferenceInvalid, ReferenceNotFound
from model_store.store import Store
from service.catalog.network import Selection, resolve_network
from service.context import ServiceContext
from service.database import Database, Hospital, upgrade
from service.errors import HospitalUnknown
from service.http.problems import Problem
from service.serving.assignments import assign
from tests.helpers.service.adapted_versions import publish_model, publish_space


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with brain@1 and brain@2, and a database with three hospitals; copied for each test."""
    folder = tmp_path_factory.mktemp("selection")
    store = Store(folder / "store")
    for seed in (1, 2):
        publish_space(store, seed)
    database = Database(f"sqlite:///{folder / 'locum.db'}")
    upgrade(database)
    now = datetime.now(UTC)
    with database.write() as session:
        for name, site in (("member", "CS"), ("outside", None), ("lost", "XX")):
            session.add(Hospital(id=name, name=name, site=site, created_at=now, updated_at=now))
    database.dispose()
    return folder


@pytest.fixture
def context(template: Path, tmp_path: Path) -> Iterator[ServiceContext]:
    folder = shutil.copytree(template, tmp_path / "copy")
    database = Database(f"sqlite:///{folder / 'locum.db'}")
    yield cast("ServiceContext", SimpleNamespace(store=Store(folder / "store"), database=database))
    database.dispose()


def assign_version(context: ServiceContext, hospital: str, version: int) -> None:
    digest = context.store.open(f"brain@{version}").digest
    with context.database.write() as session:
        assign(
            session,
            hospital,
            "brain",
            version=version,
            digest=digest,
            expected=0,
            actor="dr",
            reason="better",
        )


def told(selection: Selection) -> tuple[str, str, str]:
    return str(selection.offered), str(selection.model), selection.header


def test_one_model_need_not_be_named_and_its_newest_global_answers(context: ServiceContext) -> None:
    assert told(resolve_network(context)) == ("brain@2", "brain.global@2", "global")


def test_among_several_models_one_must_be_named(context: ServiceContext) -> None:
    publish_model(context.store, "hippocampus")
    with pytest.raises(Problem, match="brain, hippocampus") as refused:
        resolve_network(context)
    assert refused.value.extensions["choices"] == ["brain", "hippocampus"]
    assert told(resolve_network(context, "hippocampus")) == ("hippocampus@1", "hippocampus@1", "global")


def test_an_empty_store_says_so(tmp_path: Path) -> None:
    context = cast("ServiceContext", SimpleNamespace(store=Store(tmp_path / "none")))
    with pytest.raises(Problem, match="offers no model"):
        resolve_network(context)


def test_a_reference_decides_over_everything(context: ServiceContext) -> None:
    assign_version(context, "member", 2)
    first = context.store.open("brain@1")
    for reference in ("brain@1", f"brain@{first.digest}"):
        assert told(resolve_network(context, reference, "member"))[0] == "brain@1"


def test_the_assigned_version_serves_its_hospital_and_no_other(context: ServiceContext) -> None:
    assign_version(context, "outside", 1)
    selection = resolve_network(context, "brain", "outside")
    assert told(selection) == ("brain@1", "brain.global@1", "global")
    assert "assigned to hospital 'outside'" in selection.why
    assert told(resolve_network(context, None, "outside"))[0] == "brain@1"
    assert told(resolve_network(context, "brain", "lost"))[0] == "brain@2"


def test_a_withdrawn_assignment_is_refused_not_replaced(context: ServiceContext) -> None:
    assign_version(context, "outside", 2)
    context.store.withdraw("brain@2", actor="dr", reason="wrong")
    with pytest.raises(ArtefactWithdrawn):
        resolve_network(context, "brain", "outside")
    assert told(resolve_network(context, "brain"))[0] == "brain@1"


def test_auto_prefers_the_member_model_of_the_hospitals_site(context: ServiceContext) -> None:
    assert told(resolve_network(context, None, "member")) == ("brain@2", "brain.CS@2", "member; site=CS")
    assert told(resolve_network(context, None, "outside"))[1] == "brain.global@2"
    assert told(resolve_network(context, None, "lost"))[1] == "brain.global@2"


def test_global_is_global_for_a_member_too(context: ServiceContext) -> None:
    assert told(resolve_network(context, None, "member", "global"))[1] == "brain.global@2"


def test_member_takes_the_site_or_the_hospitals_own(context: ServiceContext) -> None:
    assert told(resolve_network(context, None, None, "member", "DU"))[1] == "brain.DU@2"
    assert told(resolve_network(context, None, "member", "member", "DU"))[1] == "brain.DU@2"
    assert told(resolve_network(context, None, "member", "member"))[1] == "brain.CS@2"


@pytest.mark.parametrize(
    ("hospital", "site", "status"),
    [(None, None, 422), ("outside", None, 422), ("lost", None, 404), (None, "XX", 404)],
)
def test_member_without_a_model_is_refused_with_the_sites_there_are(
    context: ServiceContext, hospital: str | None, site: str | None, status: int
) -> None:
    with pytest.raises(Problem) as refused:
        resolve_network(context, None, hospital, "member", site)
    assert refused.value.status == status
    assert refused.value.extensions["choices"] == ["CS", "DU"]


def test_a_site_without_member_contradicts_itself(context: ServiceContext) -> None:
    with pytest.raises(Problem, match="site") as refused:
        resolve_network(context, None, None, "auto", "CS")
    assert refused.value.status == 422


def test_a_part_is_not_offered_on_its_own(context: ServiceContext) -> None:
    with pytest.raises(Problem, match="part of 'brain'"):
        resolve_network(context, "brain.CS")


def test_a_hospital_nobody_registered_is_unknown(context: ServiceContext) -> None:
    with pytest.raises(HospitalUnknown):
        resolve_network(context, "brain", "nobody")


def test_references_that_do_not_open(context: ServiceContext) -> None:
    with pytest.raises(ReferenceNotFound):
        resolve_network(context, "brain@9")
    with pytest.raises(ReferenceInvalid):
        resolve_network(context, "../brain")


def test_a_model_of_one_site_alone_answers_auto_and_member_but_not_global(context: ServiceContext) -> None:
    publish_model(context.store, "local", site="CS", role="inside")
    assert told(resolve_network(context, "local")) == ("local@1", "local@1", "member; site=CS")
    assert told(resolve_network(context, "local", None, "member", "CS"))[1] == "local@1"
    with pytest.raises(Problem, match="no global model"):
        resolve_network(context, "local", None, "global")


def test_a_withdrawn_part_is_refused(context: ServiceContext) -> None:
    context.store.withdraw("brain.CS@2", actor="dr", reason="wrong")
    with pytest.raises(ArtefactWithdrawn):
        resolve_network(context, None, "member")
    assert told(resolve_network(context))[1] == "brain.global@2"


def test_a_site_that_no_model_has_is_not_passed_over_in_silence(context: ServiceContext) -> None:
    assert (
        "hospital 'lost' is registered as site 'XX', which has no model here"
        in resolve_network(context, hospital="lost").why
    )
    assert resolve_network(context, hospital="outside").why.endswith("no member model applies")
