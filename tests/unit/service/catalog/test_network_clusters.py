"""Which model of a FedBiCross artefact answers, and what is rejected."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from model_store.manifest import ClustersManifest, Lineage
from model_store.store import Store
from model_store.task import Task
from service.catalog.network import Selection, resolve_network
from service.database import Database, Hospital, upgrade
from service.errors import SelectionError
from service.serving.assignments import assign
from tests.helpers.service.adapted_versions import Catalogue, publish_model

TASK = Task(name="shapes", kind="classification", class_names=("disc", "ring"), size=(28, 28))
ASSIGNMENT = {"elm": "1", "fir": "1", "hazel": "2"}


def publish_clusters(store: Store, name: str, assignment: dict[str, str], personal: tuple[str, ...]) -> None:
    """Cluster models by name, and the personal models of some hospitals."""
    names = sorted(set(assignment.values()))
    parts: dict[str, Any] = {"part_of": name, "task": TASK}
    clusters = {k: publish_model(store, f"{name}.cluster-{k}", role="cluster", **parts).digest for k in names}
    own = {
        site: publish_model(store, f"{name}.{site}", role="inside", site=site, **parts).digest
        for site in personal
    }
    manifest = ClustersManifest(
        name=name,
        task=TASK,
        lineage=Lineage(method="fedbicross", run="r", sites=tuple(assignment), rounds=1, seed=0),
        clusters=clusters,
        assignment=assignment,
        personal=own,
        mixing={k: {j: 1 / len(names) for j in names} for k in names},
    )
    store.publish(manifest, {})


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`shapes` with two clusters, `single` with one; a hospital of each site, and one from outside."""
    folder = tmp_path_factory.mktemp("clusters")
    store = Store(folder / "store")
    publish_clusters(store, "shapes", ASSIGNMENT, ("elm",))
    publish_clusters(store, "single", {"elm": "1", "fir": "1"}, ())
    database = Database(f"sqlite:///{folder / 'locum.db'}")
    upgrade(database)
    now = datetime.now(UTC)
    with database.write() as session:
        for name, site in (("at-elm", "elm"), ("at-fir", "fir"), ("at-hazel", "hazel"), ("oak", None)):
            session.add(Hospital(id=name, name=name, site=site, created_at=now, updated_at=now))
    database.dispose()
    return folder


@pytest.fixture
def catalogue(template: Path, tmp_path: Path) -> Iterator[Catalogue]:
    folder = shutil.copytree(template, tmp_path / "copy")
    database = Database(f"sqlite:///{folder / 'locum.db'}")
    yield Catalogue(Store(folder / "store"), database)
    database.dispose()


def told(selection: Selection) -> tuple[str, str]:
    return str(selection.model), selection.header


def refusal(catalogue: Catalogue, *asked: Any) -> SelectionError:
    with pytest.raises(SelectionError) as refused:
        resolve_network(*catalogue, *asked)
    return refused.value


def test_auto_returns_the_member_model_or_that_of_its_cluster(catalogue: Catalogue) -> None:
    assert told(resolve_network(*catalogue, "shapes", "at-elm")) == ("shapes.elm@1", "member; site=elm")
    fir = resolve_network(*catalogue, "shapes", "at-fir")
    assert told(fir) == ("shapes.cluster-1@1", "cluster; cluster=1")
    assert fir.why == "the newest version; hospital 'at-fir' is a member of the federation, in this cluster"
    assert told(resolve_network(*catalogue, "shapes", "at-hazel"))[1] == "cluster; cluster=2"


def test_cluster_is_the_named_one_or_that_of_the_hospital(catalogue: Catalogue) -> None:
    cluster = ("shapes.cluster-2@1", "cluster; cluster=2")
    assert told(resolve_network(*catalogue, "shapes", None, "cluster", None, "2")) == cluster
    assert told(resolve_network(*catalogue, "shapes", "oak", "cluster", None, "2")) == cluster
    assert told(resolve_network(*catalogue, "shapes", "at-hazel", "cluster")) == cluster
    # The named cluster counts, for every caller.
    assert told(resolve_network(*catalogue, "shapes", "at-elm", "cluster", None, "2")) == cluster
    assert told(resolve_network(*catalogue, "shapes", "at-elm", "cluster")) == (
        "shapes.cluster-1@1",
        "cluster; cluster=1",
    )


