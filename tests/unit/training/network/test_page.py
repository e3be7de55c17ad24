"""The page of the roster: it needs the key, and says what the command says."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path

import httpx
import pytest
from starlette.types import ASGIApp

from training.network import calendar
from training.network.kits import Kit, provision
from training.network.messages import PROTOCOL, About, Found
from training.network.page import application, key_of
from training.network.roster import Roster

SITES = ("aster", "birch", "cedar")


@pytest.fixture(scope="module")
def provisioned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kits")
    provision(root, "hearts", "localhost:8002", SITES)
    return root


@pytest.fixture
def root(provisioned: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(provisioned, tmp_path / "kits"))


@pytest.fixture
def own(root: Path) -> Kit:
    return Kit.open(root / "server", server=True)


@dataclass
class Browser:
    """Requests to the page, with the key unless another one is set."""

    app: ASGIApp
    auth: tuple[str, str] | None

    def get(self, path: str, **headers: str) -> httpx.Response:
        async def got() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8003") as client:
                return await client.get(path, headers=headers, auth=self.auth)

        return asyncio.run(got())


@pytest.fixture
def client(root: Path, own: Kit) -> Browser:
    return Browser(application(root), ("operator", key_of(own)))


def hear(root: Path, own: Kit, site: str, *wrong: Found) -> None:
    kit = Kit.open(root / site, server=False).certified().fingerprint
    said = About(
        protocol=PROTOCOL,
        locum="0.2.0",
        clock=datetime.now(UTC),
        kit=kit,
        policy="0" * 64,
        patients=31,
        labels={"<b>ring</b>": 30},
        findings=wrong,
    )
    Roster(own).heard(site, said)


@pytest.mark.parametrize("path", ["/", "/mail/aster", "/none"])
@pytest.mark.parametrize("auth", [None, ("operator", ""), ("operator", "another")])
def test_every_path_needs_the_key(client: Browser, path: str, auth: tuple[str, str] | None) -> None:
    client.auth = auth
    answer = client.get(path)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Basic ")
    assert "aster" not in answer.text


def test_damaged_credentials_are_refused(client: Browser) -> None:
    client.auth = None
    for said in ("Basic ?", "Basic", "Bearer key", "Basic w6TDtg=="):
        assert client.get("/", Authorization=said).status_code == 401


def test_key_is_kept_and_is_its_owners_alone(own: Kit) -> None:
    assert key_of(own) == key_of(own)
    assert len(key_of(own)) >= 32
    assert (own.folder / "page.key").stat().st_mode & 0o077 == 0


def test_each_hospital_has_a_row_with_what_is_missing(client: Browser, root: Path, own: Kit) -> None:
    hear(root, own, "aster")
    hear(root, own, "birch", Found(part="disk", state="wrong", words="<script>none</script> is free"))
    answer = client.get("/")
    assert answer.status_code == 200
    assert "1 of 3 hospitals are ready" in answer.text
    assert "start `locum site` with its kit: it was never heard" in answer.text
    assert answer.text.count("359 days") == 3
    # What a hospital says is text.
    assert "mend the disk: &lt;script&gt;none&lt;/script&gt; is free" in answer.text
    assert "&lt;b&gt;ring&lt;/b&gt; 30" in answer.text
    assert "<script" not in answer.text
    assert answer.headers["refresh"] == "15"
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert answer.headers["cache-control"] == "no-store"


def test_runs_of_the_calendar_stand_below(client: Browser, own: Kit) -> None:
    assert "None is planned" in client.get("/").text
    calendar.add(own, "hearts, 25 rounds", date(2100, 12, 5), ("aster",))
    shown = client.get("/").text
    assert "hearts, 25 rounds" in shown
    assert "planned: waits for the agreement of aster" in shown


def test_mail_to_a_hospital_is_that_of_the_command(client: Browser) -> None:
    shown = client.get("/mail/cedar").text
    assert "To cedar: before the next run of hearts, please" in shown
    assert "mailto:?subject=hearts%3A%20cedar&amp;body=To%20cedar" in shown
    assert client.get("/mail/elm").status_code == 404


def test_kit_that_went_away_is_a_sentence(client: Browser, own: Kit) -> None:
    (own.folder / "kit.json").unlink()
    answer = client.get("/")
    assert answer.status_code == 500
    assert "is not a kit" in answer.text
