"""The state that each release left (`tools/keep-state`) opens in this version, and goes on."""

from __future__ import annotations

import io
import json
import re
import tarfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from sqlalchemy import func, select

from service.audit import trail
from service.database import ApiKey, AuditRow, Database
from service.settings import Settings
from tests.helpers.service.api import serving
from tests.integration.service.conftest import NO_REDIS

ROOT = Path(__file__).resolve().parents[3]
KEPT = Path(__file__).with_name("releases")
RELEASES = [
    each.group(1)
    for each in re.finditer(r"^## \[(\d+\.\d+\.\d+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
]
SERVING = "/hospitals/north/serving/bright"


def test_every_release_left_its_state() -> None:
    assert RELEASES
    assert sorted(RELEASES) == sorted(each.name.removesuffix(".tar.xz") for each in KEPT.glob("*.tar.xz"))
    assert all(each.stat().st_size < 200_000 for each in KEPT.iterdir())


def unpacked(version: str, root: Path) -> tuple[Settings, dict[str, Any]]:
    with tarfile.open(KEPT / f"{version}.tar.xz") as packed:
        # Python 3.11.2, which Debian has, knows no filter yet.
        how: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        packed.extractall(root, **how)
    said: dict[str, Any] = json.loads((root / "said.json").read_text())
    settings = Settings(
        store=root / "store", state_dir=root / "state", device="cpu", threads=1, redis_url=NO_REDIS
    )
    return settings, said


def verified(settings: Settings) -> tuple[int, int]:
    """How many rows the trail has, which is in order, and how many API keys there are."""
    database = Database(settings.resolved_database_url)
    with database.snapshot() as session:
        trail.verify(session)
        counts = [session.scalar(select(func.count()).select_from(table)) for table in (AuditRow, ApiKey)]
    database.dispose()
    return counts[0] or 0, counts[1] or 0


@pytest.mark.parametrize("version", RELEASES)
def test_state_of_a_release_is_upgraded_answers_and_is_in_order(version: str, tmp_path: Path) -> None:
    settings, said = unpacked(version, tmp_path)
    assert said["version"] == version
    scan = bytes.fromhex(said["scan"])
    with serving(settings) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        now = client.get(SERVING).raise_for_status()
        assert now.json()["artefact"] == said["serves"]
        log = client.get(f"{SERVING}/history").json()["entries"]
        names = ("sequence", "version", "actor", "reason")
        assert [{name: each[name] for name in names} for each in log] == said["history"]
        fields = {"hospital": "north", "model": "bright"}
        answer = client.post("/segment", files={"scan": ("scan.png", scan)}, data=fields).raise_for_status()
        pixels = np.asarray(Image.open(io.BytesIO(answer.content)))
        assert answer.headers["Locum-Model"] == said["serves"]
        assert sha256(pixels.tobytes()).hexdigest() == said["found"]
        # What people made: a cohort with its scan and its mask.
        place = f"{said['cohort']}/scans/patient-1.png"
        assert client.get(place).raise_for_status().content == scan
        mask = np.asarray(Image.open(io.BytesIO(client.get(f"{place}/mask").raise_for_status().content)))
        np.testing.assert_array_equal(mask, np.asarray(Image.open(io.BytesIO(scan))) > 120)
        body = {"version": 2, "actor": "ines", "reason": "after the upgrade"}
        headers = {"If-Match": now.headers["ETag"]}
        assert client.put(SERVING, json=body, headers=headers).raise_for_status().json()["version"] == 2
    rows, keys = verified(settings)
    assert rows > 0
    assert (keys > 0) == said["keys"]


def test_opened_twice_it_is_upgraded_once(tmp_path: Path) -> None:
    settings, _ = unpacked(min(RELEASES), tmp_path)
    found = []
    for _ in range(2):
        with serving(settings):
            pass
        found.append(verified(settings))
    assert found[0] == found[1]