@pytest.mark.parametrize("personalization", ["auto", "global"])
@pytest.mark.parametrize("hospital", [None, "oak"])
def test_global_of_several_clusters_is_rejected_with_the_clusters(
    catalogue: Catalogue, hospital: str | None, personalization: str
) -> None:
    problem = refusal(catalogue, "shapes", hospital, personalization)
    assert (problem.status, problem.slug) == (422, "no-global-model")
    assert problem.extensions["choices"] == ["1", "2"]
    assert "clusters: 1, 2" in str(problem)
    assert f"POST /hospitals/{hospital or 'HOSPITAL'}/adaptations" in str(problem)


def test_global_of_an_only_cluster_is_its_model(catalogue: Catalogue) -> None:
    for hospital, personalization in ((None, "auto"), ("oak", "auto"), ("at-elm", "global")):
        found = resolve_network(*catalogue, "single", hospital, personalization)  # type: ignore[arg-type]
        assert told(found) == ("single.cluster-1@1", "global")
    assert told(resolve_network(*catalogue, "single", "at-elm"))[1] == "cluster; cluster=1"


@pytest.mark.parametrize(
    ("asked", "status", "slug"),
    [
        (("shapes", "at-elm", "global"), 422, "no-global-model"),
        (("shapes", None, "cluster"), 422, "cluster-not-named"),
        (("shapes", "oak", "cluster"), 422, "cluster-not-named"),
        (("shapes", None, "cluster", None, "7"), 404, "cluster-not-found"),
        (("shapes", None, "auto", None, "1"), 422, "contradiction"),
        (("shapes", None, "cluster", "elm"), 422, "contradiction"),
        (("shapes", "at-fir", "member"), 404, "site-not-found"),
        (("shapes", "oak", "hospital"), 404, "no-adapted-version"),
        (("shapes.cluster-1", None), 422, "part-of-a-model"),
    ],
)
def test_resolve_with_invalid_cluster_options_is_rejected(
    catalogue: Catalogue, asked: tuple[Any, ...], status: int, slug: str
) -> None:
    problem = refusal(catalogue, *asked)
    assert (problem.status, problem.slug) == (status, slug)


def test_cluster_of_a_plain_model_is_rejected(catalogue: Catalogue) -> None:
    publish_model(catalogue.store, "plain", task=TASK)
    problem = refusal(catalogue, "plain", None, "cluster")
    assert "has the clusters: none" in str(problem)


def test_assigned_clusters_version_is_preferred_to_the_newest(catalogue: Catalogue) -> None:
    first = catalogue.store.open("shapes@1")
    publish_clusters(catalogue.store, "shapes", {"elm": "1", "fir": "2", "hazel": "2"}, ())
    with catalogue.database.write() as session:
        assign(
            session,
            "at-fir",
            "shapes",
            version=1,
            digest=first.digest,
            expected=0,
            actor="ada",
            reason="better",
        )
    assert told(resolve_network(*catalogue, "shapes", "at-fir"))[0] == "shapes.cluster-1@1"


def test_resolve_considers_only_models_of_the_requested_task_kind(
    catalogue: Catalogue, tmp_path: Path
) -> None:
    store = Store(tmp_path / "mixed")
    publish_model(store, "brain")
    publish_clusters(store, "shapes", {"elm": "1"}, ())
    mixed = Catalogue(store, catalogue.database)
    assert str(resolve_network(*mixed, kind="classification").offered) == "shapes@1"
    assert str(resolve_network(*mixed, kind="segmentation").offered) == "brain@1"
    with pytest.raises(SelectionError, match="POST /classify") as refused:
        resolve_network(*mixed, "shapes", kind="segmentation")
    assert refused.value.slug == "another-kind-of-task"
