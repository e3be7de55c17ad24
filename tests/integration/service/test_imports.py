"""The API half never imports torch: it would start in ten seconds and take a gigabyte."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from service.database import Database, upgrade

ANSWERS_WITHOUT_TORCH = """
import asyncio, sys
from service.app import create_app
at_first_use = {"scipy.ndimage", "alembic", "onnx", "jinja2", "joserfc", "httpx"} & {*sys.modules}
import httpx

async def ask():
    app = create_app()
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert (await client.get("/models")).status_code == 200
            assert (await client.get("/health/live")).status_code == 200
            empty = await client.post("/segment", files={"scan": ("s", b"nothing")})
            assert empty.status_code == 422, empty.text
            app.state.locum.queue.send("locum.verify_store")

asyncio.run(ask())
loaded = {name.partition(".")[0] for name in sys.modules}
of_personalization = {name.split(".")[1] for name in sys.modules if name.startswith("personalization.")}
heavy = at_first_use | loaded & {"torch", "monai", "training", "matplotlib"}
print(sorted(heavy), sorted(of_personalization))
"""

SERVES_WITHOUT = """
import asyncio, os, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "monai", "sklearn", "matplotlib", "training"}:
            raise ModuleNotFoundError(f"No module named '{name}': it is not installed here", name=name)

sys.meta_path.insert(0, Absent())
import httpx
from service.app import create_app
from service.dicom_node import scp
from service.openapi import description

async def ask():
    app = create_app()
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            scan = {"scan": ("s.png", open(os.environ["SCAN"], "rb").read())}
            for output in ("png", "overlay", "json"):
                answer = await client.post("/segment", files=scan, data={"output": output})
                assert answer.status_code == 200, answer.text
            return answer.json()

assert "/segment" in description()
print(asyncio.run(ask()))
"""

WORKER_WITHOUT_TORCH = """
import sys
from service.worker.celery import verify
verify()
print("torch" in sys.modules)
"""


def run(program: str, folder: Path) -> str:
    places = {"LOCUM_STATE_DIR": str(folder / "state"), "LOCUM_STORE": str(folder / "store")}
    places["SCAN"] = str(folder / "scan.png")
    ran = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | places, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_api_answers_and_enqueues_without_importing_torch(tmp_path: Path) -> None:
    assert run(ANSWERS_WITHOUT_TORCH, tmp_path) == "[] ['options']"


def test_scan_is_answered_where_what_trains_is_not_installed(
    publish_bright: Callable[..., object], make_png: Callable[..., bytes], picture: object, tmp_path: Path
) -> None:
    publish_bright(tmp_path / "store")
    (tmp_path / "scan.png").write_bytes(make_png(picture))
    assert "bright" in run(SERVES_WITHOUT, tmp_path)


def test_worker_verifies_the_store_without_importing_torch(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'state' / 'locum.db'}")
    upgrade(database)
    database.dispose()
    assert run(WORKER_WITHOUT_TORCH, tmp_path) == "False"
