"""Masks that go with a cohort's scans: kept as they are, bounded with them, and gone with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.cohorts import cohorts, masks
from service.database import Database
from service.errors import CohortDeleted, CohortFull, CohortInUse, CohortUnknown, MaskStale, MaskTaken
from service.expiry import expire
from tests.helpers.service.cohort_bench import Bench, digest


def test_mask_is_removed_with_its_scan_and_shared_bytes_with_the_last_name(bench: Bench) -> None:
    for name in ("a", "b"):
        bench.add(name, name.encode())
        assert bench.draw(name, b"empty")
    assert not bench.draw("a", b"empty")
    where = (bench.database, bench.settings, "north", bench.cohort)
    with pytest.raises(MaskTaken, match=digest(b"empty")[:12]):
        bench.draw("a", b"another")
    with bench.database.read() as session:
        assert cohorts.totals(session, [bench.cohort]) == {bench.cohort: (2, 2 + 2 * len(b"empty"))}
        assert list(masks.of_cohort(session, bench.cohort)) == ["a", "b"]
    # Another person's mask is not deleted for one's own.
    with pytest.raises(MaskStale, match=digest(b"empty")[:12]):
        masks.remove_mask(*where, "a", lambda tag: tag == f"sha256:{digest(b'mine')}")
    masks.remove_mask(*where, "a", lambda tag: tag == f"sha256:{digest(b'empty')}")
    with pytest.raises(CohortUnknown, match="no mask"):
        masks.remove_mask(*where, "a")
    assert sorted(bench.files().values()) == [b"a", b"b", b"empty"]
    expire(bench.database, bench.settings)
    assert sorted(bench.files().values()) == [b"a", b"b", b"empty"]
    cohorts.remove_scan(*where, "b")
    assert list(bench.files().values()) == [b"a"]
    bench.draw("a", b"target")
    with bench.database.read() as session:
        file = cohorts.file_of(bench.settings, masks.of_cohort(session, bench.cohort)["a"], "a")
    assert file.read() == b"target"
    file.files.remove(file.key)
    with pytest.raises(CohortDeleted, match=f"mask {digest(b'target')[:12]} is not stored"):
        file.read()
    cohorts.remove(*where)
    assert bench.files() == {}


def test_masks_count_towards_the_quota_and_are_kept_during_a_job(database: Database, tmp_path: Path) -> None:
    # One of several hospitals has half of it.
    bench = Bench(database, tmp_path / "state", cohort_quota_bytes=20)
    bench.add("a", b"1234567")
    with pytest.raises(CohortFull, match="LOCUM_COHORT_QUOTA_BYTES"):
        bench.draw("a", b"mask")
    bench.draw("a", b"123")
    with pytest.raises(CohortFull):
        bench.add("b", b"1")
    with pytest.raises(CohortUnknown):
        bench.draw("b", b"")
    bench.job("running")
    with pytest.raises(CohortInUse):
        masks.remove_mask(bench.database, bench.settings, "north", bench.cohort, "a")
    assert not bench.draw("a", b"123")
