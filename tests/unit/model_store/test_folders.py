"""Folders of the working directory that are called as modules that a library asks for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import model_store


@pytest.mark.parametrize("name", ["dl", "DLFCN"])
@pytest.mark.parametrize("has_init", [False, True])
def test_gdcm_does_not_find_a_folder_for_a_module_of_python_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, has_init: bool
) -> None:
    assert model_store.__doc__
    (tmp_path / name).mkdir()
    if has_init:
        (tmp_path / name / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match=name):
        exec(f"import {name}", {"__name__": "gdcm"})
    # It is still there for who means it.
    found: dict[str, object] = {"__name__": "own"}
    exec(f"import {name}", found)
    assert found[name] is sys.modules.pop(name)
