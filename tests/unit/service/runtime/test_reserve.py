"""The file that is given up for deletions on a full disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from service.runtime.reserve import keep_reserve, make_room
from service.settings import MEBIBYTE, Settings

SIZE = 2 * MEBIBYTE


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(store=tmp_path / "store", state_dir=tmp_path, reserve_bytes=SIZE)


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`limit(n)`: a disk on which n bytes are free."""
    allocate = os.posix_fallocate

    def set_free(free: int) -> None:
        def limited(file: int, start: int, size: int) -> None:
            if size > free:
                raise OSError(errno.ENOSPC, "No space left on device")
            allocate(file, start, size)

        monkeypatch.setattr(os, "posix_fallocate", limited)

    return set_free


def test_reserve_is_made_where_there_is_room_for_more(
    settings: Settings, limit: Callable[[int], None], tmp_path: Path
) -> None:
    limit(SIZE + 4 * MEBIBYTE)
    assert not keep_reserve(settings)
    assert list(tmp_path.iterdir()) == []
    limit(SIZE + 8 * MEBIBYTE)
    assert keep_reserve(settings)
    (file,) = tmp_path.iterdir()
    assert (file.stat().st_size, file.stat().st_blocks * 512) == (SIZE, SIZE)
    limit(0)
    assert keep_reserve(settings)


def test_reserve_is_given_up_on_a_full_disk_alone(
    settings: Settings, limit: Callable[[int], None], tmp_path: Path
) -> None:
    assert keep_reserve(settings)
    make_room(settings)
    assert (tmp_path / "reserve").exists()
    limit(MEBIBYTE)
    make_room(settings)
    assert list(tmp_path.iterdir()) == []
    make_room(settings)


def test_service_may_have_no_reserve(tmp_path: Path) -> None:
    settings = Settings(store=tmp_path / "store", state_dir=tmp_path, reserve_bytes=0)
    assert keep_reserve(settings)
    assert list(tmp_path.iterdir()) == []
