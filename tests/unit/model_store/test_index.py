"""The index of a store: equal to reading every manifest, whatever is in its file."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from model_store import folder, index
from model_store.artefact import Artefact
from model_store.errors import ArtefactWithdrawn, ReferenceNotFound
from model_store.index import Record
from model_store.store import Store
from tests.unit.model_store.test_store import LINEAGE, files, in_a_folder, model, store

__all__ = ["store"]


@pytest.fixture(autouse=True, params=["few", "many"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a small store, and as in one so large that not every call looks at every folder."""
    if request.param == "many":
        monkeypatch.setattr(folder, "_FEW", 0)
        monkeypatch.setattr(index, "_MANY", 0)
        monkeypatch.setattr(folder, "_SWEEP_S", 3600.0)
        # What tells of a change has to do it, not the seconds after it.
        monkeypatch.setattr(folder, "_SETTLED_NS", 0)


def publish_family(store: Store, seed: int = 0) -> list[Artefact]:
    """Publish versions of random descent, of which some are adapted to a hospital, and withdraw some."""
    choose = random.Random(seed)
    made: list[Artefact] = []
    for number in range(24):
        parents = choose.sample(made, min(len(made), choose.randrange(3)))
        hospital = choose.choice(["north", "south", None])
        lineage = LINEAGE.model_copy(
            update={"parents": tuple(each.digest for each in parents), "run": f"run-{number}"}
        )
        name = choose.choice(["brain", "heart", "liver"]) + ("" if hospital is None else f".at-{hospital}")
        role = {} if hospital is None else {"hospital": hospital, "role": "hospital"}
        made.append(store.publish(model(name, lineage=lineage, **role), files(str(number))))
    for artefact in choose.sample(made, 6):
        store.withdraw(str(artefact), actor="ada", reason="bad")
    return made


def ancestors(artefact: Artefact, made: list[Artefact]) -> set[str]:
    """Walk back over the manifests, one step at a time."""
    found: set[str] = set()
    for digest in artefact.manifest.lineage.parents:
        parent = next(each for each in made if each.digest == digest)
        found |= {str(parent)} | ancestors(parent, made)
    return found


def withdrawn(store: Store, made: list[Artefact]) -> set[str]:
    found = set()
    for artefact in made:
        try:
            Store(store.root).open(str(artefact), verify=False)
        except ArtefactWithdrawn:
            found.add(str(artefact))
    return found


def opened(store: Store) -> Iterator[Store]:
    """The store that published, one that reads the index, and one that has to make it."""
    yield store
    yield Store(store.root)
    if isinstance(store.root, Path):
        (store.root / ".index").unlink()
        yield Store(store.root)


@pytest.mark.parametrize("seed", range(2))
def test_lineage_equals_that_of_a_walk_over_all_manifests(store: Store, seed: int) -> None:
    made = publish_family(store, seed)
    gone = withdrawn(store, made)
    assert len(gone) == 6
    for each in opened(store):
        assert [str(record) for record in each.lineage.records()] == sorted(
            map(str, made), key=lambda reference: (reference.split("@")[0], int(reference.split("@")[1]))
        )
        for artefact in made:
            assert set(each.lineage.flagged(artefact)) == ancestors(artefact, made) & gone
            assert each.lineage.locate(artefact.digest) == Record.of(artefact)
            assert {str(record) for record in each.lineage.descendants(artefact.digest)} == {
                str(other) for other in made if str(artefact) in ancestors(other, made)
            }
            assert each.versions.made_by(artefact.name, artefact.manifest.lineage.run) == artefact
        assert set(each.versions.shared()) == {a.name for a in made if a.manifest.adapted_to is None}
        view = each.visible_to(lambda hospital: hospital == "north")
        assert {str(record) for record in view.lineage.records()} == {
            str(artefact) for artefact in made if artefact.manifest.adapted_to in (None, "north")
        }


