"""The file of `LOCUM_DICOM_NODE`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.dicom_node.configuration import load_node
from service.errors import SettingsInvalid
from service.settings import read_settings

GOOD: dict[str, Any] = {
    "ae_title": "LOCUM",
    "service": "http://127.0.0.1:8000",
    "senders": {"CT1": {"hospital": "north", "addresses": ["10.0.0.0/24"]}},
    "hospitals": {"north": {"model": "liver", "destination": "pacs"}},
    "destinations": {"pacs": {"ae_title": "PACS", "host": "pacs.example", "port": 104}},
}


def written(path: Path, **fields: Any) -> Path:
    path.write_text(yaml.safe_dump({**copy.deepcopy(GOOD), **fields}))
    return path


def test_node_listens_on_loopback_by_default(tmp_path: Path) -> None:
    node = load_node(written(tmp_path / "node.yaml"))
    assert (node.host, node.port, node.senders["CT1"].hospital) == ("127.0.0.1", 11112, "north")


def test_http_is_for_loopback_or_on_request(tmp_path: Path) -> None:
    node = load_node(written(tmp_path / "node.yaml", service="http://api:8000", plain_http=True))
    assert node.service == "http://api:8000"


def test_tls_with_ca_proves_senders_without_addresses(tmp_path: Path) -> None:
    fields = {"senders": {"CT1": {"hospital": "north"}}, "tls": {"certificate": "/c", "ca": "/ca"}}
    node = load_node(written(tmp_path / "node.yaml", host="0.0.0.0", **fields))
    assert node.senders["CT1"].addresses == ()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"ae_title": "TOO LONG FOR A TITLE"}, "ae_title"),
        ({"senders": {}}, "senders"),
        ({"senders": {"CT\\1": {"hospital": "north"}}}, "senders"),
        ({"senders": {"CT1": {"hospital": "south"}}}, "'south' is not among hospitals"),
        ({"senders": {"CT1": {"hospital": "north", "addresses": ["ten"]}}}, "addresses"),
        ({"destinations": {}}, "'pacs' is not among destinations"),
        ({"service": "http://api.example"}, "https"),
        ({"service": "https://a:hunter2@api.example"}, "without credentials"),
        ({"host": "0.0.0.0", "senders": {"CT1": {"hospital": "north"}}}, "CT1 would prove only"),
        (
            {"host": "0.0.0.0", "senders": {"CT1": {"hospital": "north"}}, "tls": {"certificate": "/c"}},
            "CT1 would prove only an AE title; set addresses, or tls with ca",
        ),
        ({"service": "ftp://api.example", "plain_http": True}, "https"),
        (
            {"hospitals": {"north": {"model": "a", "destination": "pacs", "key_file": "/k", "key_env": "K"}}},
            "expected one key of 'north'",
        ),
        ({"tls": {"ca": "/ca"}}, "certificate"),
        ({"colour": 1}, "colour"),
    ],
)  # fmt: skip
def test_wrong_field_is_named_without_its_value(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsInvalid, match="LOCUM_DICOM_NODE") as found:
        read_settings({"dicom_node": load_node}, dicom_node=written(tmp_path / "node.yaml", **fields))
    assert said in str(found.value)
    assert "hunter2" not in str(found.value)


@pytest.mark.parametrize("content", ["", "- a", "a: [", "\0"])
def test_file_that_is_no_configuration_is_a_wrong_setting(tmp_path: Path, content: str) -> None:
    path = tmp_path / "node.yaml"
    path.write_text(content)
    with pytest.raises(SettingsInvalid):
        load_node(path)
