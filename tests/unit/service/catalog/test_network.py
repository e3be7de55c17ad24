"""Which version and which network answers."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from model_store.errors import ArtefactWithdrawn, ReferenceInvalid, ReferenceNotFound
from model_store.store import Store
from service.acceptance import decisions
from service.catalog import network
from service.catalog.network import Selection, resolve_network
from service.catalog.served import serving
from service.change_plan import ChangePlan, set_plan
from service.database import Caller, Database, Hospital, upgrade
from service.errors import (
    HospitalUnknown,
    NothingAssigned,
    ParametersContradict,
    SelectionError,
    SiteNotShared,
)
from service.serving import demanded
from service.serving.assignments import assign, history, roll_back
from tests.helpers.service.adapted_versions import Catalogue, publish_model, publish_space


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
def catalogue(template: Path, tmp_path: Path) -> Iterator[Catalogue]:
    folder = shutil.copytree(template, tmp_path / "copy")
    database = Database(f"sqlite:///{folder / 'locum.db'}")
    yield Catalogue(Store(folder / "store"), database)
    database.dispose()


def assign_version(catalogue: Catalogue, hospital: str, version: int) -> None:
    digest = catalogue.store.open(f"brain@{version}").digest
    with catalogue.database.write() as session:
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


def test_resolve_without_name_returns_the_newest_global_of_an_only_model(catalogue: Catalogue) -> None:
    assert told(resolve_network(*catalogue)) == ("brain@2", "brain.global@2", "global")


def test_scan_of_what_only_a_job_adapts_is_refused_with_the_way_to_it(catalogue: Catalogue) -> None:
    with pytest.raises(ParametersContradict, match="send the scan to POST /segment"):
        resolve_network(*catalogue, "brain", personalization="scan")


def test_resolve_without_name_among_several_models_is_rejected(catalogue: Catalogue) -> None:
    publish_model(catalogue.store, "hippocampus")
    with pytest.raises(SelectionError, match="brain, hippocampus") as refused:
        resolve_network(*catalogue)
    assert refused.value.extensions["choices"] == ["brain", "hippocampus"]
    assert told(resolve_network(*catalogue, "hippocampus")) == ("hippocampus@1", "hippocampus@1", "global")


def test_members_own_model_answers_other_hospitals_only_where_it_shares_it(catalogue: Catalogue) -> None:
    store, database = catalogue
    asked = {"personalization": "member", "site": "CS"}

    def answered(hospital: str | None, *covers: str) -> str:
        caller = Caller("key:pacs", frozenset({"reader"}), frozenset(covers))
        return told(resolve_network(store, database.for_caller(caller), "brain", hospital, **asked))[2]

    # Its own hospital, one who answers for both, and the operator.
    own = (answered("member", "member"), answered(None, "member"), answered("outside", "outside", "member"))
    assert {*own, told(resolve_network(store, database, "brain", "outside", **asked))[2]} == {
        "member; site=CS"
    }
    for hospital, covered in (("outside", "outside"), (None, "outside"), ("lost", "lost")):
        with pytest.raises(SiteNotShared, match="'CS' answers its own hospital alone") as refused:
            answered(hospital, covered)
        assert (refused.value.status, refused.value.extensions["choices"]) == (403, [])
    with database.write() as session:
        session.get_one(Hospital, "member").shares_model = True
    assert answered("outside", "outside") == answered(None, "lost") == "member; site=CS"


def test_resolve_in_an_empty_store_is_rejected(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'locum.db'}")
    with pytest.raises(SelectionError, match="offers no model"):
        resolve_network(Store(tmp_path / "none"), database)


def test_named_version_overrides_the_assigned_one(catalogue: Catalogue) -> None:
    assign_version(catalogue, "member", 2)
    first = catalogue.store.open("brain@1")
    for reference in ("brain@1", f"brain@{first.digest}"):
        assert told(resolve_network(*catalogue, reference, "member"))[0] == "brain@1"


def test_assigned_version_is_resolved_for_its_hospital_only(catalogue: Catalogue) -> None:
    assign_version(catalogue, "outside", 1)
    selection = resolve_network(*catalogue, "brain", "outside")
    assert told(selection) == ("brain@1", "brain.global@1", "global")
    assert "assigned to hospital 'outside'" in selection.why
    assert told(resolve_network(*catalogue, None, "outside"))[0] == "brain@1"
    assert told(resolve_network(*catalogue, "brain", "lost"))[0] == "brain@2"


def test_withdrawn_assigned_version_is_rejected_and_not_replaced(catalogue: Catalogue) -> None:
    assign_version(catalogue, "outside", 2)
    catalogue.store.withdraw("brain@2", actor="dr", reason="wrong")
    with pytest.raises(ArtefactWithdrawn):
        resolve_network(*catalogue, "brain", "outside")
    assert told(resolve_network(*catalogue, "brain"))[0] == "brain@1"


def served(catalogue: Catalogue, hospital: str, **options: Any) -> Selection:
    return resolve_network(*catalogue, "brain", hospital, **options)


def test_newly_published_version_serves_no_hospital_that_was_served_before(catalogue: Catalogue) -> None:
    assert str(served(catalogue, "outside").offered) == "brain@2"
    publish_space(catalogue.store, 3)
    kept = served(catalogue, "outside")
    assert str(kept.offered) == "brain@2"
    assert "the version that hospital 'outside' is served until a decision" in kept.why
    # A hospital that was not served yet begins with the newest, and so does a scan of no hospital.
    assert str(served(catalogue, "lost").offered) == "brain@3"
    assert str(resolve_network(*catalogue, "brain").offered) == "brain@3"
    with catalogue.database.read() as session:
        now = serving(catalogue.store, session, "outside", "brain")
        assert (now.version, now.because, now.newer) == (2, "kept", 3)
        assert serving(catalogue.store, session, "lost", "brain").newer is None


def test_kept_version_that_is_withdrawn_is_rejected_and_not_replaced(catalogue: Catalogue) -> None:
    served(catalogue, "outside")
    publish_space(catalogue.store, 3)
    catalogue.store.withdraw("brain@2", actor="dr", reason="wrong")
    with pytest.raises(ArtefactWithdrawn):
        served(catalogue, "outside")


def test_new_versions_that_serve_leave_an_entry_for_each_change(catalogue: Catalogue) -> None:
    for _ in range(2):
        served(catalogue, "outside", new_versions="serve")
    publish_space(catalogue.store, 3)
    with catalogue.database.read() as session:
        found = serving(catalogue.store, session, "outside", "brain", None, "serve")
        assert (found.version, found.because) == (3, "newest")
    assert str(served(catalogue, "outside", new_versions="serve").offered) == "brain@3"
    with catalogue.database.write() as session:
        entries = history(session, "outside", "brain")
        assert [(entry.version, entry.by_default) for entry in entries] == [(2, True), (3, True)]
        roll_back(session, "outside", "brain", expected=0, actor="dr", reason="worse")
    # A decision is in force from now on, whatever is published.
    publish_space(catalogue.store, 4)
    assert str(served(catalogue, "outside", new_versions="serve").offered) == "brain@2"


def demand(catalogue: Catalogue, hospital: str, what: str, actor: str = "chief") -> None:
    """A demand of an acceptance, or a change plan; none any more for `nothing`."""
    with catalogue.database.write() as session:
        if what == "acceptance":
            decisions.demand(session, hospital, True, actor, "our rule")
        elif what == "plan":
            plan = ChangePlan(recipes=["auto"])
            set_plan(session, hospital, "brain", plan, actor, "agreed")
        else:
            decisions.demand(session, hospital, False, actor, "no longer")
            set_plan(session, hospital, "brain", None, actor, "no longer")


@pytest.mark.parametrize("what", ["acceptance", "plan"])
def test_where_a_decision_is_demanded_no_newer_version_serves_by_itself(
    catalogue: Catalogue, what: str
) -> None:
    for hospital in ("outside", "lost"):
        served(catalogue, hospital, new_versions="serve")
    demand(catalogue, "outside", what)
    publish_space(catalogue.store, 3)
    assert str(served(catalogue, "outside", new_versions="serve").offered) == "brain@2"
    assert str(served(catalogue, "lost", new_versions="serve").offered) == "brain@3"
    with catalogue.database.read() as session:
        found = serving(catalogue.store, session, "outside", "brain", None, "serve")
        assert (found.version, found.because, found.newer) == (2, "kept", 3)
        assert [entry.version for entry in history(session, "outside", "brain")] == [2]
    # Another model's plan is another matter; a demand is for every model.
    publish_model(catalogue.store, "hippocampus")
    if what == "plan":
        assert str(resolve_network(*catalogue, "hippocampus", "outside").offered) == "hippocampus@1"
    demand(catalogue, "outside", "nothing")
    assert str(served(catalogue, "outside", new_versions="serve").offered) == "brain@3"


@pytest.mark.parametrize("new_versions", ["keep", "serve"])
@pytest.mark.parametrize("what", ["acceptance", "plan"])
def test_where_a_decision_is_demanded_no_first_version_serves_by_itself(
    catalogue: Catalogue, what: str, new_versions: str
) -> None:
    demand(catalogue, "outside", what)
    with pytest.raises(NothingAssigned, match=r"by chief, .*PUT /hospitals/outside/serving/brain") as refused:
        served(catalogue, "outside", new_versions=new_versions)
    assert refused.value.status == 409
    # One that is named answers, as a candidate does.
    assert told(resolve_network(*catalogue, "brain@2", "outside"))[0] == "brain@2"
    with catalogue.database.read() as session:
        now = serving(catalogue.store, session, "outside", "brain", None, new_versions)
        assert (now.version, now.because, now.newer) == (None, "nothing", 2)
        assert history(session, "outside", "brain") == []
    assign_version(catalogue, "outside", 1)
    assert str(served(catalogue, "outside", new_versions=new_versions).offered) == "brain@1"


def test_a_demand_that_comes_while_a_scan_is_resolved_is_seen(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network is chosen between the two looks: the second, in the transaction, decides."""
    choose = network.select_network

    def slow(*given: Any, **options: Any) -> Selection:
        with catalogue.database.read() as session:
            came = demanded.needs_decision(session, "outside", "brain") is not None
        if not came:
            demand(catalogue, "outside", "acceptance")
        return choose(*given, **options)

    monkeypatch.setattr(network, "select_network", slow)
    with pytest.raises(NothingAssigned):
        served(catalogue, "outside")
    with catalogue.database.read() as session:
        assert history(session, "outside", "brain") == []


