"""What a command of training says of the system's errors."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from model_store.durable import naming
from training.errors import TrainingError, in_words


def test_full_disk_is_the_file_and_what_is_wrong_with_it(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "server-a.safetensors"
    # The system's own error of a write where no space is left; it names no file.
    with pytest.raises(OSError, match="No space") as found, naming(path), open("/dev/full", "wb") as full:  # noqa: PTH123
        full.write(b"a")
    assert found.value.errno == errno.ENOSPC
    assert in_words(found.value) == f"{path}: {os.strerror(errno.ENOSPC)}"


def test_error_of_no_file_names_the_code_that_asked() -> None:
    with pytest.raises(OSError, match="Bad file descriptor") as found:
        os.fstat(-1)
    assert in_words(found.value) == f"{os.strerror(errno.EBADF)} (asked for in {__file__})"


def test_every_other_error_is_its_sentence() -> None:
    assert in_words(TrainingError("site birch: no scans")) == "site birch: no scans"
    assert in_words(OSError("no number")) == "no number"
