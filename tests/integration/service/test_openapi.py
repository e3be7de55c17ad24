from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.openapi import description

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(description())
    return loaded


def test_committed_description_equals_that_of_the_app() -> None:
    committed = (REPOSITORY / "openapi.yaml").read_text(encoding="utf-8")
    assert committed == description(), "run `make openapi` and commit openapi.yaml"


def test_openapi_command_does_not_depend_on_the_environment(tmp_path: Path) -> None:
    environment = {"LOCUM_PORT": "9999", "LOCUM_STATE_DIR": str(tmp_path / "state"), "PATH": "/usr/bin:/bin"}
    made = subprocess.run(
        [sys.executable, "-m", "service.openapi"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        check=True,
    )
    assert made.stdout.decode() == description()
    assert list(tmp_path.iterdir()) == []


def test_description_declares_every_error_as_a_problem(document: dict[str, Any]) -> None:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            for status, answer in operation["responses"].items():
                if status.startswith("4") or (status.startswith("5") and path != "/health/ready"):
                    assert list(answer["content"]) == ["application/problem+json"], (method, path, status)
    assert "HTTPValidationError" not in document["components"]["schemas"]


@pytest.mark.parametrize(
    ("path", "own"),
    [
        (
            "/segment",
            {"compress", "voxels", "output", "preset", "segmentation_type", "shape_weight", "tolerance_mm"},
        ),
        ("/classify", {"cluster"}),
    ],
)
def test_description_declares_the_fields_of_a_scan_form(
    document: dict[str, Any], path: str, own: set[str]
) -> None:
    body = document["paths"][path]["post"]["requestBody"]
    form = body["content"]["multipart/form-data"]["schema"]
    # /segment takes a field for each channel in its place.
    assert form.get("required", []) == ([] if path == "/segment" else ["scan"])
    assert ("patternProperties" in form) == (path == "/segment")
    shared = {"scan", "model", "hospital", "personalization", "site", "series", "routing", "guard"}
    shared |= {"scanner"}
    assert set(form["properties"]) == shared | own


def test_description_references_all_resolve(document: dict[str, Any]) -> None:
    def references(node: Any) -> list[str]:
        if isinstance(node, dict):
            own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
            return own + [found for value in node.values() for found in references(value)]
        return [found for value in node for found in references(value)] if isinstance(node, list) else []

    for reference in references(document):
        target: Any = document
        for step in reference.removeprefix("#/").split("/"):
            target = target[step]
