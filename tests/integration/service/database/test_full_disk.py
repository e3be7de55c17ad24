"""A service on a small file system that is full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import typer

from service.commands.database import opened
from service.settings import Settings
from tests.helpers.service.api import NO_REDIS, Api, running
from tests.helpers.service.asking import problem

MEBIBYTE = 2**20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 48 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED ON A FULL DISK: only root mounts a file system")
    mount = ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("NOT TESTED ON A FULL DISK: a file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def api(disk: Path, tmp_path: Path, publish_bright: object) -> Iterator[Api]:
    settings = Settings(store=tmp_path / "store", state_dir=disk / "state", redis_url=NO_REDIS)
    with running(settings) as api:
        yield api


def fill(disk: Path) -> Path:
    """Write until nothing fits any more."""
    file = disk / "filler"
    with file.open("wb", buffering=0) as stream:
        for size in (MEBIBYTE, 4096):
            try:
                while True:
                    stream.write(bytes(size))
            except OSError:
                continue
    return file


@pytest.mark.parametrize("free", [0, 20, 100])
def test_command_on_a_full_disk_names_the_folder(
    disk: Path, free: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """With no page, with some pages for the file alone, and with some for its log."""
    settings = Settings(state_dir=disk / "state")
    settings.make_state_dir()
    fill(disk)
    os.truncate(disk / "filler", (disk / "filler").stat().st_size - 1024 * free)
    with pytest.raises(typer.Exit), opened(settings):
        pass
    said = capsys.readouterr().err
    assert said.startswith(f"locum: {settings.state_dir}: expected room for the database, found a full disk")


def test_deletions_work_on_a_full_disk_and_uploads_after_them(
    api: Api, disk: Path, make_png: Callable[..., bytes]
) -> None:
    assert api.client.put("/hospitals/north", json={"name": "North"}).status_code == 201
    cohort = api.client.post("/hospitals/north/cohorts").json()["id"]
    place = f"/hospitals/north/cohorts/{cohort}"
    noise = np.random.default_rng(0).integers(0, 255, (1200, 1200), np.uint8)
    scan = make_png(noise)
    assert len(scan) > MEBIBYTE
    for name in ("a", "b", "c"):
        assert api.client.put(f"{place}/scans/{name}", content=scan).status_code == 201
    reserve = disk / "state" / "reserve"
    assert reserve.stat().st_size == 16 * MEBIBYTE

    filler = fill(disk)
    refused = api.client.put(f"{place}/scans/d", content=scan)
    assert refused.status_code == 507
    assert "delete cohorts" in refused.json()["detail"]
    # What the message advises works, each time.
    assert api.client.delete(f"{place}/scans/a").status_code == 204
    assert not reserve.exists()
    for _ in range(2):
        assert problem(api.client.put(f"{place}/scans/d", content=scan)) == (507, "disk-full")
    assert api.client.delete(f"{place}/scans/b").status_code == 204
    assert api.client.delete(place).status_code == 204
    assert not list((disk / "state" / "cohorts").rglob("*.png"))

    filler.unlink()
    cohort = api.client.post("/hospitals/north/cohorts").json()["id"]
    again = api.client.put(f"/hospitals/north/cohorts/{cohort}/scans/d", content=scan)
    assert again.status_code == 201
    assert reserve.stat().st_size == 16 * MEBIBYTE
