"""`locum distance` as a person runs it, in a folder that has a package of the same name."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.unit.service.distance.test_distance import pixels, published, save


def test_distance_imports_no_torch_and_tells_that_scans_are_inverted(
    command: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published(tmp_path / "store")
    for seed in range(3):
        save(tmp_path / "scans", f"p{seed}.png", 255 - pixels(seed))
    (tmp_path / "service").mkdir()
    (tmp_path / "service" / "__init__.py").write_text("raise SystemExit('of the working folder')\n")
    monkeypatch.chdir(tmp_path)
    done = command(
        *("distance", "organ", "scans", "--store", "store", "--picture", "seen.svg"),
        PYTHONPROFILEIMPORTTIME="1",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "model_store.lens.distance" in imported
    assert not imported & {"torch", "monai", "matplotlib", "fastapi"}
    lines = done.stdout.splitlines()
    assert lines[0] == "organ@1: 3 scans"
    assert lines[3].split()[0] == "p0.png"
    assert lines[3].endswith("yes       looks inverted")
    assert lines[-1].startswith(
        "inverted: these scans look like the members' in negative; a lens would negate"
    )
    ElementTree.parse(tmp_path / "seen.svg")
