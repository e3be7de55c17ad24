"""Files of a folder or a zip file are read within limits, and none outside of it."""

from __future__ import annotations

import tracemalloc
import zipfile
from pathlib import Path

import pytest

from training.errors import ImportRefused
from training.exchange.source import MIB, MOST_FILES, Source


def _zip(path: Path, files: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


@pytest.mark.parametrize("prefix", ["", "spleen/"])
def test_folder_and_zip_file_have_the_same_files(tmp_path: Path, prefix: str) -> None:
    files = {"configs/metadata.json": b"{}", "LICENSE": b"Apache"}
    for name, content in files.items():
        (tmp_path / "bundle" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "bundle" / name).write_bytes(content)
    packed = _zip(tmp_path / "bundle.zip", {f"{prefix}{name}": content for name, content in files.items()})

    for path in (tmp_path / "bundle", packed):
        with Source(path) as source:
            assert source.names == ("LICENSE", "configs/metadata.json")
            assert source.read("LICENSE", 6) == b"Apache"
            with pytest.raises(ImportRefused, match="at most 5 bytes"):
                source.read("LICENSE", 5)
            with pytest.raises(ImportRefused, match="found none"):
                source.read("other", 5)


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/passwd", "..\\x", "C:/x"])
def test_zip_with_a_name_that_leads_out_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ImportRefused, match="paths inside of the zip file"):
        Source(_zip(tmp_path / "bad.zip", {name: b"x"}))


def test_a_bomb_is_decompressed_up_to_the_limit_only(tmp_path: Path) -> None:
    packed = _zip(tmp_path / "bomb.zip", {"configs/metadata.json": bytes(64 * MIB), "LICENSE": b""})
    with Source(packed) as source:
        tracemalloc.start()
        with pytest.raises(ImportRefused, match="at most 1 MiB, found more"):
            source.read("configs/metadata.json", MIB)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 16 * MIB


def test_a_zip_file_with_too_many_members_is_refused(tmp_path: Path) -> None:
    files = {str(index): b"" for index in range(MOST_FILES + 1)}
    with pytest.raises(ImportRefused, match=f"at most {MOST_FILES} files"):
        Source(_zip(tmp_path / "many.zip", files, zipfile.ZIP_STORED))


def test_a_link_out_of_the_folder_is_no_file_of_it(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / "LICENSE").symlink_to(secret)
    (folder / "own").write_text("own")

    assert Source(folder).names == ("own",)


def test_what_is_neither_folder_nor_zip_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text")
    for name in ("text", "missing"):
        with pytest.raises(ImportRefused, match="expected a folder or a zip file"):
            Source(tmp_path / name)
