"""Who is served what was adapted to whom."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from model_store.errors import ArtefactWithdrawn, ReferenceNotFound
from model_store.store import Store
from service.catalog.adapted import require_parts
from service.catalog.network import Personalization, Selection, resolve_network
from service.catalog.served import serving
from service.catalog.version import offered_names, resolve_parent
from service.database import Database, Hospital, upgrade
from service.errors import NotAdaptable, SelectionError
from service.serving.assignments import assign, assignment, decided, roll_back
from tests.helpers.service.adapted_versions import Catalogue, publish_adapted, publish_model, publish_space


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """brain@1 and @2; of brain@1, brain.at-dune@1 and @2 and brain.at-member@1; copied for each test."""
    folder = tmp_path_factory.mktemp("adapted")
    store = Store(folder / "store")
    first, _ = (publish_space(store, seed) for seed in (1, 2))
    for seed in (1, 2):
        publish_adapted(store, first, "dune", seed)
    publish_adapted(store, first, "member")
    database = Database(f"sqlite:///{folder / 'locum.db'}")
    upgrade(database)
    now = datetime.now(UTC)
    with database.write() as session:
        for name, site in (("dune", None), ("erg", None), ("member", "CS")):
            session.add(Hospital(id=name, name=name, site=site, created_at=now, updated_at=now))
    database.dispose()
    return folder


@pytest.fixture
def catalogue(template: Path, tmp_path: Path) -> Iterator[Catalogue]:
    folder = shutil.copytree(template, tmp_path / "copy")
    database = Database(f"sqlite:///{folder / 'locum.db'}")
    yield Catalogue(Store(folder / "store"), database)
    database.dispose()


def decide(catalogue: Catalogue, reference: str, hospital: str = "dune") -> None:
    """Assign a version, whatever anybody says of it."""
    artefact = catalogue.store.open(reference)
    with catalogue.database.write() as session:
        current = assignment(session, hospital, "brain")
        assign(
            session,
            hospital,
            "brain",
            version=artefact.version,
            digest=artefact.digest,
            expected=decided(current),
            actor="ada",
            reason="better",
            artefact=None if artefact.name == "brain" else artefact.name,
        )


def told(selection: Selection) -> tuple[str, str, str]:
    return str(selection.offered), str(selection.model), selection.header


DUNE = ("brain.at-dune@1", "brain.at-dune@1", "hospital; hospital=dune")


@pytest.mark.parametrize("personalization", ["auto", "hospital"])
@pytest.mark.parametrize("model", [None, "brain"])
def test_assigned_adapted_version_is_resolved_for_its_hospital(
    catalogue: Catalogue, model: str | None, personalization: Personalization
) -> None:
    decide(catalogue, "brain.at-dune@1")
    selection = resolve_network(*catalogue, model, "dune", personalization)
    assert told(selection) == DUNE
    assert selection.why == "the version assigned to hospital 'dune'; adapted to hospital 'dune'"


def test_unassigned_candidate_is_not_resolved(catalogue: Catalogue) -> None:
    assert told(resolve_network(*catalogue, None, "dune")) == ("brain@2", "brain.global@2", "global")
    decide(catalogue, "brain.at-dune@1")
    # The second candidate is newer, and still assigned to no hospital.
    assert told(resolve_network(*catalogue, None, "dune")) == DUNE


def test_auto_prefers_the_adapted_version_to_the_member_model(catalogue: Catalogue) -> None:
    assert told(resolve_network(*catalogue, None, "member"))[1] == "brain.CS@2"
    decide(catalogue, "brain.at-member@1", "member")
    assert told(resolve_network(*catalogue, None, "member"))[1] == "brain.at-member@1"


def test_global_and_member_come_from_the_parent_of_the_adapted_version(catalogue: Catalogue) -> None:
    decide(catalogue, "brain.at-member@1", "member")
    assert told(resolve_network(*catalogue, None, "member", "global")) == (
        "brain@1",
        "brain.global@1",
        "global",
    )
    member = resolve_network(*catalogue, None, "member", "member")
    assert told(member) == ("brain@1", "brain.CS@1", "member; site=CS")
    assert member.why.startswith("what the version assigned to hospital 'member' was made from; ")
    assert told(resolve_network(*catalogue, None, "member", "member", "DU"))[1] == "brain.DU@1"


def test_hospital_without_an_assigned_adapted_version_is_rejected(catalogue: Catalogue) -> None:
    for reference in (None, "brain@1"):
        if reference is not None:
            decide(catalogue, reference)
        with pytest.raises(SelectionError, match="/hospitals/dune/adaptations") as refused:
            resolve_network(*catalogue, None, "dune", "hospital")
        assert (refused.value.status, refused.value.slug) == (404, "no-adapted-version")


def test_rollback_returns_to_the_earlier_version(catalogue: Catalogue) -> None:
    for reference in ("brain@2", "brain.at-dune@1", "brain.at-dune@2"):
        decide(catalogue, reference)
    assert told(resolve_network(*catalogue, None, "dune"))[0] == "brain.at-dune@2"
    for sequence, expected in ((3, "brain.at-dune@1"), (4, "brain@2")):
        with catalogue.database.write() as session:
            roll_back(session, "dune", "brain", expected=sequence, actor="ada", reason="worse")
        assert told(resolve_network(*catalogue, None, "dune"))[0] == expected


@pytest.mark.parametrize("hospital", [None, "dune"])
@pytest.mark.parametrize("personalization", ["auto", "hospital"])
def test_candidate_named_by_version_or_digest_is_resolved(
    catalogue: Catalogue, hospital: str | None, personalization: Personalization
) -> None:
    digest = catalogue.store.open("brain.at-dune@2").digest
    for reference in ("brain.at-dune@2", f"brain.at-dune@{digest}"):
        selection = resolve_network(*catalogue, reference, hospital, personalization)
        assert told(selection) == ("brain.at-dune@2", "brain.at-dune@2", "hospital; hospital=dune")
        assert "asked for" in selection.why


def refusal(
    catalogue: Catalogue,
    model: str | None,
    hospital: str | None,
    personalization: Personalization = "auto",
    site: str | None = None,
) -> tuple[int, str]:
    with pytest.raises(SelectionError) as refused:
        resolve_network(*catalogue, model, hospital, personalization, site)
    return refused.value.status, refused.value.slug


def test_adapted_version_of_another_hospital_is_rejected(catalogue: Catalogue) -> None:
    assert refusal(catalogue, "brain.at-dune@1", "erg") == (422, "contradiction")
    assert refusal(catalogue, "brain.at-dune@1", "erg", "hospital") == (422, "contradiction")


def test_named_adapted_version_with_global_member_or_site_is_rejected(catalogue: Catalogue) -> None:
    assert refusal(catalogue, "brain.at-dune@1", None, "global") == (422, "contradiction")
    assert refusal(catalogue, "brain.at-dune@1", "dune", "member", "CS") == (422, "contradiction")
    assert refusal(catalogue, "brain.at-dune@1", "dune", "auto", "CS") == (422, "contradiction")


def test_personalization_hospital_with_contradicting_options_is_rejected(catalogue: Catalogue) -> None:
    decide(catalogue, "brain.at-dune@1")
    assert refusal(catalogue, "brain", None, "hospital") == (422, "contradiction")
    assert refusal(catalogue, "brain@1", "dune", "hospital") == (422, "contradiction")
    assert refusal(catalogue, "brain", "dune", "hospital", "CS") == (422, "contradiction")


def test_adapted_name_without_a_version_is_rejected(catalogue: Catalogue) -> None:
    assert refusal(catalogue, "brain.at-dune", "dune") == (422, "version-not-named")


def test_offered_names_leave_out_adapted_names(catalogue: Catalogue) -> None:
    assert offered_names(catalogue.store) == ["brain"]
    assert told(resolve_network(*catalogue))[0] == "brain@2"


def test_named_version_overrides_the_assigned_adapted_version(catalogue: Catalogue) -> None:
    decide(catalogue, "brain.at-dune@1")
    assert told(resolve_network(*catalogue, "brain@2", "dune")) == ("brain@2", "brain.global@2", "global")
    assert told(resolve_network(*catalogue, "brain.at-dune@2", "dune"))[0] == "brain.at-dune@2"


@pytest.mark.parametrize("personalization", ["auto", "hospital", "global"])
def test_withdrawn_adapted_version_is_rejected_and_not_replaced(
    catalogue: Catalogue, personalization: Personalization
) -> None:
    decide(catalogue, "brain.at-dune@1")
    catalogue.store.withdraw("brain.at-dune@1", actor="ada", reason="wrong")
    with pytest.raises(ArtefactWithdrawn, match="wrong"):
        resolve_network(*catalogue, None, "dune", personalization)


def test_adapted_version_with_a_withdrawn_parent_resolves_with_a_warning(catalogue: Catalogue) -> None:
    decide(catalogue, "brain.at-dune@1")
    assert not resolve_network(*catalogue, None, "dune").warnings
    catalogue.store.withdraw("brain@1", actor="ada", reason="a site withdrew")
    found = resolve_network(*catalogue, None, "dune")
    assert told(found) == DUNE
    (warning,) = found.warnings.items()
    assert warning[0] == "descends-from-withdrawn"
    assert warning[1].startswith("'brain.at-dune@1' was made from brain@1, withdrawn since")
    assert not resolve_network(*catalogue, "brain@2", "dune").warnings
    with catalogue.database.read() as session:
        assert serving(catalogue.store, session, "dune", "brain").flagged == ("brain@1",)
        assert serving(catalogue.store, session, "erg", "brain").flagged == ()


@pytest.mark.parametrize("part", ["brain.global@2", "brain.CS@2"])
def test_nothing_is_adapted_where_a_part_is_withdrawn(catalogue: Catalogue, part: str) -> None:
    first, second = (catalogue.store.open(f"brain@{number}") for number in (1, 2))
    require_parts(catalogue.store, second)
    catalogue.store.withdraw(part, actor="ada", reason="a site withdrew")
    with pytest.raises(ArtefactWithdrawn, match=f"'{part}' was withdrawn"):
        require_parts(catalogue.store, second)
    require_parts(catalogue.store, first)


def test_adapted_version_without_its_parent_resolves_only_itself(catalogue: Catalogue) -> None:
    decide(catalogue, "brain.at-dune@1")
    shutil.rmtree(catalogue.store.root / "brain" / "1")
    catalogue = Catalogue(Store(catalogue.store.root), catalogue.database)
    assert told(resolve_network(*catalogue, None, "dune")) == DUNE
    with pytest.raises(ReferenceNotFound):
        resolve_network(*catalogue, None, "dune", "global")


def test_resolve_parent_prefers_named_then_assigned_then_newest(
    catalogue: Catalogue,
) -> None:
    assert str(resolve_parent(*catalogue, "brain@1", "dune")) == "brain@1"
    assert str(resolve_parent(*catalogue, "brain", "dune")) == "brain@2"
    assert str(resolve_parent(*catalogue)) == "brain@2"
    decide(catalogue, "brain.at-dune@1")
    assert str(resolve_parent(*catalogue, None, "dune")) == "brain@1"
    assert str(resolve_parent(*catalogue, "brain.at-dune@2", "dune")) == "brain@1"
    decide(catalogue, "brain@2")
    assert str(resolve_parent(*catalogue, None, "dune")) == "brain@2"


def test_resolve_parent_of_a_member_s_model_is_rejected(catalogue: Catalogue) -> None:
    publish_model(catalogue.store, "plain")
    assert str(resolve_parent(*catalogue, "plain", "dune")) == "plain@1"  # by masks
    publish_model(catalogue.store, "own", role="inside", site="aster")
    with pytest.raises(NotAdaptable, match="routing-space") as refused:
        resolve_parent(*catalogue, "own", "dune")
    assert (refused.value.status, refused.value.slug) == (422, "not-adaptable")
