"""Before and after, for a person to look at: overlays of a few scans, in the job's folder for a while."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from model_store.artefact import Artefact
from model_store.digest import sha256
from model_store.manifest import GRAPH, ModelManifest
from service.adaptation.attempt import Attempt
from service.answers import picture
from service.inference.pipeline import Segmentation, Stopwatch, segment
from service.inference.sessions import Session
from service.jobs.cohort_files import ScanFile
from service.scan_limits import scan_limits
from service.settings import Settings

MOST_SCANS = 4


def draw_pictures(attempt: Attempt, files: Sequence[ScanFile], parent: Artefact, graph: bytes) -> None:
    """Write `N-before.png` (the global model) and `N-after.png` (the candidate), N from 1, into the pictures.

    Names of files are the hospital's own business and stand on none of them.
    """
    manifest = parent.manifest
    assert isinstance(manifest, ModelManifest)
    sessions = {
        "before": load(parent.read(GRAPH), attempt.settings),
        "after": load(graph, attempt.settings),
    }
    chosen = np.unique(np.linspace(0, len(files) - 1, MOST_SCANS).round().astype(int))
    for number, index in enumerate(chosen, start=1):
        data = files[index].read()
        for when, session in sessions.items():
            attempt.tick()
            found = run(data, manifest, session, attempt.settings)
            content = picture(found, manifest.task, f"scan {number}  ·  {when} adaptation")
            attempt.folder.write(attempt.folder.pictures / f"{number}-{when}.png", content)


def load(graph: bytes, settings: Settings) -> Session:
    """The graph as the API would run it."""
    return Session(sha256(graph), graph, threads=settings.threads, device=settings.device)


def run(data: bytes, manifest: ModelManifest, session: Session, settings: Settings) -> Segmentation:
    """Segment a scan's file as the API would."""
    return segment(data, manifest, session, scan_limits(settings), Stopwatch(), lambda _scan, _warnings: None)
