"""Unit tests start no process unless they are marked `process`; `make test-fast` leaves these out."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def only_marked_tests_start_processes(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail an unmarked test at the line that starts a process."""
    if request.node.get_closest_marker("process"):
        return

    def reject(*_: Any, **__: Any) -> None:
        raise AssertionError("this test starts a process: mark it with @pytest.mark.process")

    monkeypatch.setattr(subprocess, "Popen", reject)
