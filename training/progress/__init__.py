"""Show the progress of a run: a live table in a terminal, plain lines elsewhere.

A display is an engine's `Observer` that is also a context manager:

    with open_progress() as progress:
        progress.run_started("iop-fl on brain-lgg-flair", algorithm.plan(), sites)
        result = execute(run, folder, observer=progress)
        progress.published("brain-lgg-flair@3", digest)
"""

from __future__ import annotations

from training.progress.display import PlainProgress, Progress, RichProgress, open_progress
from training.progress.state import Afterwards, RunState, SiteState

__all__ = [
    "Afterwards",
    "PlainProgress",
    "Progress",
    "RichProgress",
    "RunState",
    "SiteState",
    "open_progress",
]