def test_rejected_request_records_no_version(catalogue: Catalogue) -> None:
    with pytest.raises(SelectionError):
        served(catalogue, "outside", personalization="hospital")
    with catalogue.database.read() as session:
        assert history(session, "outside", "brain") == []


def test_auto_prefers_the_member_model_of_the_hospital_site(catalogue: Catalogue) -> None:
    assert told(resolve_network(*catalogue, None, "member")) == ("brain@2", "brain.CS@2", "member; site=CS")
    assert told(resolve_network(*catalogue, None, "outside"))[1] == "brain.global@2"
    assert told(resolve_network(*catalogue, None, "lost"))[1] == "brain.global@2"


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        (
            {"CS.val_dice": 0.7, "CS.val_dice_global": 0.7},
            r"is not above .* \(\+0.000 of Dice\)",
        ),
        ({"CS.val_dice": 0.6, "CS.val_dice_global": 0.75}, r".*\(-0.150 of Dice\)"),
        ({"CS.val_dice": 0.9}, "was never compared with the global one"),
    ],
)
def test_auto_returns_the_global_model_to_a_member_that_gains_nothing(
    catalogue: Catalogue, metrics: dict[str, float], reason: str
) -> None:
    publish_space(catalogue.store, 3, metrics=metrics)
    found = resolve_network(*catalogue, None, "member")
    assert told(found) == ("brain@3", "brain.global@3", "global")
    assert re.search(
        f"hospital 'member' is a member of the federation, but its own model {reason}", found.why
    )
    assert told(resolve_network(*catalogue, None, "member", "member"))[1] == "brain.CS@3"


