"""The file of `LOCUM_PACS`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from service.errors import PacsRefused, PacsUnknown, SettingsInvalid
from service.pacs.configuration import load_servers, server_for
from service.settings import read_settings

GOOD = {"url": "https://pacs.example/dicom-web/", "hospitals": ["north"]}


def written(path: Path, **servers: Any) -> Path:
    path.write_text(yaml.safe_dump(servers))
    return path


def test_one_url_is_for_all_services_and_each_may_have_its_own(tmp_path: Path) -> None:
    more = GOOD | {"wado": "https://wado.example/rs"}
    found = load_servers(written(tmp_path / "pacs.yaml", main=GOOD, other=more))
    assert found["main"].qido_url == found["main"].stow_url == "https://pacs.example/dicom-web"
    assert found["other"].wado_url == "https://wado.example/rs"
    assert not found["main"].store


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"url": "ftp://pacs.example"}, "https"),
        ({"url": "http://pacs.example/dicom-web"}, "in the clear"),
        ({"url": "https://locum:hunter2@pacs.example"}, "without credentials"),
        ({"url": None}, "expected url"),
        ({"hospitals": []}, "at least 1"),
        ({"hospitals": ["../north"]}, "letters, digits"),
        ({"username": "locum"}, "password_file or password_env"),
        ({"username": "a", "password_env": "A", "password_file": "/a"}, "one password"),
        ({"token_env": "A", "token_file": "/a"}, "one token"),
        ({"client_key": "/a"}, "client_certificate"),
        ({"stroe": True}, "there are: url"),
    ],
)  # fmt: skip
def test_wrong_field_is_named_without_its_value(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    path = written(tmp_path / "pacs.yaml", main=GOOD | fields)
    with pytest.raises(SettingsInvalid, match=said) as found:
        load_servers(path)
    assert "main" in str(found.value)
    assert "hunter2" not in str(found.value)


def test_http_is_for_loopback_or_on_request(tmp_path: Path) -> None:
    servers = {
        "near": GOOD | {"url": "http://127.0.0.1:8042/dicom-web"},
        "asked": GOOD | {"url": "http://pacs/dicom-web", "plain_http": True},
    }
    assert len(load_servers(written(tmp_path / "pacs.yaml", **servers))) == 2


@pytest.mark.parametrize("content", ["", "- a", "main: [", "\0", "5"])
def test_file_that_is_no_list_of_pacs_is_a_wrong_setting(tmp_path: Path, content: str) -> None:
    path = tmp_path / "pacs.yaml"
    path.write_text(content)
    with pytest.raises(SettingsInvalid, match="LOCUM_PACS"):
        read_settings({"pacs": load_servers}, pacs=path)
    with pytest.raises(SettingsInvalid, match="cannot be read"):
        read_settings({"pacs": load_servers}, pacs=tmp_path / "none.yaml")


def test_pacs_is_unknown_to_other_hospitals(tmp_path: Path) -> None:
    path = written(tmp_path / "pacs.yaml", main=GOOD)
    assert server_for(path, "main", "north").hospitals == ("north",)
    for where, name, hospital in (
        (path, "main", "south"),
        (path, "http://evil", "north"),
        (None, "main", "north"),
    ):
        with pytest.raises(PacsUnknown):
            server_for(where, name, hospital)


def test_secret_is_read_at_each_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret"
    servers = {
        "file": GOOD | {"username": "a", "password_file": str(secret)},
        "variable": GOOD | {"token_env": "PACS_TOKEN"},
    }
    found = load_servers(written(tmp_path / "pacs.yaml", **servers))
    with pytest.raises(PacsRefused, match="cannot be read"):
        found["file"].password()
    for text in ("one\n", "two"):
        secret.write_text(text)
        assert found["file"].password() == text.strip()
    with pytest.raises(PacsRefused, match="PACS_TOKEN"):
        found["variable"].token()
    monkeypatch.setenv("PACS_TOKEN", "t")
    assert found["variable"].token() == "t"
    assert found["variable"].password() is None
