"""Access tokens of a real provider: npm's oidc-provider, where Node and the package are.

npm install --prefix DIR oidc-provider
LOCUM_TEST_OIDC_PROVIDER=DIR python -m pytest tests/integration/service/http/test_oidc_provider.py
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.identity import oidc
from tests.helpers.service.asking import problem

SCRIPT = Path(__file__).parents[3] / "helpers" / "service" / "provider.mjs"

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        shutil.which("node") is None or not os.environ.get("LOCUM_TEST_OIDC_PROVIDER"),
        reason="needs node, and LOCUM_TEST_OIDC_PROVIDER: a folder with npm's oidc-provider",
    ),
]


@contextmanager
def provider(port: int, algorithm: str = "RS256") -> Iterator[str]:
    """Run a provider with new keys; gives its URL."""
    command = ["node", str(SCRIPT), str(port), algorithm]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == "ready"
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def token(url: str) -> dict[str, str]:
    """The header of a client that asked for an access token."""
    found = httpx.post(
        f"{url}/token", data={"grant_type": "client_credentials"}, auth=("pacs", "secret"), timeout=30
    )
    return {"Authorization": f"Bearer {found.json()['access_token']}"}


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.mark.parametrize("algorithm", ["RS256", "ES256"])
def test_token_of_the_provider_is_accepted_and_a_changed_one_is_not(
    start: Callable[..., Any], tmp_path: Path, port: int, algorithm: str
) -> None:
    with provider(port, algorithm) as url:
        api = start(tmp_path / "store", auth="oidc", oidc_issuer=url, oidc_audience="locum")
        sent = token(url)
        found = api.client.get("/session", headers=sent)
        assert (found.status_code, found.json()["actor"], found.json()["roles"]) == (
            200,
            "oidc:pacs",
            ["reader"],
        )
        head, body, signature = sent["Authorization"].split(".")
        changed = {"Authorization": f"{head}.{body[:-4]}AAAA.{signature}"}
        assert problem(api.client.get("/models", headers=changed)) == (401, "token-not-valid")


def test_tokens_survive_a_rotation_and_an_outage_of_the_provider(
    start: Callable[..., Any], tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oidc, "COOLDOWN", 0.0)
    with provider(port) as url:
        api = start(tmp_path / "store", auth="oidc", oidc_issuer=url, oidc_audience="locum")
        before = token(url)
        assert api.client.get("/models", headers=before).status_code == 200
    api.context.authenticator.forget()
    # Down: a token with a known key is still accepted.
    assert api.client.get("/models", headers=before).status_code == 200
    with provider(port) as url:
        after = token(url)
        assert api.client.get("/models", headers=after).status_code == 200
        # The key is withdrawn.
        api.context.authenticator.forget()
        assert problem(api.client.get("/models", headers=before)) == (401, "token-not-valid")
