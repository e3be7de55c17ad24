"""CITATION.cff is of this version, and has what the format demands."""

from __future__ import annotations

import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[3]


def test_citation_is_of_the_version_of_the_package() -> None:
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (found["version"], found["license"]) == (project["version"], project["license"])
    assert {"cff-version", "message", "title", "authors"} <= found.keys()
    assert all({"type", "title", "authors"} <= each.keys() for each in found["references"])
    assert len(found["references"]) == 4
