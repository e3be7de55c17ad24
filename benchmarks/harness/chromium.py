"""Chromium: Debian's, that of `make test-web`, or the one that LOCUM_CHROMIUM names."""

from __future__ import annotations

import os
import shutil
from typing import Any

CHROMIUM = os.environ.get("LOCUM_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
_SOFTWARE = ("--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader")


def launch(playwright: Any) -> Any:
    """Start Chromium by a running Playwright, with WebGL drawn in software.

    Raises FileNotFoundError where there is none.
    """
    if CHROMIUM is None:
        raise FileNotFoundError("no Chromium: `make test-web` installs it, or LOCUM_CHROMIUM names it")
    return playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", *_SOFTWARE])