def test_store_that_was_opened_before_sees_each_change_at_its_next_call(store: Store) -> None:
    parent = store.publish(model(), files("0"))
    lineage = LINEAGE.model_copy(update={"parents": (parent.digest,)})
    child = store.publish(model("child", lineage=lineage), files("child"))
    other = Store(store.root)
    assert len(other.lineage.records()) == 2
    for number in range(1, 4):
        newest = store.publish(model(), files(str(number)))
        assert other.open("brain", verify=False) == newest
        assert other.by_digest(newest.digest) == newest
        new = store.publish(model(f"new-{number}", part_of="brain"), files(str(number)))
        assert Record.of(new) in other.lineage.records()
        assert new.name in other.versions.names()
        assert other.versions.shared() == ("brain", "child")
        store.withdraw(str(new), actor="ada", reason="bad")
        with pytest.raises(ArtefactWithdrawn):
            other.by_digest(new.digest)
        store.withdraw(str(newest), actor="ada", reason="bad")
        with pytest.raises(ArtefactWithdrawn):
            other.open(str(newest))
        assert other.open("brain", verify=False) == parent
    assert other.lineage.flagged(child) == ()
    store.withdraw("brain@1", actor="ada", reason="bad")
    assert other.lineage.flagged(child) == ("brain@1",)


def test_view_of_a_request_sees_what_was_published_before_it(store: Store) -> None:
    other = Store(store.root)
    for number in range(4):
        published = store.publish(model(), files(str(number)))
        view = other.as_of_now()
        assert view.open("brain", verify=False) == published
        store.withdraw(str(published), actor="ada", reason="bad")
        with pytest.raises(ArtefactWithdrawn):
            other.as_of_now().open(str(published))