def test_the_reason_of_a_member_model_is_its_gain(catalogue: Catalogue) -> None:
    assert "0.050 of Dice above the global one" in resolve_network(*catalogue, None, "member").why


def test_global_returns_the_global_model_for_a_member(catalogue: Catalogue) -> None:
    assert told(resolve_network(*catalogue, None, "member", "global"))[1] == "brain.global@2"


def test_member_uses_the_given_site_or_the_hospital_site(catalogue: Catalogue) -> None:
    assert told(resolve_network(*catalogue, None, None, "member", "DU"))[1] == "brain.DU@2"
    assert told(resolve_network(*catalogue, None, "member", "member", "DU"))[1] == "brain.DU@2"
    assert told(resolve_network(*catalogue, None, "member", "member"))[1] == "brain.CS@2"


@pytest.mark.parametrize(
    ("hospital", "site", "status"),
    [(None, None, 422), ("outside", None, 422), ("lost", None, 404), (None, "XX", 404)],
)
def test_member_without_a_model_is_rejected_with_the_known_sites(
    catalogue: Catalogue, hospital: str | None, site: str | None, status: int
) -> None:
    with pytest.raises(SelectionError) as refused:
        resolve_network(*catalogue, None, hospital, "member", site)
    assert refused.value.status == status
    assert refused.value.extensions["choices"] == ["CS", "DU"]


