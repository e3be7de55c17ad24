"""The store: references, atomic and idempotent publishing, tampering, withdrawal, pruning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from model_store.artefact import Artefact
from model_store.errors import (
    ArtefactDamaged,
    ArtefactWithdrawn,
    KindMismatch,
    PublishRefused,
    ReferenceInvalid,
    ReferenceNotFound,
    UnknownKind,
)
from model_store.manifest import Lineage, ModelManifest, NetworkSpec, RoutingSpaceManifest
from model_store.staging import staging
from model_store.store import Store
from model_store.task import Task
from tests.helpers.model_store.graphs import graph_of

TASK = Task(name="t", labels={"a": (1,)}, size=(32, 32))
UNET = NetworkSpec(name="unet", arguments={"in_channels": 1, "classes": 2, "width": 4})
LINEAGE = Lineage(method="fedavg", run="r", sites=("A", "B"), rounds=3, seed=0)


def files(content: str = "w") -> dict[str, bytes]:
    return {"weights.safetensors": content.encode(), "graph.onnx": graph_of(content)}


def model(name: str = "brain", **fields: Any) -> ModelManifest:
    return ModelManifest.model_validate(
        {"name": name, "task": TASK, "network": UNET, "lineage": LINEAGE, **fields}
    )


def space(parts: dict[str, Artefact]) -> RoutingSpaceManifest:
    digests = {role: part.digest for role, part in parts.items()}
    return RoutingSpaceManifest(
        name="space", task=TASK, lineage=LINEAGE, global_model=digests.pop("global"), inside=digests
    )


# For a test that looks at files of the store's folder.
in_a_folder = pytest.mark.parametrize("store", ["folder"], indirect=True)


@pytest.fixture(params=["folder", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    # Where the files of a bucket are cached.
    monkeypatch.chdir(tmp_path)
    return Store(tmp_path / "store" if request.param == "folder" else request.getfixturevalue("bucket_url"))


@pytest.fixture
def routing_space(store: Store) -> Artefact:
    parts = {
        role: store.publish(model(f"space.{role}", part_of="space"), files(role))
        for role in ("global", "A", "B")
    }
    return store.publish(space(parts), {})


def test_open_accepts_name_number_and_digest_references(store: Store) -> None:
    first = store.publish(model(), files("1"))
    second = store.publish(model(), files("2"))
    assert (first.version, second.version) == (1, 2)
    assert store.open("brain") == second
    assert store.open("brain@1") == first
    assert store.open(f"brain@{first.digest}") == first
    assert store.by_digest(second.digest) == second
    assert store.open("brain").read("graph.onnx") == graph_of("2")


def test_report_is_kept_beside_a_version_and_leaves_its_digest_alone(store: Store) -> None:
    published = store.publish(model(), files())
    other = store.publish(model("other"), files("2"))
    assert store.report(published) is None
    assert not store.has_report(published)
    store.attach_report(published, b"<p>first</p>")
    store.attach_report(published, b"<p>second</p>")
    assert store.report(published) == b"<p>second</p>"
    assert store.report(other) is None
    assert (store.has_report(published), store.has_report(other)) == (True, False)
    opened = Store(store.root).open("brain")
    assert opened.digest == published.digest
    assert "report.html" not in opened.manifest.files
    # The same content again is the same version, with its report.
    assert store.report(store.publish(model(), files())) == b"<p>second</p>"


def test_published_version_opens_in_a_new_store_object(store: Store) -> None:
    published = store.publish(model(statistics=None, metrics={"dice": 0.5}), files())
    assert Store(store.root).open("brain") == published


def test_publishing_identical_content_twice_makes_one_version(store: Store) -> None:
    assert store.publish(model(), files()) == store.publish(model(), files())
    assert [v.artefact.version for v in store.versions.of("brain")] == [1]


@in_a_folder
@pytest.mark.parametrize("damage", ["missing", "empty", "changed"])
def test_publishing_damaged_content_again_repairs_the_version(store: Store, damage: str) -> None:
    published = store.publish(model(), files())
    weights, whole = published.path / "weights.safetensors", (published.path / "graph.onnx").stat()
    weights.unlink()
    if damage != "missing":
        weights.write_bytes(b"" if damage == "empty" else b"W")
    with pytest.raises(ArtefactDamaged, match="publish the artefact again"):
        store.open("brain")
    assert store.publish(model(), files()) == published
    assert store.open("brain").read("weights.safetensors") == b"w"
    assert (published.path / "graph.onnx").stat().st_mtime_ns == whole.st_mtime_ns


def test_publishing_withdrawn_content_again_does_not_bring_its_files_back(store: Store) -> None:
    published = store.publish(model(), files())
    store.withdraw("brain@1", actor="a", reason="r")
    deleted = store.prune()
    assert len(deleted) == 2
    with pytest.raises(ArtefactWithdrawn):
        store.publish(model(), files())
    assert not (published.path / "weights.safetensors").exists()
    assert store.prune() == []


@in_a_folder
def test_publish_leaves_no_version_when_admit_raises(store: Store) -> None:
    store.publish(model(), files("1"))

    def refuse() -> None:
        assert len(list((store.root / ".staging").iterdir())) == 1
        raise InterruptedError("too late")

    with pytest.raises(InterruptedError):
        store.publish(model(), files("2"), admit=refuse)
    assert Store(store.root).versions.numbers("brain") == [1]
    assert list((store.root / ".staging").iterdir()) == []
    assert store.publish(model(), files("2"), admit=lambda: None).version == 2


def test_publishing_existing_content_does_not_call_admit(store: Store) -> None:
    asked: list[int] = []
    for _ in range(2):
        assert store.publish(model(), files(), admit=lambda: asked.append(1)).version == 1
    assert asked == [1]


def test_manifest_hospital_and_hospital_role_require_each_other(store: Store) -> None:
    published = store.publish(model(role="hospital", hospital="dune"), files())
    manifest = Store(store.root).open(str(published)).manifest
    assert isinstance(manifest, ModelManifest)
    assert manifest.hospital == "dune"
    with pytest.raises(ValidationError, match="hospital 'dune'"):
        model(hospital="dune")
    with pytest.raises(ValidationError, match="role 'hospital'"):
        model(role="hospital")


def test_unset_field_is_left_out_of_the_manifest_bytes() -> None:
    assert b"hospital" not in model().to_bytes()


@pytest.mark.parametrize(
    "reference", ["", "../x", "a/b", "brain@0", "brain@latest", "brain@sha256:12", ".a", "a@"]
)
def test_open_with_malformed_reference_is_rejected(store: Store, reference: str) -> None:
    with pytest.raises(ReferenceInvalid):
        store.open(reference)


def test_open_of_absent_reference_lists_existing_names_and_versions(store: Store) -> None:
    with pytest.raises(ReferenceNotFound, match="none"):
        store.open("brain")
    store.publish(model(), files())
    with pytest.raises(ReferenceNotFound, match="versions 1"):
        store.open("brain@7")
    with pytest.raises(ReferenceNotFound, match="brain"):
        store.open("heart")


@in_a_folder
@pytest.mark.parametrize("file", ["weights.safetensors", "graph.onnx", "manifest.json"])
@pytest.mark.parametrize("damage", ["changed", "truncated", "deleted"])
def test_open_with_damaged_file_names_the_file(store: Store, file: str, damage: str) -> None:
    path = store.publish(model(), files()).path / file
    content = path.read_bytes()
    path.unlink()
    if damage == "changed":
        path.write_bytes(content.replace(b"w", b"v") if b"w" in content else b"x" * len(content))
    elif damage == "truncated":
        path.write_bytes(content[:-1])
    with pytest.raises(ArtefactDamaged, match=file):
        Store(store.root).open("brain")


def test_an_artefact_of_another_kind_than_expected_is_rejected(store: Store, routing_space: Artefact) -> None:
    plain = store.publish(model(), files())
    assert store.by_digest(plain.digest, ModelManifest) is store.by_digest(plain.digest)
    assert store.by_digest(routing_space.digest, RoutingSpaceManifest).manifest.global_model
    with pytest.raises(
        KindMismatch, match="'space@1': expected an artefact of kind model, found kind routing"
    ):
        store.by_digest(routing_space.digest, ModelManifest)
    with pytest.raises(
        KindMismatch, match="'brain@1': expected an artefact of kind routing-space, found kind m"
    ):
        store.by_digest(plain.digest, RoutingSpaceManifest)
    store.withdraw("brain@1", actor="ada", reason="wrong")
    with pytest.raises(ArtefactWithdrawn):
        store.by_digest(plain.digest, ModelManifest)


@in_a_folder
@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("kind", "hologram", "expected a kind in model, routing-space, .*found 'hologram'"),
        ("kind", ["model"], "expected a kind in"),
        ("schema_version", 9, "schema_version"),
        ("seeds", 1, "seeds"),
    ],
)
def test_manifest_with_unknown_kind_schema_or_field_is_rejected(
    store: Store, field: str, value: object, says: str
) -> None:
    from model_store.digest import sha256

    published = store.publish(model(), files())
    content = json.dumps(json.loads(published.manifest.to_bytes()) | {field: value}).encode()
    for name, data in {"manifest.json": content, "manifest.sha256": sha256(content).encode()}.items():
        (published.path / name).unlink()
        (published.path / name).write_bytes(data)
    with pytest.raises(UnknownKind, match=says):
        Store(store.root).open("brain@1")


@in_a_folder
def test_damaged_manifest_leaves_other_versions_readable(store: Store, routing_space: Artefact) -> None:
    store.publish(model(), files("1"))
    manifest = store.publish(model(), files("2")).path / "manifest.json"
    manifest.unlink()
    opened = Store(store.root)
    assert [v.artefact.version for v in opened.versions.of("brain")] == [1]
    assert "manifest.json" in str(opened.versions.unreadable("brain")[2])
    assert opened.by_digest(routing_space.digest) == routing_space
    with pytest.raises(ArtefactDamaged):
        opened.open("brain")
    assert opened.open("brain@1").version == 1
    assert opened.publish(model(), files("3")).version == 3


def test_withdrawn_version_cannot_be_opened_or_republished(store: Store) -> None:
    store.publish(model(), files("1"))
    second = store.publish(model(), files("2"))
    store.withdraw("brain@2", actor="ada", reason="mislabelled site")
    assert store.versions.find("brain", second.digest) == second
    assert store.versions.find("brain", "sha256:" + "0" * 64) is None
    assert store.open("brain").version == 1
    for reference in ("brain@2", f"brain@{second.digest}"):
        with pytest.raises(ArtefactWithdrawn, match=r"ada.*mislabelled site"):
            store.open(reference)
    with pytest.raises(ArtefactWithdrawn):
        store.publish(model(), files("2"))
    store.withdraw("brain@1", actor="ada", reason="too")
    with pytest.raises(ArtefactWithdrawn):
        store.open("brain")


def test_withdrawal_flags_every_descendant(store: Store, routing_space: Artefact) -> None:
    part = store.open("space.A")
    derived = store.publish(
        model("hospital", lineage=LINEAGE.model_copy(update={"parents": (routing_space.digest,)})), files("h")
    )
    bystander = store.publish(model("other"), files("o"))
    flagged = store.withdraw(str(part), actor="ada", reason="consent revoked")
    assert {str(a) for a in flagged} == {"space@1", "hospital@1"}
    assert store.versions.of("space")[0].flagged == ("space.A@1",)
    assert store.versions.of(derived.name)[0].flagged == ("space.A@1",)
    assert store.versions.of(bystander.name)[0].flagged == ()
    assert store.open("hospital") == derived


def test_withdrawal_without_a_reason_is_rejected(store: Store) -> None:
    store.publish(model(), files())
    with pytest.raises(PublishRefused, match="actor and a reason"):
        store.withdraw("brain", actor="ada", reason=" ")


def test_composite_with_unfit_or_absent_part_is_rejected(store: Store, routing_space: Artefact) -> None:
    good = store.open("space.global")
    wider = NetworkSpec(name="unet", arguments={"in_channels": 1, "classes": 2, "width": 8})
    other = store.publish(model("wide", network=wider), files("wide"))
    with pytest.raises(PublishRefused, match="'A' has another architecture"):
        store.publish(space({"global": good, "A": other}), {})
    with pytest.raises(PublishRefused, match="'A' is a routing-space"):
        store.publish(space({"global": good, "A": routing_space}), {})
    absent = space({"global": good}).model_copy(update={"inside": {"A": "sha256:" + "0" * 64}})
    with pytest.raises(PublishRefused, match="'A' cannot be used"):
        store.publish(absent, {})


def test_publishing_a_model_without_graph_is_rejected(store: Store) -> None:
    with pytest.raises(PublishRefused, match=r"graph\.onnx"):
        store.publish(model(), {"weights.safetensors": b""})
    assert store.versions.names() == []


@in_a_folder
def test_publish_removes_the_staging_folder_of_a_killed_publisher(store: Store) -> None:
    left = store.root / ".staging" / "left"
    left.mkdir(parents=True)
    (left / "graph.onnx").write_bytes(b"half a gra")
    assert store.publish(model(), files()).version == 1
    assert not left.exists()


@in_a_folder
def test_prune_deletes_withdrawn_files_and_abandoned_staging_only(store: Store) -> None:
    kept = store.publish(model(), files("1"))
    store.publish(model(), files("2"))
    store.withdraw("brain@2", actor="ada", reason="bad")
    area = store.root / ".staging"
    with staging(area) as being_written:
        (area / "abandoned").mkdir()
        assert len(store.prune()) == 3
        assert list(area.iterdir()) == [being_written]
    assert store.open("brain") == kept
    assert store.versions.of("brain")[1].withdrawn is not None


def test_manifest_with_repeated_source_is_rejected() -> None:
    assert model(sources=("own", "A")).sources == ("own", "A")
    with pytest.raises(ValidationError, match="sources: expected unique names, found own, A, own"):
        model(sources=("own", "A", "own"))


@in_a_folder
def test_versions_adapted_to_a_hidden_hospital_are_as_if_never_published(
    store: Store, routing_space: Artefact
) -> None:
    lineage = LINEAGE.model_copy(update={"parents": (routing_space.digest,)})
    own, other = (
        store.publish(model(f"space.at-{name}", hospital=name, role="hospital", lineage=lineage), files(name))
        for name in ("north", "south")
    )
    assert len(store.lineage.descendants(routing_space.digest)) == 2
    damaged = store.publish(
        model("space.at-south", hospital="south", role="hospital", lineage=lineage), files("2")
    )
    (damaged.path / "manifest.json").unlink()
    view = Store(store.root).visible_to(lambda hospital: hospital == "north")

    assert store.versions.names() == sorted([*view.versions.names(), "space.at-south"])
    assert view.versions.numbers("space.at-south") == []
    assert view.versions.unreadable("space.at-south") == {}
    assert view.open("space.at-north") == own
    assert [str(a) for a in view.lineage.descendants(routing_space.digest)] == ["space.at-north@1"]
    said = []
    for name in ("south", "nowhere"):
        for reference in ("", "@1", f"@{other.digest}"):
            with pytest.raises(ReferenceNotFound) as unknown:
                view.open(f"space.at-{name}{reference}")
            said.append(str(unknown.value).replace(f"at-{name}{reference}", "…"))
        with pytest.raises(ReferenceNotFound):
            view.versions.of(f"space.at-{name}")
    assert len(set(said)) == 1
    with pytest.raises(ReferenceNotFound):
        view.by_digest(other.digest)
    # The store itself is as it was.
    assert store.by_digest(other.digest) == other


@in_a_folder
def test_a_damaged_version_is_visible_beside_a_readable_one(store: Store) -> None:
    store.publish(model(), files("1"))
    (store.publish(model(), files("2")).path / "manifest.json").unlink()
    view = Store(store.root).visible_to(lambda _: False)
    assert view.versions.numbers("brain") == [1, 2]
    assert list(view.versions.unreadable("brain")) == [2]