@in_a_folder
@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b'["brain",1,"sha256:',
        b"\x00\xff\n{}\n[]\n[1,2]\nnull\n",
        b'["brain","1","sha256:0","","","",0,""]\n["brain",1,"sha256:0",null,null,"r","when",""]\n',
    ],
)
def test_damaged_index_changes_no_answer(store: Store, damage: bytes) -> None:
    made = publish_family(store)
    file = store.root / ".index"
    whole = file.read_bytes()
    for content in (damage, whole + damage, damage + b"\n" + whole, whole[: len(whole) // 2] + damage):
        file.write_bytes(content)
        other = Store(store.root)
        assert {record.digest for record in other.lineage.records()} >= {artefact.digest for artefact in made}
        assert all(other.lineage.locate(artefact.digest) == Record.of(artefact) for artefact in made)
        # What a killed process left half written does not spoil the line after it.
        published = other.publish(model("after"), files(str(len(content))))
        assert Store(store.root).lineage.locate(published.digest) == Record.of(published)


@in_a_folder
def test_index_of_another_content_is_corrected_by_what_is_read(store: Store) -> None:
    first = store.publish(model(), files("1"))
    line = Record.of(first)._replace(digest="sha256:" + "0" * 64, adapted_to="north").to_line()
    (store.root / ".index").write_bytes(line + b"\n")
    other = Store(store.root)
    with pytest.raises(ReferenceNotFound):
        other.by_digest("sha256:" + "0" * 64)
    assert other.open("brain", verify=False) == first
    assert other.by_digest(first.digest) == first
    assert Store(store.root).lineage.locate(first.digest) == Record.of(first)


@in_a_folder
def test_index_that_cannot_be_written_is_done_without(store: Store) -> None:
    (store.root / ".index").mkdir(parents=True)
    made = publish_family(store)
    for each in (store, Store(store.root)):
        assert len(each.versions.of("brain")) == sum(artefact.name == "brain" for artefact in made)
        assert all(each.lineage.locate(artefact.digest) == Record.of(artefact) for artefact in made)


@in_a_folder
def test_publication_moves_the_time_of_its_folder_forward_whatever_the_clock_says(store: Store) -> None:
    store.publish(model(), files("1"))
    name, hour = store.root / "brain", 3600 * 10**9
    ahead = name.stat().st_mtime_ns + hour
    os.utime(name, ns=(ahead, ahead))
    other = Store(store.root)
    assert other.versions.numbers("brain") == [1]
    published = store.publish(model(), files("2"))
    assert name.stat().st_mtime_ns > ahead
    assert other.open("brain", verify=False) == published


@in_a_folder
def test_version_copied_by_hand_is_seen_at_once_in_its_name(store: Store, tmp_path: Path) -> None:
    published = store.publish(model(), files("1"))
    other = Store(tmp_path / "other")
    other.publish(model(), files("0"))
    assert len(other.lineage.records()) == 1
    shutil.copytree(published.path, tmp_path / "other" / "brain" / "2")
    assert other.versions.numbers("brain") == [1, 2]
    assert other.open("brain").digest == published.digest
    assert other.by_digest(published.digest).version == 2


@in_a_folder
def test_publication_finds_equal_content_where_its_line_is_cut_at_any_byte(store: Store) -> None:
    made = [
        store.publish(model(lineage=LINEAGE.model_copy(update={"run": run})), files(run)) for run in "abc"
    ]
    line = Record.of(made[1]).to_line()
    lines = [Record.of(each).to_line() for each in (made[0], made[2])]
    for cut in range(0, len(line), 5):
        (store.root / ".index").write_bytes(b"\n".join([lines[0], line[:cut], lines[1], b""]))
        again = Store(store.root).publish(made[1].manifest, files("b"))
        assert again == Store(store.root).versions.made_by("brain", "b") == made[1]
    assert store.versions.numbers("brain") == [1, 2, 3]


@in_a_folder
def test_publication_of_what_the_index_has_under_another_version_makes_a_version(store: Store) -> None:
    first = store.publish(model(), files("1"))
    other = Store(store.root.with_name("other")).publish(model(), files("2"))
    wrong = Record.of(first)._replace(digest=other.digest).to_line()
    (store.root / ".index").write_bytes(wrong + b"\n")
    published = Store(store.root).publish(model(), files("2"))
    assert (published.version, published.digest) == (2, other.digest)
    for each in opened(store):
        assert (each.by_digest(first.digest), each.by_digest(other.digest)) == (first, published)


@in_a_folder
def test_publication_into_a_long_name_parses_only_the_lines_that_it_needs(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "_MANY", 3)
    made = [store.publish(model(), files(str(number))) for number in range(6)]
    parsed: list[bytes] = []
    parse = index._parse
    monkeypatch.setattr(index, "_parse", lambda text: parsed.append(text) or parse(text))
    new = Store(store.root)
    assert new.by_digest(made[2].digest) == made[2]
    assert new.publish(model(), files("new")).version == 7
    assert [Record(*json.loads(text)).number for text in parsed if text] == [3]
    # What was not parsed is there.
    assert [record.number for record in new.lineage.records()] == [*range(1, 8)]


@in_a_folder
def test_request_after_a_publication_lists_a_name_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    # As in the first moments after a change.
    monkeypatch.setattr(folder, "_SETTLED_NS", 3600 * 10**9)
    made = [store.publish(model(), files(str(number))) for number in range(3)]
    listed: list[str] = []
    list_folder = folder._list
    monkeypatch.setattr(folder, "_list", lambda path: listed.append(path) or list_folder(path))
    for _ in range(2):
        request = store.as_of_now()
        assert request.open("brain", verify=False) == made[2]
        assert request.open(f"brain@{made[0].digest}", verify=False) == made[0]
        assert request.versions.numbers("brain") == [1, 2, 3]
    assert listed == [str(store.root / "brain")] * 2


def test_version_is_opened_by_its_digest_without_a_walk_over_its_name(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [store.publish(model(), files(str(number))) for number in range(3)]
    monkeypatch.delattr(index.Index, "of")
    for each in (store, Store(store.root)):
        for artefact in made:
            assert each.open(f"brain@{artefact.digest}", verify=False) == artefact


@in_a_folder
def test_view_of_an_instant_publishes_after_what_others_published_since(store: Store) -> None:
    store.publish(model(), files("1"))
    request = store.as_of_now()
    assert request.versions.numbers("brain") == [1]
    other = Store(store.root).publish(model(), files("2"))
    assert request.publish(model(), files("2")) == other
    assert request.publish(model(), files("3")).version == 3


def test_descendants_are_found_without_another_walk_over_all_records(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = publish_family(store)
    first = {str(each) for each in store.lineage.descendants(made[0].digest)}
    assert first
    walked: list[Record] = []
    ancestors = Record.ancestors.fget
    monkeypatch.setattr(
        Record, "ancestors", property(lambda record: walked.append(record) or ancestors(record))
    )
    assert {str(each) for each in store.lineage.descendants(made[0].digest)} == first
    assert walked == []
    child = store.publish(
        model("new", lineage=LINEAGE.model_copy(update={"parents": (made[0].digest,)})), files("n")
    )
    assert Record.of(child) in store.lineage.descendants(made[0].digest)


@in_a_folder
def test_version_made_by_hand_during_a_publication_is_not_replaced(store: Store) -> None:
    first = store.publish(model(), files("1"))
    name = store.root / "brain"

    def copy() -> None:
        before = name.stat()
        (name / "2").mkdir()
        # As within one tick of the clock.
        os.utime(name, ns=(before.st_atime_ns, before.st_mtime_ns))

    assert store.publish(model(), files("3"), admit=copy).version == 3
    assert [*(name / "2").iterdir()] == []
    assert store.open("brain@1") == first
