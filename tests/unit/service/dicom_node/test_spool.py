"""The node's queue on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from service.dicom_node.spool import Spool
from service.errors import DiskFull, SettingsInvalid

MOST = 10_000
Begin = Callable[..., Spool]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    with ExitStack() as stack:
        yield lambda most=MOST: stack.enter_context(closing(Spool(tmp_path, most)))


def test_objects_survive_a_process_that_never_closed(tmp_path: Path, begin: Begin) -> None:
    spool = begin()
    key = spool.add("north", "1.2", "1.2.1", b"first")
    spool.add("north", "1.2", "1.2.2", b"second")
    (tmp_path / "receiving" / key / ".half-written").write_bytes(b"x")
    spool.close()
    again = begin()
    ((found, _),) = again.receiving()
    assert found == key
    entry = again.complete(key)
    assert (entry.hospital, sorted(path.read_bytes() for path in entry.objects)) == (
        "north",
        [b"first", b"second"],
    )
    again.close()
    (kept,) = begin().ready()
    assert (kept.id, len(kept.objects)) == (entry.id, 2)


def test_paths_have_no_uid(tmp_path: Path, begin: Begin) -> None:
    spool = begin()
    spool.complete(spool.add("north", "1.2.840.1", "1.2.840.2", b"x"))
    assert not [path for path in tmp_path.rglob("*") if "1.2.840" in path.name]


def test_same_instance_replaces_itself_and_hospitals_are_apart(tmp_path: Path, begin: Begin) -> None:
    spool = begin()
    keys = {spool.add(hospital, "1.2", "1.2.1", b"x" * 10) for hospital in ("north", "north", "south")}
    assert len(keys) == 2
    assert [len(spool.complete(key).objects) for key in keys] == [1, 1]


def test_object_after_completion_begins_another_series(tmp_path: Path, begin: Begin) -> None:
    spool = begin()
    key = spool.add("north", "1.2", "1.2.1", b"x")
    first = spool.complete(key)
    second = spool.complete(spool.add("north", "1.2", "1.2.2", b"y"))
    assert [entry.id for entry in spool.ready()] == [first.id, second.id]


def test_full_queue_takes_nothing_until_a_series_is_delivered(tmp_path: Path, begin: Begin) -> None:
    spool = begin(100)
    entry = spool.complete(spool.add("north", "1.2", "1.2.1", b"x" * 80))
    with pytest.raises(DiskFull):
        spool.add("north", "1.3", "1.3.1", b"x" * 30)
    spool.finish(entry)
    spool.add("north", "1.3", "1.3.1", b"x" * 30)


def test_limit_of_the_queue_stays_the_same_after_deliveries_failures_and_restarts(
    tmp_path: Path, begin: Begin
) -> None:
    spool = begin(100)
    for number in range(3):
        delivered = spool.complete(spool.add("north", "1.2", f"1.2.{number}", b"x" * 40))
        failed = spool.complete(spool.add("north", "1.3", f"1.3.{number}", b"x" * 40))
        if number == 1:
            spool.close()
            spool = begin(100)
        spool.finish(delivered)
        spool.fail(failed, "why")
        os.utime(tmp_path / "failed" / failed.id, (0, 0))
        spool.sweep(3600)
    spool.add("north", "1.4", "1.4.1", b"x" * 100)
    with pytest.raises(DiskFull):
        spool.add("north", "1.4", "1.4.2", b"x")


def test_failed_series_is_kept_with_its_reason_and_can_be_put_back(tmp_path: Path, begin: Begin) -> None:
    spool = begin()
    entry = spool.complete(spool.add("north", "1.2", "1.2.1", b"x"))
    spool.fail(entry, "why")
    assert spool.ready() == []
    failed = tmp_path / "failed" / entry.id
    assert (failed / "reason").read_text() == "why"
    failed.rename(tmp_path / "ready" / entry.id)
    assert len(spool.ready()[0].objects) == 1
    spool.fail(entry, "again")
    os.utime(failed, (0, 0))
    spool.sweep(3600)
    assert not failed.exists()


def test_queue_has_one_node(tmp_path: Path, begin: Begin) -> None:
    spool = begin()
    with pytest.raises(SettingsInvalid, match="one queue"):
        begin()
    spool.close()
    begin()
