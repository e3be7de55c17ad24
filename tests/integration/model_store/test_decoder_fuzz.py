"""Decoder fuzzing with 12,000 damaged files: each gives a Scan or a ScanError, in bounded memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MUTATIONS = 12_000
# The child's limits allow 8 MiB decompressed; headers announce up to exabytes.
HEADROOM_MIB = 64

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="address space is limited and read as on Linux"
)


def test_decoding_mutated_files_gives_scans_or_scan_errors() -> None:
    child = Path(__file__).resolve().parents[2] / "helpers/model_store/decoder_fuzz_child.py"
    repository = Path(__file__).resolve().parents[3]
    finished = subprocess.run(
        [sys.executable, str(child), str(MUTATIONS), "20", str(HEADROOM_MIB)],
        capture_output=True,
        text=True,
        cwd=repository,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"},
        timeout=220,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    report = json.loads(finished.stdout)
    assert report["failures"] == []
    outcomes = report["outcomes"]
    assert sum(outcomes.values()) == MUTATIONS
    # Every outcome occurs, so the mutations neither miss nor break every file.
    assert min(outcomes[kind] for kind in ("Scan", "DamagedScan", "UnsupportedScan", "ScanTooLarge")) > 100
    assert set(outcomes) == {"Scan", "DamagedScan", "UnsupportedScan", "ScanTooLarge"}
