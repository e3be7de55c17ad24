"""What all tests of networks need."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def nvflare() -> None:
    """Skip where it is not installed. Imported for these tests alone, since it takes more than a second."""
    pytest.importorskip("nvflare")