def test_site_without_member_is_rejected(catalogue: Catalogue) -> None:
    with pytest.raises(SelectionError, match="site") as refused:
        resolve_network(*catalogue, None, None, "auto", "CS")
    assert refused.value.status == 422


def test_resolve_of_a_part_is_rejected(catalogue: Catalogue) -> None:
    with pytest.raises(SelectionError, match="part of 'brain'"):
        resolve_network(*catalogue, "brain.CS")


def test_resolve_for_an_unregistered_hospital_is_rejected(catalogue: Catalogue) -> None:
    with pytest.raises(HospitalUnknown):
        resolve_network(*catalogue, "brain", "nobody")


def test_resolve_with_absent_or_invalid_reference_is_rejected(catalogue: Catalogue) -> None:
    with pytest.raises(ReferenceNotFound):
        resolve_network(*catalogue, "brain@9")
    with pytest.raises(ReferenceInvalid):
        resolve_network(*catalogue, "../brain")


def test_single_site_model_resolves_for_auto_and_member_but_not_global(catalogue: Catalogue) -> None:
    publish_model(catalogue.store, "local", site="CS", role="inside")
    assert told(resolve_network(*catalogue, "local")) == ("local@1", "local@1", "member; site=CS")
    assert told(resolve_network(*catalogue, "local", None, "member", "CS"))[1] == "local@1"
    with pytest.raises(SelectionError, match="no global model"):
        resolve_network(*catalogue, "local", None, "global")


def test_withdrawn_member_part_is_rejected(catalogue: Catalogue) -> None:
    catalogue.store.withdraw("brain.CS@2", actor="dr", reason="wrong")
    with pytest.raises(ArtefactWithdrawn):
        resolve_network(*catalogue, None, "member")
    assert told(resolve_network(*catalogue))[1] == "brain.global@2"


def test_selection_reason_names_a_site_without_a_model(catalogue: Catalogue) -> None:
    assert (
        "hospital 'lost' is registered as site 'XX', which has no model here"
        in resolve_network(*catalogue, hospital="lost").why
    )
    assert resolve_network(*catalogue, hospital="outside").why.endswith("no member model applies")
