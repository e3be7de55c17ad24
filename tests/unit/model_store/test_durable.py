"""Errors of the system name the file that could not be written."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from model_store.durable import naming, write_durably


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
def test_full_disk_is_named_with_the_path(tmp_path: Path) -> None:
    path = tmp_path / "round.safetensors"
    with (
        pytest.raises(OSError, match=r"No space left on device: '.*round\.safetensors'") as caught,
        naming(path),
        open("/dev/full", "wb", buffering=0) as full,  # noqa: PTH123
    ):
        full.write(b"content")
    assert caught.value.errno == errno.ENOSPC


def test_error_that_names_its_file_keeps_the_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="gone"), naming(tmp_path / "other"):
        (tmp_path / "gone").read_bytes()
    with pytest.raises(FileNotFoundError):
        write_durably(tmp_path / "no folder" / "file", b"")
