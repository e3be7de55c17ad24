"""What the command says of an error."""

from __future__ import annotations

import errno
import resource
import sys
from pathlib import Path

import pytest

from locum.answers import write_whole
from locum.commands.app import exit_code, in_words, main
from locum.commands.exit_codes import FAILED, USAGE
from locum.errors import NotAllowed, Problem


def test_hospital_that_is_not_registered_is_registered_by_a_command() -> None:
    said = "no hospital 'heath' is registered: PUT /hospitals/heath registers it"
    assert in_words(Problem(said, status=404)) == (
        "no hospital 'heath' is registered: `locum register heath` registers it"
    )


def test_missing_key_is_asked_for_by_its_variable_and_by_login() -> None:
    said = "send the header `Authorization: Bearer ...` with an API key"
    expected = (
        "expected an API key or access token that the service takes: set LOCUM_KEY, or use `locum login`"
    )
    assert in_words(NotAllowed(said, status=401, slug="credential-missing")) == expected
    # The service says what is wrong with a key that was sent.
    assert (
        in_words(NotAllowed("the API key expired", status=401, slug="key-not-valid")) == "the API key expired"
    )


def test_disk_that_is_full_is_one_sentence_with_the_file_and_leaves_no_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "scan-mask.nii.gz"
    write_whole(path, b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The system's error of a write, which names no file: as that of a full disk, but for its number.
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, hard))
    try:
        with pytest.raises(OSError, match="too large") as found:
            write_whole(path, b"more than eight bytes")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert found.value.errno == errno.EFBIG
    assert in_words(found.value) == f"{path}: File too large"
    assert exit_code(found.value) == FAILED
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [(path.name, b"old")]


def test_command_that_the_client_lacks_names_the_checkout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("locum.commands.app.find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["locum", "serve"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == USAGE
    assert capsys.readouterr().err == (
        "locum: service is not installed: this is the client alone (locum-client); "
        "`pip install -c constraints.txt .` in a checkout of Locum installs all of it\n"
    )
