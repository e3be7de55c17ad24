"""Fixtures that every room may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before torch is imported: tests run side by side, and one that took every core would slow all others.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real medical images; tests that need it are skipped on a machine without it."""
    root = Path(os.environ.get("LOCUM_DATA", _REPOSITORY.parent / "shared" / "data"))
    if not (root / "manifest.json").is_file():
        pytest.skip(f"no real data in {root} (set LOCUM_DATA)")
    return root


@pytest.fixture(scope="session")
def phantom_federation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small phantom federation, not to be written to: aster, birch, cedar, four patients each, 32x32."""
    from training.phantom import write_federation

    root = tmp_path_factory.mktemp("phantom")
    return write_federation(root, ("aster", "birch", "cedar"), patients_per_site=4, size=32, seed=0)
